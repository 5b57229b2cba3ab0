"""Large buffers of results on a connection of their own, straight from a worker into the trainer's memory.

Through Ray's object store a buffer is written and read five times on its way between two machines; here it is sent
once and received once, into memory that is already faulted in. Only the buffers go this way: calls, answers and the
news of deaths stay Ray's, and an answer waits for its buffers. A worker that cannot reach the trainer (a firewall, a
container's network) answers through the object store instead.

One frame carries the buffers of one answer: its number and how many buffers there are (two u64, little endian), their
sizes (u64 each), their bytes. Frames are numbered from 0 per connection. A connection begins with the lane's secret
and the host's number; the trainer acknowledges with one byte.
"""

from __future__ import annotations

import contextlib
import hmac
import queue
import secrets
import socket
import struct
import threading
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

_SECRET_BYTES = 32
_HELLO = struct.Struct(f"<{_SECRET_BYTES}sQ")
_HEAD = struct.Struct("<QQ")
_ACCEPTED = b"\1"
_HANDSHAKE_S = 3.0
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


class StreamBrokenError(ConnectionError):
    """The connection ended before the buffers of an answer had arrived."""


class Sender:
    """The worker's end. `send` puts buffers in a short queue that a thread empties into the connection.

    Raises OSError if the trainer cannot be reached, or does not answer.
    """

    def __init__(self, target: Target) -> None:
        self._socket = socket.create_connection((target.address, target.port), _HANDSHAKE_S)
        try:
            self._socket.sendall(_HELLO.pack(target.secret, target.host))
            if self._socket.recv(1) != _ACCEPTED:
                raise ConnectionError("the trainer refused the connection")
            _tune(self._socket)
        except BaseException:
            self._socket.close()
            raise
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


class _Link:
    """A host's connection as the trainer sees it."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self.frames: dict[int, list[Any]] = {}
        self.waiting: dict[int, Callable[[list[Any] | None], None]] = {}
        self.broken = False


class Receiver:
    """The trainer's end: accepts hosts, and reads each in a thread of its own.

    ``memory(nbytes)`` gives a writable uint8 array to receive into; it is called from those threads.
    Raises OSError if nothing can listen on ``address``.
    """

    def __init__(self, address: str, memory: Callable[[int], Any]) -> None:
        self._memory = memory
        self._secret = secrets.token_bytes(_SECRET_BYTES)
        self._lock = threading.Lock()
        self._links: dict[int, _Link] = {}
        self._greeting: set[socket.socket] = set()
        self._closed = False
        self._listener = socket.create_server((address, 0), family=_family(address), backlog=128)
        self._address, self._port = self._listener.getsockname()[:2]
        threading.Thread(target=self._accept, name="dpex-receive", daemon=True).start()

    def target(self, host: int) -> Target:
        """What ``host`` must know to connect."""
        return Target(self._address, self._port, self._secret, host)

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
        with self._lock:
            self._closed = True
            connections = [link.connection for link in self._links.values()] + list(self._greeting)
            self._links.clear()
        _end(self._listener)
        self._listener.close()
        for connection in connections:
            _end(connection)

    def _accept(self) -> None:
        while not self._closed:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                if self._closed or self._listener.fileno() < 0:
                    return
                continue
            threading.Thread(target=self._serve, args=(connection,), name="dpex-receive-host", daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        with connection:
            link = self._greet(connection)
            if link is None:
                return
            with contextlib.suppress(OSError, MemoryError):
                while self._receive(link):
                    pass
            with self._lock:
                link.broken = True
                waiting = list(link.waiting.values())
                link.waiting.clear()
            for ready in waiting:
                ready(None)

    def _greet(self, connection: socket.socket) -> _Link | None:
        """Let a host in that knows the secret; None for anybody else."""
        with self._lock:
            self._greeting.add(connection)
        try:
            connection.settimeout(_HANDSHAKE_S)
            hello = bytearray(_HELLO.size)
            if not _receive_all(connection, [hello]):
                return None
            secret, host = _HELLO.unpack(hello)
            if not hmac.compare_digest(secret, self._secret):
                return None
            _tune(connection)
            link = _Link(connection)
            with self._lock:
                if self._closed:
                    return None
                self._links[host] = link
            connection.sendall(_ACCEPTED)
            return link
        except OSError:
            return None
        finally:
            with self._lock:
                self._greeting.discard(connection)

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


def _family(address: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in address else socket.AF_INET


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
