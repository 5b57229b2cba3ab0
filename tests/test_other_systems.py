"""Where PyTorch's own iterators do the local work, as on macOS: ``seeding="batch"`` holds, and nothing is resized."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch
from families import Augmented, seeded
from torch.utils.data import DataLoader, Dataset, get_worker_info

from dpex import AutotuneConfig, DpexDataLoader
from dpex.errors import FixedWorkersError
from dpex.options import WorkerConfig

LENGTH = 20


def epochs(**options: Any) -> list[torch.Tensor]:
    """Two, batch by batch; each with a transform that draws, as `Augmented` has."""
    options = {"batch_size": 4, "shuffle": True, "seeding": "batch", "generator": seeded(), **options}
    with DpexDataLoader(Augmented(LENGTH), **options) as loader:
        return [batch for _ in range(2) for batch in loader]


@pytest.fixture
def wanted() -> dict[bool, list[torch.Tensor]]:
    """What dpex's own workers make, with workers that persist and without."""
    return {
        persistent: epochs(num_workers=1, persistent_workers=persistent, prefetch_factor=2)
        for persistent in (False, True)
    }


@pytest.fixture
def on_a_mac(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")


def same(found: list[torch.Tensor], expected: list[torch.Tensor]) -> bool:
    return len(found) == len(expected) and all(map(torch.equal, found, expected))


OPTIONS: list[dict[str, Any]] = [
    {"num_workers": 0},
    {"num_workers": 2},
    {"num_workers": 3, "persistent_workers": True},
    {"num_workers": "auto"},
    {"num_workers": 2, "persistent_workers": True, "multiprocessing_context": "spawn"},
]


@pytest.mark.filterwarnings("ignore:This DataLoader will create")
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_batches_are_those_of_linux(
    options: dict[str, Any], wanted: dict[bool, list[torch.Tensor]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    assert same(epochs(**options), wanted[options.get("persistent_workers", False)])


@pytest.mark.parametrize("workers", [0, 2])
def test_so_they_are_where_torchs_engine_was_asked_for(workers: int, wanted: dict[bool, list[torch.Tensor]]) -> None:
    assert same(epochs(num_workers=workers, worker_config=WorkerConfig(local_engine="torch")), wanted[False])


class Within(Dataset[torch.Tensor]):
    """Sample: whether the worker's dataset is this one, what `start` left in it, and a loader's of its own."""

    def __init__(self) -> None:
        self.started = 0

    def __len__(self) -> int:
        return 3

    def __getitem__(self, index: int) -> torch.Tensor:
        info = get_worker_info()
        assert info is not None
        inner = list(DataLoader(range(2), 2))
        return torch.tensor([info.dataset is self, self.started, *inner[0]])


def start(worker: int) -> None:
    info = get_worker_info()
    assert info is not None
    info.dataset.started += 1


@pytest.mark.usefixtures("on_a_mac")
def test_dataset_and_worker_info_are_the_users() -> None:
    loader = DpexDataLoader(Within(), num_workers=2, worker_init_fn=start, seeding="batch")
    assert [batch[0].tolist() for batch in loader] == [[1, 1, 0, 1]] * 3


@pytest.mark.usefixtures("on_a_mac")
@pytest.mark.parametrize("seeding", ["batch", "worker"])
def test_a_resize_that_nobody_would_carry_out_is_refused(seeding: Any) -> None:
    loader = DpexDataLoader(range(8), num_workers=2, seeding=seeding)
    for sizes in ({"local": 2}, {"prefetch": 8}, {"local": 1, "remote": 1}):
        with pytest.raises(FixedWorkersError, match=r"local workers are PyTorch's .*this is darwin"):
            loader.resize(**sizes)
    loader.resize(local=0, remote=2)
    assert loader._current_sizes().remote == 2


@pytest.mark.usefixtures("on_a_mac")
def test_nothing_is_tuned() -> None:
    loader = DpexDataLoader(range(8), num_workers=2, autotune=AutotuneConfig(), seeding="batch")
    assert sorted(int(batch) for batch in loader) == list(range(8))
    assert not loader.decisions
