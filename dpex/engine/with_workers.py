"""Iterators that drive an `Engine`, whose workers make the batches."""

from __future__ import annotations

import os
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from threading import get_ident
from typing import TYPE_CHECKING, Any

import torch
from torch.compiler import is_dynamo_compiling
from torch.utils.data import BatchSampler

from dpex._torch import BaseDataLoaderIter, DatasetKind, is_profiled
from dpex.engine.delivery import ERRORS
from dpex.engine.draws import BegunDraws, Draws
from dpex.engine.engine import FIRST_STATES_S, TOLD_S, Engine
from dpex.engine.pass_state import PassRecorder, begin_pass, point_for, worker_state
from dpex.engine.plan import EnginePlan
from dpex.engine.samplers import draws_ahead_safely
from dpex.measure.ledger import LastReading
from dpex.measure.settings import LOCAL
from dpex.profile.live_timer import is_switched_on
from dpex.schedule.names import is_asynchronous, lanes, length_of
from dpex.schedule.placement import Place
from dpex.system.compiler import untraced
from dpex.system.gpu.stall import SHARE, cuda_stall
from dpex.system.user_warnings import warn
from dpex.worker.setup import WorkerSetup, modes_here
from dpex.worker.states import LogicalState, pack_state

if TYPE_CHECKING:
    from dpex.autotune.runtime.tuner import Tuner
    from dpex.device.feed import Feed
    from dpex.device.pinning import Pinner
    from dpex.engine.pass_state import PassState
    from dpex.engine.snapshots import LoaderCounters
    from dpex.measure.settings import Settings
    from dpex.pools.factory import PoolFactory
    from dpex.stats import LoaderStats
    from dpex.telemetry.loader_metrics import LoaderMetrics


@dataclass(frozen=True, kw_only=True)
class Observers:
    """Readers of an engine's counts: the tuner, the metrics and the diagnosis of a loader."""

    tuner: Tuner | None = None
    metrics: LoaderMetrics | None = None
    counters: LoaderCounters | None = None

    def begin(self, engine: Engine) -> Iterator[Callable[[], None]]:
        """Register the engine with diagnosis and metrics. Yield functions that unregister it, also from the tuner."""
        if self.counters is not None:
            yield self.counters.add_iterator(engine).freeze
        if self.metrics is not None:
            yield self.metrics.add_iterator(engine).freeze
        if self.tuner is not None:
            yield partial(self.tuner.remove_engine, engine)


