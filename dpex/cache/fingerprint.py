"""The key of a cache: a hash of all that the cached samples depend on, as far as that can be seen."""

from __future__ import annotations

import hashlib
import inspect
import sys
import sysconfig
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from dpex.cache.encoding import SamplePickler
from dpex.errors import CacheError

FORMAT = 2
"""Version of encoded samples and their stores. Another number makes other caches."""


def fingerprint(dataset: Any, samples: int, version: object, paths: Iterable[Path | str]) -> str:
    """Return the key of a dataset's cache, 32 hexadecimal digits.

    It depends on the pickled state of the dataset, on the source of the classes and functions in it, on the number of
    samples, on ``version``, and on size and time of change of the files in ``paths`` and below.

    Raises:
        CacheError: The dataset cannot be pickled and ``version`` is empty, or a path does not exist.
    """
    found = hashlib.blake2b(digest_size=16)
    found.update(repr((FORMAT, samples, str(version))).encode())
    state = found.copy()
    try:
        _StateHasher(state).dump(dataset)
        found = state
    except Exception as error:
        if not version:
            raise CacheError(
                f"the {type(dataset).__qualname__} cannot be pickled ({error}), so changes of it are not seen; give "
                "cache_version=, and another value whenever the samples change"
            ) from error
        found.update(_source(type(dataset)))
    for line in _files(paths):
        found.update(line)
    return found.hexdigest()


_LIBRARIES = ("site-packages", "dist-packages", sysconfig.get_path("stdlib"))


class _StateHasher(SamplePickler):
    """Hashes the pickle of an object, and the sources of all classes and functions that it meets."""

    def __init__(self, found: Any) -> None:
        super().__init__(SimpleNamespace(write=found.update), 5)
        self._found = found
        self._seen: set[Any] = set()

    def reducer_override(self, obj: Any) -> Any:
        """See `pickle.Pickler`."""
        is_named = inspect.isclass(obj) or inspect.isfunction(obj)
        for kind in (obj,) if is_named else type(obj).__mro__:
            if kind not in self._seen:
                self._seen.add(kind)
                self._found.update(_name(kind).encode() + _source(kind))
        if is_named and obj.__module__ != "builtins":  # whether or not it can be imported by its name
            bound = [cell.cell_contents for cell in getattr(obj, "__closure__", None) or ()]
            return tuple, ((_name(obj), getattr(obj, "__defaults__", None), bound),)
        return super().reducer_override(obj)


def _name(kind: Any) -> str:
    return f"{getattr(kind, '__module__', '')}.{getattr(kind, '__qualname__', kind)}"


def _source(kind: Any) -> bytes:
    """Return the source of a class or function of the user's; nothing of libraries and of compiled code."""
    file = getattr(sys.modules.get(kind.__module__), "__file__", None) or ""
    if any(place in file for place in _LIBRARIES):
        return b""
    try:
        return inspect.getsource(kind).encode()
    except (OSError, TypeError):
        return b""


def _files(paths: Iterable[Path | str]) -> Iterator[bytes]:
    for path in map(Path, paths):
        if not path.exists():
            raise CacheError(f"paths= names {path}, which does not exist")
        for file in sorted(path.rglob("*")) if path.is_dir() else [path]:
            if not file.is_dir():
                found = file.stat()
                yield f"{file} {found.st_size} {found.st_mtime_ns}\n".encode()
