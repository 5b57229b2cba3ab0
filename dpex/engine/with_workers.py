"""Iterators whose batches workers make: they drive an `Engine`."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from torch.utils.data import BatchSampler

from dpex._torch import BaseDataLoaderIter, DatasetKind, is_profiled
from dpex.engine.drawing import AsDrawn, draws_ahead_safely
from dpex.engine.engine import TOLD_S, Engine
from dpex.engine.kept_workers import KeptWorkers, end
from dpex.engine.pass_state import Drawn, begin_pass, point_for, recorder_of, worker_state
from dpex.engine.plan import EnginePlan
from dpex.errors import InternalError
from dpex.measure.ledger import LastReading
from dpex.profile.live_timer import is_switched_on
from dpex.schedule.names import LOCAL
from dpex.schedule.placement import Place
from dpex.schedule.streams import Splitting
from dpex.stats import LastStats
from dpex.system.gpu.events import cuda_stall
from dpex.system.gpu.stall import SHARE
from dpex.worker.setup import WorkerSetup, modes_here

if TYPE_CHECKING:
    from dpex.autotune.runtime.tuner import Tuner
    from dpex.device.feed import Feed
    from dpex.device.pinning import Pinner
    from dpex.engine.loader_counters import LoaderCounters
    from dpex.engine.next_epoch import NextEpoch, OverlapRecord
    from dpex.engine.pass_state import PassRecorder, PassState
    from dpex.pools.factory import PoolFactory
    from dpex.schedule.prefetch import Sizes
    from dpex.telemetry.loader_metrics import LoaderMetrics


@dataclass(frozen=True, kw_only=True)
class Observers:
    """Readers of an engine's counts: the tuner, the metrics and the diagnosis of a loader."""

    tuner: Tuner | None = None
    metrics: LoaderMetrics | None = None
    counters: LoaderCounters | None = None

    def begin(self, engine: Engine) -> Iterator[Callable[[], None]]:
        """Have metrics and diagnosis read this engine. Return the functions that end this."""
        if self.counters is not None:
            yield self.counters.open(engine).end
        if self.metrics is not None:
            yield self.metrics.watch(engine).end


