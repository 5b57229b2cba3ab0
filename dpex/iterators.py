"""Iterators: what ``iter(loader)`` returns.

Both are PyTorch's ``_BaseDataLoaderIter`` with other hands: length warnings, the base seed, the sampler and pinning
rules are PyTorch's own code.
"""

from __future__ import annotations

import os
import time
import weakref
from collections.abc import Callable
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch.autograd import profiler
from torch.utils.data import (
    BatchSampler,
    DistributedSampler,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)
from torch.utils.data import _utils as torch_utils
from torch.utils.data._utils.collate import default_collate
from torch.utils.data._utils.fetch import _MapDatasetFetcher
from torch.utils.data.dataloader import _BaseDataLoaderIter, _DatasetKind, _SingleProcessDataLoaderIter

from dpex.autotune.runtime.tuner import Tuner
from dpex.core.placement import Place
from dpex.core.prefetch import Sizes
from dpex.diagnose.counters import Book, Page
from dpex.engine.engine import Engine, Plan
from dpex.engine.inprocess_meter import InlineMeter
from dpex.engine.pin_memory import Pinner
from dpex.pools.factory import LaneMaker
from dpex.profile.live_timer import TicketTimer, is_switched_on
from dpex.stats import LastStats, LoaderStats
from dpex.system.clock import monotonic
from dpex.system.gpu.events import cuda_stall
from dpex.system.user_warnings import warn
from dpex.telemetry.loader_metrics import Entry, Ledger
from dpex.transport.arena import Arena
from dpex.worker.core import ArenaCollate, Fetcher, Stages, WorkerSetup
from dpex.worker.drawless import draws_nothing
from dpex.worker.in_process import InProcess
from dpex.worker.modes import modes_here

INLINE_ARENA_BYTES = 1 << 20
"""Batches from this size on are stacked into reused memory when they are made in the training process."""

_profiles_here: Callable[[], bool] = torch._C._autograd._profiler_enabled


def _is_profiled() -> bool:
    """Whether a profiler is on, of this thread or of any."""
    return _profiles_here() or profiler._is_profiler_enabled


def draws_ahead_safely(sampler: Any) -> bool:
    """Whether nobody can tell how far ahead this index sampler is drawn: torch's own that draw their order at once.

    A `RandomSampler` draws from its generator again when it ends, which the owner of that generator could notice.
    """
    if type(sampler) is BatchSampler:
        sampler = sampler.sampler
    if type(sampler) is RandomSampler:
        return not sampler.replacement and sampler.generator is None
    return type(sampler) in (SequentialSampler, SubsetRandomSampler, WeightedRandomSampler, DistributedSampler)


def _as_drawn(index: Any) -> Any:
    """An index that stays as it was when it was drawn, though the sampler may fill the same list again for the next.

    A ticket keeps its index until its batch is delivered, as it may have to be made again.
    """
    if isinstance(index, torch.Tensor):
        return index.clone()
    return index.copy() if type(index) in (list, np.ndarray) else index


class _AsDrawn:
    """The indices of a sampler, each as it was when it was drawn; none is lost to an exception of a signal handler."""

    def __init__(self, sampler: Any) -> None:
        self._sampler = sampler
        self._drawn: list[Any] = []

    def __iter__(self) -> _AsDrawn:
        return self

    def __next__(self) -> Any:
        if not self._drawn:
            self._drawn.extend(islice(self._sampler, 1))
        if not self._drawn:
            raise StopIteration
        index = _as_drawn(self._drawn[0])
        del self._drawn[0]  # without a call until it is returned: see `dpex.system.interrupts`
        return index


class ArenaCache:
    """Private arenas of one loader: an iterator borrows one, so that no two share it."""

    def __init__(self) -> None:
        self._idle: list[Arena] = []

    def borrow(self, owner: Any) -> Arena:
        """An arena for ``owner``; it comes back when the owner dies."""
        arena = self._idle.pop() if self._idle else Arena(shared=False)
        weakref.finalize(owner, self._idle.append, arena).atexit = False
        return arena


