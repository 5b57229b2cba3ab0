"""Encoded samples of one cache in one file: in shared memory, or on a disk, where later runs read them.

The file has a header, an entry for each sample, and the samples. Space is given out in order and not given back, so a
sample in the file never changes. A writer claims space under a lock, writes the sample, and publishes its entry last.
An entry has a checksum, so a reader never sees a part of a sample. A process that is killed while it writes wastes the
space, and another process prepares the sample.

In shared memory the last user removes the file, and a file that killed processes left is removed by the next process
that opens a store. Each epoch has new workers, which take page faults for all that they read. So space is converted to
huge pages before it is claimed, if the kernel can (Linux 6.1): one fault then serves several samples. Writes to one
file wait for each other, and are short if the pages exist already.

On disk the file stays, and a checksum behind each sample finds damage. The file is read by pread(2), not by a map: if
it was cut off or the disk fails, the call returns, but access to a map would be a bus error. Nothing is flushed to the
disk: if the machine itself fails, the samples of the last half minute may be damaged, and are prepared again.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import logging
import os
import struct
import zlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from dpex.cache import files
from dpex.cache.encoding import ALIGNMENT, Encoded
from dpex.cache.files import ClaimLock, HeldFile, aside_folder, is_alone, is_linked, own_folder, remove_unused
from dpex.errors import CacheError
from dpex.transport.memory import HUGE_PAGE, advise, map_memory

logger: logging.Logger = logging.getLogger("dpex")

PAGE = 4096
COPIED_BYTES = 1 << 20
"""Samples in memory below this size are copied out; larger ones are mapped copy-on-write."""
_MADV_POPULATE_READ, _MADV_COLLAPSE = 22, 25
"""Python has no names for these constants of linux/mman.h. Collapse makes huge pages whatever the settings of /dev/shm
are."""
_PREPARED_BYTES = 2 * HUGE_PAGE
"""Bytes that one call of madvise(2) converts to huge pages. In each call the kernel waits for all CPUs."""
_LEAD_BYTES = 64 << 20
"""Maximum bytes from the claimed space to the end of the huge pages. 16 workers write less while a part is prepared."""
_LEFT_FREE_RATIO, _MOST_LEFT_FREE = 1 / 50, 64 << 20
"""The part of a disk's file system that is left free, and its maximum in bytes."""
_MAGIC = 0x6470_6578_6361_636C
"""Identifies the layout of the file. Another layout has another number."""
_WORDS = ("magic", "samples", "capacity", "used", "least", "is_full", "is_random", "left_out", "full",
          "damaged")  # fmt: skip
"""Words of the header. ``least``: Bytes of the smallest sample. The words after ``least`` are flags (0 or 1). They are
reset when a process opens a file that no other process uses."""
_AT = {word: 8 * number for number, word in enumerate(_WORDS)}
_WORD = struct.Struct("<Q")
_ENTRY = struct.Struct("<QQII")
"""A sample's offset in the file, bytes, and microseconds to prepare it; and the checksum of this entry."""
_CRC = struct.Struct("<I")
"""The checksum behind each sample on disk."""
_BLOCK = 4096
"""Bytes of a block, whose 64-bit words are summed for the checksum."""
_TRIES = 1000
"""Maximum tries to open and lock a file. Its last user may remove it before another process has locked it."""


class Stored(NamedTuple):
    """The contents of a store.

    Attributes:
        samples: Samples of the dataset.
        kept: Samples in the store.
        nbytes: Bytes that they take.
        budget: Bytes that they may take.
    """

    samples: int
    kept: int
    nbytes: int
    budget: int


