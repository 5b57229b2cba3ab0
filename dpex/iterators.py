"""Iterators: what ``iter(loader)`` returns.

Both are PyTorch's ``_BaseDataLoaderIter`` with other hands: length warnings, the base seed, the sampler and pinning
rules are PyTorch's own code.
"""

from __future__ import annotations

import os
import weakref
from collections import deque
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, Protocol

from torch.utils.data import BatchSampler, default_collate

from dpex._torch import (
    BaseDataLoaderIter,
    DatasetKind,
    MapDatasetFetcher,
    SingleProcessDataLoaderIter,
    is_profiled,
    next_data_in_process,
    pin_memory,
)
from dpex.autotune.runtime.tuner import Tuner
from dpex.core.names import LOCAL
from dpex.core.placement import Place
from dpex.core.prefetch import Sizes
from dpex.diagnose.counters import LoaderCounters
from dpex.engine.drawing import AsDrawn, draws_ahead_safely
from dpex.engine.engine import Engine
from dpex.engine.going_on import (
    Drawn,
    begin_pass,
    go_on_in_process,
    in_process_state,
    point_for,
    recorder_of,
    worker_state,
)
from dpex.engine.guarded_fetcher import GuardedFetcher, errors_of
from dpex.engine.inprocess_meter import InlineMeter
from dpex.engine.pass_state import PassRecorder, PassState
from dpex.engine.pin_memory import Pinner
from dpex.engine.plan import EnginePlan
from dpex.engine.sample_errors import policy_of
from dpex.engine.sampler_start import hold
from dpex.feed.feed import Feed
from dpex.feed.opening import have_transformed
from dpex.measure.ledger import LastReading
from dpex.pools.factory import PoolFactory
from dpex.profile.live_timer import is_switched_on
from dpex.stats import LastStats, LoaderStats
from dpex.system.clock import monotonic
from dpex.system.gpu.events import cuda_stall
from dpex.system.user_warnings import warn
from dpex.telemetry.loader_metrics import LoaderMetrics
from dpex.transport.arena import Arena
from dpex.worker.collate import ArenaCollate
from dpex.worker.in_process import Run
from dpex.worker.inline_maker import INLINE_ARENA_BYTES, InlineMaker
from dpex.worker.modes import modes_here
from dpex.worker.outcome import Stages
from dpex.worker.own_generators import registered
from dpex.worker.setup import WorkerSetup
from dpex.worker.stand_in import StandIn


class ArenaCache:
    """Private arenas of one loader: an iterator borrows one, so that no two share it."""

    def __init__(self) -> None:
        self._idle: list[Arena] = []

    def borrow(self, owner: Any) -> Arena:
        """An arena for ``owner``; it comes back when the owner dies."""
        arena = self._idle.pop() if self._idle else Arena(shared=False)
        weakref.finalize(owner, self._idle.append, arena).atexit = False
        return arena


class _DpexInlineDataLoaderIter(SingleProcessDataLoaderIter):
    """Batches made in this process, one at a time, as torch does; large ones are stacked into reused memory."""

    _drawn: Drawn = None

    def __init__(self, loader: Any, arenas: ArenaCache, resume: PassState | None = None) -> None:
        begin_pass(super().__init__, self, loader, resume)
        if self._collate_fn is default_collate:
            self._dataset_fetcher.collate_fn = ArenaCollate(arenas.borrow(self), INLINE_ARENA_BYTES, in_worker=False)
        if loader.on_sample_error != "raise":
            self._dataset_fetcher = GuardedFetcher(self._dataset_fetcher, policy_of(loader), int(self._base_seed))
        recorder = self._recorder = recorder_of(self, loader)
        hold(self, "_sampler_iter", recorder.begin(self._sampler_iter, resume, self._drawn))
        self._drawn = None
        if resume is not None:
            go_on_in_process(self, resume)
        alive = weakref.ref(self)
        self.last_stats = LastStats(lambda: _counted_by_torch(alive()))
        self.last_state: LastReading[PassState | None] = LastReading(lambda: in_process_state(alive()))

    def __del__(self) -> None:
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


