"""Hash a dataset with its attributes and code, as far as a program can find what the samples depend on.

The user joins trainings in a cache by name and version. A different hash only keeps a training from reading the cache.
Globals, installed packages, and files other than those in ``paths`` are not in a hash.
"""

from __future__ import annotations

import hashlib
import inspect
import re
import sys
import sysconfig
from collections.abc import Iterable, Iterator, Mapping
from mmap import ALLOCATIONGRANULARITY, mmap
from pathlib import Path
from types import CellType, CodeType, SimpleNamespace
from typing import Any

import numpy as np

from dpex.cache.encoding import SamplePickler
from dpex.errors import CacheError
from dpex.worker.own_generators import GENERATORS

_LEVELS = 3
"""Maximum depth of nested objects that cannot be pickled and are hashed attribute by attribute."""
_LIBRARIES = ("site-packages", "dist-packages", sysconfig.get_path("stdlib"))


def fingerprint(dataset: Any, samples: int, paths: Iterable[Path | str] | Path | str) -> str:
    """Return the hash of a dataset, of its number of samples, and of the files in ``paths`` and below.

    Raises:
        CacheError: A path does not exist.
    """
    found = _new_hash()
    found.update(f"{samples} {digest(dataset)}".encode())
    for line in _files([paths] if isinstance(paths, (str, Path)) else paths):
        found.update(line)
    return str(found.hexdigest())


def digest(value: Any, levels: int = _LEVELS) -> str:
    """Return the hash of a value and of the compiled code of the classes and functions in it: 32 hexadecimal digits.

    The hash is the same in all processes. A value that cannot be pickled is hashed by its class, its ``repr`` without
    addresses, and its attributes down to ``levels``.
    """
    found = _new_hash()
    try:
        hasher = _Hasher(found)
        hasher.dump(value)
        for more in hasher.bound:  # the list grows meanwhile
            hasher.dump(more)
        return str(found.hexdigest())
    except Exception:
        found = _new_hash()
    found.update(digest(type(value), 0).encode() if levels else _name(type(value)).encode())
    attributes = getattr(value, "__dict__", None)
    parts = [re.sub("0x[0-9a-f]+", "", _text(value))]  # without addresses
    if levels and isinstance(attributes, Mapping):
        parts += sorted(f"{name}={digest(each, levels - 1)}" for name, each in attributes.items())
    found.update(repr(parts).encode())
    return str(found.hexdigest())


def _new_hash() -> Any:
    return hashlib.blake2b(digest_size=16)


def _text(value: Any) -> str:
    try:
        return repr(value)
    except Exception:
        return ""


class _Hasher(SamplePickler):
    """Hashes the pickle of an object, and the compiled code of all classes and functions that it meets.

    Attributes:
        bound: Code, defaults and outer variables of these functions and methods, still to be hashed.
    """

    def __init__(self, found: Any) -> None:
        super().__init__(SimpleNamespace(write=found.update))
        self._found = found
        self._seen: set[Any] = set()
        self.bound: list[Any] = []

    def persistent_id(self, obj: Any) -> Any:
        """See `pickle.Pickler`. Sets are sorted, because their order depends on string hashes, which differ by run."""
        if type(obj) in (set, frozenset):
            return type(obj).__name__, sorted(obj, key=_in_order)
        if isinstance(obj, np.memmap) and _is_whole(obj):
            return _name(type(obj)), obj.filename, obj.offset, obj.shape, obj.dtype
        return _name(type(obj)) if isinstance(obj, GENERATORS) else None  # draws from it are detected separately

    def reducer_override(self, obj: Any) -> Any:
        is_named = inspect.isclass(obj) or inspect.isfunction(obj)
        for kind in (obj,) if inspect.isfunction(obj) else (obj if is_named else type(obj)).__mro__:
            if kind not in self._seen:
                self._seen.add(kind)
                self._found.update(_name(kind).encode())
                self.bound.append(_bound(kind))
        if is_named and obj.__module__ != "builtins":  # even if it cannot be imported by its name
            return tuple, ((_name(obj),),)
        if inspect.ismodule(obj):
            return tuple, ((obj.__name__,),)
        return super().reducer_override(obj)


def _is_whole(array: Any) -> bool:
    """Return True if the array covers its whole map. A slice has the file name and offset of the whole array, too."""
    return isinstance(array.base, mmap) and len(array.base) == array.nbytes + array.offset % ALLOCATIONGRANULARITY


def _in_order(item: Any) -> str:
    return f"{sorted(map(_in_order, item))}" if isinstance(item, (tuple, frozenset)) else repr(item)


def _name(kind: Any) -> str:
    return f"{getattr(kind, '__module__', '')}.{getattr(kind, '__qualname__', kind)}"


def _bound(kind: Any) -> list[Any]:
    """Return the code of a function, or of the methods of a class of the user's, with defaults and outer variables."""
    if inspect.isfunction(kind):
        cells = [cell.cell_contents for cell in kind.__closure__ or () if cell != CellType()]
        return [_code(kind.__code__), kind.__defaults__, kind.__kwdefaults__, cells]
    if not inspect.isclass(kind) or _is_of_library(kind):
        return []
    values = {name: _function_in(value) for name, value in vars(kind).items()}
    methods = [_bound(value) for value in values.values() if inspect.isfunction(value)]
    return [methods, [(name, one) for name, one in values.items() if type(one) in _PLAIN and not name.startswith("__")]]


_PLAIN = (bool, int, float, complex, str, bytes, tuple, list, dict, set, frozenset, np.ndarray)
"""Types of class attributes that are hashed."""


def _is_of_library(kind: Any) -> bool:
    file = getattr(sys.modules.get(kind.__module__), "__file__", None) or ""
    return kind.__module__ == "builtins" or any(place in file for place in _LIBRARIES)


def _function_in(value: Any) -> Any:
    """Return the function of a method or property, or else the value."""
    return next((getattr(value, name) for name in ("__func__", "fget", "func") if hasattr(value, name)), value)


def _code(code: CodeType) -> list[Any]:
    """Return the behaviour of a compiled function: its instructions, names and constants. File names, line numbers and
    the order of constant sets are left out."""
    constants = [
        _code(one) if isinstance(one, CodeType) else sorted(map(repr, one)) if isinstance(one, frozenset) else repr(one)
        for one in code.co_consts
    ]
    return [code.co_code, code.co_names, code.co_varnames, code.co_freevars, constants]


def _files(paths: Iterable[Path | str]) -> Iterator[bytes]:
    for path in map(Path, paths):
        if not path.exists():
            raise CacheError(
                f"paths= names {path}, which does not exist; name the files that the samples are made from"
            )
        for file in sorted(path.rglob("*")) if path.is_dir() else [path]:
            if not file.is_dir():
                found = file.stat() if file.exists() else file.lstat()  # a link to nowhere
                yield f"{file} {found.st_size} {found.st_mtime_ns}\n".encode()