class Store:
    """The samples of one cache in a file on disk.

    One object serves one process with all its threads, and the processes that are forked from it.
    """

    stays: bool = True
    """True if the file outlives its last user."""
    tail_bytes: int = _CRC.size
    """Bytes behind each sample."""

    def __init__(self, path: Path, samples: int, budget: int | None, name: str) -> None:
        """Open the file, or make it. If the folder is read-only, only read the file.

        ``budget``: Maximum bytes of samples. None: half of the free bytes. If other processes use the file, their
        budget counts.

        Raises CacheError if a folder belongs to another user, or other processes use a file that is no such cache, and
        OSError if the file cannot be made.
        """
        self.path: Path = path
        self._samples, self._begins = samples, _data_begins(samples)
        own_folder(path.parent)
        is_read_only = not os.access(path.parent, os.W_OK)
        self._error = "it is read-only" if is_read_only else ""
        """The reason why nothing can be written, or ""."""
        self._own: dict[str, int] = {}
        """Words of the header that could not be written to the file."""
        self._claims: Any = contextlib.nullcontext() if is_read_only else ClaimLock(path.parent / "lock")
        self._file = HeldFile(path, self._open_file(budget, name), stays=self.stays)

    def _open_file(self, budget: int | None, name: str) -> int:
        """Return the open file, with a shared lock. The first user makes the file if it is not whole."""
        flags = (os.O_RDONLY if self._error else os.O_RDWR | os.O_CREAT) | os.O_CLOEXEC | os.O_NOFOLLOW
        for _ in range(_TRIES):
            fd = os.open(self.path, flags, 0o600)
            try:
                if not self._error and is_alone(fd):
                    self._make_file(fd, budget, name)
                fcntl.flock(fd, fcntl.LOCK_SH)
                if is_linked(self.path, fd) and self._is_whole(fd):
                    return fd
            except BaseException as error:
                os.close(fd)
                if isinstance(error, OSError):
                    error.filename = str(self.path)
                raise
            os.close(fd)  # the last user removed the file, or was killed before the file was whole
        raise CacheError(
            f"{self.path} is damaged, or is no cache of {self._samples} samples, and it cannot be replaced, as it is "
            "read-only or other processes use it; end these, or remove it"
        )

    def _is_whole(self, fd: int) -> bool:
        """Return True if the file has a header for that number of samples, and its whole table."""
        found = os.pread(fd, 16, 0)
        return found == struct.pack("<2Q", _MAGIC, self._samples) and os.fstat(fd).st_size >= self._begins

    def _make_file(self, fd: int, budget: int | None, name: str) -> None:
        """Make the file unless it is whole, and reset the flags of earlier runs. The caller has an exclusive lock."""
        if not self._is_whole(fd):
            if os.fstat(fd).st_size:
                logger.warning("%s is damaged or was cut off: it begins anew", self.path)
            os.ftruncate(fd, 0)
            os.ftruncate(fd, self._begins)
            (self.path.parent / "about.json").write_text(json.dumps({"name": name, "samples": self._samples}))
        used, least = struct.unpack("<2Q", os.pread(fd, 16, _AT["used"]))  # zeros, if it is new
        used = max(used, self._begins)
        if budget is None:
            found = os.fstatvfs(fd)
            budget = (found.f_bavail * found.f_frsize + used - self._begins) // 2
        self._write_header(fd, budget, used, least)

    def _write_header(self, fd: int, capacity: int, used: int, least: int) -> None:
        """Write the header, with all flags zero."""
        words = struct.pack("<5Q", _MAGIC, self._samples, capacity, used, least)
        _write_all(fd, 0, (words.ljust(8 * len(_WORDS), b"\0"),))

    def _read_bytes(self, at: int, nbytes: int) -> bytes | memoryview:
        """Return bytes of the header or the table. Bytes that were cut off or cannot be read are zeros."""
        try:
            return os.pread(self._file.fd, nbytes, at).ljust(nbytes, b"\0")
        except OSError:
            return bytes(nbytes)

    def _get_word(self, word: str) -> int:
        return self._own.get(word) or int(_WORD.unpack(self._read_bytes(_AT[word], 8))[0])

    def _set_word(self, word: str, value: int) -> None:
        try:
            _write_all(self._file.fd, _AT[word], (_WORD.pack(value),))
        except OSError:
            self._own[word] = value

    # -- reading -------------------------------------------------------------------------------------------------------

    def get(self, index: int) -> tuple[Any, int] | None:
        """Return the encoded sample and the microseconds that it took to prepare; None if it is missing or damaged."""
        place, nbytes, cost_us, crc = entry = _ENTRY.unpack(self._read_bytes(PAGE + index * _ENTRY.size, _ENTRY.size))
        if not place:
            return None
        is_seen = crc == _checksum(index, place, nbytes, cost_us)
        memory = self._read_sample(place, nbytes, crc) if is_seen else None
        if memory is not None:
            return memory, cost_us
        self._drop_damaged(index, entry)
        return None

    def _read_sample(self, place: int, nbytes: int, crc: int) -> Any:
        """Return the bytes of a sample; None if some are missing or damaged."""
        left = memory = np.empty(nbytes + _CRC.size, np.uint8).data
        try:
            while left and (found := os.preadv(self._file.fd, [left], place + len(memory) - len(left))):
                left = left[found:]
        except OSError:
            return None
        body = memory[:nbytes]
        return None if left or _sum_of(body, crc) != memory[nbytes:] else body

    def _drop_damaged(self, index: int, entry: tuple[int, ...]) -> None:
        """Clear the entry of a damaged sample unless it has changed since, so that the sample is prepared again."""
        at = PAGE + index * _ENTRY.size
        with self._claims, contextlib.suppress(OSError):
            if _ENTRY.unpack(self._read_bytes(at, _ENTRY.size)) != entry:
                return
            _write_all(self._file.fd, at, (bytes(_ENTRY.size),))
        if self.is_first("damaged"):
            logger.warning(
                "%s is damaged or was cut off: sample %s and others like it are made again", self.path, index
            )

    @property
    def nbytes(self) -> int:
        """The bytes that the samples take."""
        return max(0, self._get_word("used") - self._begins)

    def stored(self) -> Stored:
        places = np.frombuffer(self._read_bytes(PAGE, self._begins - PAGE), "<u8")[: 3 * self._samples : 3]
        return Stored(self._samples, int(np.count_nonzero(places)), self.nbytes, self._get_word("capacity"))

    def set_aside(self) -> None:
        """Rename the folder if it has samples, so that no later run reads them."""
        folder = self.path.parent
        try:
            if self.nbytes:
                folder.rename(aside_folder(folder))
                logger.warning(
                    "the samples in %s may be random, too: they were set aside, in %s", folder, aside_folder(folder)
                )
        except OSError as error:
            logger.warning("the samples in %s may be random, too: remove it (%s)", folder, error.strerror)

    # -- messages between processes ------------------------------------------------------------------------------------

    @property
    def is_random(self) -> bool:
        """True once the dataset turned out to be random, so that no sample may be read or kept."""
        return bool(self._get_word("is_random"))

    def is_first(self, event: str) -> bool:
        """Return True for the first call among all processes for this event, which is a flag of the header."""
        with self._claims:
            is_first = not self._get_word(event)
            if is_first:
                self._set_word(event, 1)
        return is_first

    @property
    def why_full(self) -> str:
        """The reason why the cache takes no more samples, or "". Samples that are stored already stay."""
        return self._error or ("its budget is used" if self._get_word("is_full") else "")

    # -- writing -------------------------------------------------------------------------------------------------------

    def put(self, index: int, sample: Encoded, cost_us: int) -> bool:
        """Keep a sample, unless the cache has it. Return False if it does not fit or cannot be written."""
        try:
            place = self._claim(index, sample.nbytes + self.tail_bytes)
            if place <= 0:
                return not place
            crc = _checksum(index, place, sample.nbytes, cost_us)
            self._write_sample(place, sample, crc)
            _write_all(self._file.fd, PAGE + index * _ENTRY.size, (_ENTRY.pack(place, sample.nbytes, cost_us, crc),))
        except OSError as error:  # the file system is full before the budget is used, for example
            self._error = str(error.strerror)
            return False
        return True

    def _write_sample(self, place: int, sample: Encoded, crc: int) -> None:
        """Write a sample to space that was claimed."""
        body = b"".join(sample.parts)
        _write_all(self._file.fd, place, (body, _sum_of(body, crc)))

    def _claim(self, index: int, nbytes: int) -> int:
        """Return the offset at which this process may write the sample; 0 if the cache has the sample already, and -1
        if the cache cannot take it."""
        with self._claims:
            if not self._is_whole(self._file.fd):
                raise OSError(errno.EIO, "it was cut off, or its disk fails")
            if _WORD.unpack(self._read_bytes(PAGE + index * _ENTRY.size, 8))[0]:
                return 0
            used, least = self._get_word("used"), self._get_word("least")
            place = used + -used % (PAGE if nbytes >= COPIED_BYTES else ALIGNMENT)
            room = self._get_word("capacity") - (place - self._begins)
            if nbytes > room and room < least:
                self._set_word("is_full", 1)
            if nbytes > room or self.is_random or self.why_full:
                return -1
            self._check_room(nbytes)
            _write_all(self._file.fd, _AT["used"], (struct.pack("<2Q", place + nbytes, min(least or nbytes, nbytes)),))
            return place

    def _check_room(self, nbytes: int) -> None:
        """Raise OSError if ``nbytes`` more would leave too little free space in the file system."""
        found = os.fstatvfs(self._file.fd)
        left = min(_MOST_LEFT_FREE, int(_LEFT_FREE_RATIO * found.f_blocks * found.f_frsize))
        if found.f_bavail * found.f_frsize < nbytes + left:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


