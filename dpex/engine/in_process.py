"""The iterator for ``num_workers=0``: batches are made in the training process as torch makes them, one at a time.

A batch that an exception of a handler breaks off is made again by the next call of ``next()``. Of a stream, what
was read for that batch is lost, as with torch.

It counts nothing but batches. With an `InlineMeter`, for a loader whose counts have a reader, it measures them as well.
The meter is used by the consumer's thread; `InlineMeter.sums` and `InlineMeter.stats` may be called from any.
"""

from __future__ import annotations

import sys
import weakref
from collections import Counter
from collections.abc import Callable
from time import process_time
from typing import TYPE_CHECKING, Any

from torch.utils.data import default_collate

from dpex._torch import DatasetKind, MapDatasetFetcher, SingleProcessDataLoaderIter, is_profiled
from dpex.engine.draws import BegunDraws
from dpex.engine.pass_state import PassRecorder, begin_pass, go_on_in_process, in_process_state, point_for
from dpex.measure.batch_times import CACHE_USE, BatchTimes, PoolTimes
from dpex.measure.consumer_time import SAMPLER, Tally
from dpex.measure.ledger import LastReading
from dpex.measure.sampling import SlowestSamples
from dpex.measure.sums import Sums
from dpex.profile.live_timer import TicketTimer
from dpex.schedule.events import Notice, Raise
from dpex.schedule.names import INLINE, is_asynchronous
from dpex.schedule.progress import ResumePoint
from dpex.schedule.sample_policy import SamplePolicy
from dpex.stats import LoaderStats
from dpex.system.clock import monotonic
from dpex.system.gpu.stall import cuda_stall
from dpex.system.run_queue import own_queue_s
from dpex.system.signals import is_from_handler
from dpex.system.user_warnings import warn
from dpex.transport.arena import ArenaCache
from dpex.worker.batch_seeding import InProcessMaker
from dpex.worker.fetch import ArenaCollate, SampleClock
from dpex.worker.own_generators import OwnGenerators
from dpex.worker.sample_guard import NO_ERRORS, SampleErrors, SampleGuard
from dpex.worker.setup import modes_here

if TYPE_CHECKING:
    from dpex.device.feed import Feed
    from dpex.engine.pass_state import PassState
    from dpex.system.gpu.stall import GpuStall

INLINE_ARENA_BYTES = 1 << 20
"""Batches from this size on are stacked into reused memory when they are made in the training process."""


