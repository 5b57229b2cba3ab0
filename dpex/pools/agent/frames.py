"""Frames on a stream socket between the trainer and an agent: a header of plain values, and raw buffers behind it.

A frame is the length of its header and the number of its buffers (two u32, little endian), the sizes of the buffers
(u64 each), the header, and the bytes of the buffers. Headers are marshalled, so that neither end runs code of the
other's to read them; what is pickled inside them is opened by whom it is meant for.

In a frame of which a buffer is compressed (see `dpex.transport.compression`) the highest bit of the number of buffers
is set, and behind their sizes stand as many sizes again: what each is compressed to, or 0. A frame without such a
buffer is the same, byte for byte, whether its ends can compress or not.

Where there are further connections, the buffers of a large frame travel over these (see `dpex.pools.agent.striping`);
over how many stands in eight other bits of the number of buffers.

Nothing here blocks but `receive`.
"""

from __future__ import annotations

import array
import io
import marshal
import socket
import struct
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

from dpex.errors import DpexError
from dpex.pools.agent.striping import PIECES_A_CALL, STRIPED_FROM_BYTES, receive_split, split
from dpex.transport.compression import Compressed, CompressionError, decompress

_HEAD = struct.Struct("<II")
_SIZE_BYTES = 8
"""Of a size: a u64."""
_ANCILLARY_BYTES = socket.CMSG_SPACE(16 * array.array("i").itemsize)
"""Room for more descriptors than a trainer ever hands over at once."""
LONGEST_HEADER = 1 << 28
"""Bytes; what claims to be longer is no frame, and no memory is taken for it."""
MOST_BUFFERS = 1 << 16
"""The same for the number of buffers: a batch has one for each of its tensors."""
_EXTRA_SHIFT, _MOST_EXTRA = 20, 255
"""Where the number of further connections stands in that of the buffers, and the largest that there is room for."""
_COMPRESSED = 1 << 31
"""The bit that says that buffers are compressed."""


class FrameError(DpexError, ConnectionError):
    """What came is no frame, or a descriptor cannot be handed over now."""


def send_with(connection: socket.socket, descriptor: int, header: Any) -> None:
    """Send a frame without buffers, and a descriptor with it, now. Raises OSError where that is not possible."""
    data = marshal.dumps(header)
    frame = _HEAD.pack(len(data), 0) + data
    ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [descriptor]))]
    if connection.sendmsg([frame], ancillary, socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL) != len(frame):
        raise FrameError("the agent takes no requests")


