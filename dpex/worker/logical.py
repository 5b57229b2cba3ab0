"""A logical worker: its seed, its random state, its dataset and its pass.

Logical worker *k* is what PyTorch calls worker *k*. Several of them share a worker where too few can be started.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from dpex._torch import ExceptionWrapper, WorkerInfo, generate_numpy_seed, set_worker_info
from dpex.profile.live_timer import TicketTimer
from dpex.schedule.streams import ONE, UNKNOWN
from dpex.worker.decoded_stream import users_dataset
from dpex.worker.fetch import Fetcher, where
from dpex.worker.first_stream import FirstStream
from dpex.worker.own_generators import OwnGenerators
from dpex.worker.setup import WorkerSetup
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


def seed_like_torch(base_seed: int, worker_id: int) -> int:
    """Seed the global generators as PyTorch seeds worker ``worker_id``; return ``WorkerInfo.seed``."""
    seed = base_seed + worker_id
    random.seed(seed)
    torch.manual_seed(seed)
    np.random.seed(generate_numpy_seed(base_seed, worker_id))
    return seed


def ignore(_: bool) -> None:
    """Do nothing: the default of ``tell_splitting``."""


class Logical:
    """A logical worker on this worker.

    Attributes:
        info: The value of ``get_worker_info()``.
        fetcher: Fetches the batches of the present pass.
        init_error: The error of its start, which is the answer to every ticket.
        is_asked: True if each snapshot is to hold the state of the dataset.
        own: The generators in its dataset. None for a stream, which only its own ``state_dict`` can resume.
    """

    def __init__(self, setup: WorkerSetup, number: int, timer: TicketTimer, cpu: Callable[[], float]) -> None:
        self.number = number
        self.info: Any = None
        self.fetcher: Fetcher | None = None
        self.init_error: ExceptionWrapper | None = None
        self.epoch = -1
        self.is_asked = False
        self.own: OwnGenerators | None = None
        self._setup = setup
        self._state: RngState | None = None
        """The random states to go on from; None while it has the process."""
        self._timer = timer
        self._cpu = cpu
        self._first_stream: FirstStream | None = None

    def start(
        self,
        state: RngState | None,
        streams: int,
        tell_splitting: Callable[[bool], None],
        own: OwnGenerators | None,
    ) -> None:
        """Seed, publish the worker info, and run ``worker_init_fn``.

        Args:
            state: A state that was reported earlier; None: it starts from its seed.
            streams: The number of streams of the dataset, as in `dpex.schedule.streams`.
            tell_splitting: Called once it is known if the dataset splits itself.
            own: The generators in its dataset, in their first states; None: they are looked for.
        """
        setup = self._setup
        setup.enter_modes()
        seed = seed_like_torch(setup.base_seed, self.number)
        count = 1 if streams == ONE else setup.num_workers
        self.info = WorkerInfo(id=self.number, num_workers=count, seed=seed, dataset=users_dataset(setup.dataset))
        if streams == UNKNOWN:
            self._first_stream = FirstStream(self.info, tell_splitting)
            self.info = self._first_stream.shown
        set_worker_info(self.info)
        begun = LogicalState() if state is None else unpack_state(state)
        try:
            if setup.worker_init_fn is not None:
                setup.worker_init_fn(self.number)
                if self._first_stream is not None:
                    self._first_stream.initialised()
            if not setup.iterable:
                if own is None or setup.worker_init_fn is not None:  # which may have put others there
                    own = OwnGenerators(setup.dataset, setup.collate_fn)
                own.restore(begun.own or {})
                self.own = own
            self._begin(begun.dataset)
        except Exception:
            self.init_error = ExceptionWrapper(where=where(self.number))
            if self._first_stream is not None:
                self._first_stream.settle()
        set_global_states(begun.random or {})

    def park(self) -> None:
        """Keep the random states, before another logical worker has the process."""
        self._state = pack_state(LogicalState(global_states(), own=self._own()))

    def unpark(self) -> None:
        """Have the process again."""
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
        """Begin the first pass, or resume a pass: the dataset gets its state, is iterated, and the iterator its."""
        if state is None:
            self.new_pass(0)
            return
        self.is_asked = True  # a dataset that has been given its state is not as at the start
        load_state(self._setup.dataset, state.dataset)
        self.new_pass(state.epoch)
        assert self.fetcher is not None
        self.fetcher.go_on(state)

    def new_pass(self, epoch: int) -> None:
        """Begin an epoch: an iterable dataset is iterated anew."""
        self.epoch = epoch
        setup, first = self._setup, self._first_stream
        try:
            self.fetcher = Fetcher(setup, timer=self._timer, cpu=self._cpu, first_stream=first)
        except BaseException:
            if first is not None:
                first.settle()
            raise
        if first is not None:
            first.iterated()

    @property
    def has_dataset_state(self) -> bool:
        """Return True if its dataset, or the stream that it reads, reports its state."""
        return is_stateful(self._setup.dataset) or (self.fetcher is not None and is_stateful(self.fetcher.stream))

    def snapshot(self) -> RngState | None:
        """Return its state, while the global generators are its own; None of a stream whose state is not known."""
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
