"""Large buffers of results on a connection of their own, straight from a worker into the trainer's memory.

Through Ray's object store a buffer is written and read five times on its way between two machines; here it is sent
once and received once, into memory that is already faulted in. Only the buffers go this way: calls, answers and the
news of deaths stay Ray's, and an answer waits for its buffers. A worker that cannot reach the trainer (a firewall, a
container's network) answers through the object store instead.

One frame carries the buffers of one answer: its number and how many buffers there are (two u64, little endian), their
sizes (u64 each), their bytes. Frames are numbered from 0 per connection. A connection begins with a greeting (see
`handshake`); the trainer listens on the one address at which Ray's nodes reach it, and on no other.
"""

from __future__ import annotations

import contextlib
import queue
import random
import socket
import struct
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from dpex.pools.ray.admission import Door
from dpex.pools.ray.handshake import ACCEPTED, CHALLENGE_BYTES, HEAD_BYTES, GreetingError, Guest
from dpex.system.clock import monotonic

_HEAD = struct.Struct("<QQ")
CONNECT_S = 10.0
"""How long a worker tries to connect before its batches go another way."""
_TRY_AGAIN_S = (0.02, 0.2)
"""A worker that was dropped for want of room waits so long, by chance, lest all come again at once."""
_KEEPALIVE = (("TCP_KEEPIDLE", 5), ("TCP_KEEPINTVL", 3), ("TCP_KEEPCNT", 3))
_BUFFERS_A_CALL = 512
"""Buffers handed to the system at once; the least that POSIX systems with IOV_MAX have is 1024."""
ANSWERS_AHEAD = 2
"""Answers whose buffers may wait to be sent while a worker makes the next."""


class Target(NamedTuple):
    """Where a worker finds the trainer, and how it introduces itself."""

    address: str
    port: int
    secret: bytes
    host: int

    def __repr__(self) -> str:
        """Without the secret, which must not get into logs."""
        return f"Target(address={self.address!r}, port={self.port}, host={self.host})"


class StreamBrokenError(ConnectionError):
    """The connection ended before the buffers of an answer had arrived."""


class Sender:
    """The worker's end. `send` puts buffers in a short queue that a thread empties into the connection.

    Raises OSError if the trainer cannot be reached, does not answer, or is not the one that knows the secret.
    """

    def __init__(self, target: Target) -> None:
        self._socket = _connect(target)
        self._next = 0
        self._broken = False
        self._queue: queue.Queue[tuple[int, list[Any]] | None] = queue.Queue(ANSWERS_AHEAD)
        self._thread = threading.Thread(target=self._run, name="dpex-send", daemon=True)
        self._thread.start()

    def send(self, buffers: list[Any]) -> int | None:
        """Send these; the frame's number, or None if the connection is broken. They must not change any more."""
        if self._broken:
            return None
        number, self._next = self._next, self._next + 1
        self._queue.put((number, buffers))
        return number

    def close(self) -> None:
        """End the connection; what was not sent yet is dropped. Idempotent."""
        self._broken = True
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        if self._thread.is_alive():
            self._queue.put(None)
            self._thread.join()
        self._socket.close()

    def _run(self) -> None:
        while (item := self._queue.get()) is not None:
            if not self._broken:
                try:
                    self._send(*item)
                except OSError:
                    self._broken = True
            del item  # its memory is free while this thread waits

    def _send(self, number: int, buffers: list[Any]) -> None:
        sizes = [memoryview(buffer).nbytes for buffer in buffers]
        head = _HEAD.pack(number, len(sizes)) + struct.pack(f"<{len(sizes)}Q", *sizes)
        _send_all(self._socket, [head, *buffers])


def _connect(target: Target) -> socket.socket:
    """A connection that is let in; a worker that is dropped for want of room there tries again."""
    deadline = monotonic() + CONNECT_S
    while True:
        try:
            return _introduced(target, deadline)
        except (ConnectionResetError, BrokenPipeError):
            pause_s = random.Random().uniform(*_TRY_AGAIN_S)  # the dataset's own generator stays as it is
            if monotonic() + pause_s >= deadline:
                raise
            time.sleep(pause_s)


def _introduced(target: Target, deadline: float) -> socket.socket:
    connection = socket.create_connection((target.address, target.port), _left_s(deadline))
    try:
        guest = Guest(target.secret, target.host)
        connection.sendall(guest.hello)
        head = _read(connection, HEAD_BYTES, deadline)
        guest.check_head(head)
        connection.sendall(guest.prove(head + _read(connection, CHALLENGE_BYTES - HEAD_BYTES, deadline)))
        if _read(connection, 1, deadline) != ACCEPTED:
            raise GreetingError("the trainer refused the connection")
        _tune(connection)
        return connection
    except BaseException:
        connection.close()
        raise


def _read(connection: socket.socket, nbytes: int, deadline: float) -> bytes:
    found = b""
    while len(found) < nbytes:
        connection.settimeout(_left_s(deadline))
        data = connection.recv(nbytes - len(found))
        if not data:
            raise ConnectionResetError("the trainer ended the connection")
        found += data
    return found


