"""`compact` keeps the items of a dataset in one shared buffer, because each worker would copy Python objects.

The buffer is anonymous shared memory, which forked and spawned processes map. It contains the pickled items and their
offsets. For a mapping, the pickled keys and their offsets follow, and then the sorted hashes of the keys. `_hash`
computes these hashes, because Python's own hash of a string differs between processes.
"""

from __future__ import annotations

import mmap
import os
import pickle
import struct
import zlib
from collections.abc import Iterator, Mapping, Sequence
from multiprocessing import context, reduction
from operator import index
from typing import Any, TypeVar, overload

import numpy as np

from dpex.errors import OptionError

_T = TypeVar("_T")
_K = TypeVar("_K")
_WORD = 8
"""Bytes of an offset and of a hash."""
_PAIR = struct.Struct("=QQ")
"""The start and the end of a pickle, in bytes."""
_WITH_HASHES = 4
"""A buffer contains hashes if it has more ``starts`` than this."""
_HASH_BITS = (1 << 64) - 1
_KEYS = "str, bytes, numbers, None, and tuples of these"


@overload
def compact(items: Mapping[_K, _T]) -> Mapping[_K, _T]: ...
@overload
def compact(items: Sequence[_T]) -> Sequence[_T]: ...
def compact(items: Any) -> Any:
    """Return a read-only copy of a list, tuple or dict, in memory that all workers share.

    All items are pickled into one buffer of shared memory. Reading an item unpickles it, so the result is a new object,
    equal to the given one. Workers of dpex and of PyTorch's loader map the buffer, whether they are forked or spawned.
    Other pickles, such as pickles for another machine, contain the buffer. On Python 3.12 and later, `DpexDataLoader`
    shares plain objects without `compact`.

    Costs, on one core: 1 µs per item to make, 5 µs to read a dict of five entries, 2 µs to read a string, 5 µs to find
    a key. Memory is the size of the pickles and 8 bytes per item: 146 bytes for a dict of five entries instead of 570,
    48 for a path instead of 82.

    Args:
        items: A list, a tuple or a dict. For a list or tuple, the result is a `collections.abc.Sequence`, whose slices
            are lists. For a dict, it is a `collections.abc.Mapping` in the same order. Keys are str, bytes, numbers,
            None, and tuples of these, because other keys have no hash that is the same in all processes.

    Raises:
        OptionError: ``items`` or a key has an unsupported type, or an item cannot be pickled. It is a ValueError.

    Examples:
        >>> from dpex import compact
        >>> rows = compact([{"path": "a.jpg", "label": 3}, {"path": "b.jpg", "label": 5}])
        >>> rows[1]["label"], len(rows), rows[-2:][0]["path"]
        (5, 2, 'a.jpg')
        >>> compact({"a.jpg": 3})["a.jpg"]
        3
    """
    if isinstance(items, dict):
        return CompactMapping(
            _Buffer.of_parts([_pickles(items.values(), "value"), _pickles(items, "key"), _hashes(items)])
        )
    if isinstance(items, (list, tuple)):
        return CompactSequence(_Buffer.of_parts([_pickles(items, "item")]))
    raise OptionError(f"compact({type(items).__name__}): give a list, a tuple or a dict")


class CompactSequence(Sequence[Any]):
    """The result of `compact` for a list or tuple."""

    def __init__(self, buffer: _Buffer) -> None:
        self._buffer = buffer

    def __len__(self) -> int:
        return self._buffer.count

    def __getitem__(self, place: Any) -> Any:
        if isinstance(place, slice):
            return [self._buffer.item(0, each) for each in range(*place.indices(len(self)))]
        number = index(place)
        if not -len(self) <= number < len(self):
            raise IndexError(f"index {number} is out of range: there are {len(self)} items")
        return self._buffer.item(0, number % len(self))

    def __iter__(self) -> Iterator[Any]:
        return map(self._buffer.item, (0,) * len(self), range(len(self)))

    def __repr__(self) -> str:
        return f"<compact sequence of {len(self):,} items, {self._buffer.nbytes:,} bytes>"


class CompactMapping(Mapping[Any, Any]):
    """The result of `compact` for a dict."""

    def __init__(self, buffer: _Buffer) -> None:
        self._buffer = buffer

    def __len__(self) -> int:
        return self._buffer.count

    def __getitem__(self, key: Any) -> Any:
        wanted = _hash(key)
        if wanted is not None:
            for number in self._buffer.with_hash(wanted):
                if self._buffer.item(1, number) == key:
                    return self._buffer.item(0, number)
        raise KeyError(key)

    def __iter__(self) -> Iterator[Any]:
        return map(self._buffer.item, (1,) * len(self), range(len(self)))

    def __repr__(self) -> str:
        return f"<compact mapping of {len(self):,} items, {self._buffer.nbytes:,} bytes>"


