"""One logical worker on a worker: its seed, its random state, its dataset and its pass.

Logical worker *k* is what PyTorch calls worker *k*. Several of them share a worker where too few can be had.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from dpex._torch import ExceptionWrapper, WorkerInfo, generate_numpy_seed, set_worker_info
from dpex.profile.live_timer import TicketTimer
from dpex.schedule.streams import ALL, ONE, UNKNOWN
from dpex.worker.decoded_stream import users_dataset
from dpex.worker.fetch import Fetcher
from dpex.worker.first_stream import FirstStream
from dpex.worker.logical_state import DatasetState, LogicalState, RngState, pack_state, unpack_state
from dpex.worker.outcome import where
from dpex.worker.own_generators import OwnGenerators
from dpex.worker.own_states import OwnStateKeeper, OwnStates
from dpex.worker.rng_state import global_states, set_global_states
from dpex.worker.setup import WorkerSetup
from dpex.worker.stateful import is_stateful, load_state, state_of


def seed_like_torch(base_seed: int, worker_id: int, seed_torch: Callable[[int], Any] = torch.manual_seed) -> int:
    """Seed the global generators as PyTorch seeds worker ``worker_id``; returns ``WorkerInfo.seed``."""
    seed = base_seed + worker_id
    random.seed(seed)
    seed_torch(seed)
    np.random.seed(generate_numpy_seed(base_seed, worker_id))
    return seed


def nobody(_: bool) -> None:
    """Nobody hears it."""


class Logical:
    """One logical worker on this worker."""

    def __init__(
        self,
        setup: WorkerSetup,
        number: int,
        state: RngState | None,
        timer: TicketTimer,
        cpu: Callable[[], float],
        seed_torch: Callable[[int], Any],
        streams: int = ALL,
        tell_splitting: Callable[[bool], None] = nobody,
    ) -> None:
        self.number = number
        self.state = state
        self.setup = setup
        self.info: Any = None
        self.fetcher: Fetcher | None = None
        self.init_error: ExceptionWrapper | None = None
        self.epoch = -1
        self.is_asked = False
        """Whether the dataset is asked for its state with each snapshot."""
        self.own_generators: OwnGenerators | None = None
        self._own_states: OwnStateKeeper | None = None
        self._timer = timer
        self._cpu = cpu
        self._seed_torch = seed_torch
        self._streams = streams
        self._tell_splitting = tell_splitting
        self._first_stream: FirstStream | None = None

    def start(self, own_states: OwnStateKeeper | None = None) -> None:
        """Seed, publish the worker info, run ``worker_init_fn``; an error is the answer to every ticket.

        own_states: of the generators that lay in its dataset until now; None: they are looked for.
        """
        setup = self.setup
        setup.enter_modes()
        seed = seed_like_torch(setup.base_seed, self.number, self._seed_torch)
        count = 1 if self._streams == ONE else setup.num_workers
        self.info = WorkerInfo(id=self.number, num_workers=count, seed=seed, dataset=users_dataset(setup.dataset))
        if self._streams == UNKNOWN:
            self._first_stream = FirstStream(self.info, self._tell_splitting)
            self.info = self._first_stream.shown
        set_worker_info(self.info)
        state = LogicalState() if self.state is None else unpack_state(self.state)
        self.state = None
        try:
            if setup.worker_init_fn is not None:
                setup.worker_init_fn(self.number)
                if self._first_stream is not None:
                    self._first_stream.initialised()
            self.own_generators = setup.own_generators()
            if setup.has_own_states:
                if own_states is None or setup.worker_init_fn is not None:  # which may have put others there
                    own_states = OwnStateKeeper(setup.dataset, setup.collate_fn)
                own_states.restore(state.own or {})
                self._own_states = own_states
            self._begin(state.dataset)
        except Exception:
            self.init_error = ExceptionWrapper(where=where(self.number))
            if self._first_stream is not None:
                self._first_stream.settle()
        set_global_states(state.random or {})

    def park(self) -> None:
        """Keep the random states: another logical worker is about to have the process."""
        self.state = pack_state(LogicalState(global_states(), own=self._own()))

    def unpark(self) -> None:
        """Have the process again."""
        set_worker_info(self.info)
        if self.state is None:
            return
        state = unpack_state(self.state)
        set_global_states(state.random or {})
        if self._own_states is not None:
            self._own_states.restore(state.own or {})
        self.state = None

    def _own(self) -> OwnStates | None:
        return None if self._own_states is None else self._own_states.states()

    def _begin(self, state: DatasetState | None) -> None:
        """Begin the first pass, or go on within one: the dataset gets its state, is iterated, and the iterator its."""
        if state is None:
            self.new_pass(0)
            return
        self.is_asked = True  # a dataset that has been given its state is not as at the start
        load_state(self.setup.dataset, state.dataset)
        self.new_pass(state.epoch)
        assert self.fetcher is not None
        self.fetcher.go_on(state)

    def new_pass(self, epoch: int) -> None:
        """Begin an epoch: an iterable dataset is iterated anew."""
        self.epoch = epoch
        setup, first = self.setup, self._first_stream
        try:
            self.fetcher = Fetcher(setup, setup.dataset, setup.collate_fn, self._timer, self._cpu, first)
        except BaseException:
            if first is not None:
                first.settle()
            raise
        if first is not None:
            first.iterated()

    @property
    def has_dataset_state(self) -> bool:
        """Whether its dataset, or the stream that is read, tells its state."""
        return is_stateful(self.setup.dataset) or (self.fetcher is not None and is_stateful(self.fetcher.stream))

    def snapshot(self) -> RngState | None:
        """Return its state, while the global generators are its own. None: it is a stream whose state is not known."""
        is_told = self.is_asked and self.has_dataset_state
        if self.setup.iterable and not is_told:
            return None
        dataset = self._dataset_state() if is_told else None
        return pack_state(LogicalState(global_states(), dataset, self._own()))

    def _dataset_state(self) -> DatasetState:
        dataset, stream = self.setup.dataset, self.fetcher and self.fetcher.stream
        return DatasetState(
            epoch=self.epoch,
            dataset=None if stream is dataset else state_of(dataset),
            iterator=state_of(stream),
            has_ended=self.fetcher is not None and self.fetcher.has_ended,
        )
