"""Makes tickets of ``seeding="batch"`` in the training process, as a worker would, and leaves the process as it was.

While a ticket is made, the process has what a worker has: random generators seeded for this ticket, one thread for
torch's operations (results of reductions depend on it in the last bits), and the modes in which the iterator was made.
All of it is put back, also after an error.

The generators belong to all threads of the process:

* One ticket is made at a time, whichever loader asks for it. A dataset that iterates such a loader itself may do so.
* Another thread that draws meanwhile would disturb the ticket. Draws cannot be told apart by thread. But where the
  generators moved *and* another thread ran meanwhile, by its CPU clock, what was made is made again, up to `TRIES`
  times. If threads never keep still for so long, the user hears of it.
* What such a thread draws meanwhile are the ticket's numbers, and they are not missing from the generators afterwards.
* Not noticed are threads that Python does not know of, and threads on systems other than Linux, where their clocks
  cannot be read.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import Any, TypeVar

import torch

from dpex.system.other_threads import Clocks, OtherThreads
from dpex.system.user_warnings import warn
from dpex.worker.batch_seeding import TicketSeeds, call_seeded
from dpex.worker.current_batch import current
from dpex.worker.modes import Modes
from dpex.worker.rng_state import fingerprints

TRIES = 3
"""How often a batch is made, at most, where another thread may have drawn meanwhile; then there is a warning."""
_count_threads, _set_threads = torch.get_num_threads, torch.set_num_threads
Made = TypeVar("Made")
_lock = threading.RLock()
_others = OtherThreads()


class InProcessMaker:
    """See the module."""

    def __init__(self, base_seed: int, modes: Modes | None) -> None:
        self._seeds = TicketSeeds(base_seed)
        self._modes = modes
        self._gave_up = False
        self._threads = 1

    def threads(self) -> int:
        """How many threads torch's operations have outside of the ticket that is being made."""
        return self._threads

    def make(self, fetch: Callable[[Any], Made], index: Any, number: int, epoch: int) -> Made:
        """``fetch(index)`` for ticket ``number``; its errors come as they are."""
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
            warn(
                f"thread {disturber!r} runs while batches are made in this process, and global random generators move. "
                "If it draws from random, np.random or torch, batches are not those that seeding='batch' promises. "
                "Give the loader workers (num_workers=1 or more), or that thread random generators of its own."
            )
        return made

    def _watched(self, fetch: Callable[[Any], Made], index: Any, seed: int, before: Clocks) -> tuple[Made, str | None]:
        """Made until the generators did not move or no other thread ran; else with the name of one that did."""
        moved: list[bool] = []

        def watch(index: Any) -> Made:
            begun = fingerprints()
            made = fetch(index)
            moved[:] = (fingerprints() != begun,)
            return made

        for _ in range(TRIES):
            made = self._once(watch, index, seed)
            disturber = _others.ran_since(before)
            if disturber is None or not moved[0]:
                return made, None
            before = _others.clocks()
        return made, disturber

    def _once(self, fetch: Callable[[Any], Made], index: Any, seed: int) -> Made:
        threads, modes = _count_threads(), self._modes
        self._threads = threads
        outer, current.seed = current.seed, seed
        try:
            if threads != 1:
                _set_threads(1)
            if modes is None or modes.hold():
                return call_seeded(seed, fetch, index)
            with modes.enter():
                return call_seeded(seed, fetch, index)
        finally:
            current.seed = outer
            if threads != 1:
                _set_threads(threads)


def one_at_a_time() -> threading.RLock:
    """The lock that whoever makes batches in this process holds meanwhile: they have its random generators in turn."""
    return _lock


def _new_lock() -> None:
    """In a forked child: the thread that held it may not be there."""
    global _lock
    _lock = threading.RLock()


os.register_at_fork(after_in_child=_new_lock)
