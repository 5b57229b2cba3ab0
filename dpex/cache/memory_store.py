"""Encoded samples in one file of shared memory, for all processes of a machine.

The file lies in ``/dev/shm`` and has a header, an entry for each sample, and the samples. Space is given out in order,
and is not given back before the file goes, so a sample that is there never changes. Every user of the file holds a
shared lock on it (flock(2)), which the kernel takes back when the process ends, however it ends. Only the holder of an
exclusive lock makes or removes the file. So the last user removes it, and a file that killed processes left is removed
by the next process that opens a store.

A writer claims space, writes the sample, and publishes its place last. So a reader never sees a part of a sample. A
process that is killed while it writes has wasted the space, and another one prepares the sample.

Each epoch has new workers, which take page faults for all that they read. So space is made huge pages before it is
claimed, if the kernel can (Linux 6.1): one fault then serves several samples. Writes to one file wait for each other,
and they are short where the pages exist already.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import stat
import struct
import threading
import weakref
import zlib
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from dpex.cache.encoding import ALIGNMENT, Encoded
from dpex.errors import CacheError
from dpex.system.machine import free_memory
from dpex.transport.memory import HUGE_PAGE, advise, map_memory

logger: logging.Logger = logging.getLogger("dpex")

SHARED_MEMORY = Path("/dev/shm")
PAGE = 4096
COPIED_BYTES = 1 << 20
"""A shorter sample is copied out. Of a longer one the pages are mapped, and copied when they are written to."""
_MADV_POPULATE_READ, _MADV_COLLAPSE = 22, 25
"""Python has no names for these of linux/mman.h. Collapse makes huge pages whatever the settings of /dev/shm are."""
_PREPARED_BYTES = 2 * HUGE_PAGE
"""Bytes that one call of madvise(2) makes huge pages. In each call the kernel waits for all CPUs."""
_LEAD_BYTES = 64 << 20
"""Most bytes from the claimed space to the end of the huge pages: 16 workers write less while a part is prepared."""
_SUFFIX = ".samples"
_MAGIC = 0x6470_6578_6361_636B
"""Another layout of the file has another number."""
COUNTS = [(name, "<u8") for name in ("is_random", "least", "left_out", "full", "checked")]
"""Common fields of both stores: the least bytes of a sample that was kept, and the events that `Counts` counts."""
_HEADER = np.dtype([("magic", "<u8"), ("samples", "<u8"), ("capacity", "<u8"), ("used", "<u8"), ("is_full", "<u8"),
                    *COUNTS])  # fmt: skip
_ENTRY = struct.Struct("<QQII")
"""Place, bytes, microseconds to prepare it, and checksum of this entry."""
_OFFSET = struct.Struct("<Q")
_TRIES = 1000
"""A file may go again and again, when its last user ends, before another process has its lock on it."""
_FULL = (errno.ENOSPC, errno.ENOMEM, errno.EDQUOT, errno.EFBIG)


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


class Counts:
    """Counts of events of one store, in memory that its processes share. Base of both stores."""

    _header: Any
    _claims: Any

    @property
    def is_random(self) -> bool:
        """True once the dataset turned out to be random, so that no sample may be read."""
        return bool(self._header["is_random"][0])

    def note_random(self) -> None:
        self._header["is_random"] = 1

    def is_among_first(self, event: str, most: int = 1) -> bool:
        """Return True to the first ``most`` calls of all processes: "left_out", "full", "checked" count apart."""
        if self._header[event][0] >= most:
            return False
        with self._claims:
            before = int(self._header[event][0])
            self._header[event] = before + 1
        return before < most

    def _note_kept(self, nbytes: int) -> None:
        least = int(self._header["least"][0])
        self._header["least"] = min(least or nbytes, nbytes)


class MemoryStore(Counts):
    """The samples of one cache in shared memory.

    One object serves one process with all its threads, and the processes that are forked from it.
    """

    def __init__(self, path: Path, samples: int, budget: int | None, name: str) -> None:
        """Open the file, or make it. ``budget``: None is half of what is free. If others use the file, theirs counts.

        Raises CacheError if the folder belongs to another user, or shared memory has no room for the table of samples.
        """
        own_folder(path.parent)
        _remove_unused(path.parent)
        self._claims = ClaimLock(path.parent / "lock")
        self._file = HeldFile(path, _opened(path, samples, budget, name))
        self._begins = _data_begins(samples)
        self._memory = map_memory(self._file.fd, os.fstat(self._file.fd).st_size, at_huge=True)
        self._table = memoryview(self._memory).cast("B")
        self._header = np.frombuffer(self._table[: _HEADER.itemsize], _HEADER)

    # -- reading -------------------------------------------------------------------------------------------------------

    def get(self, index: int) -> tuple[Any, int] | None:
        """Return the encoded sample and the microseconds that it took to prepare; None if it is not there."""
        offset, nbytes, cost_us, crc = _ENTRY.unpack_from(self._table, PAGE + index * _ENTRY.size)
        if not offset or crc != _checksum(index, offset, nbytes, cost_us):
            return None
        if os.fstat(self._file.fd).st_size < offset + nbytes:  # it was cut off, so reading it would be a bus error
            return None
        if nbytes < COPIED_BYTES:
            return bytearray(self._table[offset : offset + nbytes]), cost_us
        return map_memory(self._file.fd, nbytes, offset=offset, private=True), cost_us

    def stored(self) -> Stored:
        header, table = self._header[0], np.frombuffer(self._table[PAGE : self._begins], np.uint8)
        samples = int(header["samples"])
        places = table[: samples * _ENTRY.size].view("<u8")[:: _ENTRY.size // 8]
        return Stored(
            samples=samples,
            kept=int(np.count_nonzero(places)),
            nbytes=int(header["used"]) - self._begins,
            budget=int(header["capacity"]),
        )

    # -- writing -------------------------------------------------------------------------------------------------------

    @property
    def why_full(self) -> str:
        """The reason why the cache takes no more samples, or "". The first samples stay."""
        return "it has no more room" if self._header["is_full"][0] else ""

    def put(self, index: int, sample: Encoded, cost_us: int) -> bool:
        """Keep a sample, unless it is there or does not fit. Return False if it does not fit."""
        offset = self._claim(index, sample.nbytes)
        if offset <= 0:
            return not offset
        self._prepare(offset, sample.nbytes)
        at = PAGE + index * _ENTRY.size
        try:
            _write(self._file.fd, sample, offset)
        except OSError as error:  # shared memory is full before the budget is
            if error.errno not in _FULL:
                raise
            self._header["is_full"] = 1
            return False
        crc = _checksum(index, offset, sample.nbytes, cost_us)
        _ENTRY.pack_into(self._table, at, 0, sample.nbytes, cost_us, crc)
        _OFFSET.pack_into(self._table, at, offset)
        return True

    def _prepare(self, offset: int, nbytes: int) -> None:
        """Make huge pages ahead of space that was claimed; each part of the file is the task of one claim.

        Where the kernel refuses, the pages are made small, when they are written.
        """
        first, last = (self._prepared_at(used) for used in (offset - 1, offset + nbytes))
        if first == last:
            return
        for at in range(first, last, HUGE_PAGE):
            advise(self._memory, _MADV_POPULATE_READ, at, PAGE)  # collapse leaves out what has no page at all
        advise(self._memory, _MADV_COLLAPSE, first, last - first)

    def _prepared_at(self, used: int) -> int:
        """Return where the huge pages end once the file is used up to ``used``: a small cache gets a short lead."""
        end = used + min(_LEAD_BYTES, max(0, used - self._begins))
        return min(end // _PREPARED_BYTES * _PREPARED_BYTES, len(self._table) // HUGE_PAGE * HUGE_PAGE)

    def _claim(self, index: int, nbytes: int) -> int:
        """Return where this process may write the sample; 0 if it is there, and -1 if it does not fit."""
        with self._claims:
            if _OFFSET.unpack_from(self._table, PAGE + index * _ENTRY.size)[0]:
                return 0
            if self.why_full:
                return -1
            unit = PAGE if nbytes >= COPIED_BYTES else ALIGNMENT
            used = int(self._header["used"][0])
            offset = used + -used % unit
            room = int(self._header["capacity"][0]) - (offset - self._begins)
            if nbytes > room:
                self._header["is_full"] = room < int(self._header["least"][0])
                return -1
            self._header["used"] = offset + nbytes
            self._note_kept(nbytes)
            return int(offset)


# -- folders and files -------------------------------------------------------------------------------------------------


def memory_folder() -> Path:
    return SHARED_MEMORY / f"dpex-{os.getuid()}"


def room() -> int:
    """Return the bytes that a store of this process may take at present, of shared memory and of all memory."""
    found = os.statvfs(SHARED_MEMORY)
    free = free_memory()
    shared = found.f_bavail * found.f_frsize
    return shared if free is None else min(shared, free)


def own_folder(folder: Path) -> None:
    """Make a folder for this user alone. Raises CacheError if other users own it or may write into it."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = os.lstat(folder)
    except OSError as error:
        raise CacheError(
            f"the folder {folder} of a cache cannot be made: {error.strerror}; give another one"
        ) from error
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o022:
        raise CacheError(
            f"other users can change {folder} (user {found.st_uid}, mode {stat.S_IMODE(found.st_mode):o}), so "
            "a cache in it is not safe to read; remove it, or give another one"
        )


