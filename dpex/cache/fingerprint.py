"""The key of a cache: a hash of all that the cached samples depend on, as far as that can be seen."""

from __future__ import annotations

import hashlib
import inspect
import sys
import sysconfig
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import CellType, CodeType, SimpleNamespace
from typing import Any

from dpex.cache.encoding import SamplePickler
from dpex.errors import CacheError

FORMAT = 2
"""Version of encoded samples and their stores. Another number makes other caches."""


def fingerprint(dataset: Any, samples: int, version: object, paths: Iterable[Path | str] | Path | str) -> str:
    """Return the key of a dataset's cache, 32 hexadecimal digits.

    It depends on the pickled state of the dataset, and on the source of the classes and functions in it, with their
    defaults and outer variables. It also depends on the number of samples, on ``version``, and on size and time of
    change of the files in ``paths`` and below.

    Raises:
        CacheError: The dataset cannot be pickled and ``version`` is empty, or a path does not exist.
    """
    found = hashlib.blake2b(digest_size=16)
    found.update(repr((FORMAT, samples, str(version))).encode())
    state = found.copy()
    try:
        hasher = _StateHasher(state)
        hasher.dump(dataset)
        for more in hasher.bound:  # which grows meanwhile
            hasher.dump(more)
        found = state
    except Exception as error:
        if not version:
            raise CacheError(
                f"the {type(dataset).__qualname__} cannot be pickled ({error}), so changes of it are not seen; give "
                "cache_version=, and another value whenever the samples change"
            ) from error
        found.update(_source(type(dataset)))
    for line in _files([paths] if isinstance(paths, (str, Path)) else paths):
        found.update(line)
    return found.hexdigest()


_LIBRARIES = ("site-packages", "dist-packages", sysconfig.get_path("stdlib"))


class _StateHasher(SamplePickler):
    """Hashes the pickle of an object, and the sources of all classes and functions that it meets.

    Attributes:
        bound: Code, defaults and outer variables of these functions and methods, still to be hashed. Several functions
            may have the same source: lambdas in one line, or those that a function makes.
    """

    def __init__(self, found: Any) -> None:
        super().__init__(SimpleNamespace(write=found.update), 5)
        self._found = found
        self._seen: set[Any] = set()
        self.bound: list[Any] = []

    def persistent_id(self, obj: Any) -> Any:
        """See `pickle.Pickler`. The order of a set is another one in each run, as the hashes of texts are."""
        if type(obj) in (set, frozenset):
            return type(obj).__name__, sorted(obj, key=_in_order)
        return None

    def reducer_override(self, obj: Any) -> Any:
        """See `pickle.Pickler`."""
        is_named = inspect.isclass(obj) or inspect.isfunction(obj)
        for kind in (obj,) if is_named else type(obj).__mro__:
            if kind not in self._seen:
                self._seen.add(kind)
                source = _source(kind)
                self._found.update(_name(kind).encode() + source)
                self.bound.append(_bound(kind, has_source=bool(source)))
        if is_named and obj.__module__ != "builtins":  # whether or not it can be imported by its name
            return tuple, ((_name(obj),),)
        if inspect.ismodule(obj):
            return tuple, ((obj.__name__,),)
        return super().reducer_override(obj)


def _in_order(item: Any) -> str:
    return f"{sorted(map(_in_order, item))}" if isinstance(item, (tuple, frozenset)) else repr(item)


def _name(kind: Any) -> str:
    return f"{getattr(kind, '__module__', '')}.{getattr(kind, '__qualname__', kind)}"


def _source(kind: Any) -> bytes:
    """Return the source of a class or function of the user's; nothing of libraries and of compiled code."""
    try:
        return b"" if _is_of_library(kind) else inspect.getsource(kind).encode()
    except (OSError, TypeError):
        return b""


def _is_of_library(kind: Any) -> bool:
    file = getattr(sys.modules.get(kind.__module__), "__file__", None) or ""
    return kind.__module__ == "builtins" or any(place in file for place in _LIBRARIES)


def _bound(kind: Any, *, has_source: bool) -> list[Any]:
    """Return the code of a function, or of the methods of a class of the user's, with defaults and outer variables.

    Classes of a notebook have no source, so their constants count here.
    """
    if inspect.isfunction(kind):
        cells = [cell.cell_contents for cell in kind.__closure__ or () if cell != CellType()]
        return [_code(kind.__code__), kind.__defaults__, kind.__kwdefaults__, cells]
    if not inspect.isclass(kind) or _is_of_library(kind):
        return []
    values = {name: _function_in(value) for name, value in vars(kind).items()}
    methods = [_bound(value, has_source=has_source) for value in values.values() if inspect.isfunction(value)]
    constants = [(name, value) for name, value in values.items() if isinstance(value, (int, float, str, bytes))]
    return [methods, [] if has_source else [one for one in constants if not one[0].startswith("__")]]


def _function_in(value: Any) -> Any:
    """Return the function of a method or property, or else the value."""
    return next((getattr(value, name) for name in ("__func__", "fget", "func") if hasattr(value, name)), value)


def _code(code: CodeType) -> list[Any]:
    """Return what a compiled function does. Places in files do not count, nor does the order of a set of constants."""
    constants = [
        _code(one) if isinstance(one, CodeType) else sorted(map(repr, one)) if isinstance(one, frozenset) else repr(one)
        for one in code.co_consts
    ]
    return [code.co_code, code.co_names, code.co_varnames, code.co_freevars, constants]


def _files(paths: Iterable[Path | str]) -> Iterator[bytes]:
    for path in map(Path, paths):
        if not path.exists():
            raise CacheError(f"paths= names {path}, which does not exist")
        for file in sorted(path.rglob("*")) if path.is_dir() else [path]:
            if not file.is_dir():
                found = file.stat() if file.exists() else file.lstat()  # of a link to nowhere
                yield f"{file} {found.st_size} {found.st_mtime_ns}\n".encode()
