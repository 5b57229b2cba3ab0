"""The meeting place of trainings that share batches: a socket in a directory that is this user's own.

A training that finds no listener there begins to listen, under a lock on the directory, and hands the socket to a new
producer. The kernel holds the lock, so it ends with its process and leaves no file. The producer removes the socket's
file as it ends. If the producer was killed, the next listener removes it. The directory goes with its last file.

Only processes of the same user are talked to: the directory is closed to others, so is the socket (0600), and both ends
ask the kernel whose process the other one is.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import socket
import struct
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from dpex.errors import ShareError
from dpex.system.directories import is_safe, job_directories, open_checked, prepare

BACKLOG = 128
"""Trainings that may come at the same moment."""
_CREDENTIALS = struct.Struct("3i")
_NAME_LETTERS = 24
"""Characters of a hash: few enough for a socket's name, which holds 107 bytes, and enough to tell names apart."""


class Peer(NamedTuple):
    """The process at the other end of a socket, as the kernel knows it."""

    pid: int
    uid: int


def peer(connection: socket.socket) -> Peer:
    """Return the process at the other end: of a socket that connected, the listener."""
    found = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, uid, _ = _CREDENTIALS.unpack(found)
    return Peer(pid, uid)


def own_directory(environment: Mapping[str, str]) -> Path:
    """The first directory of this user's own that is safe, made if need be.

    Raises:
        ShareError: No directory is safe.
    """
    directories = job_directories(environment)
    for directory in directories:
        with contextlib.suppress(OSError):
            prepare(directory, own=True)
            if is_safe(directory):
                return directory
    tried = ", ".join(map(str, directories))
    raise ShareError(
        f"share: trainings find each other in a directory that only this user can change, and none of {tried} is one: "
        "set XDG_RUNTIME_DIR to a directory of yours (mode 700)"
    )


class MeetingPlace:
    """The place where the trainings with the same ``key`` meet."""

    def __init__(self, key: str, environment: Mapping[str, str]) -> None:
        self._directory = own_directory(environment)
        self._lock = -1
        self._file = f"share-{hashlib.sha256(key.encode()).hexdigest()[:_NAME_LETTERS]}.sock"

    def connect(self) -> socket.socket | None:
        """Return a connection to the listener, or None."""
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            with self._opened() as inside:
                connection.connect(self._address(inside))
            if peer(connection).uid == os.getuid():
                return connection
        except (ConnectionRefusedError, FileNotFoundError):
            pass
        except BaseException:
            connection.close()
            raise
        connection.close()
        return None

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the lock: no other process begins or ends to listen here. It may have to wait for another process.

        The directory stays meanwhile, as it is removed under this lock only.
        """
        inside = self._lock = self._taken_lock()
        try:
            yield
        finally:
            fcntl.flock(inside, fcntl.LOCK_UN)
            os.close(inside)
            self._lock = -1

    def _taken_lock(self) -> int:
        """The directory's descriptor, locked; of another one if that was removed while its lock was waited for."""
        while True:
            prepare(self._directory, own=True)
            try:
                inside = self._open()
            except FileNotFoundError:
                continue
            try:
                fcntl.flock(inside, fcntl.LOCK_EX)
                if self._is_there(inside):
                    return inside
            except BaseException:
                os.close(inside)
                raise
            os.close(inside)

    def _is_there(self, inside: int) -> bool:
        """Return True if this is the directory that its path names."""
        try:
            return os.path.samestat(os.fstat(inside), self._directory.stat())
        except FileNotFoundError:
            return False

    def forget_lock(self) -> None:
        """In a process that was forked under the lock, which has it, too: it is the parent's to release."""
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    def listen(self) -> socket.socket:
        """Listen here, in place of one that has ended; under the lock."""
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            with self._opened() as inside:
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(self._file, dir_fd=inside)
                listener.bind(self._address(inside))
                os.chmod(self._file, 0o600, dir_fd=inside)
            listener.listen(BACKLOG)
        except BaseException:
            listener.close()
            raise
        return listener

    def remove(self) -> None:
        """Remove the socket's file, as its listener ends; under the lock."""
        with self._opened() as inside, contextlib.suppress(FileNotFoundError):
            os.unlink(self._file, dir_fd=inside)
        with contextlib.suppress(OSError):
            self._directory.rmdir()

    @contextlib.contextmanager
    def _opened(self) -> Iterator[int]:
        inside = self._open()
        try:
            yield inside
        finally:
            os.close(inside)

    def _open(self) -> int:
        """Return the directory's descriptor, checked, as another user may have made it after it was removed."""
        return open_checked(self._directory, own=True)

    def _address(self, inside: int) -> str:
        """By the directory's descriptor, as its path may be longer than a socket's address."""
        return f"/proc/self/fd/{inside}/{self._file}"
