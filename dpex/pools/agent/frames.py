"""Frames on a stream socket between the trainer and an agent: a header of plain values, and raw buffers behind it.

A frame is the length of its header and the number of its buffers (two u32, little endian), the sizes of the buffers
(u64 each), the header, and the bytes of the buffers. Headers are marshalled, so that neither end runs code of the
other's to read them; what is pickled inside them is opened by whom it is meant for.

Nothing here blocks but `receive`.
"""

from __future__ import annotations

import array
import marshal
import socket
import struct
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from dpex.errors import DpexError

_HEAD = struct.Struct("<II")
_BUFFERS_A_CALL = 512
"""Pieces handed to the system at once; the least that POSIX systems with IOV_MAX have is 1024."""
_ANCILLARY_BYTES = socket.CMSG_SPACE(16 * array.array("i").itemsize)
"""Room for more descriptors than a trainer ever hands over at once."""
LONGEST_HEADER = 1 << 28
"""Bytes; what claims to be longer is no frame, and no memory is taken for it."""
MOST_BUFFERS = 1 << 16
"""The same for the number of buffers: a batch has one for each of its tensors."""


class FrameError(DpexError, ConnectionError):
    """What came is no frame, or a descriptor cannot be handed over now."""


def send_with(connection: socket.socket, descriptor: int, header: Any) -> None:
    """Send a frame without buffers, and a descriptor with it, now. Raises OSError where that is not possible."""
    data = marshal.dumps(header)
    frame = _HEAD.pack(len(data), 0) + data
    ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [descriptor]))]
    if connection.sendmsg([frame], ancillary, socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL) != len(frame):
        raise FrameError("the agent takes no requests")


class FrameWriter:
    """Sends frames without blocking; what the socket does not take now is kept, with the memory it lies in.

    ``pending_bytes``: what is kept. Used by one thread.
    """

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._pieces: deque[memoryview] = deque()
        self.pending_bytes = 0

    def put(self, header: Any, buffers: Sequence[Any] = ()) -> None:
        """Keep a frame until `flush` sends it; ``buffers`` must not change before."""
        data = marshal.dumps(header)
        views = [memoryview(buffer).cast("B") for buffer in buffers]
        sizes = struct.pack(f"<{len(views)}Q", *(view.nbytes for view in views))
        head = memoryview(_HEAD.pack(len(data), len(views)) + sizes + data)
        for piece in (head, *views):
            if piece.nbytes:
                self._pieces.append(piece)
                self.pending_bytes += piece.nbytes

    def flush(self) -> bool:
        """Send what the socket takes; True if nothing is kept any more.

        Raises:
            OSError: The connection is gone.
        """
        pieces = self._pieces
        while pieces:
            batch = [pieces[at] for at in range(min(len(pieces), _BUFFERS_A_CALL))]
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


def receive(connection: socket.socket, memory: Callable[[int], Any]) -> tuple[Any, list[Any]] | None:
    """The next frame of a connection that blocks: its header and its buffers, or None at the end of the connection.

    ``memory(nbytes)`` gives a writable buffer of that size.

    Raises:
        FrameError: What came is no frame.
        OSError: The connection broke.
    """
    head = bytearray(_HEAD.size)
    if not _fill(connection, [head]):
        return None
    length, count = _check(head)
    sizes, header = bytearray(8 * count), bytearray(length)
    if not _fill(connection, [sizes, header]):
        return None
    buffers = [memory(size) for size in struct.unpack(f"<{count}Q", sizes)]
    if not _fill(connection, buffers):
        return None
    return marshal.loads(header), buffers


def _check(head: bytes | bytearray) -> tuple[int, int]:
    length, count = _HEAD.unpack(head)
    if length > LONGEST_HEADER or count > MOST_BUFFERS:
        raise FrameError(f"a frame with a header of {length} bytes and {count} buffers")
    return length, count


def _fill(connection: socket.socket, buffers: Sequence[Any]) -> bool:
    """Fill the buffers, in one system call as a rule; False if the connection ends before."""
    views = [view for buffer in buffers if (view := memoryview(buffer).cast("B")).nbytes]
    at = 0
    while at < len(views):
        came = connection.recvmsg_into(views[at : at + _BUFFERS_A_CALL], 0, socket.MSG_WAITALL)[0]
        if not came:
            return False
        while at < len(views) and came >= views[at].nbytes:
            came -= views[at].nbytes
            at += 1
        if came:
            views[at] = views[at][came:]
    return True


class FrameReader:
    """Reads frames from a connection without blocking, for small frames without buffers: the agent's end.

    ``descriptors``: those that came with frames, in their order. Used by one thread.
    """

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._data = bytearray()
        self._ancillary_bytes = _ANCILLARY_BYTES if connection.family == socket.AF_UNIX else 0
        self.descriptors: deque[int] = deque()
        self.ended = False

    def read(self) -> list[Any]:
        """The headers of all frames that are here; sets ``ended`` at the end of the connection."""
        while not self.ended:
            try:
                data = self._receive()
            except BlockingIOError:
                break
            except OSError:
                data = b""
            self.ended = not data
            self._data += data
        return self._take()

    def _receive(self) -> bytes:
        """Not by `socket.recv_fds`, which forgets its flags before Python 3.12."""
        data, ancillary, _, _ = self._connection.recvmsg(1 << 18, self._ancillary_bytes, socket.MSG_DONTWAIT)
        for level, kind, found in ancillary:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                fds = array.array("i")
                fds.frombytes(found[: len(found) - len(found) % fds.itemsize])
                self.descriptors += fds
        return data

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
