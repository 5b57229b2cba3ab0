"""Makes tickets inside a worker of any pool: seed, fetch, collate, time each stage, catch errors.

A *worker* serves one or more *logical workers*. Under ``seeding="batch"`` there is one per worker, and each ticket has
a random state of its own (`batch_seeding`). Under ``seeding="worker"``, and for streams, logical worker *k* is
PyTorch's worker *k*, with its own random state, dataset copy and ``get_worker_info()``. If too few workers start, one
worker serves several.

`WorkerCore` owns the process's global random state and torch's global worker info; it is used by one thread.
"""

from __future__ import annotations

import random
import traceback
from collections.abc import Coroutine
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from dpex._torch import ExceptionWrapper, WorkerInfo, generate_numpy_seed, set_worker_info
from dpex.measure.batch_times import NO_TIMES, BatchTimes
from dpex.profile.live_timer import TicketTimer
from dpex.worker.batch_seeding import TicketSeeds, current, seed_ticket
from dpex.worker.decoded_stream import users_dataset
from dpex.worker.draws import GeneratorDraws
from dpex.worker.fetch import Failure, Fetcher, StreamEnd, where
from dpex.worker.own_generators import OwnGenerators
from dpex.worker.setup import WorkerSetup, with_own_dataset
from dpex.worker.states import (
    DatasetState,
    LogicalState,
    RngState,
    global_states,
    is_stateful,
    load_state,
    pack_state,
    set_global_states,
    state_of,
    unpack_state,
)

if TYPE_CHECKING:
    from dpex.worker.async_samples import AsyncSamples


class WorkerCore:
    """Makes the tickets of the logical workers on worker ``worker``. ``logicals``: these logical workers by number."""

    def __init__(self, setup: WorkerSetup, worker: int = 0) -> None:
        self.setup = setup
        self.logicals: dict[int, Logical] = {}
        self._current: Logical | None = None
        self._timer = TicketTimer(is_on=setup.times_calls, draws_of=GeneratorDraws, worker=worker)
        self._seeds = TicketSeeds(setup.base_seed) if setup.per_batch_seed else None
        self._own: OwnGenerators | None = None

    def adopt(self, number: int, state: RngState | None = None) -> None:
        """Start logical worker ``number``, from a ``state`` that was reported earlier, or from its seed.

        The first logical worker uses the worker's dataset, and each further one uses a shallow copy of the dataset.
        """
        if self._current is not None:
            self._current.park()
        setup = self.setup if not self.logicals else with_own_dataset(self.setup)
        own = None
        if not setup.iterable:
            at_first = self._own_as_at_first()
            own = at_first if setup is self.setup else None
        logical = self._current = self.logicals[number] = Logical(setup, number, self._timer)
        logical.start(state, own)

    def _own_as_at_first(self) -> OwnGenerators:
        """Return the dataset's generators, reset to their states on arrival, because an earlier logical worker may have
        drawn from the same generators."""
        if self._own is None:
            self._own = OwnGenerators(self.setup.dataset, self.setup.collate_fn)
        else:
            self._own.reset()
        return self._own

    def unfit(self, number: int) -> str:
        """Return the error of ``worker_init_fn`` in logical worker ``number`` if dpex added this worker to the user's
        workers, otherwise ""."""
        reason, own_workers = self.logicals[number].init_reason, self.setup.own_workers
        if not reason or own_workers is None or number < own_workers:
            return ""
        return f"{reason} (raised by worker_init_fn({number}) in a worker that dpex added)"

    def snapshot(self, number: int) -> RngState | None:
        """Return the state of logical worker ``number``, to restart it after a death or in a later run.

        Return None for a stream whose dataset has no state, or whose state was never requested (`Logical.is_asked`).
        """
        self._switch(number)
        return self.logicals[number].snapshot()

    def make(self, number: int, index: Any, logical_number: int, epoch: int) -> tuple[Any, BatchTimes]:
        """Return the batch of a ticket, or a `Failure` or a `StreamEnd` in its place, and the times of its stages."""
        if self._current is None or self._current.number != logical_number:
            self._switch(logical_number)
        logical = self._current
        assert logical is not None
        if logical.init_error is not None:
            return Failure(logical.init_error), NO_TIMES
        try:
            if logical.epoch != epoch:
                logical.new_pass(epoch)
            fetch = logical.fetcher.fetch  # type: ignore[union-attr]
            if self._seeds is not None:
                current.seed = seed = self._seeds.of(number, epoch)
                seed_ticket(seed)
                if logical.own:
                    logical.own.seed(seed)
            return fetch(index)
        except Exception as error:
            if isinstance(error, StopIteration) and self.setup.iterable:
                return StreamEnd(), NO_TIMES
            return Failure(ExceptionWrapper(where=where(logical_number))), NO_TIMES

    @property
    def samples(self) -> AsyncSamples | None:
        """The loader of concurrent samples, if the worker may make several batches at the same time (`make_beside`)."""
        logical = self._current
        return None if self._seeds is None or logical is None or logical.fetcher is None else logical.fetcher.samples

    async def make_beside(self, number: int, index: Any, epoch: int) -> tuple[Any, BatchTimes]:
        """Make a batch as `make` does, while the worker makes other batches."""
        logical, seeds = self._current, self._seeds
        assert logical is not None
        assert seeds is not None
        try:
            if logical.epoch != epoch:
                logical.new_pass(epoch)
            return await logical.fetcher.fetch_beside(number, index, seeds.of(number, epoch))  # type: ignore[union-attr]
        except Exception:
            return Failure(ExceptionWrapper(where=where(logical.number))), NO_TIMES

    def _switch(self, number: int) -> None:
        if self._current is not None and self._current.number == number:
            return
        if self._current is not None:
            self._current.park()
        logical = self._current = self.logicals[number]
        logical.unpark()


