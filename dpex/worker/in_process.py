"""Makes tickets of ``seeding="batch"`` in the training process, as a worker would, and leaves the process as it was.

While a ticket is made, the process has what a worker has: random generators seeded for this ticket, one thread for
torch's operations (the last bits of reductions depend on it), and the modes in which the iterator was made. All of it
is put back, also after an error.

The generators belong to all threads of the process. So one ticket is made at a time, in whichever thread; a dataset may
iterate another such loader meanwhile. A thread of the user's that draws meanwhile takes numbers of the ticket's.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import Any, TypeVar

import torch

from dpex.worker.batch_seeding import TicketSeeds, call_seeded
from dpex.worker.current_batch import current
from dpex.worker.modes import Modes
from dpex.worker.own_generators import OwnGenerators

_count_threads, _set_threads = torch.get_num_threads, torch.set_num_threads
Made = TypeVar("Made")
_lock = threading.RLock()


class InProcessMaker:
    """Makes the tickets of one iterator.

    Args:
        base_seed: The seed of the iterator.
        modes: The modes of torch in which it was made; None: those of the moment.
        own: The generators in the dataset, which are seeded for each ticket and put back, too.
    """

    def __init__(self, base_seed: int, modes: Modes | None, own: OwnGenerators | None = None) -> None:
        self._seeds = TicketSeeds(base_seed)
        self._modes = modes
        self._own = own
        self._threads = 1

    def threads(self) -> int:
        """Return the number of threads that torch's operations have outside of the ticket that is being made."""
        return self._threads

    def make(self, fetch: Callable[[Any], Made], index: Any, number: int, epoch: int) -> Made:
        """Return ``fetch(index)`` for ticket ``number``. Its errors pass through."""
        with _lock:
            seed, modes = self._seeds.of(number, epoch), self._modes
            self._threads = threads = _count_threads()
            outer, current.seed = current.seed, seed
            try:
                if threads != 1:
                    _set_threads(1)
                if modes is None or modes.hold():
                    return call_seeded(seed, fetch, index, self._own)
                with modes.enter():
                    return call_seeded(seed, fetch, index, self._own)
            finally:
                current.seed = outer
                if threads != 1:
                    _set_threads(threads)


def one_at_a_time() -> threading.RLock:
    """Return the lock that is held while a batch is made in this process, which has its random generators meanwhile."""
    return _lock


def _new_lock() -> None:
    """In a forked child: the thread that held it may not be there."""
    global _lock
    _lock = threading.RLock()


os.register_at_fork(after_in_child=_new_lock)
