"""Makes batches of a dataset in one thread, as a worker does, and takes the time. The process is the bench's own."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import count
from typing import Any, NamedTuple

from torch.utils.data import default_collate

from dpex.cli.bench.forecast import MeasuredWork
from dpex.errors import DpexError
from dpex.measure.durations import remainder
from dpex.profile.instrument import Profile
from dpex.profile.spans import Spans
from dpex.system import run_queue
from dpex.system.machine import MachineMeter
from dpex.transport.arena import Arena
from dpex.transport.codec import INLINE_BYTES, Encoder
from dpex.worker.collate import ArenaCollate
from dpex.worker.current_batch import current
from dpex.worker.fetch import Fetcher
from dpex.worker.setup import WorkerSetup, prepare_process

SEVERAL = 1.1
"""CPU time of so many times the wall time shows that a batch keeps several CPUs busy."""
_BATCHES = 3
"""Measured at least, however long they take."""
_SEED = 0
"""Of all batches, for a dataset that asks `dpex.batch_seed`."""
_TIMED_EVERY = 4
"""The last of so many batches is one whose steps are timed."""


class BenchError(DpexError, ValueError):
    """What was asked for cannot be measured; the message says what would do."""


@dataclass(frozen=True, kw_only=True)
class BenchSubject:
    """What is measured. batch_size: None where the dataset makes batches itself."""

    name: str
    dataset: Any
    batch_size: int | None
    collate_fn: Callable[[Any], Any]
    iterable: bool


@dataclass(frozen=True, kw_only=True)
class DatasetTimes:
    """Means over ``batches``, in seconds per batch; the first batch is not among them.

    CPU times are the process's, with all threads that libraries started. queued_s: these could have run and had no CPU;
    it is in none of the CPU times. fetch_queued_s, encode_queued_s: the same of the thread that makes the batch, while
    it loads and collates, and while it encodes; they are in the wall times.
    Batches whose steps were timed are in none of these.
    walls_s: of single batches, without what that thread queued. others: CPUs of this machine that other programs kept
    busy.
    spans: steps and samples of ``timed_batches`` others, as timing the steps takes time itself.
    """

    batches: int
    seconds: float
    first_s: float
    load_s: float
    load_cpu_s: float
    collate_s: float
    collate_cpu_s: float
    encode_s: float
    encode_cpu_s: float
    queued_s: float
    fetch_queued_s: float
    encode_queued_s: float
    batch_bytes: float
    walls_s: tuple[float, ...]
    timed_batches: int
    spans: Spans
    cpus: float
    others: float

    def work(self) -> MeasuredWork:
        """What the model wants to know; other programs are not in it, as they may be gone tomorrow."""
        cpu_s = self.load_cpu_s + self.collate_cpu_s + self.encode_cpu_s
        wall_s = self.load_s + self.collate_s + self.encode_s
        mean_s = sum(self.walls_s) / len(self.walls_s)
        several = cpu_s > SEVERAL * wall_s
        at_once = (cpu_s + self.queued_s) / wall_s if several else 1.0
        making_s = (cpu_s - self.encode_cpu_s) / min(at_once, max(1.0, self.cpus))
        return MeasuredWork(
            here_s=making_s if several else max(making_s, remainder(self.load_s + self.collate_s, self.fetch_queued_s)),
            cpu_s=cpu_s,
            wait_s=remainder(wall_s, cpu_s, self.fetch_queued_s, self.encode_queued_s),
            batch_bytes=self.batch_bytes,
            spread=tuple(seconds / max(1e-12, mean_s) for seconds in self.walls_s),
            cpus=self.cpus,
            at_once=at_once,
        )


class _Row(NamedTuple):
    """What one batch took; see `DatasetTimes`."""

    load_s: float
    collate_s: float
    load_cpu_s: float
    collate_cpu_s: float
    encode_s: float
    encode_cpu_s: float
    fetch_queued_s: float
    encode_queued_s: float
    batch_bytes: float

    @property
    def unqueued_s(self) -> float:
        """The wall time without what the thread queued; that may have been just before or after, so not below 0."""
        wall_s = self.load_s + self.collate_s + self.encode_s
        return remainder(wall_s, self.fetch_queued_s, self.encode_queued_s)


class _Bench:
    """Makes batches as a worker does, and forgets each."""

    def __init__(self, subject: BenchSubject) -> None:
        self._subject = subject
        self._lent: list[Any] = []
        self._arena = _Lending(Arena(shared=True), self._lent)
        self._encoder = Encoder(self._arena)
        stacking = ArenaCollate(self._arena.arena, INLINE_BYTES, in_worker=True)
        stacking.install()
        collate_fn = stacking if subject.collate_fn is default_collate else subject.collate_fn
        self._collate_fn = collate_fn
        self._queue = _OwnQueue()
        self.rows: list[_Row] = []
        self.begin()

    def begin(self) -> None:
        """Forget what was measured."""
        self.profile = Profile.of(self._subject.dataset, self._collate_fn, time.process_time)
        self._fetcher = self._new_fetcher()
        self.timed = 0
        self.timed_queued_s = 0.0
        self.rows.clear()

    def _new_fetcher(self) -> Any:
        setup = WorkerSetup(
            dataset=self.profile.dataset,
            collate_fn=self.profile.collate_fn,
            worker_init_fn=None,
            iterable=self._subject.iterable,
            auto_collation=self._subject.batch_size is not None,
            drop_last=False,
            num_workers=1,
            base_seed=_SEED,
            per_batch_seed=False,
        )
        return Fetcher(setup, setup.dataset, setup.collate_fn, cpu=self._queue.cpu_s)

    def make(self, index: Any) -> None:
        """One batch, which is measured, or whose steps are timed."""
        is_timed = self.profile.is_on = (len(self.rows) + self.timed) % _TIMED_EVERY == _TIMED_EVERY - 1
        queued = _queues() if is_timed else None
        self._queue.begin()
        try:
            batch, stages = self._fetcher.fetch(index)
        except StopIteration:
            if not self._subject.iterable:
                raise BenchError(f"{self._subject.name!r}: the dataset raised StopIteration") from None
            self._fetcher = self._new_fetcher()
            batch, stages = self._fetcher.fetch(index)
        fetch_queued_s = self._queue.end()
        self._queue.begin()
        cpu_began, began = self._queue.cpu_s(), time.perf_counter()
        self._encoder.encode(batch)
        encode_s, encode_cpu_s = time.perf_counter() - began, self._queue.cpu_s() - cpu_began
        encode_queued_s = self._queue.end()
        if queued is not None:
            self.timed += 1
            self.timed_queued_s += _queued_s(queued)
        else:
            rest = encode_s, encode_cpu_s, fetch_queued_s, encode_queued_s, float(self._encoder.nbytes)
            self.rows.append(_Row(stages.load_s, stages.collate_s, stages.load_cpu_s, stages.collate_cpu_s, *rest))
        del batch
        self._arena.take_all_back()


class _OwnQueue:
    """How long this thread is on a run queue between the outermost two of its questions for CPU time; 0 where the
    kernel tells nothing.

    A question for CPU time brings the scheduler's account up to date, so that a thread whose time slice is used up
    loses the CPU right there, outside of the stage whose times begin after the first question and end before the last.
    """

    def __init__(self) -> None:
        self._own = run_queue.OwnQueue()
        self.begin()

    def begin(self) -> None:
        """Forget what was asked."""
        self._asked = 0
        self._began_s = self._ended_s = self._now_s()

    def cpu_s(self) -> float:
        """Of the process."""
        self._asked += 1
        self._ended_s = self._now_s()
        cpu_s = time.process_time()
        if self._asked == 1:
            self._began_s = self._now_s()
        return cpu_s

    def end(self) -> float:
        """What was queued, in seconds; since `begin` where CPU time was not asked for, as for most tiny batches."""
        return (self._ended_s if self._asked else self._now_s()) - self._began_s

    def _now_s(self) -> float:
        return self._own.seconds() or 0.0


def _queues() -> run_queue.Queued:
    """Those of this process's threads, now."""
    return run_queue.look((os.getpid(),), 0)