class MemoryStore(Store):
    """The samples of one cache in shared memory. The file is read through a map, and samples have no checksums."""

    stays: bool = False
    tail_bytes: int = 0

    def __init__(self, path: Path, samples: int, budget: int | None, name: str) -> None:
        """See `Store`. Raises CacheError as well if shared memory has no room for the table of samples."""
        super().__init__(path, samples, budget, name)
        remove_unused(path.parent)
        self._memory = map_memory(self._file.fd, os.fstat(self._file.fd).st_size, at_huge=True)
        self._table = memoryview(self._memory).cast("B")

    def _make_file(self, fd: int, budget: int | None, name: str) -> None:
        """Make the file anew.

        Header and entries are allocated now, so that no later access is a bus error. Samples are allocated on writing.
        """
        os.ftruncate(fd, 0)
        try:
            if self._begins > files.store_room():  # allocating it would leave no memory to other processes
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            os.posix_fallocate(fd, 0, self._begins)
        except OSError as error:
            raise CacheError(
                f"shared memory has no room for the table of {self._samples} samples ({self._begins} bytes): "
                f"{error.strerror}; {files.how_to_enlarge()}"
            ) from error
        free = files.store_room()
        if budget is not None and budget > free:
            logger.warning(
                "memory=%s for a cache of %s, but only %s bytes are free, so it takes at most these. To keep more, %s",
                f"{budget:,}", name, f"{free:,}", files.how_to_enlarge()
            )  # fmt: skip
        capacity = free // 2 if budget is None else min(budget, free)
        os.ftruncate(fd, self._begins + capacity)  # so that all of it can be mapped
        self._write_header(fd, capacity, self._begins, 0)

    def _read_bytes(self, at: int, nbytes: int) -> memoryview:
        return self._table[at : at + nbytes]

    def _read_sample(self, place: int, nbytes: int, crc: int) -> Any:
        if os.fstat(self._file.fd).st_size < place + nbytes:  # it was cut off, so reading it would be a bus error
            return None
        if nbytes < COPIED_BYTES:
            return bytearray(self._table[place : place + nbytes])
        return map_memory(self._file.fd, nbytes, offset=place, private=True)

    def _write_sample(self, place: int, sample: Encoded, crc: int) -> None:
        self._make_huge_pages(place, sample.nbytes)
        _write_all(self._file.fd, place, sample.parts)

    def _make_huge_pages(self, place: int, nbytes: int) -> None:
        """Make huge pages ahead of claimed space. Each part of the file is prepared by the writer of one claim.

        If the kernel refuses, writing the samples allocates small pages.
        """
        first, last = (self._prepared_at(used) for used in (place - 1, place + nbytes))
        if first == last:
            return
        for at in range(first, last, HUGE_PAGE):
            advise(self._memory, _MADV_POPULATE_READ, at, PAGE)  # collapse leaves out ranges without a page
        advise(self._memory, _MADV_COLLAPSE, first, last - first)

    def _prepared_at(self, used: int) -> int:
        """Return where huge pages must end when the file is used up to ``used``. A small cache gets a short lead."""
        end = used + min(_LEAD_BYTES, max(0, used - self._begins))
        return min(end // _PREPARED_BYTES * _PREPARED_BYTES, len(self._table) // HUGE_PAGE * HUGE_PAGE)


# -- bytes -------------------------------------------------------------------------------------------------------------


def _write_all(fd: int, at: int, parts: Iterable[Any]) -> None:
    """Write all parts by pwrite(2). If the file system is full, the call raises an error.

    Writing through a map would kill the process (SIGBUS).
    """
    for part in parts:
        view = memoryview(part).cast("B")
        while len(view):
            written = os.pwrite(fd, view, at)
            view, at = view[written:], at + written


def _data_begins(samples: int) -> int:
    end = PAGE + samples * _ENTRY.size
    return end + -end % PAGE


def _checksum(*values: int) -> int:
    """Return the checksum of an entry."""
    return zlib.crc32(struct.pack(f"<{len(values)}Q", *values))


def _sum_of(body: Any, crc: int) -> bytes:
    """Return the CRC-32 of an entry's checksum, of the sums of the 64-bit words of each block, and of the rest.

    It takes a tenth of the time of a CRC-32 of all bytes, which takes longer than reading them.
    """
    if len(body) < _BLOCK:
        return _CRC.pack(zlib.crc32(body, crc))
    words = np.frombuffer(body, "<u8", len(body) // _BLOCK * (_BLOCK // 8))
    sums = words.reshape(-1, _BLOCK // 8).sum(axis=1)
    return _CRC.pack(zlib.crc32(memoryview(body)[words.nbytes :], zlib.crc32(sums, crc)))
