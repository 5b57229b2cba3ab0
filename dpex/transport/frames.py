"""Frames on a stream socket between a trainer and an agent. A frame has raw buffers after a header of plain values.

A frame begins with the length of its header and the number of its buffers (two u32, little endian). The size of each
buffer follows (u64). Then comes the header. It is marshalled, so reading a frame runs no code of the other end. The
bytes of the buffers are last. Both ends unpickle the content of some frames, and a pickle may run any code, so the
trainer must trust its agents, and an agent its trainer. ``docs/explanation/security.md`` lists all trusted processes.

Only `receive` blocks.
"""

from __future__ import annotations

import marshal
import socket
import struct
from collections import deque
from collections.abc import Callable, Sequence
from itertools import islice
from typing import Any

from dpex.errors import DpexError

_HEAD = struct.Struct("<II")
_SIZE = struct.Struct("<Q")
_FLAGS = socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL
PIECES_A_CALL = 512
"""Maximum number of memory pieces for one system call. Linux accepts 1024 (IOV_MAX)."""
LONGEST_HEADER = 1 << 28
"""Maximum bytes of a header. A longer header is an error, for which dpex allocates no memory."""
MOST_BUFFERS = 1 << 16
"""Maximum number of buffers of a frame. More are an error. A batch has one buffer for each of its tensors."""


class FrameError(DpexError, ConnectionError):
    """The received bytes are no frame."""


class FrameWriter:
    """Sends frames without blocking. Used by one thread.

    ``pending_bytes``: Bytes that are not sent yet. The writer keeps references to their buffers.
    """

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._pieces: deque[memoryview] = deque()
        self.pending_bytes: int = 0

    def add_frame(self, header: Any, buffers: Sequence[Any] = ()) -> None:
        """Keep a frame until `flush` sends it. The buffers must not change until then."""
        data = marshal.dumps(header)
        pieces = [memoryview(one).cast("B") for one in buffers]
        sizes = map(_SIZE.pack, map(len, pieces))
        head = memoryview(b"".join((_HEAD.pack(len(data), len(pieces)), *sizes, data)))
        kept = [head, *filter(len, pieces)]
        self._pieces += kept
        self.pending_bytes += sum(map(len, kept))

    def flush(self) -> bool:
        """Send as many bytes as the connection takes; return True if all are sent. Raises OSError if the connection is
        gone."""
        pieces = self._pieces
        while pieces:
            try:
                sent = self._connection.sendmsg(list(islice(pieces, PIECES_A_CALL)), (), _FLAGS)
            except BlockingIOError:
                return False
            self.pending_bytes -= sent
            while sent:
                first = pieces.popleft()
                if sent < first.nbytes:
                    pieces.appendleft(first[sent:])
                sent -= min(sent, first.nbytes)
        return True


def receive(connection: socket.socket, memory: Callable[[int], Any]) -> tuple[Any, list[Any]] | None:
    """Return the header and the buffers of the next frame of a blocking connection, or None at its end.

    ``memory`` returns a writable buffer of the given number of bytes.

    Raises:
        FrameError: The received bytes are no frame.
        OSError: The connection broke.
    """
    head = bytearray(_HEAD.size)
    if not _fill_buffers(connection, [head]):
        return None
    length, count = _parsed_head(head)
    table, data = bytearray(_SIZE.size * count), bytearray(length)
    if not _fill_buffers(connection, [table, data]):
        return None
    buffers = [memory(nbytes) for (nbytes,) in _SIZE.iter_unpack(table)]
    if not _fill_buffers(connection, buffers):
        return None
    return marshal.loads(data), buffers


def _parsed_head(head: bytes | bytearray) -> tuple[int, int]:
    """Return the length of the header and the number of buffers."""
    length, count = _HEAD.unpack(head)
    if length > LONGEST_HEADER or count > MOST_BUFFERS:
        raise FrameError(f"a frame with a header of {length} bytes and {count} buffers exceeds the limits")
    return length, count


def _fill_buffers(connection: socket.socket, buffers: Sequence[Any]) -> bool:
    """Fill the buffers, in one system call as a rule; return False if the connection ends before."""
    views = [view for buffer in buffers if (view := memoryview(buffer).cast("B")).nbytes]
    at = 0
    while at < len(views):
        came = connection.recvmsg_into(views[at : at + PIECES_A_CALL], 0, socket.MSG_WAITALL)[0]
        if not came:
            return False
        while at < len(views) and came >= views[at].nbytes:
            came -= views[at].nbytes
            at += 1
        if came:
            views[at] = views[at][came:]
    return True


class FrameReader:
    """The agent's end: reads frames without buffers, and does not block. Used by one thread."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._data = bytearray()
        self.ended: bool = False

    def read(self) -> list[Any]:
        while not self.ended:
            try:
                data = self._connection.recv(1 << 18, socket.MSG_DONTWAIT)
            except BlockingIOError:
                break
            except OSError:
                data = b""
            self.ended = not data
            self._data += data
        return self._next_frame()

    def _next_frame(self) -> list[Any]:
        headers, at, data = [], 0, self._data
        while len(data) - at >= _HEAD.size:
            length, count = _parsed_head(data[at : at + _HEAD.size])
            if count:
                raise FrameError("a frame with buffers, where none are expected")
            end = at + _HEAD.size + length
            if len(data) < end:
                break
            headers.append(marshal.loads(memoryview(data)[at + _HEAD.size : end]))
            at = end
        del data[:at]
        return headers
