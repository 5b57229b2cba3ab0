"""Keep the states of the global random generators, and put them back later in this process, in 4 µs.

The public functions take far longer: ``get_state`` of NumPy 40 µs, and ``getstate`` and ``setstate`` of Python 13 µs,
more than the rest of a tiny batch. So the 624 words of these two Mersenne Twisters are copied in memory. NumPy exposes
the address of its words (``BitGenerator.ctypes``). The offsets of Python's words in a ``random.Random``, and of the
second number of a pair of normal numbers in a ``RandomState``, are found once, by searching the objects for known
values. The public functions are used if an offset is not found, and for other bit generators.

Each copy is made under the GIL, so no thread of the user can draw from a half-set state of Python's generator.
"""

from __future__ import annotations

import ctypes
import random
import struct
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from dpex.worker.states import GLOBAL, generator_state, set_generator_state

if TYPE_CHECKING:
    from dpex.worker.own_generators import OwnGenerators

MT19937_BYTES = 624 * 4 + 4
"""Bytes of the 624 words and of the position in NumPy's ``mt19937_state`` or Python's ``RandomObject``."""
_Words = ctypes.c_char * MT19937_BYTES
_Pair = ctypes.c_char * 16
"""The C fields ``int has_gauss; double gauss;`` of a ``np.random.RandomState``, with padding."""
_numpy_random: Any = np.random


def words_of(bits: Any) -> bytes:
    """Return, in 1 µs, the words of a ``np.random.MT19937`` and the position of the next word."""
    return _Words.from_address(bits.ctypes.state_address).raw


@cache
def words_offset() -> int | None:
    """Return the byte offset of the Mersenne Twister (position, words) in a ``random.Random``; None if not found."""
    probe = random.Random(0)
    offset = _only_place(probe, _packed(probe))
    if offset is None:
        return None
    other = random.Random(1)
    other.random()
    _Words.from_address(id(probe) + offset).raw = _packed(other)
    return offset if probe.getstate() == other.getstate() else None


def _packed(generator: random.Random) -> bytes:
    """Return the C form of a state: ``int index; uint32_t state[624];``."""
    *words, position = generator.getstate()[1]
    return struct.pack("=i624I", position, *words)


def _only_place(thing: Any, wanted: bytes) -> int | None:
    """Return the offset of the bytes ``wanted`` in an object's memory; None unless they occur exactly once."""
    memory = ctypes.string_at(id(thing), type(thing).__basicsize__)
    at = memory.find(wanted)
    return at if at >= 0 and memory.find(wanted, at + 1) < 0 else None


@cache
def pair_offset() -> int | None:
    """Return the byte offset of ``has_gauss`` and ``gauss`` in a ``np.random.RandomState``; None if not found."""
    probe, number = np.random.RandomState(0), 0.7390851332151607
    state: Any = probe.get_state(legacy=False)
    probe.set_state({**state, "has_gauss": 1, "gauss": number})
    at = _only_place(probe, bytes(ctypes.c_int(1)) + bytes(4) + bytes(ctypes.c_double(number)))
    if at is None:
        return None
    probe.set_state({**state, "has_gauss": 0, "gauss": number})
    return at if ctypes.string_at(id(probe) + at, 4) == bytes(4) else None


@cache
def places() -> tuple[Any, Any]:
    """Return writable views of the words of Python's global generator and of NumPy's `_Pair`; None where not found."""
    words, pair = words_offset(), pair_offset()
    return (
        None if words is None else _Words.from_address(id(GLOBAL["python"]) + words),
        None if pair is None else _Pair.from_address(id(GLOBAL["numpy"]) + pair),
    )


class KeptStates:
    """The present states of the global generators and of a dataset's own generators. `put_back` restores them.

    NumPy's bit generator is restored, too, because `seed_ticket` and datasets may replace it.
    """

    __slots__ = ("_bits", "_numpy", "_own", "_own_states", "_pair", "_python", "_python_words", "_torch", "_words")

    def __init__(self, own: OwnGenerators | None = None) -> None:
        self._python_words, self._pair = places()
        if self._python_words is None:
            self._python: Any = random.getstate()
        else:
            self._python = self._python_words.raw, GLOBAL["python"].gauss_next
        self._torch = torch.default_generator.get_state()
        bits = self._bits = _numpy_random.get_bit_generator()
        self._words = None
        if self._pair is not None and type(bits) is np.random.MT19937:
            self._words = _Words.from_address(bits.ctypes.state_address)
            self._numpy: Any = self._words.raw, self._pair.raw
        else:
            self._numpy = generator_state(GLOBAL["numpy"])
        self._own = own
        self._own_states = own.states() if own else {}

    def put_back(self) -> None:
        """Set the generators to the kept states. It may be called again."""
        if self._python_words is None:
            random.setstate(self._python)
        else:
            self._python_words.raw, GLOBAL["python"].gauss_next = self._python
        torch.default_generator.set_state(self._torch)
        if _numpy_random.get_bit_generator() is not self._bits:
            _numpy_random.set_bit_generator(self._bits)
        if self._words is None:
            set_generator_state(GLOBAL["numpy"], self._numpy)
        else:
            self._words.raw, self._pair.raw = self._numpy
        if self._own:
            self._own.restore(self._own_states)
