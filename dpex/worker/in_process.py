"""Makes tickets of ``seeding="batch"`` in the training process, as a worker would, and leaves the process as it was.

While a ticket is made, the process has what a worker has: random generators seeded for this ticket, one thread for
torch's operations (results of reductions depend on it in the last bits), and the modes in which the iterator was made.
All of it is put back, also after an error.

The generators belong to all threads of the process:

* One ticket is made at a time, whichever loader asks for it. A dataset that iterates such a loader itself may do so.
* Another thread that draws meanwhile would disturb the ticket. Draws cannot be told apart by thread. But where the
  generators moved *and* another thread ran meanwhile, by its CPU clock, what was made is made again, up to `TRIES`
  times. If threads never keep still for so long, the user hears of it, and a loader that is tuned gets workers.
* What such a thread draws meanwhile are the ticket's numbers, and they are not missing from the generators afterwards.
* Batches that torch's own code makes alone, of which `drawless` tells, need neither states nor threads, only the modes.
* Not noticed are threads that Python does not know of, and threads on systems other than Linux, where their clocks
  cannot be read.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

import torch

from dpex.system.other_threads import Clocks, OtherThreads
from dpex.worker.batch_seeding import TicketSeeds, words_of
from dpex.worker.current_batch import current
from dpex.worker.drawless import is_torchs_alone
from dpex.worker.modes import Modes
from dpex.worker.rng_state import ByFunctions, Generators, InMemory, located

TRIES = 3
"""How often a batch is made, at most, where another thread may have drawn meanwhile; then there is a warning."""
_count_threads, _set_threads = torch.get_num_threads, torch.set_num_threads
Made = TypeVar("Made")
Run = deque[tuple[Any, Any]]
"""Batches that were made in a row, each with its index."""
_lock = threading.RLock()
_others = OtherThreads()


class InProcessMaker:
    """See the module. ``disturbed`` hears once which thread would not keep still; ``draws``: False where
    `dpex.worker.drawless.draws_nothing`.
    """

    def __init__(
        self, base_seed: int, modes: Modes | None, disturbed: Callable[[str], None], *, draws: bool = True
    ) -> None:
        self._draws = draws
        self._seeds = TicketSeeds(base_seed)
        self._modes = modes
        self._disturbed = disturbed
        self._gave_up = False
        self._threads = 1

    def threads(self) -> int:
        """How many threads torch's operations have outside of the ticket that is being made."""
        return self._threads

    def make(self, fetch: Callable[[Any], Made], index: Any, number: int, epoch: int) -> Made:
        """``fetch(index)`` for ticket ``number``; its errors come as they are."""
        if not self._draws and is_torchs_alone(index):
            return self._in_modes(fetch, index)
        with _lock:
            seed = self._seeds.of(number, epoch)
            if self._gave_up:
                return self._once(fetch, index, seed)
            before = {} if _others.are_none() else _others.clocks()
            if not before:
                made = self._once(fetch, index, seed)
                if not _others.are_none():
                    _others.ran_since({})  # it notes the threads that the dataset has started
                return made
            made, disturber = self._watched(fetch, index, seed, before)
            self._gave_up = disturber is not None
        if disturber is not None:
            self._disturbed(disturber)
        return made

    def make_run(
        self, fetch: Callable[[Any], Made], indices: deque[Any], count: int, numbers: tuple[int, int], into: Run
    ) -> None:
        """Make a ticket, or several in a row, up to ``count``, where that spares what is done around each.

        Args:
            fetch: Makes a batch of an index.
            indices: Of the tickets; those that were made are taken out.
            count: The number of tickets, at most that of the indices.
            numbers: The number of the first ticket, and the epoch.
            into: Where each batch goes as soon as it is made, with its index.

        Raises:
            Exception: A batch's own. Those before it are in ``into``.
        """
        number, epoch = numbers
        if not self._draws and is_torchs_alone(indices[0]):
            return self._in_modes(partial(_make_alone, fetch, indices, count), into)
        if count > 1:
            with _lock:
                generators = located() if not self._gave_up and _others.are_none() else None
                if generators is not None:
                    seeds = [self._seeds.of(each, epoch) for each in range(number, number + count)]
                    self._once(partial(self._make_each, fetch, indices, seeds, generators), into, seeds[0])
                    if not _others.are_none():
                        _others.ran_since({})
                    return None
        index = indices[0]
        into += ((self.make(fetch, index, number, epoch), index),)
        del indices[0]
        return None

    def _make_each(
        self, fetch: Callable[[Any], Any], indices: deque[Any], seeds: list[int], generators: InMemory, into: Run
    ) -> None:
        """Make the tickets of these seeds, in a process that is as the first one needs it."""
        modes, is_begun = self._modes, True
        for seed in seeds:
            if not is_begun:
                if not generators.holds() or _count_threads() != 1 or not (modes is None or modes.hold()):
                    return  # the dataset has changed that, and what follows begins anew
                current.seed = seed
                generators.fill(words_of(seed), seed)
            is_begun, index = False, indices[0]
            into += ((fetch(index), index),)  # from here on without a call: see `dpex.system.interrupts`
            del indices[0]

    def _in_modes(self, fetch: Callable[[Any], Made], index: Any) -> Made:
        modes = self._modes
        if modes is None or modes.hold():
            return fetch(index)
        with modes.enter():
            return fetch(index)

    def _watched(self, fetch: Callable[[Any], Made], index: Any, seed: int, before: Clocks) -> tuple[Made, str | None]:
        """Made until the generators did not move or no other thread ran; else with the name of one that did."""
        moved: list[bool] = []

        def watch(index: Any) -> Made:
            begun = generators.save()
            made = fetch(index)
            moved[:] = (generators.moved_since(begun),)
            return made

        for _ in range(TRIES):
            generators: Generators = located() or ByFunctions()
            made = self._once(watch, index, seed)
            disturber = _others.ran_since(before)
            if disturber is None or not moved[0]:
                return made, None
            before = _others.clocks()
        return made, disturber

    def _once(self, fetch: Callable[[Any], Made], index: Any, seed: int) -> Made:
        generators: Generators = located() or ByFunctions()
        threads, modes = _count_threads(), self._modes
        self._threads = threads
        outer, current.seed = current.seed, seed
        try:
            if threads != 1:
                _set_threads(1)
            if modes is None or modes.hold():
                return generators.lent(words_of(seed), seed, fetch, index)
            with modes.enter():
                return generators.lent(words_of(seed), seed, fetch, index)
        finally:
            current.seed = outer
            if threads != 1:
                _set_threads(threads)


def _make_alone(fetch: Callable[[Any], Any], indices: deque[Any], count: int, into: Run) -> None:
    """Batches that torch's code makes alone, as long as they are."""
    for _ in range(count):
        index = indices[0]
        if not is_torchs_alone(index):
            return
        into += ((fetch(index), index),)  # from here on without a call: see `dpex.system.interrupts`
        del indices[0]


def one_at_a_time() -> threading.RLock:
    """The lock that whoever makes batches in this process holds meanwhile: they have its random generators in turn."""
    return _lock


def _new_lock() -> None:
    """In a forked child: the thread that held it may not be there."""
    global _lock
    _lock = threading.RLock()


os.register_at_fork(after_in_child=_new_lock)
