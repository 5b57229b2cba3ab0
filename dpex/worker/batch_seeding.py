"""``seeding="batch"``: every ticket is made from random states that are a function of its seed alone.

Each of the three global generators, which are Mersenne Twisters, gets 624 words of its own. They are drawn from one
fast bit generator, SFC64 (by Chris Doty-Humphrey, of PractRand), whose state is made of the ticket's seed as its author
seeds it. So no ticket shares words with another, nor one library with another. All of each state is set, because
whatever was left over could be read: by ``torch.random.fork_rng``, ``random.getstate`` and the like.
``torch.initial_seed()`` is the ticket's seed.

Generators are set by their public functions. That takes 35 µs, nearly all of it for the 1,248 integers of Python as
which `random` and NumPy take their words.
"""

from __future__ import annotations

import random
import struct
from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np
import torch

from dpex.core.seeding import GOLDEN_GAMMA, MIX, epoch_key
from dpex.worker.rng_state import KeptStates

_WORDS = 624
"""32-bit words of a Mersenne Twister."""
_BLOCK = 3 * _WORDS // 2
"""Draws of 64 bits that hold the words of the three generators, one generator's after the other's."""
_ROUNDS = 16
"""Drawn first and not used, until every bit of the state depends on every bit of the seed; SFC64's author takes 12."""
_TORCH_HEADER = struct.Struct("=QiiQ")
"""Begin of the state of a ``torch.Generator``: seed, left, seeded, next. Its words follow, each in 64 bits."""
_TORCH_LEFT, _TORCH_NEXT = _WORDS, 1
"""torch accepts no state whose first word is still to come, so it is marked as drawn."""
_AT_ONCE = 256
"""Seeds of consecutive tickets that are computed together, with NumPy. One alone takes as long as 20 of these."""

Result = TypeVar("Result")
_numpy_random: Any = np.random
_source: Any = np.random.SFC64(0)
_torch_state = torch.Generator().get_state()
_torch_bytes: Any = _torch_state.numpy()
_TORCH_HEADER.pack_into(_torch_bytes, 0, 0, _TORCH_LEFT, 1, _TORCH_NEXT)
_torch_seed = _torch_bytes[:8].view(np.uint64)
_torch_words = _torch_bytes[_TORCH_HEADER.size : _TORCH_HEADER.size + 8 * _WORDS].view(np.uint64)


def words_of(seed: int) -> Any:
    """Return the words of a seed, an unsigned 64-bit integer: uint32 (3, 624), for Python, NumPy and torch."""
    state = {"state": (seed, seed, seed, 1)}  # three words, and a counter that begins with 1
    _source.state = {"bit_generator": "SFC64", "state": state, "has_uint32": 0, "uinteger": 0}
    return _source.random_raw(_ROUNDS + _BLOCK)[_ROUNDS:].view(np.uint32).reshape(3, _WORDS)


def seed_ticket(seed: int) -> None:
    """Set the three global generators for one ticket. One thread at a time may call it."""
    python, numpy, of_torch = words_of(seed)
    random.setstate((random.Random.VERSION, (*python.tolist(), 0), None))
    if type(_numpy_random.get_bit_generator()) is not np.random.MT19937:
        _numpy_random.set_bit_generator(np.random.MT19937(0))
    _numpy_random.set_state(("MT19937", numpy.tolist(), 0, 0, 0.0))
    _torch_seed[0], _torch_words[:] = seed, of_torch
    torch.default_generator.set_state(_torch_state)


def call_seeded(seed: int, call: Callable[[Any], Result], argument: Any) -> Result:
    """Return ``call(argument)``, with the global generators set by `seed_ticket`. Afterwards they are as they were."""
    before = KeptStates()
    try:
        seed_ticket(seed)
        return call(argument)
    finally:
        try:
            before.put_back()
        except BaseException:  # of a signal handler, which came in between
            before.put_back()
            raise


class TicketSeeds:
    """The seed of each ticket of a loader's pass. Used by one thread at a time."""

    def __init__(self, base_seed: int) -> None:
        self._base_seed = base_seed
        self._epoch = -1
        self._first = 0
        self._seeds: list[int] = []

    def of(self, number: int, epoch: int) -> int:
        """The seed of ticket ``number``."""
        at = number - self._first
        if epoch != self._epoch or not 0 <= at < _AT_ONCE:
            first = number - number % _AT_ONCE
            key = epoch_key(self._base_seed, epoch)
            seeds = _ticket_seeds(key, first)
            self._epoch, self._first, self._seeds = epoch, first, seeds  # at once: see `dpex.system.interrupts`
            at = number - first
        return self._seeds[at]


def _ticket_seeds(key: int, first: int) -> list[int]:
    """`ticket_seed` of `_AT_ONCE` numbers from ``first`` on; integers of 64 bits overflow as they should."""
    values: Any = np.arange(first + 1, first + 1 + _AT_ONCE, dtype=np.uint64) * GOLDEN_GAMMA + np.uint64(key)
    values = (values ^ (values >> 30)) * MIX[0]
    values = (values ^ (values >> 27)) * MIX[1]
    seeds: list[int] = ((values ^ (values >> 31)) >> 1).tolist()
    return seeds