def hold_all() -> list[Any]:
    """Use all stores of this user on this machine, without reading them, for as long as the result lives."""
    held = []
    for path in memory_folder().glob(f"*{_SUFFIX}"):
        with contextlib.suppress(FileNotFoundError):
            fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
            fcntl.flock(fd, fcntl.LOCK_SH)
            held.append(HeldFile(path, fd))
    return held


def path_of(key: str) -> Path:
    return memory_folder() / f"{key}{_SUFFIX}"


class ClaimLock:
    """A lock between all threads and processes that claim space. The kernel takes it back from a process that ends."""

    def __init__(self, path: Path) -> None:
        self._hold(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600))

    def _hold(self, fd: int) -> None:
        self._pid, self._threads, self._fd = os.getpid(), threading.RLock(), fd
        weakref.finalize(self, os.close, fd).atexit = False

    def __enter__(self) -> None:
        if self._pid != os.getpid():
            # One that was inherited by a fork would not exclude the parent. By its number, as systemd removes the files
            # of a user who logs out (RemoveIPC=), and another file would not exclude the parent either.
            self._hold(os.open(f"/proc/self/fd/{self._fd}", os.O_RDWR | os.O_CLOEXEC))
        self._threads.acquire()
        fcntl.flock(self._fd, fcntl.LOCK_EX)

    def __exit__(self, *_: object) -> None:
        fcntl.flock(self._fd, fcntl.LOCK_UN)
        self._threads.release()


