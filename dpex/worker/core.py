"""Makes tickets inside a worker of any pool: seed, fetch, collate, time each stage, catch errors.

A *worker* serves one or more *logical workers*. Under ``seeding="batch"`` there is one per worker, and each ticket has
a random state of its own (`batch_seeding`). Under ``seeding="worker"``, and for streams, logical worker *k* is what
PyTorch calls worker *k*: it has its own random state, dataset copy and ``get_worker_info()``.

`WorkerCore` owns the process's global random state and torch's global worker info; it is used by one thread.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from dpex._torch import ExceptionWrapper
from dpex.measure.batch_times import NO_TIMES, BatchTimes
from dpex.profile.live_timer import TicketTimer
from dpex.schedule.streams import ALL
from dpex.worker.batch_seeding import TicketSeeds, seed_ticket
from dpex.worker.current_batch import current
from dpex.worker.fetch import Failure, StreamEnd, where
from dpex.worker.logical import Logical, ignore
from dpex.worker.own_generators import OwnGenerators
from dpex.worker.setup import WorkerSetup, with_own_dataset
from dpex.worker.states import RngState


class WorkerCore:
    """Makes the tickets of the logical workers of one worker."""

    def __init__(self, setup: WorkerSetup) -> None:
        self._setup = setup
        self._logicals: dict[int, Logical] = {}
        self._current: Logical | None = None
        self._timer = TicketTimer(is_on=setup.times_steps, cpu=time.process_time)
        self._seeds = TicketSeeds(setup.base_seed) if setup.per_batch_seed else None
        self._own: OwnGenerators | None = None
        self.cpu: Callable[[], float] = time.process_time
        """The clock of the CPU time of batches, in seconds."""

    @property
    def snapshot_every(self) -> int | None:
        """Batches between two reports of a logical worker's state, if the loader sets this number."""
        return self._setup.snapshot_every

    @property
    def sample_timeout_s(self) -> float | None:
        """Seconds that loading a sample may take; None: no limit."""
        return self._setup.samples.timeout_s

    def adopt(
        self,
        number: int,
        state: RngState | None = None,
        *,
        streams: int = ALL,
        tell_splitting: Callable[[bool], None] = ignore,
    ) -> None:
        """Serve logical worker ``number``, from a ``state`` that was reported earlier, or from its seed.

        The first one uses the worker's dataset, and each further one a shallow copy of it. ``streams`` is one of the
        constants of `dpex.schedule.streams`. ``tell_splitting`` is called once it is known if the dataset splits
        itself.
        """
        self._park()
        setup = self._setup if not self._logicals else with_own_dataset(self._setup)
        own = None
        if not setup.iterable:
            at_first = self._own_as_at_first()
            own = at_first if setup is self._setup else None
        logical = self._current = self._logicals[number] = Logical(setup, number, self._timer, self.cpu)
        logical.start(state, streams, tell_splitting, own)

    def _own_as_at_first(self) -> OwnGenerators:
        """Set the generators in the dataset to the states in which they came here: logical workers may share them."""
        if self._own is None:
            self._own = OwnGenerators(self._setup.dataset, self._setup.collate_fn)
        else:
            self._own.reset()
        return self._own

    def unfit(self, number: int) -> str:
        """Return why worker ``number``, for which the user did not ask, cannot work: its ``worker_init_fn`` failed. Or
        ""."""
        return self._setup.why_unfit(number, self._logicals[number].init_error)

    @property
    def is_stream(self) -> bool:
        """Return True if the dataset is iterable."""
        return self._setup.iterable

    def snapshot(self, number: int) -> RngState | None:
        """Return the state of ``number``, from which it can be restarted after a death or in a later run.

        None: it is a stream whose dataset has no state, or has not been asked for it (`ask_state`).
        """
        self._switch(number)
        return self._logicals[number].snapshot()

    def ask_state(self, number: int) -> None:
        """Have snapshots of ``number`` hold the state of its dataset from now on."""
        self._logicals[number].is_asked = True

    def has_dataset_state(self, number: int) -> bool:
        """Return True if the dataset of ``number``, or the stream that it reads, can report its state."""
        return self._logicals[number].has_dataset_state

    def make(self, number: int, index: Any, logical_number: int, epoch: int) -> tuple[Any, BatchTimes]:
        """Return the batch of a ticket and the times of its stages; or a `Failure` or a `StreamEnd` in its place."""
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
            if isinstance(error, StopIteration) and self._setup.iterable:
                return StreamEnd(), NO_TIMES
            return Failure(ExceptionWrapper(where=where(logical_number))), NO_TIMES

    def _park(self) -> None:
        if self._current is not None:
            self._current.park()

    def _switch(self, number: int) -> None:
        if self._current is not None and self._current.number == number:
            return
        self._park()
        logical = self._current = self._logicals[number]
        logical.unpark()
