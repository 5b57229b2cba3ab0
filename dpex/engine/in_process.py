"""The iterator for ``num_workers=0``: batches are made in the training process as torch makes them, one at a time.

A batch that Ctrl-C or a time limit breaks off is made again by the next call of ``next()``. If the dataset is a stream,
the samples that were read for the interrupted batch are lost, as with torch. An error of the sampler or the dataset
takes the place of its batch, as with torch.

The iterator counts batches. If the loader's measurements have a reader, an `InlineMeter` also times the batches. The
consumer's thread uses the meter; any thread may call `InlineMeter.reading` and `InlineMeter.stats`.
"""

from __future__ import annotations

import sys
import weakref
from collections import Counter, deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeGuard

import torch
from torch.compiler import is_dynamo_compiling
from torch.utils.data import default_collate

from dpex._torch import DatasetKind, SingleProcessDataLoaderIter, is_profiled
from dpex.engine.draws import BegunDraws
from dpex.engine.pass_state import PassRecorder, begin_pass, go_on_in_process, in_process_state, point_for
from dpex.errors import IteratorInterruptedError
from dpex.measure.batch_times import BatchTimes, PoolTimes
from dpex.measure.causes import SAMPLER
from dpex.measure.consumer_time import Tally
from dpex.measure.ledger import LastReading
from dpex.measure.reading import Reading
from dpex.measure.sampling import SlowestSamples
from dpex.measure.settings import INLINE
from dpex.profile.live_timer import TicketTimer
from dpex.schedule.events import Notice, Raise
from dpex.schedule.names import is_asynchronous
from dpex.schedule.progress import ResumePoint
from dpex.stats import LoaderStats
from dpex.system.clock import monotonic
from dpex.system.compiler import untraced
from dpex.system.gpu.stall import cuda_stall
from dpex.system.handlers import is_of_handler
from dpex.system.meter import own_queue_s
from dpex.system.user_warnings import warn
from dpex.transport.arena import ArenaCache
from dpex.worker.batch_seeding import InProcessMaker
from dpex.worker.fetch import ArenaCollate, Fetcher
from dpex.worker.own_generators import OwnGenerators
from dpex.worker.sample_guard import NO_ERRORS, SampleErrors
from dpex.worker.setup import WorkerSetup, modes_here

if TYPE_CHECKING:
    from dpex.device.feed import Feed
    from dpex.engine.pass_state import PassState
    from dpex.system.gpu.stall import GpuStall

INLINE_ARENA_BYTES = 1 << 20
"""Batches from this size on are stacked into reused memory when they are made in the training process."""


