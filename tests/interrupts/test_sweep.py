"""Signals at each place where CPython looks for them inside ``next()``: the epoch goes on, or says how to continue.

With workers in this process (`PromptPool`) a signal costs no process, so hundreds come. The iterator, the engine, the
schedule and the samplers are the real ones.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerator import pretended
from fake_pool import Work
from families import Augmented, assert_same, seeded, stacked
from places import Swept, swept
from prompt_pool import PromptPool
from torch.utils.data import IterableDataset

import dpex
from dpex import DpexDataLoader
from dpex.engine.with_workers import _DpexDataLoaderIter
from dpex.pools.factory import PoolFactory
from dpex.schedule.schedule import Schedule

pytestmark = [
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # a generator was just being closed
]
ROWS = 400
TICKS = 316
PLANTED_TICKS = 1000
KINDS: dict[str, dict[str, Any]] = {
    "worker": {},
    "batch": {"seeding": "batch"},
    "out of order": {"seeding": "batch", "in_order": False},
    "pinned": {"seeding": "batch", "pin_memory": True},
}


@pytest.fixture
def in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    def make(_: PoolFactory, _name: str, count: int, setup: Any, shared_queue: bool) -> PromptPool:
        return PromptPool(count, shared=shared_queue, make=tuple)

    monkeypatch.setattr(PoolFactory, "__call__", make)


def loader_of(kind: str) -> DpexDataLoader[Any]:
    dataset: Any = range(ROWS)
    return DpexDataLoader(dataset, batch_size=4, num_workers=2, shuffle=True, generator=seeded(), **KINDS[kind])


def both(kind: str, monkeypatch: pytest.MonkeyPatch, ticks: int) -> tuple[list[Any], list[Any], Swept]:
    """Return the indices of an undisturbed epoch, those of an epoch with signals, and how these came."""
    for _ in pretended(monkeypatch):
        with loader_of(kind) as loader:
            wanted = [Work(*batch).index for batch in loader]
        with loader_of(kind) as loader:
            found = swept(loader, ticks)
    got = [Work(*batch).index for batch in found.batches]
    if kind == "out of order":
        got, wanted = sorted(got), sorted(wanted)
    return wanted, got, found


@pytest.mark.usefixtures("in_this_process")
@pytest.mark.parametrize("kind", KINDS)
def test_each_batch_comes_once_at_every_place(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted, got, found = both(kind, monkeypatch, TICKS)
    print(kind, found.ticks, found.broken, len(found.places))
    assert got == wanted
    assert found.ticks == TICKS
    assert found.ticks > found.broken > 0
    assert len(found.places) > 30


PLANTED = str(Path(dpex.__file__).parent / "planted.py")
"""Signals come in code of dpex only."""
FAULTS: dict[str, tuple[type[Any], str]] = {
    "a batch that leaves the schedule before it is in a hand": (
        Schedule,
        """
def deliver(self, batch, thread=0):
    del self._ready[batch.number]
    self.delivered += 1
    self.delivered_of[batch.queue] += 1
    self.next_number = batch.number + 1
    print(end="")
    if thread:
        self.in_hand[thread] = batch
""",
    ),
    "a hand that is emptied too early": (
        _DpexDataLoaderIter,
        """
def __next__(self):
    value = self._next()
    self._engine.schedule.in_hand.clear()
    self._num_yielded += len("1")
    return value
""",
    ),
}


@pytest.mark.usefixtures("in_this_process")
@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_found(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    owner, source = FAULTS[fault]
    made: dict[str, Any] = {}
    exec(compile(source, PLANTED, "exec"), made)
    (name,) = set(made) - {"__builtins__"}
    monkeypatch.setattr(owner, name, made[name])
    wanted, got, _ = both("batch", monkeypatch, PLANTED_TICKS)
    assert got != wanted


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


REAL_ROWS, REAL_TICKS, STEP = 120, 60, 7
"""``STEP``: places from one signal to the next. Each signal may cost new workers."""
REAL: dict[str, dict[str, Any]] = {
    "worker": {"num_workers": 2},
    "pinned": {"num_workers": 2, "seeding": "batch", "pin_memory": True},
    "persistent": {"num_workers": 2, "seeding": "batch", "persistent_workers": True},
    "stream": {"num_workers": 2},
    "in the training process": {"num_workers": 0, "seeding": "batch"},
}


def real(kind: str) -> DpexDataLoader[Any]:
    if kind == "stream":
        return DpexDataLoader(Counting(REAL_ROWS), batch_size=4, generator=seeded(), **REAL[kind])
    dataset = Augmented(REAL_ROWS, extra=1000)
    return DpexDataLoader(dataset, batch_size=4, shuffle=True, generator=seeded(), **REAL[kind])


@pytest.mark.parametrize("kind", [pytest.param(one, marks=[pytest.mark.long] * (one == "worker")) for one in REAL])
def test_each_batch_comes_once_from_real_workers(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for _ in pretended(monkeypatch):
        with real(kind) as loader:
            wanted = stacked(loader)
        with real(kind) as loader:
            loader.state_dict()
            found = swept(loader, REAL_TICKS, STEP)
    print(kind, found.ticks, found.broken, len(found.places))
    assert_same(torch.cat(found.batches), wanted)
    assert found.ticks > REAL_TICKS // 2
    assert (found.broken > 0) == (kind != "in the training process")