def _left_s(deadline: float) -> float:
    left_s = deadline - monotonic()
    if left_s <= 0:
        raise TimeoutError("the trainer did not answer in time")
    return left_s


class _Link:
    """A host's connection as the trainer sees it."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self.frames: dict[int, list[Any]] = {}
        self.waiting: dict[int, Callable[[list[Any] | None], None]] = {}
        self.broken = False


class Receiver:
    """The trainer's end: lets workers in (see `admission`), and reads each in a thread of its own.

    ``memory(nbytes)`` gives a writable uint8 array to receive into; it is called from those threads.
    Raises OSError if nothing can listen on ``address``.
    """

    def __init__(self, address: str, memory: Callable[[int], Any]) -> None:
        self._memory = memory
        self._lock = threading.Lock()
        self._links: dict[int, _Link] = {}
        self._closed = False
        self._door = Door(address, self._admit)

    def target(self, host: int) -> Target:
        """What ``host`` must know to connect."""
        return Target(self._door.address, self._door.port, self._door.secret, host)

    def when_here(self, host: int, frame: int, ready: Callable[[list[Any] | None], None]) -> None:
        """Call ``ready`` with the buffers of a frame once they are here, or with None if they will never be."""
        with self._lock:
            link = self._links.get(host)
            buffers = link.frames.pop(frame, None) if link is not None else None
            if buffers is None and link is not None and not link.broken:
                link.waiting[frame] = ready
                return
        ready(buffers)

    def forget(self, host: int) -> None:
        """A host is no more: end its connection; nobody waits for its frames."""
        with self._lock:
            link = self._links.pop(host, None)
        if link is not None:
            link.waiting.clear()
            _end(link.connection)

    def close(self) -> None:
        """End everything. Idempotent; threads end soon after."""
        self._door.close()
        with self._lock:
            self._closed = True
            links = list(self._links.values())
            self._links.clear()
        for link in links:
            _end(link.connection)

    def _admit(self, connection: socket.socket, host: int) -> None:
        """Read this worker's frames from now on. Its link is there before the worker hears that it is let in."""
        link = _Link(connection)
        try:
            _tune(connection)
            with self._lock:
                if self._closed:
                    raise OSError("the receiver is closed")
                self._links[host] = link
            threading.Thread(target=self._serve, args=(link,), name="dpex-receive-host", daemon=True).start()
        except (OSError, RuntimeError):  # RuntimeError: there can be no further thread
            link.broken = True
            connection.close()

    def _serve(self, link: _Link) -> None:
        try:
            with link.connection, contextlib.suppress(OSError, MemoryError, OverflowError):
                link.connection.sendall(ACCEPTED)
                while self._receive(link):
                    pass
        finally:
            with self._lock:
                link.broken = True
                waiting = list(link.waiting.values())
                link.waiting.clear()
            for ready in waiting:
                ready(None)

    def _receive(self, link: _Link) -> bool:
        """Take one frame in; False at the end of the connection."""
        head = bytearray(_HEAD.size)
        if not _receive_all(link.connection, [head]):
            return False
        number, count = _HEAD.unpack(head)
        table = bytearray(8 * count)
        if not _receive_all(link.connection, [table]):
            return False
        buffers = [self._memory(size) for size in struct.unpack(f"<{count}Q", table)]
        if not _receive_all(link.connection, buffers):
            return False
        with self._lock:
            ready = link.waiting.pop(number, None)
            if ready is None:
                link.frames[number] = buffers
        if ready is not None:
            ready(buffers)
        return True


def _tune(connection: socket.socket) -> None:
    """Block without a limit, send small things at once, and notice a machine that is gone within about 15 seconds."""
    connection.settimeout(None)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _KEEPALIVE:
        if hasattr(socket, name):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def _end(connection: socket.socket) -> None:
    """Wake whoever blocks on it."""
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)


def _send_all(connection: socket.socket, buffers: Sequence[Any]) -> None:
    _advance([memoryview(buffer).cast("B") for buffer in buffers], connection.sendmsg)


def _receive_all(connection: socket.socket, buffers: Sequence[Any]) -> bool:
    """Fill the buffers, in one system call as a rule; False if the connection ends before."""

    def receive(views: list[memoryview]) -> int:
        return connection.recvmsg_into(views, 0, socket.MSG_WAITALL)[0]

    return _advance([memoryview(buffer).cast("B") for buffer in buffers], receive)


def _advance(views: list[memoryview], move: Callable[[list[memoryview]], int]) -> bool:
    """Move all bytes of the views; False if there was an end first."""
    views = [view for view in views if view.nbytes]
    at = 0
    while at < len(views):
        moved = move(views[at : at + _BUFFERS_A_CALL])
        if not moved:
            return False
        while at < len(views) and moved >= views[at].nbytes:
            moved -= views[at].nbytes
            at += 1
        if moved:
            views[at] = views[at][moved:]
    return True