class InProcessIterator(SingleProcessDataLoaderIter):
    """Makes batches in this process, one at a time, as torch does. Large batches are stacked into reused memory.

    Under ``seeding="batch"`` the random states of a batch depend on its number (see `dpex.worker.batch_seeding`). If
    ``is_measured``, an `InlineMeter` times the batches.
    """

    _begun: BegunDraws | None = None
    meter: InlineMeter | None = None
    sample_errors: SampleErrors = NO_ERRORS

    def __init__(
        self, loader: Any, arenas: ArenaCache, resume: PassState | None = None, *, is_measured: bool = False
    ) -> None:
        begin_pass(super().__init__, self, loader, resume)
        self._first = point_for(resume) or ResumePoint()
        is_map = loader._dataset_kind == DatasetKind.Map
        is_async, is_seeded = is_map and is_asynchronous(self._dataset), is_map and loader.seeding == "batch"
        own = OwnGenerators(self._dataset, self._collate_fn) if is_async or is_seeded else None
        maker = InProcessMaker(int(self._base_seed), modes_here(), own) if is_seeded else None
        if self._collate_fn is default_collate:
            threads = (lambda: 1) if maker is None else maker.threads
            self._dataset_fetcher.collate_fn = ArenaCollate(
                arenas.borrow(self), INLINE_ARENA_BYTES, in_worker=False, threads=threads
            )
        if is_measured or is_async or loader.sample_policy.tolerates:
            timer = loader._runtime.timer if is_measured else None
            self._dataset_fetcher = InProcessFetcher(self._dataset_fetcher, self._setup(loader), own, timer)
            self.sample_errors = self._dataset_fetcher.errors
        recorder = self._recorder = PassRecorder(loader, int(self._base_seed))
        self._draws = recorder.begin(self._sampler_iter, resume, self._begun)
        self._delivered_ahead = sorted(self._first.ahead)
        self._number = self._first.first
        """The number of the batch that is being made."""
        self._drawn: deque[tuple[Any, int]] = deque(maxlen=1)
        """The index that was drawn last, and the number of its batch."""
        self._broken_by: str = ""
        """The exception, other than an error of the sampler, that ended the latest draw."""
        self._has_ended = False
        """True if the sampler has no more indices."""
        if resume is not None:
            go_on_in_process(self, resume)
        if is_measured:
            self.meter = InlineMeter(cuda_stall(), self.sample_errors)
            self._dataset_fetcher.made = self.meter.made
        if maker is not None:
            self._seed_batches(maker)
        alive = weakref.ref(self)
        self.last_stats: LastReading[LoaderStats] = LastReading(
            (lambda: _counted_by_torch(alive())) if self.meter is None else self.meter.stats
        )
        self.last_state: LastReading[PassState | None] = LastReading(lambda: in_process_state(alive()))

    def _seed_batches(self, maker: InProcessMaker) -> None:
        """Have each batch made from the random states of its number."""
        fetcher, alive, epoch = self._dataset_fetcher, weakref.ref(self), self._first.epoch
        fetch = fetcher.fetch
        fetcher.fetch = lambda index: maker.make(fetch, index, alive()._number, epoch)  # type: ignore[union-attr]

    def _setup(self, loader: Any) -> WorkerSetup:
        """Return the setup of the worker's `Fetcher` that makes the batches in this process."""
        return WorkerSetup(
            dataset=self._dataset,
            collate_fn=self._dataset_fetcher.collate_fn,
            worker_init_fn=None,
            iterable=loader._dataset_kind == DatasetKind.Iterable,
            auto_collation=self._auto_collation,
            drop_last=self._drop_last,
            num_workers=0,
            base_seed=int(self._base_seed),
            per_batch_seed=False,
            samples=loader.sample_policy,
            concurrency=loader.worker_config.concurrency,
        )

    def __del__(self, is_ending: Callable[[], bool] = sys.is_finalizing) -> None:
        if not is_ending():  # at exit, modules needed for a reading may be cleared, and no reader is left
            self._end_readings()

    @untraced
    def _end_readings(self) -> None:
        last_stats, last_state = getattr(self, "last_stats", None), getattr(self, "last_state", None)
        if last_stats is not None:  # None: the constructor has failed
            last_stats.freeze(_counted_by_torch(self) if self.meter is None else None)
        if last_state is not None:
            last_state.freeze(in_process_state(self))

    def _next_index(self) -> Any:
        """Return the index of the next batch; the same index until that batch is returned, or has raised an error."""
        number = self._num_yielded + self._recorder.failed
        for other in self._delivered_ahead:
            number += other <= number
        self._number = number
        while not self._has_index:
            if not self._draw():
                raise StopIteration
        if self.meter is not None:
            self.meter.drawn()
        return self._drawn[0][0]

    @property
    def _has_index(self) -> bool:
        """True if the index of the batch that is being made was drawn."""
        return bool(self._drawn) and self._drawn[0][1] >= self._number

    def _draw(self) -> bool:
        """Draw the next index; return False at the end.

        Raises:
            IteratorInterruptedError: An exception interrupted the latest draw and ended the sampler, a generator.
        """
        if self._has_ended:
            return False
        latest = self._drawn[0][1] if self._drawn else -1
        try:
            self._draws.draw_into(self._drawn, 1)
        except BaseException as error:
            self._broken_by = "" if _is_own(error) else repr(error)
            raise
        if self._drawn and self._drawn[0][1] > latest:
            self._broken_by = ""
            return True
        if self._broken_by:
            raise IteratorInterruptedError.of(self._broken_by)
        self._has_ended = True
        return False

    def _next_data(self) -> Any:
        if is_dynamo_compiling():  # see `dpex.system.compiler`
            return torch.compiler.disable(self._next_data)()
        meter = self.meter
        if meter is not None:
            meter.enter()
        try:
            data = super()._next_data()  # type: ignore[no-untyped-call]
        except BaseException as error:
            if _is_own(error):
                self._recorder.raised(error, has_index=self._has_index)
            if meter is not None:
                meter.leave(error)
            raise
        if meter is not None:
            meter.leave()
        return data


def _is_own(error: BaseException) -> TypeGuard[Exception]:
    """Return True for an error of the sampler or the dataset, which takes the place of a batch."""
    return isinstance(error, Exception) and not is_of_handler(error)


def _counted_by_torch(iterator: Any) -> LoaderStats:
    if iterator is None:
        return LoaderStats()
    return LoaderStats(batches=iterator._num_yielded, failed_samples=iterator.sample_errors.count)


