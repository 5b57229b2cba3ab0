"""The three global random generators: `random`'s, numpy's legacy one and torch's CPU one; set, saved and restored.

All three are Mersenne Twisters of 624 words. Their own functions take tens of microseconds to read and write them, as
much as a tiny batch takes to make. So they are read and written where they lie in memory, provided that `located` could
prove on generators of its own that it knows the layout (CPython, numpy's MT19937, torch's CPU generator). Elsewhere
`ByFunctions` sets the very same states.

One thread at a time: access by memory races with a draw in another thread, as the generators' own functions would not.
"""

from __future__ import annotations

import ctypes
import logging
import random
import struct
import sys
from collections.abc import Callable
from functools import cache
from typing import Any, Protocol, TypeVar

import numpy as np
import torch

logger = logging.getLogger("dpex")
Result = TypeVar("Result")

_WORDS = 624
"""The Mersenne Twister's state."""
_HALF = _WORDS // 2
"""Items of 64 bits that hold a generator's words."""
BLOCK = 3 * _HALF
"""Items of 64 bits that `Generators.fill` takes: one generator's words after the other's."""
_FORMAT: Any = np.empty(1, np.uint64).data.format
"""Of these items: "L" or "Q", by platform."""
_KEY_AND_POSITION_BYTES = 4 * (_WORDS + 1)
_MAGIC_SEED = 0x1E3779B97F4A7C15
"""A seed that does not stand in a generator's memory by chance."""
_TORCH_HEADER_BYTES = 256
"""How far behind a torch generator's address its engine is looked for."""
_TORCH_ENGINE = struct.Struct(f"=QiB3xI{_WORDS}I4x")
"""at::mt19937_data_pod: seed, left, seeded, next, words."""
_TORCH_ENGINE_START = struct.Struct("=QiB3xI")
_TORCH_NORMALS = struct.Struct("=fB3xdB7x")
"""What follows there: the normal draws kept for the next call, as float and as double, and whether there are any."""
_TORCH_LEGACY = struct.Struct(f"=QiiQ{_WORDS}Q")
"""How ``Generator.get_state`` begins: seed, left, seeded, next, words."""
_TORCH_LEGACY_NORMAL = struct.Struct("=dddi")
"""What follows there: x, y (the normal draw kept for the next call), rho, whether there is one."""
_TORCH_LEFT, _TORCH_NEXT = _WORDS, 1
"""torch accepts no state whose first word is still to come: as if one had been drawn."""
_GAUSS_BYTES = 16
"""In numpy's RandomState: whether a normal draw is kept for the next call (int), and that (double)."""
_mtrand: Any = np.random.mtrand
_numpy_random: Any = np.random
_python: Any = random.seed.__self__  # type: ignore[attr-defined]
_torch: Any = torch.default_generator


class Generators(Protocol):
    """All three."""

    def fill(self, words: memoryview, seed: int) -> None:
        """Set their states to these `BLOCK` items of 64 bits, with no draw kept, and ``torch.initial_seed()``."""

    def save(self) -> Any:
        """Their states."""

    def restore(self, state: Any) -> None:
        """Set them to what `save` returned."""

    def moved_since(self, state: Any) -> bool:
        """Whether they are not as `save` found them; True also where that cannot be told."""

    def lent(self, words: memoryview, seed: int, call: Callable[[Any], Result], argument: Any) -> Result:
        """``call(argument)`` with their states filled as by `fill`; afterwards they are as they were before."""


class ByFunctions:
    """By the functions that each library offers; right for any bit generator and any Python."""

    def fill(self, words: memoryview, seed: int) -> None:
        """See `Generators`."""
        python, numpy, of_torch = np.frombuffer(words, "=u4").reshape(3, _WORDS)
        _python.setstate((_python.VERSION, (*python.tolist(), 0), None))
        if type(_numpy_random.get_bit_generator()) is not np.random.MT19937:
            _numpy_random.set_bit_generator(np.random.MT19937(0))
        _numpy_random.set_state(("MT19937", numpy, 0, 0, 0.0))
        state = bytearray(_fresh_torch_state())
        _TORCH_LEGACY.pack_into(state, 0, seed, _TORCH_LEFT, 1, _TORCH_NEXT, *of_torch.tolist())
        _torch.set_state(torch.frombuffer(state, dtype=torch.uint8))

    def save(self) -> Any:
        """See `Generators`."""
        bits = _numpy_random.get_bit_generator()
        return _python.getstate(), bits, _numpy_random.get_state(legacy=False), _torch.get_state()

    def restore(self, state: Any) -> None:
        """See `Generators`."""
        python, bits, numpy, torch_state = state
        _python.setstate(python)
        if _numpy_random.get_bit_generator() is not bits:
            _numpy_random.set_bit_generator(bits)
        _numpy_random.set_state(numpy)
        _torch.set_state(torch_state)

    def moved_since(self, state: Any) -> bool:
        """See `Generators`."""
        return True

    def lent(self, words: memoryview, seed: int, call: Callable[[Any], Result], argument: Any) -> Result:
        """See `Generators`."""
        state = self.save()
        try:
            self.fill(words, seed)
            return call(argument)
        finally:
            self.restore(state)


