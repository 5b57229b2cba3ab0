"""Immortal objects of the dataset: forked workers read them without copying them.

A forked worker shares the memory of the dataset until it touches an object: each read writes the object's reference
count, and the kernel copies the page. Since Python 3.12 a count in a certain range marks an object as immortal
(PEP 683), and nothing writes it. `ObjectSearch` finds the plain objects of a dataset and sets these counts. It runs in
the fork server, a process that runs no code of users and only forks workers, so the training process is unchanged.

Invariants:

- An object becomes immortal only if no code can observe that it is never freed. Its exact type is a plain built-in
  type, or a type without finalizer and without support for weak references.
- A container stays mortal if it leads to an object whose end code can observe: an object with a finalizer, with a weak
  reference, or of an unknown extension type. So a worker that drops such a container still closes its files.
- The search writes only after `why_unsupported` has checked the layout of objects in this process.

The search works on batches of some 16,000 references. ``gc.get_referents`` finds them, and NumPy reads and writes their
counts and types in place. During the search, the reference counts of found containers have the bit `_FOUND` set. The
module needs NumPy only, and no torch.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import itertools
import resource
import sys
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cache
from types import BuiltinFunctionType, CodeType, FrameType, FunctionType, ModuleType
from typing import TYPE_CHECKING, Any

import numpy as np

from dpex.schedule.events import SharedObjects
from dpex.system.clock import monotonic

if TYPE_CHECKING:
    import numpy.typing as npt

_IMMORTAL_COUNTS: dict[tuple[int, ...], int] = {(3, 12): 0xFFFFFFFF, (3, 13): 0xFFFFFFFF, (3, 14): 3 << 30}
"""The lower half of the reference count of an immortal object, by version (``_Py_IMMORTAL_INITIAL_REFCNT``)."""
_IMMORTAL = np.uint32(_IMMORTAL_COUNTS.get(sys.version_info[:2], 0xFFFFFFFF))
_IMMORTAL_FLAG = np.uint32(1 << 16 if sys.version_info >= (3, 14) else 0)
"""The bit of ``ob_flags`` (``_Py_IMMORTAL_FLAGS``) in the upper half of the count, by which Python 3.14 knows an
immortal object on the stack of the interpreter. Without it, the interpreter writes the count."""
_IS_IMMORTAL = np.uint32(1 << 31)
"""The bit that is set in the count of every immortal object, in all these versions."""
_FOUND = np.uint32(1 << 30)
"""The bit of a container that the search has found. A count of references does not reach it."""
_LEAVES = (str, int, float, complex, bytes)
_CONTAINERS = (tuple, list, dict, set, frozenset)
_SETS = (set, frozenset)
"""The containers that support weak references."""
_BATCH = 1 << 14
"""References that are looked at together: their counts fit in the cache of a CPU, and a batch takes 2 ms."""
_FEW = 8
"""References that an object of an unknown size is expected to have."""
_PAGE_BITS = 12
"""Binary digits of an address within a page of memory."""
_FIRST = 1 << 12
"""The lowest address that can be read. Views of the memory begin here, as a view at 0 is not allowed."""
_ITEMS_OFFSET = 24
"""Offset of the address of a list's items (``ob_item``)."""
_VALUES_OFFSET = 40
"""Offset of the values that a dict keeps outside of its table (``ma_values``), as the ``__dict__`` of an instance does.
From Python 3.13 on, `gc` sees these as references of the instance alone."""
_DEALLOC_OFFSET = 48
"""Offset of ``tp_dealloc`` in a type."""
_HAS_REFERENCES = 1 << 14
"""The flag of types whose objects the garbage collector traverses (``Py_TPFLAGS_HAVE_GC``)."""
LEAST_BYTES = 1 << 20
"""Bytes of a dataset's objects from which sharing them is worth it. The private memory of workers that copy nothing
varies by as much from run to run."""
_KNOWN_MODULES = frozenset(
    (
        *("array", "builtins", "collections", "datetime", "decimal", "enum", "fractions"),
        *("functools", "numpy", "operator", "pathlib", "re", "torch", "uuid"),
    )
)
"""Modules whose extension types do nothing but free memory when an object ends, unless they have ``__del__``."""
_VALUE_MODULES = frozenset(("datetime", "decimal", "numpy"))
"""Modules whose types are plain values if they do not support weak references."""