def _counted_by_torch(iterator: Any) -> LoaderStats:
    if iterator is None:
        return LoaderStats()
    return LoaderStats(batches=iterator._num_yielded, failed_samples=errors_of(iterator._dataset_fetcher).count)


class _CountedFetcher(MapDatasetFetcher):
    """torch's, with single samples timed where that is worth it."""

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
    """The same, counted. A call that passes unmeasured does what torch's does, and no more (see
    `dpex.engine.inprocess_sampling`)."""

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
            may_pass=is_map and not self._pin_memory,
        )
        self._meter.sample_errors = errors_of(fetcher)
        self._stretch = self._meter.stretch
        self._fetch_uncounted = fetcher.fetch
        if is_map:
            self._dataset_fetcher = fetcher = _CountedFetcher(fetcher, self._meter)
        fetcher.collate_fn = self._meter.timed(fetcher.collate_fn)
        self.last_stats = LastStats(self._meter.stats)
        if ledger is not None:
            weakref.finalize(self, ledger.watch(self._meter).end)
        weakref.finalize(self, book.open(self._meter).end)

    def __del__(self) -> None:
        last_stats = getattr(self, "last_stats", None)
        if last_stats is not None:
            last_stats.end()
        super().__del__()

    def _next_index(self) -> Any:
        index = super()._next_index()  # type: ignore[no-untyped-call]
        self._meter.drawn()
        return index

    def _next_data(self) -> Any:
        stretch = self._stretch
        if stretch.left:
            entered = monotonic()
            if entered < stretch.until:
                inside_s, _ = stretch.spent
                stretch.spent = inside_s, entered
                try:
                    index = next(self._sampler_iter)
                    stretch.index = index
                    data = self._fetch_uncounted(index)
                except BaseException as error:
                    self._meter.broke_off(error)
                    if isinstance(error, Exception):
                        self._recorder.raised(error)
                    raise
                stretch.left_at = now = monotonic()
                stretch.spent = inside_s + now - entered, 0.0
                stretch.left -= 1
                return data
        self._meter.enter()
        try:
            data = super()._next_data()
        except BaseException as error:
            self._meter.leave(error)
            raise
        self._meter.leave()
        return data


class _Unmarked:
    """torch's ``__next__`` without its profiler mark, which takes as long as a tiny batch, while nobody profiles.

    Not for a stream that may warn of its length: the warning names the line of whoever calls ``__next__``.
    """

    _next_data: Callable[[], Any]
    _num_yielded: int

    def __next__(self) -> Any:
        if is_profiled():
            return super().__next__()  # type: ignore[misc]
        data = self._next_data()
        self._num_yielded += 1
        return data


class _DpexUnmarkedDataLoaderIter(_Unmarked, _DpexInlineDataLoaderIter):
    """See both. One call fewer for each batch."""

    _next_data = next_data_in_process

    def __next__(self) -> Any:
        try:
            if is_profiled():
                return super().__next__()
            data = self._next_data()
        except Exception as error:
            self._recorder.raised(error)
            raise
        self._num_yielded += 1
        return data


class _DpexMeteredUnmarkedDataLoaderIter(_Unmarked, _MeteredInlineDataLoaderIter):
    """See both."""


def _warn_of_thread(name: str, engine: Engine, tuner: Tuner | None) -> None:
    """A thread would not keep still while batches were made in this process; see `dpex.worker.in_process`."""
    remedy = "Give the loader workers (num_workers=1 or more), or that thread random generators of its own."
    if tuner is not None and tuner.leave_process(f"thread {name!r} runs while batches are made"):
        engine.request(tuner.sizes)
        remedy = "From now on they are made by workers."
    warn(
        f"thread {name!r} runs while batches are made in this process, and global random generators move. If it draws "
        f"from random, np.random or torch, batches are not those that seeding='batch' promises. {remedy}"
    )


