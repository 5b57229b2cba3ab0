"""Iterators for ``num_workers=0``: batches are made in the training process as torch makes them, one at a time.

`_DpexInlineDataLoaderIter` counts nothing but batches. `_MeteredInlineDataLoaderIter` also measures them, with an
`InlineMeter`. Their unmarked subclasses are faster, for all data but streams that may warn (`may_warn`).
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Collection, Iterator
from itertools import count
from typing import TYPE_CHECKING, Any

from torch.utils.data import default_collate

from dpex._torch import DatasetKind, MapDatasetFetcher, SingleProcessDataLoaderIter, is_profiled
from dpex.engine.inprocess_meter import InlineMeter
from dpex.engine.pass_state import Drawn, begin_pass, go_on_in_process, in_process_state, point_for, recorder_of
from dpex.engine.sample_errors import NO_ERRORS, SampleErrors
from dpex.measure.ledger import LastReading
from dpex.schedule.instructions import Raise, Say
from dpex.schedule.progress import ResumePoint
from dpex.schedule.sample_policy import SamplePolicy
from dpex.stats import LastStats, LoaderStats
from dpex.system.gpu.events import cuda_stall
from dpex.system.user_warnings import warn
from dpex.transport.arena import ArenaCache
from dpex.worker.collate import ArenaCollate
from dpex.worker.in_process import InProcessMaker
from dpex.worker.modes import modes_here
from dpex.worker.own_generators import OwnGenerators
from dpex.worker.sample_guard import SampleGuard

if TYPE_CHECKING:
    from dpex.engine.loader_counters import LoaderCounters
    from dpex.engine.pass_state import PassState
    from dpex.telemetry.loader_metrics import LoaderMetrics


INLINE_ARENA_BYTES = 1 << 20
"""Batches from this size on are stacked into reused memory when they are made in the training process."""


class _DpexInlineDataLoaderIter(SingleProcessDataLoaderIter):
    """Batches made in this process, one at a time, as torch does; large ones are stacked into reused memory.

    Under ``seeding="batch"`` each is made from the random states of its number (see `dpex.worker.in_process`).
    """

    _drawn: Drawn = None
    _maker: InProcessMaker | None = None

    def __init__(self, loader: Any, arenas: ArenaCache, resume: PassState | None = None) -> None:
        begin_pass(super().__init__, self, loader, resume)
        self._first = point_for(resume) or ResumePoint()
        if loader.seeding == "batch" and loader._dataset_kind == DatasetKind.Map:
            own = OwnGenerators(self._dataset, self._collate_fn)
            self._maker = InProcessMaker(int(self._base_seed), modes_here(), own)
        if self._collate_fn is default_collate:
            threads = (lambda: 1) if self._maker is None else self._maker.threads
            self._dataset_fetcher.collate_fn = ArenaCollate(
                arenas.borrow(self), INLINE_ARENA_BYTES, in_worker=False, threads=threads
            )
        if loader.sample_policy.tolerates:
            self._dataset_fetcher = GuardedFetcher(self._dataset_fetcher, loader.sample_policy, int(self._base_seed))
        recorder = self._recorder = recorder_of(self, loader)
        indices = recorder.begin(self._sampler_iter, resume, self._drawn)
        self._sampler_iter = _without(self._first.ahead, self._first.first, indices)
        self._drawn = None
        if resume is not None:
            go_on_in_process(self, resume)
        alive = weakref.ref(self)
        self.last_stats = LastStats(lambda: _counted_by_torch(alive()))
        self.last_state: LastReading[PassState | None] = LastReading(lambda: in_process_state(alive()))

    def seed_batches(self) -> None:
        """Have each batch made from the random states of its number; to be called once, before the first batch."""
        maker, fetcher, first = self._maker, self._dataset_fetcher, self._first
        if maker is None:
            return
        fetch = fetcher.fetch
        numbers = _without(first.ahead, first.first, count(first.first))
        fetcher.fetch = lambda index: maker.make(fetch, index, next(numbers), first.epoch)

    def __del__(self, is_ending: Callable[[], bool] = sys.is_finalizing) -> None:
        if is_ending():  # the modules that would answer may be cleared, and no caller is left
            return
        last_stats, last_state = getattr(self, "last_stats", None), getattr(self, "last_state", None)
        if last_stats is not None:  # None: the constructor has failed
            last_stats.end(_counted_by_torch(self))
        if last_state is not None:
            last_state.end(in_process_state(self))

    def _next_data(self) -> Any:
        try:
            return super()._next_data()  # type: ignore[no-untyped-call]
        except Exception as error:
            self._recorder.raised(error)
            raise


def _without(numbers: Collection[int], first: int, items: Iterator[Any]) -> Iterator[Any]:
    """Return ``items``, which are numbered from ``first`` on, without those of these numbers."""
    if not numbers:
        return items
    return (item for number, item in zip(count(first), items, strict=False) if number not in numbers)


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
        self.errors = SampleErrors(policy)

    def fetch(self, possibly_batched_index: Any) -> Any:
        """See torch's."""
        guard, index = self._guard, possibly_batched_index
        data = guard.samples(index) if self.auto_collation else guard.sample(index)
        self._made += 1
        said = self.errors.made((0, self._made), len(data) if self.auto_collation else 1, guard.taken())
        for one in said:
            if isinstance(one, Say):
                warn(one.text)
            elif isinstance(one, Raise):
                raise one.error
        return self.collate_fn(data)