class InProcessIterator(SingleProcessDataLoaderIter):
    """Batches made in this process, one at a time, as torch does; large ones are stacked into reused memory.

    Under ``seeding="batch"`` each is made from the random states of its number (see `dpex.worker.batch_seeding`).

    Args:
        loader: The loader.
        arenas: Source of the reused memory.
        resume: The state from which the pass resumes.
        is_measured: True if batches are measured, by an `InlineMeter`.
    """

    _begun: BegunDraws | None = None
    meter: InlineMeter | None = None

    def __init__(
        self, loader: Any, arenas: ArenaCache, resume: PassState | None = None, *, is_measured: bool = False
    ) -> None:
        begin_pass(super().__init__, self, loader, resume)
        self._first = point_for(resume) or ResumePoint()
        maker: InProcessMaker | None = None
        if loader.seeding == "batch" and loader._dataset_kind == DatasetKind.Map:
            own = OwnGenerators(self._dataset, self._collate_fn)
            maker = InProcessMaker(int(self._base_seed), modes_here(), own)
        if self._collate_fn is default_collate:
            threads = (lambda: 1) if maker is None else maker.threads
            self._dataset_fetcher.collate_fn = ArenaCollate(
                arenas.borrow(self), INLINE_ARENA_BYTES, in_worker=False, threads=threads
            )
        if loader._dataset_kind == DatasetKind.Map and is_asynchronous(self._dataset):
            own = OwnGenerators(self._dataset, self._collate_fn)
            self._dataset_fetcher = AsyncFetcher(
                self._dataset_fetcher, loader.sample_policy, int(self._base_seed), own, loader.worker_config.concurrency
            )
        elif loader.sample_policy.tolerates:
            self._dataset_fetcher = GuardedFetcher(self._dataset_fetcher, loader.sample_policy, int(self._base_seed))
        recorder = self._recorder = PassRecorder(loader, int(self._base_seed))
        self._draws = recorder.begin(self._sampler_iter, resume, self._begun)
        self._delivered_ahead = sorted(self._first.ahead)
        self._number = self._first.first
        """The number of the batch that is being made."""
        if resume is not None:
            go_on_in_process(self, resume)
        if is_measured:
            self.meter = self._measure(loader._runtime.timer)
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

    def _measure(self, timer: TicketTimer) -> InlineMeter:
        """Have the parts of each batch measured."""
        fetcher: Any = self._dataset_fetcher
        meter = InlineMeter(auto_collation=self._auto_collation, gpu=cuda_stall(), dataset=self._dataset, timer=timer)
        meter.sample_errors = errors_of(fetcher)
        if type(fetcher) is MapDatasetFetcher and self._auto_collation:
            self._dataset_fetcher = fetcher = _CountedFetcher(fetcher, meter)
        fetcher.collate_fn = meter.timed(fetcher.collate_fn)
        return meter

    def __del__(self, is_ending: Callable[[], bool] = sys.is_finalizing) -> None:
        if is_ending():  # the modules that would answer may be cleared, and no caller is left
            return
        last_stats, last_state = getattr(self, "last_stats", None), getattr(self, "last_state", None)
        if last_stats is not None:  # None: the constructor has failed
            last_stats.end(_counted_by_torch(self) if self.meter is None else None)
        if last_state is not None:
            last_state.end(in_process_state(self))

    def _next_index(self) -> Any:
        """Return the index of the next batch: the same one until that batch is returned, or raises its own error."""
        draws, number = self._draws, self._num_yielded + self._recorder.failed
        for other in self._delivered_ahead:
            number += other <= number
        draws.forget(number)
        draws.draw(number + 1)
        self._number = number
        if not draws.has(number):
            draws.check_end()
            raise StopIteration
        (index,) = draws.indices(number, number + 1)
        return index if self.meter is None else self.meter.drawn(index)

    def _next_data(self) -> Any:
        meter = self.meter
        if meter is not None:
            meter.enter()
        try:
            data = super()._next_data()  # type: ignore[no-untyped-call]
        except BaseException as error:
            if isinstance(error, Exception) and not is_from_handler(error):
                self._recorder.raised(error, has_index=self._draws.has(self._number))
            if meter is not None:
                meter.leave(error)
            raise
        if meter is not None:
            meter.leave()
        return data


def _counted_by_torch(iterator: Any) -> LoaderStats:
    if iterator is None:
        return LoaderStats()
    return LoaderStats(batches=iterator._num_yielded, failed_samples=errors_of(iterator._dataset_fetcher).count)


class GuardedFetcher(MapDatasetFetcher):
    """torch's fetcher for batches that are made although some samples fail. ``errors``: the samples that failed."""

    def __init__(self, torchs: Any, policy: SamplePolicy, seed: int) -> None:
        vars(self).update(vars(torchs))
        self._guard = SampleGuard(self.dataset, policy, seed)
        self._made = 0
        self.errors: SampleErrors = SampleErrors(policy)

    def fetch(self, possibly_batched_index: Any) -> Any:
        """See torch's."""
        guard, index = self._guard, possibly_batched_index
        data = guard.samples(index) if self.auto_collation else guard.sample(index)
        self._count(len(data) if self.auto_collation else 1, guard.taken())
        return self.collate_fn(data)

    def _count(self, samples: int, failed: tuple[tuple[str, str], ...]) -> None:
        """Count the samples of a batch; warn of those that failed, or raise an error if they are too many."""
        self._made += 1
        said = self.errors.made((0, self._made), samples, failed)
        for one in said:
            if isinstance(one, Notice):
                warn(one.text)
            elif isinstance(one, Raise):
                raise one.error


