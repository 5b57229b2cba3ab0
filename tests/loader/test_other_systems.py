"""Where PyTorch's own iterators do the local work, as on macOS: batches are PyTorch's, and nothing is resized."""

import sys
from typing import Any

import pytest
import torch
from families import Augmented, seeded
from inspection import settings_of
from torch.utils.data import DataLoader

from dpex import DpexDataLoader
from dpex.errors import OptionError


@pytest.fixture
def on_a_mac(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")


@pytest.mark.usefixtures("on_a_mac")
def test_batches_are_torchs_and_a_warning_says_so() -> None:
    options: dict[str, Any] = {"batch_size": 4, "shuffle": True, "num_workers": 2}
    expected = list(DataLoader(Augmented(8), generator=seeded(), **options))
    loader = DpexDataLoader(Augmented(8), generator=seeded(), seeding="batch", **options)
    with pytest.warns(RuntimeWarning, match=r"seeding='batch' needs .* this is darwin\): batches have torch's random"):
        found = list(loader)
    assert all(map(torch.equal, found, expected))


@pytest.mark.usefixtures("on_a_mac")
@pytest.mark.parametrize("seeding", ["batch", "worker"])
def test_a_resize_that_nobody_would_carry_out_is_refused(seeding: Any) -> None:
    loader = DpexDataLoader(range(8), num_workers=2, seeding=seeding)
    for sizes in ({"local": 2}, {"prefetch": 8}, {"local": 1, "remote": 1}):
        with pytest.raises(OptionError, match=r"local workers are PyTorch's .*this is darwin|ties the random"):
            loader.resize(**sizes)
    if seeding == "batch":
        loader.resize(local=0, remote=2)
        assert settings_of(loader).remote == 2