class _DpexInlineDataLoaderIter(_SingleProcessDataLoaderIter):
    """Batches made in this process, one at a time, as torch does; large ones are stacked into reused memory."""

    def __init__(self, loader: Any, arenas: ArenaCache) -> None:
        super().__init__(loader)
        if self._collate_fn is default_collate:
            self._dataset_fetcher.collate_fn = ArenaCollate(arenas.borrow(self), INLINE_ARENA_BYTES, in_worker=False)
        alive = weakref.ref(self)
        self.last_stats = LastStats(lambda: _counted_by_torch(alive()))

    def __del__(self) -> None:
        last_stats = getattr(self, "last_stats", None)  # None: the constructor has failed
        if last_stats is not None:
            last_stats.end(_counted_by_torch(self))


def _counted_by_torch(iterator: Any) -> LoaderStats:
    return LoaderStats() if iterator is None else LoaderStats(batches=iterator._num_yielded)


class _CountedFetcher(_MapDatasetFetcher):
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

    def __init__(self, loader: Any, arenas: ArenaCache, ledger: Ledger | None, book: Book) -> None:
        super().__init__(loader, arenas)
        fetcher: Any = self._dataset_fetcher
        is_map = type(fetcher) is _MapDatasetFetcher and self._auto_collation
        self._meter = InlineMeter(
            auto_collation=self._auto_collation,
            gpu=cuda_stall(),
            dataset=self._dataset,
            timer=loader._timer,
            may_pass=is_map and not self._pin_memory,
        )
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
                    raise
                stretch.left_at = now = monotonic()
                stretch.spent = inside_s + now - entered, 0.0
                stretch.left -= 1
                return data
        self._meter.enter()
        try:
            data = super()._next_data()  # type: ignore[no-untyped-call]
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
        if _is_profiled():
            return super().__next__()  # type: ignore[misc]
        data = self._next_data()
        self._num_yielded += 1
        return data


class _DpexUnmarkedDataLoaderIter(_Unmarked, _DpexInlineDataLoaderIter):
    """See both."""


class _DpexMeteredUnmarkedDataLoaderIter(_Unmarked, _MeteredInlineDataLoaderIter):
    """See both."""


class InlineMaker:
    """Makes tickets in the training process under ``seeding="batch"``, as a worker would."""

    def __init__(self, setup: WorkerSetup, arena: Arena, timer: TicketTimer, disturbed: Callable[[str], None]) -> None:
        collate_fn = setup.collate_fn
        draws = not draws_nothing(setup.dataset, collate_fn)
        if collate_fn is default_collate:
            collate_fn = ArenaCollate(arena, INLINE_ARENA_BYTES, in_worker=False)
        self._fetcher = Fetcher(setup, setup.dataset, collate_fn, timer, time.thread_time)
        self._process = InProcess(setup.base_seed, setup.modes, disturbed, draws=draws)

    def __call__(self, number: int, index: Any, epoch: int) -> tuple[Any, Stages]:
        """The batch and its stage times; errors come as they are."""
        return self._process.make(self._fetcher.fetch, index, number, epoch)

    def unmeasured(self, number: int, index: Any, epoch: int) -> Any:
        """The batch alone."""
        return self._process.make(self._fetcher.unmeasured, index, number, epoch)


def _warn_of_thread(name: str, engine: Engine, tuner: Tuner | None) -> None:
    """A thread would not keep still while batches were made in this process; see `dpex.worker.in_process`."""
    remedy = "Give the loader workers (num_workers=1 or more), or that thread random generators of its own."
    if tuner is not None and tuner.leave_process(f"thread {name!r} runs while batches are made"):
        engine.wish(tuner.sizes)
        remedy = "From now on they are made by workers."
    warn(
        f"thread {name!r} runs while batches are made in this process, and global random generators move. If it draws "
        f"from random, np.random or torch, batches are not those that seeding='batch' promises. {remedy}"
    )