def _queued_s(then: run_queue.Queued) -> float:
    """How long this process's threads could have run and had no CPU since then; 0 where the kernel tells nothing."""
    ran = _queues().since(then).workers
    return ran.queued_s if ran is not None else 0.0


class _Lending:
    """An arena nobody takes batches from: what is lent comes back at once."""

    def __init__(self, arena: Any, lent: list[Any]) -> None:
        self.arena = arena
        self.array, self.find, self.take_back = arena.array, arena.find, arena.take_back
        self._lent = lent

    def lend(self, ref: Any) -> None:
        """See `dpex.transport.arena.Arena.lend`."""
        self._lent.append(ref)
        self.arena.lend(ref)

    def take_all_back(self) -> None:
        """As if the taker's views had died."""
        for ref in self._lent:
            self.arena.take_back(ref)
        self._lent.clear()


@current.seeded(_SEED)
def measure(subject: BenchSubject, seconds: float) -> DatasetTimes:
    """Make batches for so many seconds, after a first one, in an order that touches the dataset all over.

    Raises:
        BenchError: an iterable dataset has no samples.
    """
    prepare_process()
    bench, indices = _Bench(subject), _indices(subject)
    began = time.perf_counter()
    try:
        bench.make(next(indices))
    except StopIteration:
        raise BenchError(f"{subject.name!r}: the dataset has no samples") from None
    first_s = time.perf_counter() - began
    bench.begin()
    machine = MachineMeter()
    machine.sample((), 0.0)
    queued, began = _queues(), time.perf_counter()
    while time.perf_counter() - began < seconds or len(bench.rows) < _BATCHES or not bench.timed:
        bench.make(next(indices))
    took_s = time.perf_counter() - began
    queued_s = max(0.0, _queued_s(queued) - bench.timed_queued_s)
    batches = len(bench.rows)
    means = _Row(*(sum(column) / batches for column in zip(*bench.rows, strict=True)))
    return DatasetTimes(
        batches=batches,
        seconds=took_s,
        first_s=first_s,
        **means._asdict(),
        queued_s=queued_s / batches,
        walls_s=tuple(row.unqueued_s for row in bench.rows),
        timed_batches=bench.timed,
        spans=bench.profile.spans(),
        cpus=machine.cpus,
        others=machine.sample((), 0.0).others,
    )


def _indices(subject: BenchSubject) -> Iterator[Any]:
    """Of batches without end: each sample once, in disorder, then again. The global generators are left alone."""
    size = subject.batch_size
    if subject.iterable:
        while True:
            yield None if size is None else [None] * size
    length = len(subject.dataset)
    for seed in count():
        order = random.Random(seed).sample(range(length), length)
        if size is None:
            yield from order
        else:
            yield from (order[at : at + size] for at in range(0, length - length % size or length, size))
