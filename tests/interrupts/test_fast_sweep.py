"""Hundreds of signals, at each place inside ``next()``, with workers in this process. Planted faults are found.

The iterator, the engine, the schedule and the samplers are the real ones. `test_sweep` has real workers, and fewer
signals, as each costs new processes.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from accelerator import pretended
from fake_pool import Work
from families import seeded
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
STREAM_BATCHES = 50
TICKS = 400
PLANTED_TICKS = 2000
RENEWED_TICKS = 200
"""Signals of which some come within a renewal, which has hundreds of places."""
KINDS: dict[str, dict[str, Any]] = {
    "worker": {},
    "batch": {"seeding": "batch"},
    "out of order": {"seeding": "batch", "in_order": False},
    "pinned": {"seeding": "batch", "pin_memory": True},
    "stream": {},
}


class Stream(IterableDataset[int]):
    """A stream that workers of a `PromptPool` need not read."""

    def __iter__(self) -> Iterator[int]:
        return iter(())


@pytest.fixture(autouse=True)
def in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    def make(_: PoolFactory, _name: str, count: int, setup: Any, shared_queue: bool) -> PromptPool:
        return PromptPool(count, shared=shared_queue, make=part_of_stream if setup.iterable else tuple)

    monkeypatch.setattr(PoolFactory, "__call__", make)


def part_of_stream(work: Work) -> tuple[Any, ...]:
    assert work.state is not None
    if work.state >= STREAM_BATCHES:
        raise StopIteration
    return tuple(work)


def loader_of(kind: str) -> DpexDataLoader[Any]:
    dataset: Any = Stream() if kind == "stream" else range(ROWS)
    shuffle = None if kind == "stream" else True
    return DpexDataLoader(dataset, batch_size=4, num_workers=2, shuffle=shuffle, generator=seeded(), **KINDS[kind])


def content(batch: Any) -> tuple[Any, ...]:
    """What of a batch does not depend on the worker that made it."""
    work = Work(*batch)
    return work.index, work.logical, work.state


def both(
    kind: str, monkeypatch: pytest.MonkeyPatch, ticks: int, *, in_renewals: bool = False
) -> tuple[list[Any], list[Any], Swept]:
    """Return the batches of an undisturbed pass, those of a pass with signals, and how these came."""
    for _ in pretended(monkeypatch):
        with loader_of(kind) as loader:
            wanted = [content(batch) for batch in loader]
        with loader_of(kind) as loader:
            found = swept(iter(loader), ticks, in_renewals=in_renewals)
    got = [content(batch) for batch in found.batches]
    if kind == "out of order":
        got, wanted = sorted(got), sorted(wanted)
    return wanted, got, found


@pytest.mark.parametrize("kind", KINDS)
def test_each_batch_comes_once_at_every_place(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted, got, found = both(kind, monkeypatch, TICKS)
    assert got == wanted
    assert found.ticks > TICKS // 2
    assert len(found.places) > 100


@pytest.mark.parametrize("kind", KINDS)
def test_a_renewal_may_be_broken_off_itself(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted, got, found = both(kind, monkeypatch, RENEWED_TICKS, in_renewals=True)
    assert got == wanted
    assert found.ticks > RENEWED_TICKS // 2


PLANTED = str(Path(dpex.__file__).parent / "planted.py")
"""Signals come in code of dpex only."""
FAULTS: dict[str, tuple[type[Any], str]] = {
    "a call while a batch is delivered": (
        Schedule,
        """
def deliver(self, batch, value=None, out=None):
    del self._ready[batch.number]
    self.delivered += 1
    self.delivered_of[batch.queue] += 1
    self.next_number = max(self.next_number, batch.number + 1)
    out += (value, batch)
""",
    ),
    "a batch that next() does not keep": (
        _DpexDataLoaderIter,
        """
def __next__(self):
    out = []
    self._next_into(out)
    return out[0]
""",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_found(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    owner, source = FAULTS[fault]
    made: dict[str, Any] = {}
    exec(compile(source, PLANTED, "exec"), made)
    (name,) = set(made) - {"__builtins__"}
    monkeypatch.setattr(owner, name, made[name])
    wanted, got, _ = both("batch", monkeypatch, PLANTED_TICKS)
    assert got != wanted