class InProcessFetcher:
    """Replaces torch's fetcher by a worker's, which times batches, tolerates failed samples and awaits async ones.

    Attributes:
        dataset, dataset_iter, ended: As in torch's fetcher.
        errors: The samples that failed.
        made: Called with the index and the times of each batch.
    """

    def __init__(self, torchs: Any, setup: WorkerSetup, own: OwnGenerators | None, timer: TicketTimer | None) -> None:
        self.dataset: Any = torchs.dataset
        self.dataset_iter: Any = getattr(torchs, "dataset_iter", None)
        self.errors: SampleErrors = SampleErrors(setup.samples)
        self.made: Callable[[Any, BatchTimes], None] = lambda _, __: None
        self._fetcher = Fetcher(setup, timer, own=own, stream=self.dataset_iter)
        self._batches = 0

    @property
    def ended(self) -> bool:
        return self._fetcher.has_ended

    @ended.setter
    def ended(self, value: bool) -> None:
        self._fetcher.has_ended = value

    def fetch(self, index: Any) -> Any:
        """Return a batch. Warn of samples that failed, or raise an error if they are too many."""
        batch, times = self._fetcher.fetch(index)
        if self.errors.is_on:
            self._batches += 1
            for one in self.errors.made((0, self._batches), times.samples, times.failed):
                if isinstance(one, Notice):
                    warn(one.text)
                elif isinstance(one, Raise):
                    raise one.error
        self.made(index, times)
        return batch


def in_process_kind(loader: Any) -> type[InProcessIterator]:
    """Return the class of a loader's iterators.

    torch warns of batches beyond the length that a stream has reported. The warning names the caller of torch's
    ``__next__``, which must be the user's line, so such a loader gets the class that does not override ``__next__``.
    """
    may_warn = loader._dataset_kind == DatasetKind.Iterable and loader._IterableDataset_len_called is not None
    return InProcessIterator if may_warn else _UnmarkedInProcessIterator


class _UnmarkedInProcessIterator(InProcessIterator):
    """Marks batches for a torch profiler only while one is on, because the mark takes as long as a tiny batch."""

    def __next__(self) -> Any:
        if is_profiled():
            return super().__next__()
        data = self._next_data()
        self._num_yielded += 1  # no function is called after this statement, so no handler comes in between
        return data


class InlineMeter:
    """Times the parts of each call of ``next()``: `enter`, `drawn`, `made`, `leave`, in this order.

    ``errors``: samples that failed.
    """

    def __init__(self, gpu: GpuStall[Any] | None, errors: SampleErrors) -> None:
        self._gpu = gpu
        self.feed: Feed | None = None
        """The feed that copies the batches to a device; set before the first call."""
        self._mark: Any = None
        self._entered = self._opened = 0.0
        self._tally = Tally(detailed=True, queue=own_queue_s)
        self._times = PoolTimes()
        self._errors: Counter[str] = Counter(batch=0)
        self._sample_errors = errors
        self._slow_samples = SlowestSamples()

    def enter(self) -> None:
        now = monotonic()
        self._opened, self._entered = 0.0, now
        self._tally.enter(now)
        if self._gpu is not None:
            self._mark = self._gpu.enter()

    def drawn(self) -> None:
        self._tally.busy(SAMPLER, self._entered, monotonic())

    def made(self, index: Any, times: BatchTimes) -> None:
        self._opened = monotonic()
        if times.slowest and times.slowest[0] > self._slow_samples.least_s:
            self._slow_samples.add(times.slowest[0], index, times.slowest[1])
        self._times.count(times)
        tally = self._tally
        tally.made_here(times.load_s, times.load_cpu_s, times.collate_s)
        tally.batches += 1
        tally.samples += times.samples

    def leave(self, error: BaseException | None = None) -> None:
        """Note that ``next()`` returns a batch, or raises ``error``."""
        over = False
        if error is not None:
            over = isinstance(error, StopIteration)
            self._errors["batch"] += isinstance(error, Exception) and not over
        now = monotonic()
        if self._gpu is not None:
            self._gpu.leave(self._mark, now - self._entered, starting=self._tally.starting, over=over)
        self._tally.leave(now - self._opened if self._opened else None, now, over=over)

    # -- reading -------------------------------------------------------------------------------------------------

    def reading(self) -> Reading:
        gpu, feed = self._gpu, self.feed
        now = monotonic()
        return Reading(
            **self._tally.counts(now),
            **({} if feed is None else feed.counts()),
            **({} if gpu is None else gpu.counts()),
            at=now,
            passes=1,
            errors=dict(self._errors),
            pools={INLINE: self._times.reading()},
            moved_bytes={"h2d": 0} if feed is None else {"h2d": feed.staged_bytes, "device": feed.copied_bytes},
            slow_samples=self._slow_samples.found(),
            failed_samples=self._sample_errors.count,
            latest_failed=tuple(self._sample_errors.latest),
        )

    def stats(self) -> LoaderStats:
        found = self.reading()
        return LoaderStats.of(found, busy_s=found.next_s, first_batch_s=self._tally.first_batch_s)