def seed_like_torch(base_seed: int, worker_id: int) -> int:
    """Seed the global generators as PyTorch seeds worker ``worker_id``; return ``WorkerInfo.seed``."""
    seed = base_seed + worker_id
    random.seed(seed)
    torch.manual_seed(seed)
    np.random.seed(generate_numpy_seed(base_seed, worker_id))
    return seed


class Logical:
    """A logical worker on this worker: its seed, its random state, its dataset and its pass.

    ``init_error``: the error of the start, which fails every ticket. ``init_reason``: its type and text, or "".
    ``is_asked``: True if snapshots include the state of the dataset.
    ``own``: the generators in the dataset. None for a stream, which only its own ``state_dict`` can resume.
    """

    def __init__(self, setup: WorkerSetup, number: int, timer: TicketTimer) -> None:
        self.number = number
        self.info: Any = None
        self.fetcher: Fetcher | None = None
        self.init_error: ExceptionWrapper | None = None
        self.init_reason: str = ""
        self.epoch: int = -1
        self.is_asked: bool = False
        self.own: OwnGenerators | None = None
        self._setup = setup
        self._state: RngState | None = None
        """The saved random states; None while this logical worker uses the global generators."""
        self._timer = timer

    def start(self, state: RngState | None, own: OwnGenerators | None) -> None:
        """Seed, publish the worker info, and run ``worker_init_fn``.

        Start from a ``state`` that was reported earlier, or from the seed. ``own``: the generators in the dataset, in
        their initial states; None: search for them.
        """
        setup = self._setup
        if setup.modes is not None:
            setup.modes.stay()
        seed = seed_like_torch(setup.base_seed, self.number)
        dataset = users_dataset(setup.dataset)
        self.info = WorkerInfo(id=self.number, num_workers=setup.num_workers, seed=seed, dataset=dataset)
        set_worker_info(self.info)
        begun = LogicalState() if state is None else unpack_state(state)
        try:
            if setup.worker_init_fn is not None:
                initialising: Any = setup.worker_init_fn(self.number)
                if isinstance(initialising, Coroutine):
                    from dpex.worker.async_loop import loop_of_process

                    loop_of_process().run(initialising)
            if not setup.iterable:
                if own is None or setup.worker_init_fn is not None:  # worker_init_fn may have replaced generators
                    own = OwnGenerators(setup.dataset, setup.collate_fn)
                own.restore(begun.own or {})
                self.own = own
            self._begin(begun.dataset)
        except Exception as error:
            self.init_error = ExceptionWrapper(where=where(self.number))
            self.init_reason = "".join(traceback.format_exception_only(error)).strip()
        set_global_states(begun.random or {})

    def park(self) -> None:
        """Save the random states, before another logical worker uses the global generators."""
        self._state = pack_state(LogicalState(global_states(), own=self._own()))

    def unpark(self) -> None:
        set_worker_info(self.info)
        if self._state is None:
            return
        state = unpack_state(self._state)
        set_global_states(state.random or {})
        if self.own is not None:
            self.own.restore(state.own or {})
        self._state = None

    def _own(self) -> dict[str, Any] | None:
        return None if self.own is None else self.own.states()

    def _begin(self, state: DatasetState | None) -> None:
        """Begin the first pass, or resume one: load the dataset's state, iterate it, then load the iterator's state."""
        if state is None:
            self.new_pass(0)
            return
        self.is_asked = True  # snapshots must include a dataset that is no longer in its initial state
        load_state(self._setup.dataset, state.dataset)
        self.new_pass(state.epoch)
        assert self.fetcher is not None
        self.fetcher.go_on(state)

    def new_pass(self, epoch: int) -> None:
        """Begin an epoch. An iterable dataset is iterated anew."""
        self.epoch = epoch
        self.fetcher = Fetcher(self._setup, self._timer, own=self.own, former=self.fetcher)

    @property
    def has_dataset_state(self) -> bool:
        return is_stateful(self._setup.dataset) or (self.fetcher is not None and is_stateful(self.fetcher.stream))

    def snapshot(self) -> RngState | None:
        """Return the current state of this logical worker; None for a stream whose state is not known."""
        has_state = self.is_asked and self.has_dataset_state
        if self._setup.iterable and not has_state:
            return None
        dataset = self._dataset_state() if has_state else None
        return pack_state(LogicalState(global_states(), dataset, self._own()))

    def _dataset_state(self) -> DatasetState:
        dataset, stream = self._setup.dataset, self.fetcher and self.fetcher.stream
        return DatasetState(
            epoch=self.epoch,
            dataset=None if stream is dataset else state_of(dataset),
            iterator=state_of(stream),
            has_ended=self.fetcher is not None and self.fetcher.has_ended,
        )