class _Buffer:
    """Pickles in an in-memory file, which this object closes.

    ``starts``: Byte offsets: two for each list (its pickles, their offsets), then two for item numbers and hashes.
    """

    def __init__(self, fd: int, nbytes: int, count: int, starts: tuple[int, ...]) -> None:
        self.nbytes: int = nbytes
        self.count: int = count
        self._fd, self._starts = fd, starts
        self._map = mmap.mmap(fd, nbytes, prot=mmap.PROT_READ)
        self._bytes = memoryview(self._map)
        if len(starts) > _WITH_HASHES:
            self._order, self._hashes = (np.frombuffer(self._map, np.uint64, count, start) for start in starts[-2:])

    @classmethod
    def of_parts(cls, parts: list[Any]) -> _Buffer:
        """Write ``parts`` to a new buffer. Each part is a list of pickles or an array of hashes."""
        fd = os.memfd_create("dpex-compact")
        starts: list[int] = []
        count = len(parts[0])
        with os.fdopen(os.dup(fd), "wb") as file:
            for part in parts:
                is_hashes = isinstance(part, np.ndarray)
                starts.append(file.tell())
                if is_hashes:
                    order = np.argsort(part, kind="stable").astype(np.uint64)
                    words = np.append(part[order.astype(np.int64)], np.uint64(0))
                    file.write(np.append(order, np.uint64(0)).tobytes())
                else:
                    file.writelines(part)
                    file.write(b"\0" * (-file.tell() % _WORD))
                    words = np.cumsum([0, *map(len, part)], dtype=np.uint64)
                starts.append(file.tell())
                file.write(words.tobytes())
            nbytes = file.tell()
        return cls(fd, nbytes, count, tuple(starts))

    def item(self, part: int, number: int) -> Any:
        start, offsets = self._starts[2 * part : 2 * part + 2]
        begin, end = _PAIR.unpack_from(self._map, offsets + _WORD * number)
        return pickle.loads(self._bytes[start + begin : start + end])

    def with_hash(self, wanted: int) -> list[int]:
        first = int(self._hashes.searchsorted(np.uint64(wanted)))
        last = first
        while last < self.count and self._hashes[last] == wanted:
            last += 1
        return self._order[first:last].tolist()  # type: ignore[no-any-return]

    def __reduce__(self) -> tuple[Any, ...]:
        facts = (self.nbytes, self.count, self._starts)
        if context.get_spawning_popen() is not None:
            return _mapped, (reduction.DupFd(self._fd), *facts)
        return _copied, (bytes(self._bytes), *facts)

    def __del__(self, close: Any = os.close) -> None:  # at the exit of the interpreter `os` may be gone
        close(self._fd)


def _mapped(sent: Any, *facts: Any) -> _Buffer:
    return _Buffer(sent.detach(), *facts)


def _copied(data: bytes, *facts: Any) -> _Buffer:
    fd = os.memfd_create("dpex-compact")
    with os.fdopen(os.dup(fd), "wb") as file:
        file.write(data)
    return _Buffer(fd, *facts)


def _pickles(items: Any, what: str) -> list[bytes]:
    found = []
    for number, item in enumerate(items):
        try:
            found.append(pickle.dumps(item, 5))
        except Exception as error:
            raise OptionError(
                f"compact: {what} {number} is a {type(item).__name__} that cannot be pickled ({error}). Give data, "
                "such as a path, and open it where it is read"
            ) from error
    return found


def _hashes(keys: Any) -> Any:
    found = np.empty(len(keys), np.uint64)
    for number, key in enumerate(keys):
        one = _hash(key)
        if one is None:
            raise OptionError(f"compact: the key {key!r} is a {type(key).__name__}; keys may be {_KEYS}")
        found[number] = one
    return found


def _hash(key: Any) -> int | None:
    """Return a hash of a key, or None for an unsupported type. Equal keys have the same hash in all processes."""
    if isinstance(key, (str, bytes)):
        data = key.encode("utf-8", "surrogatepass") if isinstance(key, str) else key
        return zlib.crc32(data) << 32 | zlib.adler32(data)
    if isinstance(key, (int, float, complex, np.generic)):
        return hash(key) & _HASH_BITS
    if key is None:
        return 1
    if isinstance(key, tuple):
        parts = [_hash(each) for each in key]
        return None if None in parts else hash(tuple(parts)) & _HASH_BITS
    return None