def errors_of(fetcher: Any) -> SampleErrors:
    """Return the errors of a `GuardedFetcher`, and `NO_ERRORS` of any other fetcher."""
    return fetcher.errors if isinstance(fetcher, GuardedFetcher) else NO_ERRORS


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


class _MeteredInlineDataLoaderIter(_DpexInlineDataLoaderIter):
    """Batches made in this process, one at a time, and measured."""

    def __init__(
        self,
        loader: Any,
        arenas: ArenaCache,
        resume: PassState | None,
        ledger: LoaderMetrics | None,
        book: LoaderCounters,
    ) -> None:
        super().__init__(loader, arenas, resume)
        fetcher: Any = self._dataset_fetcher
        is_map = type(fetcher) is MapDatasetFetcher and self._auto_collation
        self._meter = InlineMeter(
            auto_collation=self._auto_collation,
            gpu=cuda_stall(),
            dataset=self._dataset,
            timer=loader._runtime.timer,
        )
        self._meter.sample_errors = errors_of(fetcher)
        if is_map:
            self._dataset_fetcher = fetcher = _CountedFetcher(fetcher, self._meter)
        fetcher.collate_fn = self._meter.timed(fetcher.collate_fn)
        self.last_stats = LastStats(self._meter.stats)
        if ledger is not None:
            weakref.finalize(self, ledger.watch(self._meter).end)
        weakref.finalize(self, book.open(self._meter).end)

    def __del__(self, is_ending: Callable[[], bool] = sys.is_finalizing) -> None:
        last_stats = getattr(self, "last_stats", None)
        if last_stats is not None and not is_ending():
            last_stats.end()
        super().__del__()

    def _next_index(self) -> Any:
        index = super()._next_index()  # type: ignore[no-untyped-call]
        self._meter.drawn()
        return index

    def _next_data(self) -> Any:
        self._meter.enter()
        try:
            data = super()._next_data()
        except BaseException as error:
            self._meter.leave(error)
            raise
        self._meter.leave()
        return data


def may_warn(loader: Any) -> bool:
    """Return True if the dataset is a stream that has named its length: torch warns of batches beyond it."""
    return loader._dataset_kind == DatasetKind.Iterable and loader._IterableDataset_len_called is not None


class _Unmarked:
    """torch's ``__next__`` without its mark for a profiler, which takes as long as a tiny batch, while none is on.

    Not for a stream that may warn of its length: the warning names the line that calls torch's ``__next__``.
    """

    _next_data: Callable[[], Any]
    _num_yielded: int

    def __next__(self) -> Any:
        if is_profiled():
            return super().__next__()  # type: ignore[misc]
        data = self._next_data()
        self._num_yielded += 1
        return data


class _UnmarkedInlineDataLoaderIter(_Unmarked, _DpexInlineDataLoaderIter):
    """Batches made in this process, marked only while a profiler is on."""


class _UnmarkedMeteredDataLoaderIter(_Unmarked, _MeteredInlineDataLoaderIter):
    """Batches made in this process and measured, marked only while a profiler is on."""
