"""``seeding="batch"`` at work: every ticket is made from random states that are a function of its seed alone.

Each of the three global generators gets 624 words of its own, drawn from one fast bit generator, SFC64 (by Chris
Doty-Humphrey, of PractRand), whose state is made of the ticket's seed as its author seeds it. So no ticket shares words
with another, nor one library with another. All of each state is written, as whatever was left over could be read: by
``torch.random.fork_rng``, ``random.getstate`` and the like. That takes 4 µs. ``torch.initial_seed()`` is the ticket's
seed.
"""

from __future__ import annotations

import ctypes
import struct
import sys
from typing import Any

import numpy as np

from dpex.core.seeding import GOLDEN_GAMMA, MIX, epoch_key
from dpex.worker.rng_state import BLOCK, ByFunctions, Generators, located

_SEEDED = struct.Struct("=4Q")
"""SFC64's state: three words, which are the seed, and a counter that begins with 1."""
_ROUNDS = 16
"""Drawn first and not used, until every bit of the state depends on every bit of the seed; its author takes 12."""

_AT_ONCE = 256
"""Seeds of so many tickets in a row are computed together, with numpy: one alone takes as long as 20 of these."""


class WordSource:
    """Random words as a function of a seed: `BLOCK` items of 64 bits each time. Used by one thread at a time."""

    def __init__(self) -> None:
        self._bits: Any = np.random.SFC64(0)
        memory = (ctypes.c_ubyte * _SEEDED.size).from_address(self._bits.ctypes.state_address)
        self._memory = memoryview(memory).cast("B")
        self._is_known = sys.implementation.name == "cpython" and self._is_as_expected()

    def block(self, seed: int) -> memoryview:
        """The words of that seed, an unsigned 64-bit integer."""
        if self._is_known:
            _SEEDED.pack_into(self._memory, 0, seed, seed, seed, 1)
        else:
            self._seed_by_function(seed)
        words: memoryview = self._bits.random_raw(_ROUNDS + BLOCK).data[_ROUNDS:]
        return words

    def _seed_by_function(self, seed: int) -> None:
        state = {"state": np.array([seed, seed, seed, 1], np.uint64)}
        self._bits.state = {"bit_generator": "SFC64", "state": state, "has_uint32": 0, "uinteger": 0}

    def _is_as_expected(self) -> bool:
        return bool(self._memory.tobytes() == self._bits.state["state"]["state"].tobytes())


_source = WordSource()


def seed_ticket(seed: int, generators: Generators | None = None) -> None:
    """Set the three global generators for one ticket."""
    generators = generators or located() or ByFunctions()
    generators.fill(_source.block(seed), seed)


def words_of(seed: int) -> memoryview:
    """`BLOCK` items of 64 bits from which `seed_ticket` fills the generators."""
    return _source.block(seed)


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
