"""The folders, files and locks of the stores of `dpex.cache.store`.

Every user of a file holds a shared lock on it (flock(2)), which the kernel releases when the process ends in any way.
Only the holder of an exclusive lock makes or removes the file.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import stat
import threading
import weakref
from pathlib import Path
from typing import Any

from dpex.errors import CacheError
from dpex.system.meter import free_memory

SHARED_MEMORY = Path("/dev/shm")
_SUFFIX = ".samples"


def memory_folder() -> Path:
    return SHARED_MEMORY / f"dpex-{os.getuid()}"


def store_room() -> int:
    """Return the bytes that a store may take at present: the smaller of the free shared memory and the free memory."""
    found = os.statvfs(SHARED_MEMORY)
    free = free_memory()
    shared = found.f_bavail * found.f_frsize
    return shared if free is None else min(shared, free)


def how_to_enlarge() -> str:
    """Return the remedy for a lack of `store_room`, in words: shared memory, or memory if less of it is free."""
    found, free = os.statvfs(SHARED_MEMORY), free_memory()
    if free is not None and free < found.f_bavail * found.f_frsize:
        return "free some memory, or give disk="
    return f"enlarge {SHARED_MEMORY} (docker run --shm-size=...), or give disk="


def own_folder(folder: Path) -> None:
    """Make a folder for this user alone. Raises CacheError if other users own it or may write into it."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        found, owner = os.lstat(folder), folder.parent.stat().st_uid
    except OSError as error:
        raise CacheError(
            f"the folder {folder} of a cache cannot be made: {error.strerror}; give another one"
        ) from error
    is_ours = stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid() and not found.st_mode & 0o022
    if not is_ours or owner not in (os.getuid(), 0):
        raise CacheError(
            f"other users can change {folder} (user {found.st_uid}, mode {stat.S_IMODE(found.st_mode):o}, in a folder "
            f"of user {owner}), so a cache in it is not safe to read; remove it, or give another one"
        )


def folder_of(disk: Path, key: str) -> Path:
    """Return the folder of a cache on disk. Raises CacheError if LMDB has written to it."""
    for found in (disk / "data.mdb", *disk.glob(f"{'[0-9a-f]' * len(key)}/data.mdb")):
        if found.exists():
            raise CacheError(
                f"{found} was written by LMDB, which dpex.cached does not read; give another disk=, or remove "
                f"{found.parent} if it is a former cache"
            )
    return disk.absolute() / key


def aside_folder(folder: Path) -> Path:
    """Return the folder to which a cache on disk is moved when one of its samples turns out to be random."""
    return folder.with_suffix(".aside")


def hold_all_stores() -> list[Any]:
    """Hold every store of this user on this machine, so that no process removes them while the returned list lives."""
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
    """A lock between all threads and processes that claim space. The kernel releases it when its process ends."""

    def __init__(self, path: Path) -> None:
        self._hold(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600))

    def _hold(self, fd: int) -> None:
        self._pid, self._threads, self._fd = os.getpid(), threading.RLock(), fd
        weakref.finalize(self, os.close, fd).atexit = False

    def __enter__(self) -> None:
        if self._pid != os.getpid():
            # A forked child inherits the parent's lock, which does not exclude the parent. So the child opens the file
            # again. It uses the descriptor, because systemd may have removed the path when the user logged out
            # (RemoveIPC=), and a new file at the path would not exclude the parent.
            self._hold(os.open(f"/proc/self/fd/{self._fd}", os.O_RDWR | os.O_CLOEXEC))
        self._threads.acquire()
        fcntl.flock(self._fd, fcntl.LOCK_EX)

    def __exit__(self, *_: object) -> None:
        fcntl.flock(self._fd, fcntl.LOCK_UN)
        self._threads.release()


class HeldFile:
    """The open file of a store, with a shared lock. The last user to close it removes the file, unless it ``stays``."""

    def __init__(self, path: Path, fd: int, *, stays: bool = False) -> None:
        self.fd = fd
        weakref.finalize(self, _release, fd, path, None if stays else os.getpid())


def _release(fd: int, path: Path, pid: int | None) -> None:
    """Close the file. Only process ``pid``, and none of its forks, removes the file, if no other process uses it."""
    if os.getpid() == pid and is_alone(fd) and is_linked(path, fd):
        path.unlink()
    os.close(fd)


def is_alone(fd: int) -> bool:
    """Take an exclusive lock; return True if no other process uses the file. If False, the shared lock may be lost."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def is_linked(path: Path, fd: int) -> bool:
    try:
        return os.path.samestat(path.stat(), os.fstat(fd))
    except FileNotFoundError:
        return False


def remove_unused(folder: Path) -> None:
    """Remove the stores of processes that were killed."""
    for path in folder.glob(f"*{_SUFFIX}"):
        with contextlib.suppress(FileNotFoundError), path.open("rb") as file:
            if is_alone(file.fileno()) and is_linked(path, file.fileno()):
                path.unlink()
