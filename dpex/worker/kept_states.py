"""The global random generators as they are now, to be put back later in this process, in some 15 µs.

NumPy's ``get_state`` takes 40 µs, more than all else that a tiny batch costs. So the 624 words of its Mersenne Twister
are copied at the address that NumPy tells (``BitGenerator.ctypes``). The second number of a pair of normal numbers lies
in the ``RandomState``, at a place that is found once by setting it. NumPy's own functions serve where there is no such
place, and for other bit generators.
"""

from __future__ import annotations

import ctypes
import random
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from dpex.worker.states import GLOBAL, generator_state, set_generator_state

if TYPE_CHECKING:
    from dpex.worker.own_generators import OwnGenerators

MT19937_BYTES = 624 * 4 + 4
"""The words of NumPy's ``mt19937_state`` and the position of the next one."""
_PAIR_BYTES = 16
"""C: ``int has_gauss; double gauss;``."""
_numpy_random: Any = np.random


def words_of(bits: Any) -> bytes:
    """Return the words of a ``np.random.MT19937`` and the position of the next one, in 1 µs."""
    return ctypes.string_at(bits.ctypes.state_address, MT19937_BYTES)


@cache
def pair_offset() -> int | None:
    """Return where a ``np.random.RandomState`` has the second number of a pair: bytes from its address, or None."""
    probe, number = np.random.RandomState(0), 0.7390851332151607
    state: Any = probe.get_state(legacy=False)
    probe.set_state({**state, "has_gauss": 1, "gauss": number})
    size = type(probe).__basicsize__
    wanted = bytes(ctypes.c_int(1)) + bytes(4) + bytes(ctypes.c_double(number))
    found = ctypes.string_at(id(probe), size)
    at = found.find(wanted)
    if at < 0 or found.find(wanted, at + 1) >= 0:
        return None
    probe.set_state({**state, "has_gauss": 0, "gauss": number})
    return at if ctypes.string_at(id(probe) + at, 4) == bytes(4) else None


class KeptStates:
    """The present states of the global generators and the dataset's generators, to be restored later in this process.

    It includes NumPy's bit generator, which `seed_ticket` and datasets may replace.
    """

    def __init__(self, own: OwnGenerators | None = None) -> None:
        self._python = random.getstate()
        self._torch = torch.default_generator.get_state()
        bits = self._bits = _numpy_random.get_bit_generator()
        offset = pair_offset() if type(bits) is np.random.MT19937 else None
        self._pair_address = 0 if offset is None else id(GLOBAL["numpy"]) + offset
        if self._pair_address:
            self._numpy: Any = words_of(bits), ctypes.string_at(self._pair_address, _PAIR_BYTES)
        else:
            self._numpy = generator_state(GLOBAL["numpy"])
        self._own = own
        self._own_states = own.states() if own else {}

    def put_back(self) -> None:
        """Set the generators to the kept states. It may be called again."""
        random.setstate(self._python)
        torch.default_generator.set_state(self._torch)
        if _numpy_random.get_bit_generator() is not self._bits:
            _numpy_random.set_bit_generator(self._bits)
        if self._pair_address:
            words, pair = self._numpy
            ctypes.memmove(self._bits.ctypes.state_address, words, MT19937_BYTES)
            ctypes.memmove(self._pair_address, pair, _PAIR_BYTES)
        else:
            set_generator_state(GLOBAL["numpy"], self._numpy)
        if self._own:
            self._own.restore(self._own_states)