class _DpexDataLoaderIter(_BaseDataLoaderIter):
    """Batches made by workers; drives an `Engine`. ``__next__`` is torch's, with its profiler mark and warnings."""

    def __init__(
        self,
        loader: Any,
        make_lane: LaneMaker,
        sizes: Sizes,
        tuner: Tuner | None = None,
        ledger: Ledger | None = None,
        book: Book | None = None,
    ) -> None:
        super().__init__(loader)
        if self._num_workers > 0 and loader.prefetch_factor <= 0:
            raise AssertionError("prefetch_factor must be greater than 0 for MultiProcessingDataLoaderIter")
        if self._num_workers == 0 and self._timeout != 0:
            raise AssertionError("_SingleProcessDataLoaderIter requires timeout == 0")
        iterable = self._dataset_kind == _DatasetKind.Iterable
        per_batch = loader.seeding == "batch" and not iterable
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
            modes=modes_here() if per_batch else None,
        )
        timer = loader._timer
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

        def make_unmeasured(number: int, index: Any, epoch: int) -> Any:
            return inline[0].unmeasured(number, index, epoch)

        pinner = Pinner(self._pin_memory_device) if self._pin_memory and self._num_workers > 0 else None
        plan = Plan(
            logicals=0 if per_batch else self._num_workers,
            iterable=iterable,
            in_order=getattr(loader, "in_order", True),
            timeout_s=self._timeout,
            base_window=max(1, self._num_workers) * (loader.prefetch_factor or 2),
            stretch=self._may_stretch(loader, per_batch),
            memory_budget=loader.memory_budget,
            make_lane=lambda name, count: make_lane(name, count, setup, per_batch),
            make_inline=make_inline,
            make_unmeasured=make_unmeasured if per_batch and self._auto_collation and tuner is None else None,
            pinner=pinner,
            gpu=cuda_stall(),
            metered=ledger is not None,
        )
        self._engine = Engine(plan, sizes)
        engines.append(weakref.ref(self._engine))
        entry = ledger.watch(self._engine) if ledger is not None else None
        page = book.open(self._engine) if book is not None else None
        self.last_stats = LastStats(self._engine.stats)
        self._finalizer = weakref.finalize(self, _end, self._engine, self.last_stats, pinner, tuner, entry, page)
        if pinner is not None:
            pinner.start(self._engine.listen)
        self._reset(loader, first_iter=True)
        if tuner is not None:
            tuner.watch(self._engine)

    def _may_stretch(self, loader: Any, per_batch: bool) -> bool:
        """Whether nobody can tell if workers run further ahead than torch's.

        After a broken-off epoch persistent workers go on with the random state that running ahead left them.
        """
        if loader._prefetch_is_given or self._dataset_kind == _DatasetKind.Iterable:
            return False
        return draws_ahead_safely(self._index_sampler) and (per_batch or not self._persistent_workers)

    def _reset(self, loader: Any, first_iter: bool = False) -> None:
        if self._num_workers > 0:
            super()._reset(loader, first_iter)
        sampler = self._index_sampler
        makes_new_ones = type(sampler) is BatchSampler or draws_ahead_safely(sampler)
        self._engine.begin_epoch(self._sampler_iter if makes_new_ones else _AsDrawn(self._sampler_iter))

    def _next_data(self) -> Any:
        hand: list[Any] = []
        try:
            self._next_into(hand)
        except BaseException:  # without a call from here, and until it is returned: see `dpex.system.interrupts`
            self._engine.returned += hand
            raise
        return hand[0]

    def _next_into(self, hand: list[Any]) -> None:
        try:
            self._engine.next(hand)
        except StopIteration:
            if self._engine.schedule.finished and not self._persistent_workers:
                self._shutdown_workers()
            raise
        if self._pin_memory and self._num_workers == 0:
            hand[0] = torch_utils.pin_memory.pin_memory(hand[0], self._pin_memory_device)

    @property
    def _workers(self) -> list[Any]:
        """Local workers, by logical number, as torch's iterator lists them."""
        lane = self._engine.lane("local")
        handles = getattr(lane, "handles", ())
        return sorted(handles, key=lambda handle: self._engine.first_tenant(Place("local", handle.host)))

    def _shutdown_workers(self) -> None:
        self._finalizer()


def _end(
    engine: Engine,
    last_stats: LastStats,
    pinner: Pinner | None,
    tuner: Tuner | None,
    entry: Entry | None,
    page: Page | None,
) -> None:
    last_stats.end()
    if page is not None:
        page.end()
    if entry is not None:
        entry.end()
    if tuner is not None:
        tuner.leave(engine)
    if pinner is None:
        engine.close()
    else:
        pinner.close(last_act=engine.close)


class _DpexMapDataLoaderIter(_DpexDataLoaderIter):
    """For map-style data, which has no length warnings: torch's ``__next__`` without a profiler mark nobody reads."""

    def __next__(self) -> Any:
        if _is_profiled():
            return super().__next__()
        hand: list[Any] = []
        try:
            self._next_into(hand)
            self._num_yielded += 1
        except BaseException:  # without a call from here, and until it is returned: see `dpex.system.interrupts`
            self._engine.returned += hand
            raise
        return hand[0]
