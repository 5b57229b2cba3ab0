"""The plain part of a plan: unpickled once for all workers, in the process that forks them.

A worker that is not forked from the training process unpickles the plan, and so has objects, threads and open files of
its own. For a large dataset that is a copy, and seconds of work, per worker. Built-in containers, numbers, strings,
dates, paths and arrays of numbers need no code of users to be unpickled. A `PlainPart` takes them out of the pickle of
the plan. The process that forks the workers unpickles them, and nothing else. Each worker unpickles the rest, with
all classes, functions and modules of users, as torch's workers do.

An object to which several others refer must be one object in the worker, too. So every container that leads to
plain objects alone belongs to the plain part, whatever its size.
"""

from __future__ import annotations

import copyreg
import datetime
import decimal
import gc
import pathlib
import pickle
from collections import ChainMap
from collections.abc import Callable
from itertools import chain
from multiprocessing.reduction import ForkingPickler
from typing import Any

import numpy as np

_CONTAINERS = frozenset((list, tuple, dict, set, frozenset))
_STRINGS = frozenset((str, bytes))
_VALUES = frozenset(
    (
        *(type(None), bool, int, float, complex, bytearray, *_STRINGS),
        *(datetime.date, datetime.timedelta, decimal.Decimal, pathlib.PosixPath, pathlib.PurePosixPath),
        *(set(np.sctypeDict.values()) - {np.object_, np.void}),
    )
)
_LARGE_BYTES = 4096
"""Length from which a string outside of such containers is taken out. A shorter one is not worth it: no program can
change a string, so each worker may have its own."""

_OF_OTHER_LIBRARIES = 2
"""``isbuiltin`` of a dtype that another library has made."""


def _is_of_numbers(array: Any) -> bool:
    dtype: np.dtype[Any] = array.dtype
    return dtype.kind in "biufcmMSU" and dtype.isbuiltin != _OF_OTHER_LIBRARIES and dtype.metadata is None


def _has_plain_zone(time: Any) -> bool:
    return type(time.tzinfo) in (type(None), datetime.timezone)


_TESTED: dict[type, Callable[[Any], bool]] = {
    np.ndarray: _is_of_numbers,
    datetime.datetime: _has_plain_zone,
    datetime.time: _has_plain_zone,
}
"""Types whose objects are plain if they pass a test."""
_PARTS = _CONTAINERS | _STRINGS | {bytearray, np.ndarray}
"""Types whose objects are taken out: those that can be changed or are large."""


class PlainPart:
    """The plain ``objects`` of a plan that is being pickled, which were taken out of the pickle."""

    def __init__(self) -> None:
        self.objects: list[Any] = []
        self._places: dict[int, int] = {}
        self._plain: set[int] = set()
        """Addresses of containers within `objects`, which keep them alive."""
        reducers = ChainMap(ForkingPickler._extra_reducers, copyreg.dispatch_table)  # type: ignore[attr-defined]
        others = {kind for kind, reduce in reducers.items() if getattr(reduce, "__module__", "") != copyreg.__name__}
        self._kinds = _VALUES.union(_CONTAINERS, _TESTED) - others
        """The types of plain objects. Those that are pickled by a function of other libraries are left out."""

    def place_of(self, one: Any) -> int | None:
        """Return the place of an object in `objects`, and put it there if it belongs there; None: it does not.

        This is the ``persistent_id`` of the pickler.
        """
        kind = type(one)
        if kind not in _PARTS or (kind in _STRINGS and len(one) < _LARGE_BYTES):
            return None
        place = self._places.get(id(one))
        if place is None and self._is_plain(one):
            place = self._places[id(one)] = len(self.objects)
            self.objects.append(one)
        return place

    def _is_plain(self, root: Any) -> bool:
        """Return True if an object and all that it leads to are plain. Takes 0.3 µs per object.

        From Python 3.13 on, `gc` does not see the values of a dict that an instance has as its ``__dict__``.
        """
        references, found = [root], set[int]()
        while references:
            kinds = set(map(type, references))
            if not kinds <= self._kinds:
                return False
            for kind in kinds & _TESTED.keys():
                if not all(_TESTED[kind](one) for one in references if type(one) is kind):
                    return False
            level = {}
            if not kinds.isdisjoint(_CONTAINERS):
                level = {id(one): one for one in references if type(one) in _CONTAINERS}
                for address in [*(level.keys() & found), *(level.keys() & self._plain)]:
                    level.pop(address, None)
            found |= level.keys()
            dicts = [one for one in level.values() if type(one) is dict]
            references = gc.get_referents(*[one for one in level.values() if type(one) is not dict])
            references += chain(chain.from_iterable(dicts), chain.from_iterable(map(dict.values, dicts)))
        self._plain |= found
        return True


class Joining(pickle.Unpickler):
    """Unpickles a plan without its plain part, and puts the objects of that in."""

    def __init__(self, file: Any, objects: list[Any]) -> None:
        super().__init__(file)
        self._objects = objects

    def persistent_load(self, pid: int) -> Any:
        return self._objects[pid]