class _DpexDataLoaderIter(BaseDataLoaderIter):
    _begun: BegunDraws | None = None

    def __init__(
        self,
        loader: Any,
        make_pool: PoolFactory,
        settings: Settings,
        observers: Observers | None = None,
        *,
        feed: Feed | None = None,
        resume: PassState | None = None,
    ) -> None:
        begin_pass(super().__init__, self, loader, resume)
        if loader.prefetch_factor <= 0:
            raise AssertionError("prefetch_factor must be greater than 0 for MultiProcessingDataLoaderIter")
        setup = self._setup(loader)
        self._feed = feed
        if feed is not None:
            feed.have_transformed(loader.device_config.transform, int(self._base_seed))
        pinner = self._new_pinner(feed)
        observers = observers or Observers()
        self._counters = observers.counters
        self._engine = Engine(
            EnginePlan(
                logicals=0 if setup.per_batch_seed else self._num_workers,
                iterable=setup.iterable,
                in_order=getattr(loader, "in_order", True),
                timeout_s=self._timeout,
                may_group=self._may_group(setup.per_batch_seed),
                memory_budget=loader.worker_config.memory_budget,
                make_pool=lambda name, count: make_pool(name, count, setup, setup.per_batch_seed),
                samples=setup.samples,
                pinner=pinner,
                feed=feed,
                gpu=cuda_stall(SHARE),
                metered=observers.metrics is not None,
                pass_batches=length_of(self._index_sampler) or 0,
                lanes=lanes_of(loader),
                is_tuned=observers.tuner is not None,
                starts_anew=not self._persistent_workers,
            ),
            settings,
        )
        self._recorder, self._resume = self._new_recorder(loader), resume
        self.last_stats: LastReading[LoaderStats] = LastReading(self._engine.stats)
        self.last_state: LastReading[PassState | None] = LastReading(
            partial(worker_state, self._engine, self._recorder)
        )
        ends: tuple[Callable[[], None], ...] = (
            self.last_stats.freeze,
            self.last_state.freeze,
            *observers.begin(self._engine),
        )
        self._finalizer = weakref.finalize(self, _end, self._engine, ends, pinner, feed)
        if pinner is not None:
            pinner.start(self._engine.listen)
        if loader._runtime.asks_states or loader.worker_config.snapshot_every_n_steps:
            self._engine.ask_states()
        self._reset(loader, first_iter=True)
        if observers.tuner is not None:
            observers.tuner.add_engine(self._engine)

    def _new_pinner(self, feed: Feed | None) -> Pinner | None:
        """Return the thread that copies batches to page-locked memory or to a device; None if neither is wanted."""
        if feed is None and not self._pin_memory:
            return None
        from dpex.device.pinning import Pinner

        return Pinner(self._pin_memory_device, feed)

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
            times_calls=is_switched_on(os.environ),
            snapshot_every=loader.worker_config.snapshot_every_n_steps,
            samples=loader.sample_policy,
            modes=modes_here() if per_batch else None,
            concurrency=loader.worker_config.concurrency,
            shares_objects=loader.worker_config.share_objects,
        )

    def _may_group(self, per_batch: bool) -> bool:
        """Return True if the number of indices drawn at a time has no effect that the user could observe.

        After an interrupted epoch, persistent workers continue from random states that depend on the drawn batches.
        """
        if self._dataset_kind == DatasetKind.Iterable:
            return False
        return draws_ahead_safely(self._index_sampler) and (per_batch or not self._persistent_workers)

    def _reset(self, loader: Any, first_iter: bool = False) -> None:
        super()._reset(loader, first_iter)
        if self._counters is not None and not first_iter:
            self._counters.wake()
        resume, self._resume = self._resume, None
        self._engine.begin_epoch(self._new_draws(resume), point_for(resume))
        if resume is not None and not resume.has_finished:
            self._num_yielded = resume.batches

    def _new_draws(self, resume: PassState | None) -> Draws:
        """Return the indices of an epoch that begins or is resumed."""
        sampler, begun = self._index_sampler, self._begun
        self._begun = None
        copies = not (type(sampler) is BatchSampler or draws_ahead_safely(sampler))
        return self._recorder.begin(self._sampler_iter, resume, begun, copies=copies)

    def _new_recorder(self, loader: Any) -> PassRecorder:
        return PassRecorder(loader, int(self._base_seed))

    def __next__(self) -> Any:
        """Return the next batch, with torch's mark for profilers and its warning of wrong lengths.

        If an exception interrupts the call, the batch stays in ``in_hand``, and the next call raises an error.
        """
        if is_dynamo_compiling():  # see `dpex.system.compiler`
            return torch.compiler.disable(self.__next__)()
        thread = get_ident()
        if is_profiled():  # without a profiler no mark, because the mark takes as long as a tiny batch
            with torch.autograd.profiler.record_function(self._profile_name):
                value = self._next()
        else:
            value = self._next()
        self._num_yielded += 1
        is_error, in_hand = type(value) in ERRORS, self._engine.schedule.in_hand
        if self._length is not None and self._num_yielded > self._length:
            try:
                warnings.warn(self._too_long(self._length), stacklevel=2)
            except Warning:  # a filter raises it as an error, which takes the place of the batch, as in torch
                del in_hand[thread]
                raise
        if is_error:
            value = getattr(value, "error", value)
        del in_hand[thread]  # no function is called after this statement, so no handler comes in between
        if not is_error:
            return value
        try:
            raise value
        finally:
            del value  # else the error, its traceback and this frame form a cycle that keeps the iterator

    @property
    def _length(self) -> int | None:
        """The length that a stream has reported, if ``len(loader)`` was called."""
        named: int | None = self._IterableDataset_len_called
        return named if self._dataset_kind == DatasetKind.Iterable else None

    def _too_long(self, length: int) -> str:
        return (
            f"Length of IterableDataset {self._dataset} was reported to be {length}"
            f"(when accessing len(dataloader)), but {self._num_yielded} samples have been fetched. "
            "For multiprocessing data-loading, this could be caused by not properly configuring the "
            "IterableDataset replica at each worker. Please see "
            "https://pytorch.org/docs/stable/data.html#torch.utils.data.IterableDataset for examples."
        )

    def _next(self) -> Any:
        feed = self._feed
        if feed is not None:
            feed.check_open()
        try:
            return self._engine.next()
        except StopIteration:
            self._recorder.has_finished = True
            if self._engine.schedule.finished and not self._persistent_workers:
                self._shutdown_workers()
                raise
            if feed is not None:
                feed.settle()
            if self._counters is not None:
                self._counters.rest()
            raise

    def ask_states(self) -> None:
        """Have workers report the states of datasets from now on.

        If the pass has ended and its workers persist, wait up to `TOLD_S` seconds for their states.
        """
        is_over = self._recorder.has_finished and self._persistent_workers
        self._engine.ask_states(TOLD_S if is_over else 0.0)

    def await_first_states(self, *, has_init_fn: bool) -> None:
        """Wait until each worker has reported the first states of generators in the dataset; warn if one has not.

        Args:
            has_init_fn: The loader has a ``worker_init_fn``, which may change these states.
        """
        unreported = 0 if self._dataset_kind == DatasetKind.Iterable else self._engine.unreported()
        if not unreported:
            return
        from dpex.worker.own_generators import OwnGenerators

        own = OwnGenerators(self._dataset, self._collate_fn)
        names = list(own.states())
        if unreported < self._num_workers:
            is_lacking = self._engine.unreported(FIRST_STATES_S) > 0
        else:  # no worker has started, so each will start from the states in this process
            is_lacking = bool(names) and has_init_fn
            if names and not is_lacking:
                self._engine.begin_with(pack_state(LogicalState(own=own.states())))
        if is_lacking:
            warn(
                "state_dict(): some workers have not started, so this state lacks the states of random generators in "
                f"the dataset ({', '.join(names) or 'made by worker_init_fn'}). In a resumed run, generators without a "
                "seed give other numbers. Call state_dict() again after the first batches"
            )

    @property
    def _workers(self) -> list[Any]:
        """The local workers, by logical number, as torch's iterator lists them."""
        pool = self._engine.pool(LOCAL)
        handles = getattr(pool, "handles", ())
        return sorted(handles, key=lambda handle: self._engine.first_logical_worker(Place(LOCAL, handle.worker)))

    @property
    def is_broken(self) -> bool:
        return self._engine.is_broken

    def _shutdown_workers(self) -> None:
        self._finalizer()


def lanes_of(loader: Any) -> int:
    """Return the batches that a worker makes at a time; 1 if a user's sampler could observe the larger prefetch."""
    is_free = loader.seeding == "batch" and loader._dataset_kind == DatasetKind.Map
    sampler = loader._index_sampler
    if not is_free or not draws_ahead_safely(sampler) or not is_asynchronous(loader.dataset):
        return 1
    return lanes(getattr(sampler, "batch_size", None) or 1, loader.worker_config.concurrency)


@untraced
def _end(engine: Engine, ends: Iterable[Callable[[], None]], pinner: Pinner | None, feed: Feed | None) -> None:
    for end in ends:
        end()
    if pinner is None:
        engine.close()
    else:
        pinner.close(last_act=partial(_end_copies, feed, engine))


def _end_copies(feed: Feed | None, engine: Engine) -> None:
    """Wait for copies under way, then release the memory that they read."""
    try:
        if feed is not None:
            feed.settle()
    finally:
        engine.close()
