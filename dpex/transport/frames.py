"""Frames on a stream socket between a trainer and an agent: a header of plain values, and raw buffers behind it.

A frame begins with the length of its header and the number of its buffers (two u32, little endian). Two sizes of each
buffer follow (u64): its own, and the bytes that travel, which are fewer if it is compressed. Then comes the header. It
is marshalled, so that neither end runs code of the other's to read it. The bytes of the buffers are last.

Only `receive` blocks.
"""

from __future__ import annotations

import marshal
import socket
import struct
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from dpex.errors import DpexError
from dpex.transport.compression import Compressed, decompress

_HEAD = struct.Struct("<II")
_SIZES = struct.Struct("<QQ")
PIECES_A_CALL = 512
"""Pieces that are handed to the system at once; POSIX systems take at least 1024 (IOV_MAX)."""
LONGEST_HEADER = 1 << 28
"""Bytes. A longer header is an error, and no memory is taken for it."""
MOST_BUFFERS = 1 << 16
"""More buffers are an error, too: a batch has one for each of its tensors."""


class FrameError(DpexError, ConnectionError):
    """The bytes that came are no frame."""


class FrameWriter:
    """Sends frames without blocking. Used by one thread.

    Attributes:
        pending_bytes: Bytes that the connection has not taken yet; they are kept, with the memory that they lie in.
    """

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._pieces: deque[memoryview] = deque()
        self.pending_bytes = 0

    def put(self, header: Any, buffers: Sequence[Any] = ()) -> None:
        """Keep a frame until `flush` sends it. The buffers must not change before; some may be `Compressed`."""
        data = marshal.dumps(header)
        parts = [buffer if type(buffer) is Compressed else _as_it_is(buffer) for buffer in buffers]
        sizes = [_SIZES.pack(part.nbytes, sum(map(len, part.pieces))) for part in parts]
        self._keep(b"".join((_HEAD.pack(len(data), len(parts)), *sizes, data)))
        for part in parts:
            for piece in part.pieces:
                self._keep(piece)

    def _keep(self, piece: bytes | memoryview) -> None:
        if len(piece):
            self._pieces.append(memoryview(piece))
            self.pending_bytes += len(piece)

    def flush(self) -> bool:
        """Send what the connection takes; return True if nothing is kept any more.

        Raises:
            OSError: The connection is gone.
        """
        pieces = self._pieces
        while pieces:
            batch = [pieces[at] for at in range(min(len(pieces), PIECES_A_CALL))]
            try:
                sent = self._connection.sendmsg(batch, (), socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
            except BlockingIOError:
                return False
            self._drop(sent)
        return True

    def _drop(self, sent: int) -> None:
        pieces = self._pieces
        self.pending_bytes -= sent
        while sent:
            first = pieces.popleft()
            if sent < first.nbytes:
                pieces.appendleft(first[sent:])
                return
            sent -= first.nbytes


def _as_it_is(buffer: Any) -> Compressed:
    view = memoryview(buffer).cast("B")
    return Compressed(view.nbytes, [view])


class Frame(NamedTuple):
    """A frame that came: its header and its buffers."""

    header: Any
    buffers: list[Any]


def receive(connection: socket.socket, memory: Callable[[int], Any]) -> Frame | None:
    """Return the next frame of a connection that blocks, or None at the end of the connection.

    Args:
        connection: The connection.
        memory: Returns a writable buffer of the given number of bytes.

    Raises:
        FrameError: What came is no frame.
        CompressionError: A compressed buffer is damaged.
        OSError: The connection broke.
    """
    head = bytearray(_HEAD.size)
    if not _fill(connection, [head]):
        return None
    length, count = _check(head)
    table, data = bytearray(_SIZES.size * count), bytearray(length)
    if not _fill(connection, [table, data]):
        return None
    sizes = list(_SIZES.iter_unpack(table))
    if any(travelling > nbytes for nbytes, travelling in sizes):
        raise FrameError("a buffer of which more bytes travel than it has")
    buffers = [memory(nbytes) for nbytes, _ in sizes]
    coming = [
        buffer if travelling == nbytes else bytearray(travelling)
        for buffer, (nbytes, travelling) in zip(buffers, sizes, strict=True)
    ]
    if not _fill(connection, coming):
        return None
    for buffer, came in zip(buffers, coming, strict=True):
        if came is not buffer:
            decompress(came, memoryview(buffer).cast("B"))
    return Frame(marshal.loads(data), buffers)


def _check(head: bytes | bytearray) -> tuple[int, int]:
    """Return the length of the header and the number of buffers."""
    length, count = _HEAD.unpack(head)
    if length > LONGEST_HEADER or count > MOST_BUFFERS:
        raise FrameError(f"a frame with a header of {length} bytes and {count} buffers")
    return length, count


def _fill(connection: socket.socket, buffers: Sequence[Any]) -> bool:
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
    """The agent's end: reads frames without buffers, and does not block. Used by one thread.

    Attributes:
        ended: True once the connection has ended.
    """

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._data = bytearray()
        self.ended = False

    def read(self) -> list[Any]:
        """Return the headers of all frames that are here."""
        while not self.ended:
            try:
                data = self._connection.recv(1 << 18, socket.MSG_DONTWAIT)
            except BlockingIOError:
                break
            except OSError:
                data = b""
            self.ended = not data
            self._data += data
        return self._take()

    def _take(self) -> list[Any]:
        headers, at, data = [], 0, self._data
        while len(data) - at >= _HEAD.size:
            length, count = _check(data[at : at + _HEAD.size])
            if count:
                raise FrameError("a frame with buffers, where none are expected")
            end = at + _HEAD.size + length
            if len(data) < end:
                break
            headers.append(marshal.loads(memoryview(data)[at + _HEAD.size : end]))
            at = end
        del data[:at]
        return headers
