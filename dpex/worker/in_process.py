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
from collections.abc import Callable
from typing import Any, TypeVar

import torch

from dpex.system.other_threads import Clocks, OtherThreads, is_alone
from dpex.worker.batch_seeding import TicketSeeds, words_of
from dpex.worker.drawless import is_torchs_alone
from dpex.worker.modes import Modes
from dpex.worker.rng_state import ByFunctions, Generators, located

TRIES = 3
_count_threads, _set_threads = torch.get_num_threads, torch.set_num_threads
Made = TypeVar("Made")
_lock = threading.RLock()
_others = OtherThreads()


class InProcess:
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

    def make(self, fetch: Callable[[Any], Made], index: Any, number: int, epoch: int) -> Made:
        """``fetch(index)`` for ticket ``number``; its errors come as they are."""
        if not self._draws and is_torchs_alone(index):
            return self._in_modes(fetch, index)
        with _lock:
            seed = self._seeds.of(number, epoch)
            if self._gave_up:
                return self._once(fetch, index, seed)
            before = {} if is_alone() else _others.clocks()
            if not before:
                made = self._once(fetch, index, seed)
                if not is_alone():
                    _others.ran_since({})  # it notes the threads that the dataset has started
                return made
            made, disturber = self._watched(fetch, index, seed, before)
            self._gave_up = disturber is not None
        if disturber is not None:
            self._disturbed(disturber)
        return made

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
        try:
            if threads != 1:
                _set_threads(1)
            if modes is None or modes.hold():
                return generators.lent(words_of(seed), seed, fetch, index)
            with modes.enter():
                return generators.lent(words_of(seed), seed, fetch, index)
        finally:
            if threads != 1:
                _set_threads(threads)


def _new_lock() -> None:
    """In a forked child: the thread that held it may not be there."""
    global _lock
    _lock = threading.RLock()


os.register_at_fork(after_in_child=_new_lock)
