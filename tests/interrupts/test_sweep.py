"""Signals at each place where CPython looks for them inside ``next()``, one after the other: nothing is lost."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from accelerator import pretended
from families import Augmented, assert_same, seeded, stacked
from places import swept
from torch.utils.data import IterableDataset

from dpex import DpexDataLoader

pytestmark = [
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # a generator was just being closed
]
ROWS = 120
TICKS = 120
STEP = 7
"""Places from one signal to the next. Each signal costs new workers."""
KINDS: dict[str, dict[str, Any]] = {
    "worker": {"num_workers": 2},
    "batch": {"num_workers": 2, "seeding": "batch"},
    "out of order": {"num_workers": 2, "seeding": "batch", "in_order": False},
    "pinned": {"num_workers": 2, "seeding": "batch", "pin_memory": True},
    "stream": {"num_workers": 2},
    "in the training process": {"num_workers": 0, "seeding": "batch"},
}


class Counting(IterableDataset[torch.Tensor]):
    """A stream with a state: rows of its place, one stream's even and the other's odd."""

    def __init__(self, rows: int) -> None:
        self.rows = rows
        self.at = 0

    def __iter__(self) -> Iterator[torch.Tensor]:
        info = torch.utils.data.get_worker_info()
        number, count = (0, 1) if info is None else (info.id, info.num_workers)
        while self.at < self.rows:
            self.at += 1
            if (self.at - 1) % count == number:
                yield torch.tensor([self.at - 1.0, torch.rand(()).item()], dtype=torch.float64)

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


def loader_of(kind: str) -> DpexDataLoader[Any]:
    if kind == "stream":
        return DpexDataLoader(Counting(ROWS), batch_size=4, generator=seeded(), **KINDS[kind])
    return DpexDataLoader(Augmented(ROWS, extra=1000), batch_size=4, shuffle=True, generator=seeded(), **KINDS[kind])


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=[pytest.mark.long] * (kind in ("batch", "out of order"))) for kind in KINDS]
)
def test_each_batch_comes_once(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for _ in pretended(monkeypatch):
        with loader_of(kind) as loader:
            wanted = stacked(loader)
        with loader_of(kind) as loader:
            loader.state_dict()
            got, ticks, places = swept(iter(loader), TICKS, STEP)
    rows = torch.cat(got)
    print(kind, ticks, len(places), len(got))
    if kind == "out of order":
        rows, wanted = (each[each[:, 0].argsort()] for each in (rows, wanted))
    assert_same(rows, wanted)
    assert ticks > TICKS // 2
    assert len(places) > 50
