"""Encoded samples in a file on disk, kept by LMDB: a folder for each cache, shared by processes and by later runs.

LMDB publishes a sample with one write of a page, so a process that is killed while it writes leaves the file as it was.
A checksum before each sample finds what the disk damaged. Nothing is flushed to the disk at once: when the machine
itself fails, the samples of the last half minute may be damaged, and are made again.
"""

from __future__ import annotations

import contextlib
import json
import logging
import mmap
import os
import struct
import zlib
from pathlib import Path
from typing import Any
from weakref import WeakValueDictionary

import numpy as np

from dpex.cache.encoding import Encoded
from dpex.cache.memory_store import COUNTS, ClaimLock, Counts, Stored, own_folder
from dpex.errors import CacheError, OptionError

logger: logging.Logger = logging.getLogger("dpex")

_HEAD = struct.Struct("<II")
"""Before each sample: its checksum, and the microseconds that it took to prepare."""
_BLOCK = 4096
"""Bytes that are added up for the checksum."""
_LEFT_FREE_RATIO, _MOST_LEFT_FREE = 1 / 50, 64 << 20
"""The part of the file system that is left free, and its maximum in bytes."""
_MUCH_LARGER = 2
"""Factor over other samples from which a sample that does not fit is skipped. Otherwise the store is full."""
_LEAST_MAP = 1 << 20
_DATA = "data.mdb"
_READERS = 1024
"""Processes that may read at the same time."""
_stores: WeakValueDictionary[Path, DiskStore] = WeakValueDictionary()


