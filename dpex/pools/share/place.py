"""The meeting place of trainings that share batches: an abstract socket address of this machine.

The kernel gives an address to one listener at a time, and frees it when that ends. So nothing has to be locked or
removed. A training that finds no listener begins to listen, and hands the socket to a new producer.

Any user can connect to such an address, or take it. So both ends ask the kernel whose process the other one is, and
talk only to processes of the same user.
"""

from __future__ import annotations

import errno
import hashlib
import os
import socket
import struct
from pathlib import Path
from typing import NamedTuple

from dpex.errors import ShareError

BACKLOG = 128
"""Trainings that may come at the same moment."""
_CREDENTIALS = struct.Struct("3i")
_NAME_LETTERS = 24
"""Characters of a hash: few enough for a socket's address, which holds 107 bytes, and enough to tell names apart."""


class Peer(NamedTuple):
    """The process at the other end of a socket, as the kernel knows it."""

    pid: int
    uid: int


def peer(connection: socket.socket) -> Peer:
    """Return the process at the other end: of a socket that connected, the listener."""
    found = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, uid, _ = _CREDENTIALS.unpack(found)
    return Peer(pid, uid)


class MeetingPlace:
    """The place where the trainings with the same ``key`` meet. Those in other containers have another place."""

    def __init__(self, key: str) -> None:
        processes = Path("/proc/self/ns/pid").readlink()
        name = hashlib.sha256(f"{processes}\n{key}".encode()).hexdigest()[:_NAME_LETTERS]
        self.address = f"\0dpex-share-{os.getuid()}-{name}"

    def connect(self) -> socket.socket | None:
        """Return a connection to the listener, or None if there is none.

        Raises:
            ShareError: The listener is a process of another user.
        """
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            connection.connect(self.address)
            if (uid := peer(connection).uid) != os.getuid():
                raise ShareError(f"share: a process of another user (number {uid}) listens where this training would")
            return connection
        except ConnectionRefusedError:
            connection.close()
            return None
        except BaseException:
            connection.close()
            raise

    def listen(self) -> socket.socket | None:
        """Begin to listen here; return None if another process does."""
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            listener.bind(self.address)
            listener.listen(BACKLOG)
            return listener
        except BaseException as error:
            listener.close()
            if isinstance(error, OSError) and error.errno == errno.EADDRINUSE:
                return None
            raise
