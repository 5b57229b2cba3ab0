"""``seeding="batch"``: every ticket is made from random states that are a function of its seed alone.

A seed has 63 bits. The three global generators are Mersenne Twisters, and their own public functions seed them.
`random` gets the whole seed, and NumPy its upper 32 bits. torch gets the whole seed, and uses the lower 32 bits. NumPy
and torch expand a seed to the 624 words of a state in the same way, so they need different bits.
``torch.initial_seed()`` is the ticket's seed.

Seeding sets each whole state, including the cached second number of a pair of normal numbers. It takes 8 µs in all.

`InProcessMaker` makes tickets in the training process with the environment of a worker, and then restores the process's
environment. torch uses one thread, because the last bits of reductions depend on the number of threads. The generators
belong to all threads of the process, so only one thread makes a ticket at a time. If a thread of the user's draws
during a ticket, it takes numbers from the ticket's sequence.

A process makes one batch at a time. So the seed belongs to the process (`current`), and the dataset's own threads can
read it, too (`batch_seed`).
"""

from __future__ import annotations

import contextvars
import os
import random
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import torch
from torch.utils.data import get_worker_info

from dpex.errors import UsageError
from dpex.schedule.seeding import epoch_key, ticket_seed
from dpex.worker.kept_states import KeptStates
from dpex.worker.setup import Modes

if TYPE_CHECKING:
    from dpex.worker.own_generators import OwnGenerators

_TORCHS_BITS = 31
"""The number of lower bits of a seed that NumPy does not use. NumPy takes the upper 32."""

Result = TypeVar("Result")
_numpy_random: Any = np.random


def seed_ticket(seed: int) -> None:
    """Set the three global generators for one ticket. One thread at a time may call it."""
    random.seed(seed)
    if type(_numpy_random.get_bit_generator()) is not np.random.MT19937:
        _numpy_random.set_bit_generator(np.random.MT19937(0))
    np.random.seed(seed >> _TORCHS_BITS)
    torch.default_generator.manual_seed(seed)


def call_seeded(seed: int, call: Callable[[Any], Result], argument: Any, own: OwnGenerators | None = None) -> Result:
    """Return ``call(argument)``, with the global generators and ``own`` seeded, and restore them afterwards."""
    before, outer = KeptStates(own), current.seed
    try:
        current.seed = seed
        seed_ticket(seed)
        if own:
            own.seed(seed)
        return call(argument)
    finally:
        current.seed = outer
        try:
            before.put_back()
        except BaseException:  # a KeyboardInterrupt came between two generators
            before.put_back()
            raise


class TicketSeeds:
    """The seed of each ticket of a loader's pass. Used by one thread at a time."""

    def __init__(self, base_seed: int) -> None:
        self._base_seed = base_seed
        self._keys: dict[int, int] = {}

    def of(self, number: int, epoch: int) -> int:
        key = self._keys.get(epoch)
        if key is None:
            key = epoch_key(self._base_seed, epoch)
            self._keys = {epoch: key}
        return ticket_seed(key, number)


# -- the batch that is being made --------------------------------------------------------------------------------------


@dataclass(slots=True)
class CurrentBatch:
    """The batch that is being made in this process."""

    seed: int | None = None
    """None: no batch is being made, or it has no seed of its own."""
    is_per_batch: bool = False
    """True in a worker of ``seeding="batch"``."""


current: CurrentBatch = CurrentBatch()
seed_of_sample: contextvars.ContextVar[int | None] = contextvars.ContextVar("dpex-batch-seed", default=None)
"""The seed of a sample's batch, if an event loop loads samples of several batches at the same time."""


def batch_seed() -> int:
    """Return the seed of the batch that is being made, to seed a dataset's own random generators.

    Call it in the dataset, its transforms or the collate function. Under ``seeding="batch"`` the seed of a batch of a
    map-style dataset is a function of the base seed, the epoch and the number of the batch alone: the same in any
    worker, on this machine or another. The samples of a batch share it, so seed a generator with the index of the
    sample, too. Under ``seeding="worker"``, for an iterable dataset, and in the workers of PyTorch's DataLoader, it is
    the seed of the worker, which all its batches of an epoch share (``get_worker_info().seed``).

    Returns:
        A non-negative integer of 63 bits.

    Raises:
        UsageError: This process makes no batch at the moment, or makes batches without seeds (``num_workers=0`` with
            ``seeding="worker"`` or an iterable dataset). It is a RuntimeError.

    Examples:
        >>> import numpy as np
        >>> import torch
        >>> from dpex import DpexDataLoader, batch_seed
        >>> class Noise:
        ...     def __len__(self):
        ...         return 6
        ...     def __getitem__(self, index):
        ...         return np.random.default_rng((batch_seed(), index)).random()
        >>> def noise(num_workers):
        ...     torch.manual_seed(0)
        ...     with DpexDataLoader(Noise(), num_workers=num_workers, seeding="batch") as loader:
        ...         return [batch.item() for batch in loader]
        >>> noise(0) == noise(2)
        True
    """
    seed = seed_of_sample.get()
    if seed is None:
        seed = current.seed
    if seed is None and not current.is_per_batch:
        worker = get_worker_info()
        seed = None if worker is None else worker.seed
    if seed is None:
        raise UsageError(_why_none())
    return seed


def _why_none() -> str:
    name = threading.current_thread().name
    if current.is_per_batch:
        return (
            f"batch_seed() was called in worker process {os.getpid()} before its first batch, such as in "
            "worker_init_fn: call it in the dataset, its transforms or the collate function"
        )
    return (
        f"batch_seed() was called in process {os.getpid()} (thread {name!r}) while no batch that has a seed was being "
        "made: call it in the dataset, its transforms or the collate function, and give the loader seeding='batch', or "
        "workers if the dataset is iterable: other batches that are made without workers have no seed"
    )


# -- in the training process -------------------------------------------------------------------------------------------

_count_threads, _set_threads = torch.get_num_threads, torch.set_num_threads
_lock = threading.RLock()


class InProcessMaker:
    """Makes the tickets of one iterator, in ``modes``: torch's modes when the iterator was made.

    The dataset's ``own`` generators are seeded for each ticket and restored afterwards, too.
    """

    def __init__(self, base_seed: int, modes: Modes, own: OwnGenerators | None = None) -> None:
        self._seeds = TicketSeeds(base_seed)
        self._modes = modes
        self._own = own or None
        self._threads = 1

    def threads(self) -> int:
        """Return torch's number of threads as it was before the present ticket, which is made with one thread."""
        return self._threads

    def make(self, fetch: Callable[[Any], Result], index: Any, number: int, epoch: int) -> Result:
        """Return ``fetch(index)`` for ticket ``number``. Its errors pass through."""
        with _lock:
            seed, modes = self._seeds.of(number, epoch), self._modes
            self._threads = threads = _count_threads()
            try:
                if threads != 1:
                    _set_threads(1)
                if modes.hold():
                    return call_seeded(seed, fetch, index, self._own)
                with modes.enter():
                    return call_seeded(seed, fetch, index, self._own)
            finally:
                if _count_threads() != threads:
                    _set_threads(threads)


def one_at_a_time() -> threading.RLock:
    """Return the lock that reserves the process's global random generators for the batch that is being made."""
    return _lock


def _new_lock() -> None:
    """Replace the lock in a forked child, which lacks the thread that may hold it."""
    global _lock
    _lock = threading.RLock()


os.register_at_fork(after_in_child=_new_lock)