class Outbox:
    """Sends bytes over a connection without blocking; what it does not take now is kept, with the memory it lies in."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self._pieces: deque[memoryview] = deque()
        self.pending_bytes = 0

    def put(self, piece: memoryview) -> None:
        """Keep that until `flush` sends it."""
        if piece.nbytes:
            self._pieces.append(piece)
            self.pending_bytes += piece.nbytes

    def flush(self) -> bool:
        """Send what the socket takes; True if nothing is kept any more. Raises OSError if the connection is gone."""
        pieces = self._pieces
        while pieces:
            batch = [pieces[at] for at in range(min(len(pieces), PIECES_A_CALL))]
            try:
                sent = self.connection.sendmsg(batch, (), socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
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


class FrameWriter:
    """Sends frames without blocking; what the connections do not take now is kept. Used by one thread."""

    def __init__(self, connection: socket.socket) -> None:
        self._outbox = Outbox(connection)
        self._extra: list[Outbox] = []
        self._former: list[Outbox] = []

    @property
    def pending_bytes(self) -> int:
        """What is kept, in bytes as they travel: of a compressed buffer those that it is compressed to."""
        return sum(outbox.pending_bytes for outbox in self._outboxes())

    def _outboxes(self) -> list[Outbox]:
        return [self._outbox, *self._extra, *self._former] if self._extra or self._former else [self._outbox]

    def spread(self, extra: Sequence[socket.socket]) -> None:
        """Have the buffers of large frames travel over these connections from now on; over the first one, if none."""
        known = {outbox.connection: outbox for outbox in (*self._extra, *self._former)}
        self._extra = [known.pop(one) if one in known else Outbox(one) for one in extra]
        self._former = [outbox for outbox in known.values() if outbox.pending_bytes]

    def blocked(self) -> list[socket.socket]:
        """Connections for which something is kept."""
        return [outbox.connection for outbox in self._outboxes() if outbox.pending_bytes]

    def put(self, header: Any, buffers: Sequence[Any] = ()) -> None:
        """Keep a frame until `flush` sends it; ``buffers``, of which some may be `Compressed`, must not change
        before."""
        data = marshal.dumps(header)
        parts = [_parts(buffer) for buffer in buffers]
        sizes, flags = [part.nbytes for part in parts], 0
        if any(part.travelling_bytes for part in parts):
            sizes, flags = [*sizes, *(part.travelling_bytes for part in parts)], _COMPRESSED
        pieces = [piece for part in parts for piece in part.pieces]
        extra = self._extra if sum(piece.nbytes for piece in pieces) >= STRIPED_FROM_BYTES else []
        head = _HEAD.pack(len(data), len(parts) | flags | len(extra) << _EXTRA_SHIFT)
        self._outbox.put(memoryview(head + struct.pack(f"<{len(sizes)}Q", *sizes) + data))
        shares = split(pieces, len(extra)) if extra else [pieces]
        for outbox, share in zip(extra or [self._outbox], shares, strict=True):
            for piece in share:
                outbox.put(piece)

    def flush(self) -> bool:
        """Send what the connections take; True if nothing is kept any more.

        Raises:
            OSError: A connection is gone.
        """
        if not self._extra and not self._former:
            return self._outbox.flush()
        for outbox in self._outboxes():
            outbox.flush()
        self._former = [outbox for outbox in self._former if outbox.pending_bytes]
        return not self.pending_bytes


class _Parts(NamedTuple):
    """A buffer as it travels: its size, what it is compressed to or 0, and its bytes."""

    nbytes: int
    travelling_bytes: int
    pieces: list[memoryview]


def _parts(buffer: Any) -> _Parts:
    if type(buffer) is Compressed:
        return _Parts(buffer.nbytes, buffer.travelling_bytes, [memoryview(piece) for piece in buffer.pieces])
    view = memoryview(buffer).cast("B")
    return _Parts(view.nbytes, 0, [view])


class Frame(NamedTuple):
    """What came: its header, its buffers, and how many bytes less travelled than these have."""

    header: Any
    buffers: list[Any]
    saved_bytes: int


def receive(
    connection: socket.socket,
    memory: Callable[[int], Any],
    check: Callable[[Any, Sequence[int]], None] | None = None,
    further: Mapping[int, socket.socket] = MappingProxyType({}),
) -> Frame | None:
    """The next frame of a connection that blocks, or None at the end of the connection.

    ``further``: connections from number 1 on, over which the buffers of large frames may come.

    ``memory(nbytes)`` gives a writable buffer of that size. What is compressed is decompressed into it as it comes, so
    that little may become much; before any memory is taken for such a frame, ``check(header, sizes)`` raises FrameError
    unless its buffers are as large as they should be.

    Raises:
        FrameError: What came is no frame.
        OSError: The connection broke.
    """
    head = bytearray(_HEAD.size)
    if not _fill(connection, [head]):
        return None
    length, count, is_compressed, split_over = _check(head)
    table, data = bytearray(_SIZE_BYTES * count * (1 + is_compressed)), bytearray(length)
    if not _fill(connection, [table, data]):
        return None
    numbers, header = struct.unpack(f"<{len(table) // _SIZE_BYTES}Q", table), marshal.loads(data)
    sizes, travelling = numbers[:count], numbers[count:]
    if is_compressed and check is not None:
        check(header, sizes)
    buffers = [memory(size) for size in sizes]
    if split_over:
        is_whole = _fill_split(_first(further, split_over), buffers, travelling)
    elif is_compressed:
        is_whole = _fill_compressed(connection, buffers, travelling)
    else:
        is_whole = _fill(connection, buffers)
    if not is_whole:
        return None
    saved_bytes = sum(size - nbytes for size, nbytes in zip(sizes, travelling, strict=False) if nbytes)
    return Frame(header, buffers, saved_bytes)


def _check(head: bytes | bytearray) -> tuple[int, int, bool, int]:
    """The length of a header, the number of buffers, whether any of them is compressed, and over how many further
    connections they travel."""
    length, number = _HEAD.unpack(head)
    count, is_compressed = number & ~_COMPRESSED & ~(_MOST_EXTRA << _EXTRA_SHIFT), bool(number & _COMPRESSED)
    if length > LONGEST_HEADER or count > MOST_BUFFERS:
        raise FrameError(f"a frame with a header of {length} bytes and {count} buffers")
    return length, count, is_compressed, number >> _EXTRA_SHIFT & _MOST_EXTRA


def _first(further: Mapping[int, socket.socket], count: int) -> list[socket.socket]:
    found = [connection for number in range(1, count + 1) if (connection := further.get(number)) is not None]
    if len(found) < count:
        raise FrameError(f"buffers over {count} further connections, of which {len(found)} are here")
    return found


def _fill_split(connections: Sequence[socket.socket], buffers: Sequence[Any], compressed: Sequence[int]) -> bool:
    """As `_fill`, over several connections; what comes compressed is decompressed once it is here."""
    came = [bytearray(nbytes) if nbytes else None for nbytes in compressed or [0] * len(buffers)]
    views = [memoryview(one or buffer).cast("B") for one, buffer in zip(came, buffers, strict=True)]
    if not receive_split(connections, views):
        return False
    for buffer, one in zip(buffers, came, strict=True):
        if one is not None:
            _decompress(io.BytesIO(one).read, len(one), buffer)
    return True


def _fill_compressed(connection: socket.socket, buffers: Sequence[Any], compressed: Sequence[int]) -> bool:
    """As `_fill`, where some buffers come compressed, to so many bytes."""
    plain: list[Any] = []
    for buffer, nbytes in zip(buffers, compressed, strict=True):
        if not nbytes:
            plain.append(buffer)
            continue
        if not (_fill(connection, plain) and _decompress(connection.recv, nbytes, buffer)):
            return False
        plain.clear()
    return _fill(connection, plain)


def _decompress(read: Callable[[int], bytes], nbytes: int, buffer: Any) -> bool:
    try:
        return decompress(read, nbytes, memoryview(buffer).cast("B"))
    except CompressionError as error:
        raise FrameError(str(error)) from error


def _fill(connection: socket.socket, buffers: Sequence[Any]) -> bool:
    """Fill the buffers, in one system call as a rule; False if the connection ends before."""
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
            length, count, *_ = _check(data[at : at + _HEAD.size])
            if count:
                raise FrameError("a frame with buffers, where none are expected")
            end = at + _HEAD.size + length
            if len(data) < end:
                break
            headers.append(marshal.loads(memoryview(data)[at + _HEAD.size : end]))
            at = end
        del data[:at]
        return headers