def why_unsupported() -> str:
    """Return why this interpreter cannot share objects, after a test of the layout of its objects; "" if it can."""
    release: tuple[int, ...] = sys.version_info[:2]
    version = "{}.{}".format(*release)
    if sys.implementation.name != "cpython":
        return f"{sys.implementation.name} is not supported, only CPython"
    if release < (3, 12):
        return f"Python {version} writes the reference count of each object that is read, and Python 3.12 does not"
    if release not in _IMMORTAL_COUNTS:
        return f"dpex does not know the immortal reference counts of Python {version}"
    flags = getattr(sys, "abiflags", "")
    if "t" in flags or "d" in flags or hasattr(sys, "gettotalrefcount"):
        return "free-threaded and debug builds of Python are not supported"
    if sys.maxsize < 1 << 32 or sys.byteorder != "little":
        return "only 64-bit processors with little-endian numbers are supported"
    return "" if _is_layout_known() else "objects of this Python have another layout than expected"


@cache
def _memory() -> tuple[npt.NDArray[np.uint32], npt.NDArray[np.int64]]:
    """Return two views of the memory of this process from address `_FIRST` on: words of 4 and of 8 bytes."""
    words = np.ctypeslib.as_array((ctypes.c_uint32 * (1 << 45)).from_address(_FIRST))
    return words, np.ctypeslib.as_array((ctypes.c_int64 * (1 << 44)).from_address(_FIRST))


def _addresses(objects: list[Any]) -> npt.NDArray[np.int64]:
    """Return the addresses of a list's items: a view, valid while the list is neither changed nor freed."""
    longs = _memory()[1]
    start = (int(longs[(id(objects) + _ITEMS_OFFSET - _FIRST) >> 3]) - _FIRST) >> 3 if objects else 0
    return longs[start : start + len(objects)]


def _make_immortal(places: npt.NDArray[np.int64] | list[int]) -> None:
    """Set the counts at these places of the view of the memory, and the flags where this Python has them."""
    words = _memory()[0]
    words[places] = _IMMORTAL
    if _IMMORTAL_FLAG:
        words[np.asarray(places) + 1] |= _IMMORTAL_FLAG


def _is_layout_known() -> bool:
    """Test on objects of our own that counts, types, sizes and items are where the search expects them."""
    words, longs = _memory()
    probe: Any
    for probe in (["probe"], {"a": 1, "b": 2}, ("probe", *map(str, range(3)))):
        place = (id(probe) - _FIRST) >> 2
        before, seen = int(words[place]), sys.getrefcount(probe)
        held = [probe] * 3
        if words[place] != before + len(held) or longs[(place >> 1) + 1] != id(type(probe)):
            return False
        if longs[(place >> 1) + 2] != len(probe) or not (_addresses(held) == id(probe)).all():
            return False
        del held
        words[place] |= _FOUND
        counted = sys.getrefcount(probe) - seen
        words[place] &= ~_FOUND
        if counted != _FOUND or words[place] != before:
            return False
        _make_immortal([place])
        _use(probe)
        if words[place] != _IMMORTAL or not getattr(sys, "_is_immortal", bool)(probe):
            return False
    return True


def _use(probe: Any) -> None:
    """Use an object as code does: bind it, hold it, pass it on and ask for its size."""
    for _ in range(5):
        name = probe
        held = [name, (name,), {"name": name}]
        name = held[0]
        len(name)
        name = None
        del held


# -- types -------------------------------------------------------------------------------------------------------------

_mro_of = type.__dict__["__mro__"].__get__
_names_of = type.__dict__["__dict__"].__get__
_module_of = type.__dict__["__module__"].__get__
_flags_of = type.__dict__["__flags__"].__get__
_weak_offset_of = type.__dict__["__weakrefoffset__"].__get__
"""Attributes of a type, read past its metaclass, whose code must not run here."""