class DiskStore(Counts):
    """The samples of one cache on disk. One object serves one process, and the processes that are forked from it."""

    def __init__(self, folder: Path, budget: int, name: str, samples: int) -> None:
        """Open the folder of a cache, or make it. Use `opened`: LMDB opens a file once in a process.

        Raises OptionError if lmdb is not installed, and CacheError if the folder or the one around it belongs to
        another user, or it cannot be made or read.
        """
        try:
            import lmdb
        except ImportError as error:
            raise OptionError(
                f"disk={str(folder.parent)!r} needs the package lmdb: pip install 'dpex[cache]'"
            ) from error
        self._lmdb = lmdb
        self._folder, self._budget, self._samples = folder, budget, samples
        with contextlib.suppress(FileNotFoundError):
            owner = folder.parent.stat().st_uid
            if owner not in (os.getuid(), 0):
                raise CacheError(
                    f"{folder.parent} belongs to user {owner}, who could change what the cache has; give a folder of "
                    "yours"
                )
        own_folder(folder)
        self._is_read_only = not os.access(folder, os.W_OK)
        if not self._is_read_only:
            with contextlib.suppress(OSError):  # of a full disk, on which the file that is there must stay
                (folder / "about.json").write_text(json.dumps({"name": name, "samples": samples}))
        self.why_full = "it is read-only" if self._is_read_only else ""
        self._claims: Any = contextlib.nullcontext() if self._is_read_only else ClaimLock(folder / "lock")
        self._header = np.frombuffer(
            mmap.mmap(-1, mmap.PAGESIZE), COUNTS, 1
        )  # of this process and those forked from it
        self._pid, self._env = os.getpid(), self._opened()

    def _opened(self) -> Any:
        try:
            return self._open()
        except (self._lmdb.Error, OSError) as error:
            raise CacheError(f"the cache in {self._folder} cannot be opened: {error}; give another disk=") from error

    def _open(self) -> Any:
        options: dict[str, Any] = {
            "map_size": max(self._budget, _LEAST_MAP),
            "max_readers": _READERS,
            "sync": False,
            "metasync": False,
        }
        folder = str(self._folder)
        if self._is_read_only:
            return self._whole(self._lmdb.open(folder, readonly=True, lock=False, **options))
        with contextlib.suppress(self._lmdb.InvalidError, self._lmdb.CorruptedError, self._lmdb.VersionMismatchError):
            if (env := self._whole(self._lmdb.open(folder, **options))) is not None:
                env.reader_check()  # processes that were killed have left their marks
                return env
        logger.warning("the cache in %s is damaged or was cut off: it begins anew", folder)
        for name in (_DATA, "lock.mdb"):
            (self._folder / name).unlink(missing_ok=True)
        return self._lmdb.open(folder, **options)

    def _whole(self, env: Any) -> Any:
        """Return ``env`` unless its file was cut off: reading a page that is missing would be a bus error."""
        pages = env.info()["last_pgno"] + 1
        if (self._folder / _DATA).stat().st_size >= pages * env.stat()["psize"]:
            return env
        env.close()
        return None

    def _current(self) -> Any:
        """Return the environment of this process: after a fork it is to be closed and opened again."""
        if self._pid != os.getpid():
            if self._env is not None:
                self._env.close()
            self._pid, self._env = os.getpid(), None
            try:
                self._env = self._opened()
            except CacheError as error:
                self.why_full = str(error)
                logger.warning("process %s goes on without it: %s", self._pid, error)
        return self._env

    def get(self, index: int) -> tuple[Any, int] | None:
        """Return the encoded sample and the microseconds that it took to prepare; None if it is missing or damaged."""
        env = self._current()
        if env is None:
            return None
        try:
            with self._reading(env) as transaction:
                found = transaction.get(_key(index))
                if found is None or len(found) < _HEAD.size:
                    return None
                checksum, cost_us = _HEAD.unpack_from(found)
                memory = bytearray(found[_HEAD.size :])
        except self._lmdb.Error:
            return None
        return (memory, cost_us) if _checksum(memory) == checksum else None

    def _reading(self, env: Any) -> Any:
        try:
            return env.begin(buffers=True)
        except self._lmdb.MapResizedError:  # another training has a larger budget
            env.set_mapsize(0)
            return env.begin(buffers=True)

    def put(self, index: int, sample: Encoded, cost_us: int) -> bool:
        """Keep a sample, in place of a damaged one too. Return False if it does not fit or the folder is read-only."""
        env = self._current()
        if self.why_full:
            return False
        body = b"".join(sample.parts)
        record = _HEAD.pack(_checksum(body), cost_us) + body
        why = f"its budget of {self._budget:,} bytes is used"
        try:
            if _has_room(self._folder, len(record)):
                with env.begin(write=True) as transaction:
                    transaction.put(_key(index), record)
                self._note_kept(len(record))
                return True
            why = "its file system is full"
        except (self._lmdb.MapFullError, self._lmdb.MapResizedError):  # by this process, or by one with a larger budget
            pass
        except (self._lmdb.Error, OSError) as error:  # the folder was removed, for example
            self.why_full = f"it cannot be written ({error})"
            return False
        if len(record) <= _MUCH_LARGER * self._usual_bytes():
            self.why_full = why
        return False

    def _usual_bytes(self) -> int:
        """Return the bytes of the smallest sample that was kept, or of the mean one of earlier runs."""
        kept = self.stored().kept
        return int(self._header["least"][0]) or (self._env.info()["last_pgno"] * _BLOCK // kept if kept else 0)

    def stored(self) -> Stored:
        env, file = self._current(), self._folder / _DATA
        kept = 0 if env is None else int(env.stat()["entries"])
        nbytes = file.stat().st_blocks * 512 if file.exists() else 0
        return Stored(self._samples, kept, nbytes, self._budget)


def opened(folder: Path, budget: int | None, name: str, samples: int) -> DiskStore:
    """Return the store in that folder; it is made, or shared with others of this process. Raises as `DiskStore`.

    A budget of None is half of what is free.
    """
    folder = folder.parent.resolve() / folder.name  # LMDB refuses to open a file by two names
    found = _stores.get(folder)
    if found is None:
        budget = _free_bytes(folder) // 2 if budget is None else budget
        found = _stores[folder] = DiskStore(folder, budget, name, samples)
    return found


def _free_bytes(folder: Path) -> int:
    """Return the bytes that are free in that folder, which may not exist yet."""
    while not folder.exists():
        folder = folder.parent
    found = os.statvfs(folder)
    return found.f_bavail * found.f_frsize


def _has_room(folder: Path, nbytes: int) -> bool:
    found = os.statvfs(folder)
    left = min(_MOST_LEFT_FREE, int(_LEFT_FREE_RATIO * found.f_blocks * found.f_frsize))
    return found.f_bavail * found.f_frsize >= nbytes + left


def _checksum(memory: bytes | bytearray) -> int:
    """Return the CRC-32 of the sums of the 64-bit words of each block, and of the bytes after the last word.

    It takes a tenth of the time of the CRC-32 of all bytes, which is longer than reading them.
    """
    words = np.frombuffer(memory, "<u8", len(memory) // _BLOCK * (_BLOCK // 8))
    sums = words.reshape(-1, _BLOCK // 8).sum(axis=1)
    return zlib.crc32(memoryview(memory)[words.nbytes :], zlib.crc32(sums))


def _key(index: int) -> bytes:
    return index.to_bytes(8, "big")