class AsyncFetcher(GuardedFetcher):
    """torch's fetcher for an asynchronous dataset: the samples of a batch are loaded at the same time."""

    def __init__(self, torchs: Any, policy: SamplePolicy, seed: int, own: OwnGenerators, concurrency: int) -> None:
        from dpex.worker.async_samples import AsyncSamples

        super().__init__(torchs, policy, seed)
        guard = self._guard if policy.is_on else None
        auto_collation = self.auto_collation
        self._samples = AsyncSamples(
            self.dataset, auto_collation=auto_collation, concurrency=concurrency, own=own, guard=guard
        )

    def fetch(self, possibly_batched_index: Any) -> Any:
        """See torch's."""
        data, batch = self._samples.load_drawn(possibly_batched_index)
        self._count(len(data) if type(data) is list else 1, tuple(batch.failed))
        return self.collate_fn(data)


def errors_of(fetcher: Any) -> SampleErrors:
    """Return the errors of a `GuardedFetcher`, and `NO_ERRORS` of any other fetcher."""
    return fetcher.errors if isinstance(fetcher, GuardedFetcher) else NO_ERRORS


def in_process_kind(loader: Any) -> type[InProcessIterator]:
    """Return the class of a loader's iterators.

    torch warns of batches beyond the length that a stream has named. The warning names the line that calls torch's
    ``__next__``, so that this must be the user's.
    """
    may_warn = loader._dataset_kind == DatasetKind.Iterable and loader._IterableDataset_len_called is not None
    return InProcessIterator if may_warn else _UnmarkedInProcessIterator


class _UnmarkedInProcessIterator(InProcessIterator):
    """Batches are marked only while a profiler is on: torch's mark takes as long as a tiny batch."""

    def __next__(self) -> Any:
        if is_profiled():
            return super().__next__()
        data = self._next_data()
        self._num_yielded += 1  # without a call until it is returned: see `dpex.system.signals`
        return data


class _CountedFetcher(MapDatasetFetcher):
    """torch's fetcher, with single samples timed where they take long enough."""

    def __init__(self, torchs: Any, meter: InlineMeter) -> None:
        vars(self).update(vars(torchs))
        self._meter = meter

    def fetch(self, possibly_batched_index: Any) -> Any:
        """See torch's."""
        meter, dataset = self._meter, self.dataset
        if not meter.times_samples or getattr(dataset, "__getitems__", None):
            return super().fetch(possibly_batched_index)  # type: ignore[no-untyped-call]
        return self.collate_fn(meter.samples(dataset, possibly_batched_index))