class InMemory:
    """By their memory; of use while numpy's bit generator is the one found here (see `holds`)."""

    def __init__(self, gauss_offset: int, engine_offset: int) -> None:
        self._bits = _numpy_random.get_bit_generator()
        self._python = _bytes_at(id(_python) + object.__basicsize__, _KEY_AND_POSITION_BYTES)
        self._python_index = self._python[:4]
        self._python_words = self._python[4:].cast(_FORMAT)
        self._numpy = _bytes_at(self._bits.ctypes.state_address, _KEY_AND_POSITION_BYTES)
        self._numpy_words = self._numpy[:-4].cast(_FORMAT)
        self._numpy_position = self._numpy[-4:]
        self._gauss = _bytes_at(id(_mtrand._rand) + gauss_offset, _GAUSS_BYTES)
        engine = _torch._cdata + engine_offset
        self._torch = _bytes_at(engine, _TORCH_ENGINE.size + _TORCH_NORMALS.size)
        start = _TORCH_ENGINE_START.size
        self._torch_words = self._torch[start : start + 4 * _WORDS].cast(_FORMAT)
        self._torch_normals = self._torch[_TORCH_ENGINE.size :]

    def holds(self) -> bool:
        """Whether numpy's global generator still has the bit generator that was found."""
        return _numpy_random.get_bit_generator() is self._bits

    def fill(self, words: memoryview, seed: int) -> None:
        """See `Generators`."""
        self._python_words[:] = words[:_HALF]
        self._python_index[:] = _ZERO
        _python.gauss_next = None
        self._numpy_words[:] = words[_HALF : 2 * _HALF]
        self._numpy_position[:] = _ZERO
        self._gauss[:] = _NO_GAUSS
        self._torch_words[:] = words[2 * _HALF :]
        _TORCH_ENGINE_START.pack_into(self._torch, 0, seed, _TORCH_LEFT, 1, _TORCH_NEXT)
        self._torch_normals[:] = _NO_NORMALS

    def save(self) -> Any:
        """See `Generators`."""
        return (
            self._python.tobytes(),
            _python.gauss_next,
            self._numpy.tobytes(),
            self._gauss.tobytes(),
            self._torch.tobytes(),
        )

    def restore(self, state: Any) -> None:
        """See `Generators`."""
        self._python[:], _python.gauss_next, numpy, gauss, self._torch[:] = state
        if not self.holds():
            _numpy_random.set_bit_generator(self._bits)
        self._numpy[:], self._gauss[:] = numpy, gauss

    def moved_since(self, state: Any) -> bool:
        """See `Generators`."""
        return not self.holds() or bool(self.save() != state)

    def lent(self, words: memoryview, seed: int, call: Callable[[Any], Result], argument: Any) -> Result:
        """See `Generators`. `save`, `fill` and `restore` in one, which takes half the time, for every tiny batch.

        States are put back without a call, so that no exception of a signal handler comes between (see `interrupts`).
        """
        python, numpy, gauss, of_torch = self._python, self._numpy, self._gauss, self._torch
        saved_python, python_gauss = python.tobytes(), _python.gauss_next
        saved_numpy, saved_gauss, saved_torch = numpy.tobytes(), gauss.tobytes(), of_torch.tobytes()
        try:
            self._python_words[:] = words[:_HALF]
            self._python_index[:] = _ZERO
            _python.gauss_next = None
            self._numpy_words[:] = words[_HALF : 2 * _HALF]
            self._numpy_position[:] = _ZERO
            gauss[:] = _NO_GAUSS
            self._torch_words[:] = words[2 * _HALF :]
            _start_torch(of_torch, 0, seed, _TORCH_LEFT, 1, _TORCH_NEXT)
            self._torch_normals[:] = _NO_NORMALS
            return call(argument)
        finally:
            python[:], numpy[:], gauss[:], of_torch[:] = saved_python, saved_numpy, saved_gauss, saved_torch
            _python.gauss_next = python_gauss
            if _numpy_random.get_bit_generator() is not self._bits:
                _numpy_random.set_bit_generator(self._bits)
                gauss[:] = saved_gauss  # which that function resets


