"""A loader in a terminal, in a notebook, and below progress bars."""

import io

import pytest
import torch
from decisions import a_decision
from rich.console import Console
from rich.progress import track
from torch.utils.data import TensorDataset

from dpex import DpexDataLoader
from dpex.autotune.types import Outcome
from dpex.loader.runtime import DecisionList
from dpex.measure.settings import Settings

OUTCOME = Outcome(rate=9.0, wait=0.2, kept=True, at=2.0)
DECISION = a_decision(old=Settings(), text="<more>", outcome=OUTCOME)
DATA = TensorDataset(torch.arange(400))


def test_a_loader_that_was_not_iterated_says_so() -> None:
    text = repr(DpexDataLoader(DATA, 4, num_workers="auto", name="train"))
    assert (
        text == '<DpexDataLoader train: TensorDataset, batch size 4, num_workers="auto". No batch was delivered yet.>'
    )


def test_a_loader_with_a_fixed_number_says_what_it_did() -> None:
    loader = DpexDataLoader(DATA, 4, num_workers=1)
    assert sum(len(batch) for (batch,) in loader) == 400
    text = repr(loader)
    assert "num_workers=1" in text
    assert "Epoch 1: 100 batches, " in text
    assert "no worker runs now" in text


def test_what_a_loader_tells_fits_a_terminal_and_a_notebook() -> None:
    with DpexDataLoader(DATA, 4, num_workers="auto", name="train") as loader:
        assert "workers that run: " in next(repr(loader) for _ in iter(loader))
        for _ in loader:
            pass
        assert "no worker runs now" in repr(loader)
        told = loader, loader.stats(), loader.decisions, loader.diagnose()
    assert repr(loader).startswith("<DpexDataLoader train: TensorDataset, batch size 4")
    assert repr(loader.stats()).startswith("LoaderStats(epoch 2; batches 100; wait ")
    for one in told:
        assert len(repr(one)) < 2500
    for one in told[:2]:
        assert "\n" not in repr(one)
    assert all(
        line in repr(DecisionList([DECISION]))
        for line in ("1. in-process → 4 local", "measured 9 batches/s with a wait of 20 %, kept")
    )
    assert repr(DpexDataLoader.__new__(DpexDataLoader)).startswith("<dpex.dataloader.DpexDataLoader object")


def test_nothing_is_written_below_a_progress_bar(capfd: pytest.CaptureFixture[str]) -> None:
    shown = io.StringIO()
    with DpexDataLoader(DATA, 4, num_workers="auto") as loader:
        batches = track(loader, console=Console(file=shown, force_terminal=True, width=80))
        assert sum(len(batch) for (batch,) in batches) == 400
    assert capfd.readouterr() == ("", "")
    assert "100%" in shown.getvalue()