class _DpexDataLoaderIter(BaseDataLoaderIter):
    """Batches made by workers; drives an `Engine`. ``__next__`` is torch's, with its profiler mark and warnings."""

    _drawn: Drawn = None

    def __init__(
        self,
        loader: Any,
        make_pool: PoolFactory,
        sizes: Sizes,
        tuner: Tuner | None = None,
        ledger: LoaderMetrics | None = None,
        book: LoaderCounters | None = None,
        *,
        may_stand_in: bool = False,
        feed: Feed | None = None,
        resume: PassState | None = None,
    ) -> None:
        begin_pass(super().__init__, self, loader, resume)
        if self._num_workers > 0 and loader.prefetch_factor <= 0:
            raise AssertionError("prefetch_factor must be greater than 0 for MultiProcessingDataLoaderIter")
        if self._num_workers == 0 and self._timeout != 0:
            raise AssertionError("_SingleProcessDataLoaderIter requires timeout == 0")
        iterable = self._dataset_kind == DatasetKind.Iterable
        per_batch = loader.seeding == "batch" and not iterable
        samples = policy_of(loader)
        setup = WorkerSetup(
            dataset=self._dataset,
            collate_fn=self._collate_fn,
            worker_init_fn=loader.worker_init_fn,
            iterable=iterable,
            auto_collation=self._auto_collation,
            drop_last=self._drop_last,
            num_workers=self._num_workers,
            base_seed=int(self._base_seed),
            per_batch_seed=per_batch,
            own_workers=(1 if loader.auto_workers else self._num_workers) if per_batch else None,
            times_steps=is_switched_on(os.environ),
            snapshot_every=loader.snapshot_every_n_steps or None,
            samples=samples,
            modes=modes_here() if per_batch else None,
            registered=registered() if per_batch else (),
        )
        timer = loader._runtime.timer
        inline: list[InlineMaker] = []
        engines: list[weakref.ref[Engine]] = []

        def disturbed(thread: str) -> None:
            engine = engines[0]()
            if engine is not None:
                _warn_of_thread(thread, engine, tuner)

        def make_inline(number: int, index: Any, epoch: int) -> tuple[Any, Stages]:
            if not inline:
                inline.append(InlineMaker(setup, Arena(shared=False), timer, disturbed))
            return inline[0](number, index, epoch)

        def make_run(indices: deque[Any], count: int, numbers: tuple[int, int], into: Run) -> None:
            inline[0].make_run(indices, count, numbers, into)

        stand_ins: list[StandIn] = []

        def make_stand_in(logical: int, number: int, index: Any, epoch: int) -> tuple[Any, Stages]:
            if not stand_ins:
                stand_ins.append(StandIn(setup))
            return stand_ins[0].make(logical, number, index, epoch)

        self._feed = feed
        have_transformed(feed, loader.device_transform, int(self._base_seed))
        has_thread = feed is not None or (self._pin_memory and self._num_workers > 0)
        pinner = Pinner(self._pin_memory_device, feed) if has_thread else None
        plan = EnginePlan(
            logicals=0 if per_batch else self._num_workers,
            iterable=iterable,
            in_order=getattr(loader, "in_order", True),
            timeout_s=self._timeout,
            base_prefetch=max(1, self._num_workers) * (loader.prefetch_factor or 2),
            may_read_ahead=self._may_read_ahead(loader, per_batch),
            memory_budget=loader.memory_budget,
            make_pool=lambda name, count: make_pool(name, count, setup, per_batch),
            make_inline=make_inline,
            may_stand_in=may_stand_in and not iterable,
            make_stand_in=make_stand_in,
            stop_standing_in=stand_ins.clear,
            make_run=make_run if per_batch and self._auto_collation and not samples.is_on else None,
            may_make_ahead=tuner is not None and loader.memory_budget is None,
            samples=samples,
            pinner=pinner,
            feed=feed,
            gpu=cuda_stall(),
            metered=ledger is not None,
        )
        self._engine = Engine(plan, sizes)
        engines.append(weakref.ref(self._engine))
        entry = ledger.watch(self._engine) if ledger is not None else None
        page = book.open(self._engine) if book is not None else None
        self._recorder, self._resume = self._new_recorder(loader), resume
        self.last_stats = LastStats(self._engine.stats)
        self.last_state: LastReading[PassState | None] = LastReading(
            partial(worker_state, self._engine, self._recorder)
        )
        ends = (self.last_stats, self.last_state, page, entry)
        self._finalizer = weakref.finalize(self, _end, self._engine, ends, pinner, feed, tuner)
        if pinner is not None:
            pinner.start(self._engine.listen)
        self._reset(loader, first_iter=True)
        if tuner is not None:
            tuner.watch(self._engine)

    def _may_read_ahead(self, loader: Any, per_batch: bool) -> bool:
        """Whether nobody can tell if workers run further ahead than torch's.

        After a broken-off epoch persistent workers go on with the random state that running ahead left them.
        """
        if loader._prefetch_is_given or self._dataset_kind == DatasetKind.Iterable:
            return False
        return draws_ahead_safely(self._index_sampler) and (per_batch or not self._persistent_workers)

    def _reset(self, loader: Any, first_iter: bool = False) -> None:
        if self._num_workers > 0:
            super()._reset(loader, first_iter)
        resume, self._resume = self._resume, None
        self._engine.begin_epoch(self._new_draws(resume), point_for(resume))
        if resume is not None and not resume.has_finished:
            self._num_yielded = resume.batches

    def _new_draws(self, resume: PassState | None) -> Any:
        """What the engine draws from in an epoch that begins, or goes on."""
        sampler, drawn = self._index_sampler, self._drawn
        self._drawn = None
        indices = self._recorder.begin(self._sampler_iter, resume, drawn)
        makes_new_ones = type(sampler) is BatchSampler or draws_ahead_safely(sampler)
        return indices if makes_new_ones else AsDrawn(indices)

    def _new_recorder(self, loader: Any) -> PassRecorder:
        """What takes notes of the passes."""
        return recorder_of(self, loader)

    def _next_data(self) -> Any:
        hand: list[Any] = []
        try:
            self._next_into(hand)
        except BaseException:  # without a call from here, and until it is returned: see `dpex.system.interrupts`
            self._engine.returned += hand
            raise
        return hand[0]

    def _next_into(self, hand: list[Any]) -> None:
        feed = self._feed
        if feed is not None:
            feed.check_open()
        try:
            self._engine.next(hand)
        except StopIteration:
            self._recorder.has_finished = True
            if self._engine.schedule.finished and not self._persistent_workers:
                self._shutdown_workers()
            elif feed is not None:
                feed.settle()
            raise
        if self._pin_memory and self._num_workers == 0 and feed is None:
            hand[0] = pin_memory(hand[0], self._pin_memory_device)

    @property
    def _workers(self) -> list[Any]:
        """Local workers, by logical number, as torch's iterator lists them."""
        pool = self._engine.pool(LOCAL)
        handles = getattr(pool, "handles", ())
        return sorted(handles, key=lambda handle: self._engine.first_logical_worker(Place(LOCAL, handle.worker)))

    def _shutdown_workers(self) -> None:
        self._finalizer()