_start_torch = _TORCH_ENGINE_START.pack_into
_ZERO = bytes(4)
_NO_GAUSS = bytes(_GAUSS_BYTES)
_NO_NORMALS = bytes(_TORCH_NORMALS.size)


def _bytes_at(address: int, size: int) -> memoryview:
    return memoryview((ctypes.c_ubyte * size).from_address(address)).cast("B")


def located() -> InMemory | None:
    """The generators' memory, or None where the layout is another, or numpy's bit generator is."""
    global _found
    if _found is None or not _found.holds():
        offsets = _offsets()
        known = offsets is not None and type(_numpy_random.get_bit_generator()) is np.random.MT19937
        _found = InMemory(*offsets) if offsets is not None and known else None
    return _found


_found: InMemory | None = None


@cache
def _offsets() -> tuple[int, int] | None:
    """Where numpy's kept normal draw and torch's engine lie in their objects; None if anything is not as expected."""
    if sys.implementation.name != "cpython" or sys.byteorder != "little":
        return None
    try:
        _check_python()
        return _numpy_offset(), _torch_offset()
    except Exception as error:
        logger.info("random states are read and set by their own functions: %r", error)
        return None


def _expect(right: bool, what: str) -> None:
    if not right:
        raise LookupError(f"the memory of {what} is not laid out as expected")


def _check_python() -> None:
    base = random.Random.__mro__[1]
    _expect(base.__basicsize__ >= object.__basicsize__ + _KEY_AND_POSITION_BYTES, "random.Random")
    _expect(isinstance(_python, base), "the random module's generator")
    one = random.Random(_MAGIC_SEED)
    memory = (ctypes.c_uint32 * (_WORDS + 1)).from_address(id(one) + object.__basicsize__)
    for draws in (0, 1, 700):
        for _ in range(draws):
            one.random()
        *words, index = one.getstate()[1]
        _expect(list(memory) == [index, *words], "random.Random")


def _numpy_offset() -> int:
    bits: Any = np.random.MT19937(7)
    one: Any = np.random.RandomState(bits)
    memory = (ctypes.c_uint32 * (_WORDS + 1)).from_address(bits.ctypes.state_address)
    for draws in (0, 1, 700):
        one.random_sample(draws)
        state = bits.state["state"]
        _expect(list(memory) == [*state["key"].tolist(), state["pos"]], "numpy's MT19937")
    one.standard_normal()
    kept = one.get_state(legacy=False)
    held = ctypes.string_at(id(one), np.random.RandomState.__basicsize__)
    offset = held.find(struct.pack("=d", kept["gauss"])) - 8
    flag = ctypes.c_int.from_address(id(one) + max(0, offset))
    _expect(offset > 0 and kept["has_gauss"] == 1 == flag.value, "numpy's RandomState")
    one.standard_normal()
    _expect(flag.value == 0, "numpy's RandomState")
    return offset


def _torch_offset() -> int:
    one: Any = torch.Generator()
    one.manual_seed(_MAGIC_SEED)
    offset = ctypes.string_at(one._cdata, _TORCH_HEADER_BYTES).find(struct.pack("=Q", _MAGIC_SEED))
    _expect(offset > 0, "torch's generator")
    for draws in (0, 1, 700):
        torch.rand(draws, generator=one, device="cpu")
        _expect(_engine(one, offset) == _engine_by_function(one), "torch's generator")
    for kept in (1, 0):
        torch.randn(1, generator=one, dtype=torch.float64)
        tail = ctypes.string_at(one._cdata + offset + _TORCH_ENGINE.size, _TORCH_NORMALS.size)
        _, no_float, double, has_double = _TORCH_NORMALS.unpack(tail)
        _, y, _, valid = _TORCH_LEGACY_NORMAL.unpack_from(_state_bytes(one), _TORCH_LEGACY.size)
        _expect((no_float, has_double, valid) == (0, kept, kept), "torch's generator")
        _expect(not kept or double == y, "torch's generator")
    return offset


def _state_bytes(generator: torch.Generator) -> bytes:
    return generator.get_state().numpy().tobytes()


def _engine(generator: Any, offset: int) -> tuple[int, ...]:
    return _TORCH_ENGINE.unpack(ctypes.string_at(generator._cdata + offset, _TORCH_ENGINE.size))


def _engine_by_function(generator: torch.Generator) -> tuple[int, ...]:
    return _TORCH_LEGACY.unpack_from(_state_bytes(generator))


@cache
def _fresh_torch_state() -> bytes:
    return _state_bytes(torch.Generator())