class InlineMeter:
    """Times the parts of each call of ``next()``: `enter`, `drawn`, the collate function, `leave`, in this order.

    Args:
        auto_collation: An index is a list of samples.
        dataset: The dataset whose transforms are timed now and then, if there is a ``timer``.
        timer: Times the transforms of a batch.
    """

    def __init__(
        self,
        *,
        auto_collation: bool,
        gpu: GpuStall[Any] | None = None,
        dataset: Any = None,
        timer: TicketTimer | None = None,
    ) -> None:
        self._gpu = gpu
        self.feed: Feed | None = None
        """The feed that copies the batches to a device; set before the first call."""
        self._dataset = dataset
        self._timer = timer or TicketTimer(is_on=False)
        self._is_timed = False
        self._mark: Any = None
        self._entered = 0.0
        self._auto_collation = auto_collation
        self._tally = Tally(detailed=True, queue=own_queue_s)
        self._times = PoolTimes()
        self._errors: Counter[str] = Counter(batch=0)
        self.sample_errors = NO_ERRORS
        """Samples that failed in an iterator that makes batches without them."""
        self._opened = self._drawn_at = self._cpu_drawn_at = 0.0
        self._clock = SampleClock()
        self._slow_samples = SlowestSamples()
        self._index: Any = None
        CACHE_USE.take()  # of batches that were made before, and not measured

    def enter(self) -> None:
        """Note that the consumer asks for a batch."""
        now = monotonic()
        self._opened, self._entered = 0.0, now
        self._tally.enter(now)
        if self._gpu is not None:
            self._mark = self._gpu.enter()

    def drawn(self, index: Any) -> Any:
        """Note that the sampler has given the index of the batch. Return the index."""
        now = monotonic()
        self._tally.busy(SAMPLER, self._entered, now)
        if now >= self._timer.due:
            self._is_timed = self._timer.begin(now, self._dataset)
            now = monotonic()
        self._drawn_at = now
        self._cpu_drawn_at = process_time()
        return index

    @property
    def times_samples(self) -> bool:
        """Return True if the samples of the next batch are to be loaded by `samples`."""
        return self._clock.is_on

    def samples(self, dataset: Any, index: Any) -> list[Any]:
        """Return ``[dataset[i] for i in index]``, timed one by one."""
        self._index = index
        return self._clock.samples(dataset, index)

    def timed(self, collate_fn: Callable[[Any], Any]) -> Callable[[Any], Any]:
        """Return a collate function that calls ``collate_fn`` and counts the batch."""
        tally, count = self._tally, self._times.count

        def collate(data: Any) -> Any:
            began, cpu_began = monotonic(), process_time()
            batch = self._timer.collating(collate_fn, data) if self._is_timed else collate_fn(data)
            self._opened, cpu_ended = monotonic(), process_time()
            load_s, collate_s = began - self._drawn_at, self._opened - began
            samples = len(data) if self._auto_collation and isinstance(data, list) else 1
            load_cpu_s, collate_cpu_s = cpu_began - self._cpu_drawn_at, cpu_ended - cpu_began
            slowest = self._clock.slowest(load_s, samples)
            if slowest and slowest[0] > self._slow_samples.least_s:
                self._slow_samples.add(slowest[0], self._index, slowest[1])
            loaded = (samples, load_s, load_cpu_s, collate_s, collate_cpu_s, (), slowest, ())
            times = BatchTimes(*loaded, *CACHE_USE.take())
            if self._is_timed:
                self._end_timing()
                times = self._timer.finished(self._dataset, times)
            count(times)
            tally.made_here(load_s, load_cpu_s, collate_s)
            tally.batches += 1
            tally.samples += samples
            return batch

        return collate

    def _end_timing(self) -> None:
        self._is_timed = False
        self._timer.end()

    def leave(self, error: BaseException | None = None) -> None:
        """Note that the consumer has its batch, or that this error comes out of ``next()``."""
        if self._is_timed:
            self._end_timing()
        over = False
        if error is not None:
            over = isinstance(error, StopIteration)
            self._errors["batch"] += isinstance(error, Exception) and not over
        now = monotonic()
        if self._gpu is not None:
            self._gpu.leave(self._mark, now - self._entered, starting=self._tally.starting, over=over)
        self._tally.leave(now - self._opened if self._opened else None, now, over=over)

    # -- reading -------------------------------------------------------------------------------------------------

    def sums(self) -> Sums:
        """Return the counts so far."""
        gpu, feed = self._gpu, self.feed
        return self._tally.sums(
            monotonic(),
            passes=1,
            errors=dict(self._errors),
            pools={INLINE: self._times.sums()},
            moved_bytes={"h2d": 0} if feed is None else {"h2d": feed.staged_bytes, "device": feed.copied_bytes},
            **({} if feed is None else feed.sums()),
            slow_samples=self._slow_samples.found(),
            failed_samples=self.sample_errors.count,
            latest_failed=tuple(self.sample_errors.latest),
            gpu_stall_s=gpu.total_s if gpu is not None else None,
            gpu_running_stall_s=gpu.stall_s if gpu is not None else None,
        )

    def stats(self) -> LoaderStats:
        """Return the counts so far; see `LoaderStats`."""
        sums = self.sums()
        inside_s = sums.wait_s + sums.transfer_s
        return LoaderStats(
            batches=sums.batches,
            wait_s=inside_s,
            busy_s=inside_s,
            work_s=sums.work_s,
            first_batch_s=self._tally.first_batch_s,
            gpu_stall_s=sums.gpu_stall_s,
            failed_samples=sums.failed_samples,
            pools=sums.pools,
        )