class _DpexDataLoaderIter(BaseDataLoaderIter):
    """Batches made by workers; drives an `Engine`. ``__next__`` is torch's, with its profiler mark and warnings."""

    _drawn: Drawn = None

    def __init__(
        self,
        loader: Any,
        make_pool: PoolFactory,
        sizes: Sizes,
        observers: Observers | None = None,
        *,
        feed: Feed | None = None,
        resume: PassState | None = None,
        overlap: OverlapRecord | None = None,
        kept: KeptWorkers | None = None,
        facts: object = None,
    ) -> None:
        begin_pass(super().__init__, self, loader, resume)
        if loader.prefetch_factor <= 0:
            raise AssertionError("prefetch_factor must be greater than 0 for MultiProcessingDataLoaderIter")
        self._feed, self._facts, self._runtime = feed, facts, weakref.ref(loader._runtime)
        self._is_over = False
        observers = observers or Observers()
        pinner: Pinner | None
        if kept is None:
            self._next_epoch = self._new_next_epoch(loader, overlap)
            pinner = self._new_pinner(feed)
            self._engine = self._new_engine(loader, make_pool, sizes, observers, pinner, overlap)
            self._ends = tuple(observers.begin(self._engine))
        else:
            self._next_epoch, pinner, self._engine, self._ends = kept.next_epoch, kept.pinner, kept.engine, kept.ends
        self._recorder, self._resume = self._new_recorder(loader), resume
        self.last_stats = LastStats(self._engine.stats)
        self.last_state: LastReading[PassState | None] = LastReading(
            partial(worker_state, self._engine, self._recorder)
        )
        ends: tuple[Callable[[], None], ...] = (self.last_stats.end, self.last_state.end, *self._ends)
        if (tuner := observers.tuner) is not None:
            ends += (partial(tuner.leave, self._engine),)
        self._pinner = pinner
        self._finalizer = weakref.finalize(self, end, self._engine, ends, pinner, feed)
        if kept is not None:
            kept.taken()
        elif pinner is not None:
            pinner.start(self._engine.listen)
        if loader._runtime.asks_states or loader.worker_config.snapshot_every_n_steps:
            self._engine.ask_states()
        self._begin_first(loader, kept)
        if kept is not None:
            self._engine.resize(sizes)
        self._tuner = tuner
        if tuner is not None:
            tuner.watch(self._engine)

    def _begin_first(self, loader: Any, kept: KeptWorkers | None) -> None:
        """Begin the first epoch of this iterator."""
        if kept is None:
            self._reset(loader, first_iter=True)
            return
        seeds = kept.next_epoch.base_seeds
        if seeds is None or seeds[1] != int(self._base_seed):
            raise InternalError(f"batches were made ahead with the base seeds {seeds}, not {self._base_seed}")
        self._drawn = kept.next_epoch.take()
        self._engine.begin_epoch(self._new_draws(None), takes_ahead=True)

    def _new_engine(
        self,
        loader: Any,
        make_pool: PoolFactory,
        sizes: Sizes,
        observers: Observers,
        pinner: Pinner | None,
        overlap: OverlapRecord | None,
    ) -> Engine:
        """Return an engine, which starts its workers."""
        setup, feed = self._setup(loader), self._feed
        if feed is not None:
            feed.have_transformed(loader.device_config.transform, int(self._base_seed))
        return Engine(
            EnginePlan(
                logicals=0 if setup.per_batch_seed else self._num_workers,
                iterable=setup.iterable,
                in_order=getattr(loader, "in_order", True),
                timeout_s=self._timeout,
                base_prefetch=self._num_workers * (loader.prefetch_factor or 2),
                may_read_ahead=self._may_read_ahead(loader, setup.per_batch_seed),
                memory_budget=loader.worker_config.memory_budget,
                make_pool=lambda name, count: make_pool(name, count, setup, setup.per_batch_seed),
                samples=setup.samples,
                splitting=self._splitting(loader),
                pinner=pinner,
                feed=feed,
                gpu=cuda_stall(SHARE),
                metered=observers.metrics is not None,
                pass_batches=_length(self._index_sampler),
                next_epoch=self._next_epoch,
                overlap=overlap,
                starts_anew=not self._persistent_workers,
            ),
            sizes,
        )

    def _splitting(self, loader: Any) -> Splitting | None:
        """Return the findings of earlier passes about the dataset's splitting. None: each worker reads a stream."""
        streams = loader._streams
        if not loader._is_auto or streams is None or streams.is_certain or self._num_workers < 2:
            return None
        if self._dataset_kind != DatasetKind.Iterable:
            return None
        runtime = loader._runtime
        if runtime.splitting is None:
            runtime.splitting = Splitting(most=self._num_workers)
        found: Splitting = runtime.splitting
        return found

    def _new_pinner(self, feed: Feed | None) -> Pinner | None:
        """Return the thread that copies batches to page-locked memory or to a device; None if neither is wanted."""
        if feed is None and not self._pin_memory:
            return None
        from dpex.device.pinning import Pinner

        return Pinner(self._pin_memory_device, feed)

    def _new_next_epoch(self, loader: Any, overlap: OverlapRecord | None) -> NextEpoch | None:
        """Return what predicts the next epoch; None if its batches are not to be made ahead."""
        if overlap is None or overlap.why_not or (self._facts is None and not self._persistent_workers):
            return None
        from dpex.engine.next_epoch import NextEpoch

        base_seed = None if self._persistent_workers else int(self._base_seed)
        return NextEpoch(self._index_sampler, loader.generator, base_seed=base_seed, record=overlap)

    def _setup(self, loader: Any) -> WorkerSetup:
        iterable = self._dataset_kind == DatasetKind.Iterable
        per_batch = loader.seeding == "batch" and not iterable
        return WorkerSetup(
            dataset=self._dataset,
            collate_fn=self._collate_fn,
            worker_init_fn=loader.worker_init_fn,
            iterable=iterable,
            auto_collation=self._auto_collation,
            drop_last=self._drop_last,
            num_workers=self._num_workers,
            base_seed=int(self._base_seed),
            per_batch_seed=per_batch,
            own_workers=(1 if loader._is_auto else self._num_workers) if per_batch else None,
            times_steps=is_switched_on(os.environ),
            snapshot_every=loader.worker_config.snapshot_every_n_steps or None,
            samples=loader.sample_policy,
            modes=modes_here() if per_batch else None,
            renews=self._facts is not None,
        )

    def _may_read_ahead(self, loader: Any, per_batch: bool) -> bool:
        """Return True if the user cannot notice that workers run further ahead than torch's.

        After a broken-off epoch persistent workers continue with the random state that running ahead left them.
        """
        if loader._prefetch_is_given or self._dataset_kind == DatasetKind.Iterable:
            return False
        return draws_ahead_safely(self._index_sampler) and (per_batch or not self._persistent_workers)

    def _reset(self, loader: Any, first_iter: bool = False) -> None:
        super()._reset(loader, first_iter)
        resume, self._resume = self._resume, None
        takes_ahead = not first_iter and self._next_epoch is not None and self._next_epoch.is_right()
        if takes_ahead and self._next_epoch is not None:
            self._drawn = self._next_epoch.take()
        self._engine.begin_epoch(self._new_draws(resume), point_for(resume), takes_ahead=takes_ahead)
        if resume is not None and not resume.has_finished:
            self._num_yielded = resume.batches

    def _new_draws(self, resume: PassState | None) -> Any:
        """Return the indices from which the engine draws in an epoch that begins, or is resumed."""
        sampler, drawn = self._index_sampler, self._drawn
        self._drawn = None
        indices = self._recorder.begin(self._sampler_iter, resume, drawn)
        makes_new_ones = type(sampler) is BatchSampler or draws_ahead_safely(sampler)
        return indices if makes_new_ones else AsDrawn(indices)

    def _new_recorder(self, loader: Any) -> PassRecorder:
        """Return the recorder of the passes."""
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
        if self._is_over:
            raise StopIteration
        try:
            self._engine.next(hand)
        except StopIteration:
            self._recorder.has_finished = True
            if self._engine.schedule.finished and not self._persistent_workers:
                if not self._keep_workers():
                    self._shutdown_workers()
            elif feed is not None:
                feed.settle()
            raise

    def ask_states(self) -> None:
        """Have workers report the states of datasets from now on.

        A pass that has ended, and has persistent workers, has reported its states when this returns.
        """
        is_over = self._recorder.has_finished and self._persistent_workers
        self._engine.ask_states(TOLD_S if is_over else 0.0)

    @property
    def _workers(self) -> list[Any]:
        """The local workers, by logical number, as torch's iterator lists them."""
        pool = self._engine.pool(LOCAL)
        handles = getattr(pool, "handles", ())
        return sorted(handles, key=lambda handle: self._engine.first_logical_worker(Place(LOCAL, handle.worker)))

    def _keep_workers(self) -> bool:
        """Leave the workers to the loader's next iterator, if they have begun with its batches. Return False if not."""
        runtime, next_epoch = self._runtime(), self._next_epoch
        if runtime is None or next_epoch is None or next_epoch.base_seeds is None or self._engine.closed:
            return False
        self.last_stats.end()
        self.last_state.end()
        self._is_over = True
        if self._tuner is not None:
            self._tuner.leave(self._engine)
        runtime.keep(KeptWorkers(self._engine, self._ends, self._pinner, next_epoch, self._facts))
        self._finalizer.detach()
        return True

    def _shutdown_workers(self) -> None:
        self._finalizer()


def _length(sampler: Any) -> int:
    """Return the number of batches of a pass; 0 if it is unknown."""
    try:
        return len(sampler)
    except (TypeError, NotImplementedError):
        return 0


class _DpexMapDataLoaderIter(_DpexDataLoaderIter):
    """For map-style data, which has no length warnings: batches are marked only while a profiler is on."""

    def __next__(self) -> Any:
        if is_profiled():
            return super().__next__()
        hand: list[Any] = []
        try:
            self._next_into(hand)
            self._num_yielded += 1
        except BaseException:  # without a call from here, and until it is returned: see `dpex.system.interrupts`
            self._engine.returned += hand
            raise
        return hand[0]