IGNORED, FOLLOWED, SHARED, OBSERVED = "ignored", "followed", "shared", "observed"
"""Roles of a type that is not plain. Ignored: nothing is looked for behind its objects. Followed: they stay mortal.
Shared: they become immortal. Observed: they stay mortal, and so does what leads to them, as their end may do more than
free memory."""
_IGNORED_TYPES = (type, ModuleType, FunctionType, BuiltinFunctionType, CodeType, FrameType)


class _PlainClass:
    """The probe for ``tp_dealloc`` of classes that are written in Python."""


def role_of(kind: type) -> str:
    """Return the role of the objects of a type; see `IGNORED`."""
    bases = _mro_of(kind)
    if issubclass(kind, _IGNORED_TYPES):
        return IGNORED
    roots = {_root_module(base) for base in bases if not _is_written_in_python(base)}
    if any("__del__" in _names_of(base) for base in bases) or not roots <= _KNOWN_MODULES:
        return OBSERVED
    is_value = _is_written_in_python(kind) or _root_module(kind) in _VALUE_MODULES
    return SHARED if is_value and not _weak_offset_of(kind) else FOLLOWED


def _root_module(kind: type) -> str:
    name = _module_of(kind)
    return name.partition(".")[0].lstrip("_") if isinstance(name, str) else ""


def _is_written_in_python(kind: type) -> bool:
    """Return True if a ``class`` statement made this type, so that its objects are freed in Python's own way."""
    longs = _memory()[1]
    mine, plain = ((id(one) + _DEALLOC_OFFSET - _FIRST) >> 3 for one in (kind, _PlainClass))
    return bool(longs[mine] == longs[plain])


# -- the search --------------------------------------------------------------------------------------------------------


@dataclass(eq=False)
class _Unit:
    """Objects that the search found together, and whose references it follows together.

    Attributes:
        parent: The unit whose objects refer to ``items``; None: the root.
        is_shareable: True if the objects may become immortal.
        crossings: Positions of earlier objects to which ``items`` refer.
        is_mortal: True if the objects must stay mortal: the search is incomplete, or leads to an observable end.
            `ObjectSearch.share` then clears the bit `_FOUND`.
    """

    parent: _Unit | None
    items: list[Any]
    is_shareable: bool
    crossings: list[npt.NDArray[np.int64]] = field(default_factory=list)
    is_followed: bool = False
    has_observed: bool = False
    is_mortal: bool = False

    def places(self) -> npt.NDArray[np.int64]:
        """Return the index of each object's count in the view of the memory."""
        return _places(_addresses(self.items))