class HeldFile:
    """The open file of a store, with a shared lock. At the end of this object the last user removes the file."""

    def __init__(self, path: Path, fd: int) -> None:
        self.fd = fd
        weakref.finalize(self, _release, fd, path, os.getpid())


def _release(fd: int, path: Path, pid: int) -> None:
    """Close the file, and remove it if it has no other user. A forked process shares the lock of process ``pid``."""
    if os.getpid() == pid and _is_alone(fd) and _is_there(path, fd):
        path.unlink()
    os.close(fd)


def _opened(path: Path, samples: int, budget: int | None, name: str) -> int:
    """Open the file with a shared lock, and make it if it does not exist."""
    for _ in range(_TRIES):
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            if _is_alone(fd):
                _begin(fd, samples, budget, name)
            fcntl.flock(fd, fcntl.LOCK_SH)
            if _is_there(path, fd) and _is_whole(fd, samples):
                return fd
            os.close(fd)  # the last user has removed it, or was killed before it was whole
        except BaseException:
            os.close(fd)
            raise
    raise CacheError(f"{path} is used by processes that did not make it; end these, or remove it")


def _is_alone(fd: int) -> bool:
    """Return True, with an exclusive lock, if no other process uses the file; else the lock may be lost."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _is_there(path: Path, fd: int) -> bool:
    try:
        return os.path.samestat(path.stat(), os.fstat(fd))
    except FileNotFoundError:
        return False


def _remove_unused(folder: Path) -> None:
    """Remove the stores of processes that were killed."""
    for path in folder.glob(f"*{_SUFFIX}"):
        with contextlib.suppress(FileNotFoundError), path.open("rb") as file:
            if _is_alone(file.fileno()) and _is_there(path, file.fileno()):
                path.unlink()


def _is_whole(fd: int, samples: int) -> bool:
    found = os.pread(fd, _HEADER.itemsize, 0)
    if len(found) < _HEADER.itemsize or os.fstat(fd).st_size < _data_begins(samples):
        return False
    header = np.frombuffer(found, _HEADER)[0]
    return (int(header["magic"]), int(header["samples"])) == (_MAGIC, samples)


def _begin(fd: int, samples: int, budget: int | None, name: str) -> None:
    """Make the file anew. The caller has an exclusive lock.

    Header and entries are allocated now, so that no later access is a bus error; samples when they are written.
    """
    header, begins = np.zeros(1, _HEADER), _data_begins(samples)
    try:
        os.ftruncate(fd, 0)
        os.posix_fallocate(fd, 0, begins)
    except OSError as error:
        raise CacheError(
            f"shared memory has no room for the table of {samples} samples ({begins} bytes): {error.strerror}; "
            f"enlarge {SHARED_MEMORY} (docker run --shm-size=...)"
        ) from error
    free = room()
    if budget is not None and budget > free:
        logger.warning(
            "memory=%s for a cache of %s, and %s bytes of shared memory are free: it takes these at most. Enlarge %s "
            "(docker run --shm-size=...), or give disk=", f"{budget:,}", name, f"{free:,}", SHARED_MEMORY
        )  # fmt: skip
    header["magic"], header["samples"], header["used"] = _MAGIC, samples, begins
    header["capacity"] = free // 2 if budget is None else min(budget, free)
    os.ftruncate(fd, begins + int(header["capacity"][0]))  # so that all of it can be mapped
    os.pwrite(fd, header.tobytes(), 0)


def _write(fd: int, sample: Encoded, offset: int) -> None:
    """Write all pieces. A write to shared memory that is full is an error, where a store through a map would kill."""
    for piece in sample.parts:
        view = memoryview(piece).cast("B")
        while len(view):
            written = os.pwrite(fd, view, offset)
            view, offset = view[written:], offset + written


def _data_begins(samples: int) -> int:
    end = PAGE + samples * _ENTRY.size
    return end + -end % PAGE


def _checksum(*values: int) -> int:
    """Return the checksum of an entry: some CPUs let other processes see its parts in another order."""
    return zlib.crc32(struct.pack(f"<{len(values)}Q", *values))
