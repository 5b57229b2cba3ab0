"""Share one copy of a dataset's plain objects among all forked workers, on Python 3.12 and later.

A forked worker shares the memory of the dataset until it reads an object: the read writes the object's reference count,
and the kernel copies the page. Since Python 3.12 nothing writes the count of an immortal object (PEP 683). The
template makes the plain objects of the dataset immortal before it forks workers. This runs no user code, and leaves the
training process unchanged.

An object is plain if its exact type is str, int, float, complex, bytes, bool or None, or a tuple, list, dict, set or
frozenset that leads to plain objects alone. A container that leads to an open file stays mortal, so a worker that drops
the container closes the file.

All workers wait for this search. These extensions were tried and removed, because they took 827 lines, and
`dpex.compact` serves the same users: a first worker that starts before the search, a time limit, plain parts for
spawned workers, and instances of classes.
"""

from __future__ import annotations

import ctypes
import gc
import sys
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np

_LEAVES = (str, int, float, complex, bytes)
_CONTAINERS: frozenset[type] = frozenset((tuple, list, dict, set, frozenset))
_PLAIN: frozenset[type] = _CONTAINERS.union(_LEAVES, (bool, type(None)))
_CHUNK = 1 << 12
"""Objects whose references are read in one call."""
_MOST_INSTANCES = 10_000
"""Maximum instances of classes whose attributes are searched, nearest to the dataset first (datasets of datasets)."""
_HAS_ATTRIBUTES = 1 << 9
"""``Py_TPFLAGS_HEAPTYPE``: set in types made by class statements, not in the types of modules and functions."""
_COUNT = 0xFFFFFFFF
"""The lower half of the reference count of an immortal object."""
_FLAGS = (0, 1 << 16)
"""Values of the upper half: Python 3.14 sets a flag there for an immortal object on the interpreter's stack."""
_FIRST = 1 << 12
"""The address at which the views of the memory begin. No object lies below it."""


def share_plain_objects(dataset: Any) -> str:
    """Make the plain objects of a dataset immortal in this process; return "", or why this Python cannot do that.

    Takes about 0.15 s for a million objects.
    """
    memory = next((heads for heads in map(_Heads, _FLAGS) if heads.is_never_written()), None) if _is_known() else None
    if memory is None:
        return f"Python {sys.version.split()[0]} writes the reference count of each object that is read"
    mortal: set[int] = set()
    levels = list(_containers_below(dataset, memory, mortal))
    known = 0
    while known < len(mortal):  # repeat: containers may refer to each other in cycles
        known = len(mortal)
        for chunk in [chunk for level in reversed(levels) for chunk in _chunks(level)]:
            if np.isin(memory.addresses(gc.get_referents(*chunk)), [*mortal]).any():
                mortal.update(id(one) for one in chunk if not mortal.isdisjoint(map(id, gc.get_referents(one))))
    for level in levels:
        addresses = memory.addresses(level)
        memory.make_immortal(addresses[~np.isin(addresses, [*mortal])])
    return ""


def _is_known() -> bool:
    """Return True if objects of this interpreter may have the heads that `_Heads` expects."""
    has_gil: bool = getattr(sys, "_is_gil_enabled", lambda: True)()
    return sys.implementation.name == "cpython" and sys.byteorder == "little" and sys.maxsize > 1 << 32 and has_gil


class _Heads:
    """Reads and writes the heads of objects: the count in 8 bytes, then the address of the type, little-endian."""

    def __init__(self, flag: int) -> None:
        self._flag = np.uint32(flag)
        self._words = np.ctypeslib.as_array((ctypes.c_uint32 * (1 << 45)).from_address(_FIRST))
        self._longs = np.ctypeslib.as_array((ctypes.c_int64 * (1 << 44)).from_address(_FIRST))

    def addresses(self, objects: list[Any]) -> Any:
        """Return the addresses of a list's items. Byte 24 of a list has the pointer to them (``ob_item``)."""
        start = (int(self._longs[(id(objects) + 24 - _FIRST) >> 3]) - _FIRST) >> 3 if objects else 0
        return self._longs[start : start + len(objects)].copy()

    def are_of(self, addresses: Any, kinds: Iterable[type]) -> Any:
        """Return an array that is True where the object at an address has one of these types exactly."""
        return np.isin(self._longs[(addresses + 8 - _FIRST) >> 3], [id(kind) for kind in kinds])

    def make_immortal(self, addresses: Any) -> None:
        places = (addresses - _FIRST) >> 2
        self._words[places] = _COUNT
        if self._flag:
            self._words[places + 1] |= self._flag

    def is_never_written(self) -> bool:
        """Test on a new object if its head has the expected layout, and if reads leave its count unchanged."""
        probe = ["probe"]
        held = [probe] * 3
        addresses = self.addresses(held)
        if addresses.tolist() != [id(probe)] * 3 or not self.are_of(addresses, [list]).all():
            return False
        self.make_immortal(addresses)
        for one in held:
            one.copy()
        return bool(self._words[(id(probe) - _FIRST) >> 2] == _COUNT)


def _containers_below(root: Any, memory: _Heads, mortal: set[int]) -> Iterator[list[Any]]:
    """Yield the containers that are 1, 2, 3, ... references away from ``root``, and make all leaves immortal.

    Add to ``mortal`` the addresses of containers that hold an object that is not plain.
    """
    seen, instances_left, frontier = np.array([id(root)]), _MOST_INSTANCES, [root]
    while frontier:
        below: list[Any] = []
        for chunk in _chunks(frontier):
            found = gc.get_referents(*chunk)
            addresses = memory.addresses(found)
            are_leaves = memory.are_of(addresses, _LEAVES)
            memory.make_immortal(addresses[are_leaves])
            below += [found[place] for place in np.flatnonzero(~are_leaves)]
            if not memory.are_of(addresses, _PLAIN).all():
                mortal.update(id(one) for one in chunk if not _PLAIN.issuperset(map(type, gc.get_referents(one))))
        addresses, places = np.unique(memory.addresses(below), return_index=True)
        are_new = ~np.isin(addresses, seen, assume_unique=True)
        addresses, places = addresses[are_new], places[are_new]
        are_containers = memory.are_of(addresses, _CONTAINERS)
        containers = [below[place] for place in places[are_containers]]
        others = [below[place] for place in places[~are_containers]]
        instances = [one for one in others if _is_instance(one)][:instances_left]
        instances_left -= len(instances)
        frontier = containers + instances
        seen = np.concatenate([seen, memory.addresses(frontier)])
        yield containers


def _chunks(objects: list[Any]) -> Iterator[list[Any]]:
    return (objects[first : first + _CHUNK] for first in range(0, len(objects), _CHUNK))


def _is_instance(one: Any) -> bool:
    return bool(type(one).__flags__ & _HAS_ATTRIBUTES) and not isinstance(one, type)