def _places(addresses: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    return (addresses - _FIRST) >> 2


class ObjectSearch:
    """Find the objects that are reachable from ``root``, and make the plain ones immortal.

    Call `advance` until it returns True or the time is over, then `share`. A process that was forked in between calls
    `abandon`. It is for a process with one thread that runs no other code, where `why_unsupported` has returned "".
    """

    def __init__(self, root: Any, clock: Callable[[], float] = monotonic) -> None:
        self._clock = clock
        self._words, self._longs = _memory()
        top = _Unit(None, [], is_shareable=False)
        self._units: list[_Unit] = [top]
        self._pending: list[tuple[_Unit, Iterator[list[Any]]]] = [(top, iter([[root]]))]
        """Units that the search has yet to follow, the next one last, so that few are pending."""
        self._roles: dict[int, str] = {}
        """Roles by the address of the type: the hash of a type may run a user's code."""
        self._leaves = 0
        self._pages: list[npt.NDArray[np.int64]] = []
        self.seconds: float = 0.0
        """Wall seconds that were spent so far."""
        self.copying_s: float = 0.0
        """Seconds of these in which the kernel copied pages. Each worker would spend as much without the search."""

    @property
    def is_complete(self) -> bool:
        return not self._pending

    def advance(self, seconds: float) -> bool:
        """Search for ``seconds``, and a few milliseconds more at most; return True once all is found."""
        began, copied_s = self._clock(), _system_s()
        while self._pending and self._clock() - began < seconds:
            unit, batches = self._pending[-1]
            references = next(batches, None)
            if references is None:
                unit.is_followed = True
                self._pending.remove((unit, batches))
            elif references:
                self._take(unit, references)
        self.seconds += self._clock() - began
        self.copying_s += _system_s() - copied_s
        return self.is_complete

    def abandon(self) -> None:
        """Make the containers that were found what they were, in this process."""
        for unit in self._units:
            if not unit.is_mortal:
                self._words[unit.places()] &= ~_FOUND
        self._units, self._pending = [], []

    def share(self) -> SharedObjects:
        """Make what was found immortal, unless it is too little to gain from."""
        nbytes = len(_distinct_of(np.concatenate(self._pages))) << _PAGE_BITS if self._pages else 0
        self._keep_mortal()
        objects = self._leaves + sum(len(unit.items) for unit in self._units if _is_shared(unit))
        if nbytes < LEAST_BYTES or not objects:
            why = f"the dataset has too few objects to gain from it ({objects:,} in {nbytes >> 10:,} KiB)"
            if not self.is_complete:
                why = f"the search for objects ended at its limit of {self.seconds:.2f} s, a small part of an epoch"
            self.abandon()
            return SharedObjects(why_not=why)
        for unit in self._units:
            if _is_shared(unit):
                _make_immortal(unit.places())
        self._units = [unit for unit in self._units if not _is_shared(unit)]
        self.abandon()
        return SharedObjects(objects, nbytes)

    # -- finding -----------------------------------------------------------------------------------------------------

    def _take(self, unit: _Unit, references: list[Any]) -> None:
        """Take in the objects to which those of ``unit`` refer."""
        addresses = _addresses(references)
        counts = self._words[_places(addresses)]
        was_found = (counts & (_FOUND | _IS_IMMORTAL)) == _FOUND
        if was_found.any():
            unit.crossings.append(_distinct_of(_places(addresses[was_found])))
        fresh = np.flatnonzero(counts < _FOUND)
        kinds = self._longs[((addresses[fresh] - _FIRST) >> 3) + 1]
        is_other = np.ones(len(fresh), bool)
        is_leaf = np.zeros(len(fresh), bool)
        for kind in _LEAVES:
            is_leaf |= kinds == id(kind)
        is_other ^= is_leaf
        self._share_leaves(addresses[fresh[is_leaf]])
        for container in _CONTAINERS:
            if (is_kind := kinds == id(container)).any():
                is_other ^= is_kind
                self._add(unit, _distinct(references, addresses, fresh[is_kind]), is_shareable=True)
        for address in _distinct_of(kinds[is_other]):
            self._take_others(unit, _distinct(references, addresses, fresh[kinds == address]))

    def _share_leaves(self, addresses: npt.NDArray[np.int64]) -> None:
        """Make these immortal at once: they refer to nothing."""
        addresses = _distinct_of(addresses)
        _make_immortal(_places(addresses))
        self._leaves += len(addresses)
        self._pages.append(_distinct_of(addresses >> _PAGE_BITS))

    def _take_others(self, unit: _Unit, objects: list[Any]) -> None:
        """Take in objects of one type that is not plain."""
        kind = type(objects[0])
        role = self._roles.get(id(kind)) or self._roles.setdefault(id(kind), role_of(kind))
        if role == IGNORED:
            return
        is_weakly_referenced = _is_weakly_referenced(kind, objects)
        unit.has_observed |= role == OBSERVED or is_weakly_referenced
        if kind is np.ndarray:
            objects = [one for one in objects if one.dtype.hasobject]
        elif not _flags_of(kind) & _HAS_REFERENCES:
            if role == SHARED:
                self._share_leaves(_addresses(objects))
            return
        self._add(unit, objects, is_shareable=role == SHARED)

    def _add(self, parent: _Unit, objects: list[Any], *, is_shareable: bool) -> None:
        """Have objects of one type followed, in units of about `_BATCH` references."""
        if not objects:
            return
        kind = type(objects[0])
        if any(kind is one for one in _SETS) and _is_weakly_referenced(kind, objects):
            parent.has_observed, is_shareable = True, False
        addresses = _addresses(objects)
        self._words[_places(addresses)] |= _FOUND
        self._pages.append(_distinct_of(addresses >> _PAGE_BITS))
        if any(issubclass(kind, base) for base in _CONTAINERS):
            sizes = self._longs[((addresses - _FIRST) >> 3) + 2]
        else:
            sizes = np.array([one.size if kind is np.ndarray else _FEW for one in objects])
        units = []
        for place in np.flatnonzero(sizes > _BATCH).tolist():
            unit = _Unit(parent, [objects[place]], is_shareable)
            units.append((unit, _slices(objects[place])))
        small = np.flatnonzero(sizes <= _BATCH)
        group = np.cumsum(sizes[small] + 1) // _BATCH
        for part in np.split(small, np.flatnonzero(np.diff(group)) + 1) if len(small) else ():
            unit = _Unit(parent, [objects[place] for place in part.tolist()], is_shareable)
            units.append((unit, _references(unit.items)))
        self._units += [unit for unit, _ in units]
        self._pending += units

    # -- what stays mortal -------------------------------------------------------------------------------------------

    def _keep_mortal(self) -> None:
        """Release the units that lead to an observed object or are not followed to the end, and all that lead there."""
        for unit in self._units:
            if unit.has_observed or not unit.is_followed:
                self._release(unit)
        has_changed = any(unit.is_mortal for unit in self._units)
        while has_changed:
            has_changed = False
            for unit in self._units:
                if not unit.is_mortal and any(not (self._words[p] & _FOUND).all() for p in unit.crossings):
                    self._release(unit)
                    has_changed = True

    def _release(self, unit: _Unit | None) -> None:
        while unit is not None and not unit.is_mortal:
            unit.is_mortal = True
            self._words[unit.places()] &= ~_FOUND
            unit = unit.parent


def _system_s() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_stime


def _is_shared(unit: _Unit) -> bool:
    return unit.is_shareable and not unit.is_mortal


def _is_weakly_referenced(kind: type, objects: list[Any]) -> bool:
    return bool(_weak_offset_of(kind)) and any(map(weakref.getweakrefcount, objects))


def _distinct_of(numbers: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Return the numbers in ascending order, each once. (``np.unique`` imports modules for 10 ms.)"""
    ordered = np.sort(numbers)
    return ordered[_is_first(ordered)]


def _is_first(ordered: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
    is_first = np.ones(len(ordered), bool)
    np.not_equal(ordered[1:], ordered[:-1], out=is_first[1:])
    return is_first


def _distinct(objects: list[Any], addresses: npt.NDArray[np.int64], places: npt.NDArray[np.int64]) -> list[Any]:
    """Return the objects at these places of the list, each once, in the order of their addresses."""
    order = np.argsort(addresses[places])
    ordered = places[order]
    return list(map(objects.__getitem__, ordered[_is_first(addresses[ordered])].tolist()))


def _references(objects: list[Any]) -> Iterator[list[Any]]:
    if type(objects[0]) is np.ndarray:
        yield list(itertools.chain.from_iterable(one.reshape(-1).tolist() for one in objects))
    else:
        yield gc.get_referents(*objects)
        if type(objects[0]) is dict:
            values = _memory()[1][((_addresses(objects) + _VALUES_OFFSET - _FIRST) >> 3)]
            of_instances = map(objects.__getitem__, np.flatnonzero(values).tolist())
            yield list(itertools.chain.from_iterable(map(dict.values, of_instances)))


def _slices(one: Any) -> Iterator[list[Any]]:
    """Yield what a large container refers to, in slices. No method of a subclass is called."""
    kind = type(one)
    each: Iterator[Any]
    if kind is np.ndarray:
        each = iter(one.flat)
    elif issubclass(kind, dict):
        each = itertools.chain(dict.keys(one), dict.values(one))
    else:
        each = next(base for base in _CONTAINERS if issubclass(kind, base)).__iter__(one)
    while batch := list(itertools.islice(each, _BATCH)):
        yield batch
    if kind is not np.ndarray and not any(kind is plain for plain in _CONTAINERS):
        yield [attributes] if (attributes := _attributes_of(one)) is not None else []


def _attributes_of(one: Any) -> Any:
    """Return the attributes of an instance, past its class."""
    with contextlib.suppress(AttributeError):
        return object.__getattribute__(one, "__dict__")
    return None
