"""Who reads its place in the first stream of a dataset before the first sample, and what the place is then."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from torch.utils.data import IterableDataset, get_worker_info

from dpex._torch import WorkerInfo, set_worker_info
from dpex.schedule.progress import ALL, ONE, UNKNOWN
from dpex.worker.core import FirstStream, WorkerCore
from dpex.worker.fetch import Failure, StreamEnd
from dpex.worker.setup import WorkerSetup

BATCH = [None] * 3


@pytest.fixture(autouse=True)
def no_worker_info() -> Iterator[None]:
    yield
    set_worker_info(None)


def info_of(told: list[bool]) -> FirstStream:
    return FirstStream(WorkerInfo(id=0, num_workers=4, seed=7, dataset="data"), told.append)


READS: dict[str, Callable[[Any], Any]] = {
    "id": lambda info: info.id,
    "num_workers": lambda info: info.num_workers,
    "getattr": lambda info: getattr(info, "num_workers", 1),
    "repr": repr,
    "copy": copy.copy,
    "pickle": pickle.dumps,
}


@pytest.mark.parametrize("read", READS.values(), ids=READS)
def test_reading_the_place_in_any_way_is_noted(read: Callable[[Any], Any]) -> None:
    told: list[bool] = []
    first = info_of(told)
    read(first.shown)
    assert told == []
    first.settle()
    first.settle()
    assert told == [True]
    assert (first.shown.id, first.shown.num_workers) == (0, 4)


@pytest.mark.parametrize(
    "read",
    [lambda info: None, lambda info: info.seed, lambda info: info.dataset, lambda info: isinstance(info, WorkerInfo)],
    ids=["nothing", "seed", "dataset", "isinstance"],
)
def test_what_tells_nothing_of_other_streams_is_not(read: Callable[[Any], Any]) -> None:
    told: list[bool] = []
    first = info_of(told)
    read(first.shown)
    first.settle()
    assert told == [False]
    assert (first.shown.id, first.shown.num_workers, first.shown.seed, first.shown.dataset) == (0, 1, 7, "data")


def test_it_looks_and_travels_as_torchs_does() -> None:
    plain, first = WorkerInfo(id=0, num_workers=4, seed=7, dataset="data"), info_of([])
    assert repr(first.shown).partition("(")[2] == repr(plain).partition("(")[2]
    for copied in (copy.copy(first.shown), copy.deepcopy(first.shown), pickle.loads(pickle.dumps(first.shown))):
        assert type(copied) is WorkerInfo
        assert (copied.id, copied.num_workers, copied.seed, copied.dataset) == (0, 4, 7, "data")
    with pytest.raises((AttributeError, RuntimeError)):
        first.shown.id = 3
    with pytest.raises(AttributeError):
        first.shown.anything_else  # noqa: B018


# -- in a worker -------------------------------------------------------------------------------------------------------


class Reads(IterableDataset[int]):
    """Ten numbers; ``when`` says when it reads its place: "iter", "before" or "after" the first number, or never."""

    def __init__(self, when: str) -> None:
        self.when = when

    def __iter__(self) -> Iterator[int]:
        return self.numbers(*self.place() if self.when == "iter" else (0, 1))

    def numbers(self, first: int, step: int) -> Iterator[int]:
        if self.when == "before":
            first, step = self.place()
        yield first
        if self.when == "after":
            _, step = self.place()
        yield from range(first + step, 10, step)

    def place(self) -> tuple[int, int]:
        info = get_worker_info()
        assert info is not None
        return info.id, info.num_workers


def setup_of(dataset: Any, **options: Any) -> WorkerSetup:
    plain: dict[str, Any] = {
        "collate_fn": list,
        "worker_init_fn": None,
        "iterable": True,
        "auto_collation": True,
        "drop_last": False,
        "num_workers": 2,
        "base_seed": 0,
        "per_batch_seed": False,
    }
    return WorkerSetup(dataset=dataset, **plain | options)


def read_alone(dataset: Any, streams: int = UNKNOWN, **options: Any) -> tuple[list[bool], list[int]]:
    """What the first stream tells, and all that it yields."""
    told: list[bool] = []
    core = WorkerCore(setup_of(dataset, **options))
    core.adopt(0, streams=streams, tell_splitting=told.append)
    found: list[int] = []
    for number in range(100):
        batch, _ = core.make(number, BATCH if options.get("auto_collation", True) else None, 0, 0)
        if isinstance(batch, StreamEnd):
            return told, found
        assert not isinstance(batch, Failure), batch.wrapper.exc_msg
        found += batch if isinstance(batch, list) else [batch]
    raise AssertionError("the stream does not end")


WHOLE, HALF = list(range(10)), list(range(0, 10, 2))


def test_where_the_number_is_known_or_there_is_no_sample() -> None:
    assert read_alone(Reads("iter"), ALL) == ([], HALF)
    assert read_alone(Reads("iter"), ONE) == ([], WHOLE)
    assert read_alone(Part(length=0)) == ([False], [])


def test_it_is_told_before_the_first_batch_and_at_once_where_it_is_read_at_the_start() -> None:
    told: list[bool] = []
    WorkerCore(setup_of(Reads("iter"))).adopt(0, tell_splitting=told.append, streams=UNKNOWN)
    assert told == [True]
    told.clear()

    def collate(samples: list[int]) -> list[int]:
        assert told
        return samples

    core = WorkerCore(setup_of(Reads("never"), collate_fn=collate))
    core.adopt(0, tell_splitting=told.append, streams=UNKNOWN)
    assert told == []
    assert core.make(0, BATCH, 0, 0)[0] == [0, 1, 2]


class FailsAt(Reads):
    """An error instead of a beginning ("iter") or of a first number ("next"), or in the second epoch ("again")."""

    epochs = 0

    def __iter__(self) -> Iterator[int]:
        self.epochs += 1
        if self.when == "iter" or self.epochs == 2:
            fails(0)
        return super().__iter__()

    def numbers(self, first: int, step: int) -> Iterator[int]:
        if self.when == "next":
            fails(0)
        return super().numbers(first, step)


def fails(_: int) -> None:
    raise OSError("nothing there")


@pytest.mark.parametrize(
    ("dataset", "init", "epoch"),
    [(FailsAt("iter"), None, 0), (FailsAt("next"), None, 0), (Reads("never"), fails, 0), (FailsAt("again"), None, 1)],
)
def test_an_error_before_the_first_sample_leaves_nobody_waiting(dataset: Any, init: Any, epoch: int) -> None:
    told: list[bool] = []
    core = WorkerCore(setup_of(dataset, worker_init_fn=init))
    core.adopt(0, streams=UNKNOWN, tell_splitting=told.append)
    failure, _ = core.make(0, BATCH, 0, epoch)
    assert "nothing there" in failure.wrapper.exc_msg
    assert told == [False]


class Part(IterableDataset[int]):
    """A ``worker_init_fn`` may set its ``part``, or read what seeds it."""

    part = (0, 1)

    def __init__(self, length: int = 10) -> None:
        self.length = length

    def __iter__(self) -> Iterator[int]:
        yield from range(self.part[0], self.length, self.part[1])


INITS: dict[str, Callable[[int, Any], Any]] = {
    "splits": lambda _, info: setattr(info.dataset, "part", (info.id, info.num_workers)),
    "splits by its argument": lambda worker, info: setattr(info.dataset, "part", (worker, 2)),
    "seeds": lambda _, info: setattr(info.dataset, "seeded", info.seed),
}


@pytest.mark.parametrize("init", INITS)
def test_a_worker_init_fn_may_split_the_dataset(init: str) -> None:
    def begin(worker: int) -> None:
        INITS[init](worker, get_worker_info())

    is_split = init != "seeds"
    assert read_alone(Part(), worker_init_fn=begin) == ([is_split], HALF if is_split else WHOLE)
