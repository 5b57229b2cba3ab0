"""What is logged of a loader, and where it is written."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from dpex import DpexDataLoader, log_to

DATA = TensorDataset(torch.arange(20))


class Board:
    """The method of TensorBoard's `SummaryWriter` that is used."""

    def __init__(self) -> None:
        self.kept: dict[tuple[str, int], float] = {}

    def add_scalar(self, tag: str, value: float, step: int) -> None:
        self.kept[tag, step] = value


class Run:
    """The method of a W&B run that is used."""

    def __init__(self) -> None:
        self.kept: dict[tuple[str, int], float] = {}

    def log(self, values: dict[str, float], step: int) -> None:
        self.kept.update({(name, step): value for name, value in values.items()})


@pytest.mark.parametrize("kind", [Board, Run])
def test_figures_are_those_since_the_last_call(kind: Any) -> None:
    writer, loader = kind(), DpexDataLoader(DATA, num_workers=1, name="train")
    log = log_to(writer, loader)
    for step, _ in enumerate(loader, start=1):
        if step % 10 == 0:
            log(step)
    for step in (10, 20):
        assert 0 < writer.kept["dpex/train/wait_ratio", step] <= 1
        assert writer.kept["dpex/train/batches_per_s", step] > 0
        assert writer.kept["dpex/train/workers", step] == 1
    for _ in loader:
        pass
    log(21)
    assert writer.kept["dpex/train/batches_per_s", 21] > 0


def test_a_loader_that_was_made_from_one_will_do_and_needs_no_name() -> None:
    kept: list[str] = []
    loader = DpexDataLoader(DATA, num_workers=1)
    log = log_to(lambda values, step: kept.extend(values), DataLoader(DATA, num_workers=1, timeout=loader.timeout))
    log(0)
    assert {"dpex/workers", "dpex/prefetch", "dpex/decisions"} <= set(kept)


def test_what_cannot_be_logged_is_refused() -> None:
    with pytest.raises(ValueError, match="none makes its batches: give a DpexDataLoader"):
        log_to(print, DataLoader(DATA))
    with pytest.raises(ValueError, match="log_to\\(3\\): give a TensorBoard SummaryWriter, a W&B run"):
        log_to(3, DpexDataLoader(DATA))
