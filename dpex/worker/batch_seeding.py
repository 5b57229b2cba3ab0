"""``seeding="batch"``: every ticket is made from random states that are a function of its seed alone.

A seed has 63 bits. The three global generators are Mersenne Twisters, and each is seeded by its own public function:
`random` by the whole seed, NumPy by its upper 32 bits, torch by the whole seed, of which it takes the lower 32 bits.
NumPy and torch fill the 624 words of a state in the same way, so they get different bits; `random` has another way.
``torch.initial_seed()`` is the ticket's seed.

Seeding sets all of each state, with the second number of a pair of normal numbers. It takes 8 µs in all.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import torch

from dpex.schedule.seeding import GOLDEN_GAMMA, MIX, epoch_key
from dpex.worker.rng_state import KeptStates

if TYPE_CHECKING:
    from dpex.worker.own_generators import OwnGenerators

_TORCHS_BITS = 31
"""The lower bits of a seed, which torch takes. NumPy takes the other 32."""
_AT_ONCE = 256
"""Seeds of consecutive tickets that NumPy computes together. Python takes as long for one seed as NumPy for 20."""

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
    before = KeptStates(own)
    try:
        seed_ticket(seed)
        if own:
            own.seed(seed)
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
        """Return the seed of ticket ``number``."""
        at = number - self._first
        if epoch != self._epoch or not 0 <= at < _AT_ONCE:
            first = number - number % _AT_ONCE
            key = epoch_key(self._base_seed, epoch)
            seeds = _ticket_seeds(key, first)
            self._epoch, self._first, self._seeds = epoch, first, seeds  # at once: see `dpex.system.interrupts`
            at = number - first
        return self._seeds[at]


def _ticket_seeds(key: int, first: int) -> list[int]:
    """Return `ticket_seed` of `_AT_ONCE` numbers from ``first`` on. Integers of 64 bits overflow as intended."""
    values: Any = np.arange(first + 1, first + 1 + _AT_ONCE, dtype=np.uint64) * GOLDEN_GAMMA + np.uint64(key)
    values = (values ^ (values >> 30)) * MIX[0]
    values = (values ^ (values >> 27)) * MIX[1]
    seeds: list[int] = ((values ^ (values >> 31)) >> 1).tolist()
    return seeds