class _Ending(Protocol):
    """What keeps the latest reading of an iterator that ends."""

    def end(self) -> None:
        """Keep it."""


def _end(
    engine: Engine, ends: Iterable[_Ending | None], pinner: Pinner | None, feed: Feed | None, tuner: Tuner | None
) -> None:
    for each in ends:
        if each is not None:
            each.end()
    if tuner is not None:
        tuner.leave(engine)
    if pinner is None:
        engine.close()
    else:
        pinner.close(last_act=partial(_end_copies, feed, engine))


def _end_copies(feed: Feed | None, engine: Engine) -> None:
    """Nothing more is begun: wait for copies under way, before the memory that they read is gone."""
    try:
        if feed is not None:
            feed.settle()
    finally:
        engine.close()


class _DpexMapDataLoaderIter(_DpexDataLoaderIter):
    """For map-style data, which has no length warnings: torch's ``__next__`` without a profiler mark nobody reads."""

    def __next__(self) -> Any:
        if is_profiled():
            return super().__next__()
        hand: list[Any] = []
        try:
            if self._pin_memory or not self._engine.pass_unmeasured(hand):
                self._next_into(hand)
            self._num_yielded += 1
        except BaseException as error:  # without a call from here, and until it is returned: `dpex.system.interrupts`
            self._engine.returned += hand
            if type(error) is StopIteration:
                self._recorder.has_finished = True
            raise
        return hand[0]
