"""Buffers made smaller for their way over a network, by Zstandard (the extra ``dpex[compression]``).

Zstandard works without the interpreter's lock, decompresses into memory that is given to it, and its negative levels
are about as fast as LZ4: one library serves slow and fast links. Each buffer is one Zstandard frame with a checksum.
What is decompressed is exactly the buffer that was compressed, or an error.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

from dpex.errors import DpexError

PIECE_BYTES = 256 << 10
"""What is compressed at once: a third of a millisecond, after which the connection can be served."""
READ_BYTES = 256 << 10
"""What is read from the connection at once, at most; it stays in the cache of a CPU."""
MOST_WINDOW_BYTES = 8 << 20
"""Memory of a decompressor, whatever a frame asks for; the levels that are used here need half a megabyte."""


class CompressionError(DpexError, ValueError):
    """What came cannot be decompressed: it is damaged, of another length than was said, or Zstandard is missing."""


class Compressed(NamedTuple):
    """A buffer of ``nbytes``, compressed, in pieces."""

    nbytes: int
    pieces: list[bytes]

    @property
    def travelling_bytes(self) -> int:
        """The length of what travels."""
        return sum(map(len, self.pieces))


@cache
def _zstandard() -> Any | None:
    try:
        return importlib.import_module("zstandard")
    except ImportError:
        return None


def can_compress() -> bool:
    """Whether Zstandard is installed here."""
    return _zstandard() is not None


class Compressor:
    """Compresses buffers at one level. Used by one thread; Zstandard must be installed."""

    def __init__(self, level: int) -> None:
        library = _zstandard()
        assert library is not None, "Zstandard is not installed"
        self._compressor = library.ZstdCompressor(level=level, write_checksum=True)

    def compress(self, data: memoryview, after_piece: Callable[[], None]) -> Compressed:
        """``data``, compressed; ``after_piece`` is called now and then."""
        stream = self._compressor.compressobj(size=data.nbytes)
        pieces = []
        for at in range(0, data.nbytes, PIECE_BYTES):
            pieces.append(stream.compress(data[at : at + PIECE_BYTES]))
            after_piece()
        pieces.append(stream.flush())
        return Compressed(data.nbytes, [piece for piece in pieces if piece])


_END_BYTE = b"\1"
"""See `_end_mark`."""


@cache
def _end_mark() -> bytes:
    """A Zstandard frame of one byte, which the decompressor is given behind a buffer.

    The decompressor returns all bytes of a frame before it has seen the checksum at its end, and does not say where a
    frame ends. This byte comes out behind the buffer, and nothing else, only if the frame was whole.
    """
    library = _zstandard()
    assert library is not None, "Zstandard is not installed"
    mark: bytes = library.ZstdCompressor().compress(_END_BYTE)
    return mark


class _Source:
    """The next ``left`` bytes of whatever ``read`` reads from, as the decompressor wants them, and the end mark."""

    def __init__(self, read: Callable[[int], bytes], left: int) -> None:
        self._read = read
        self._mark = _end_mark()
        self.left = left
        self.ended = False

    def read(self, size: int) -> bytes:
        if self.ended:
            return b""
        if not self.left:
            mark, self._mark = self._mark, b""
            return mark
        data = self._read(min(size, self.left))
        self.left -= len(data)
        self.ended = not data
        return data


def decompress(read: Callable[[int], bytes], travelling_bytes: int, into: memoryview) -> bool:
    """Decompress into ``into``, and never beyond it, the next so many bytes that ``read(most)`` gives.

    Returns:
        False if these bytes end before.

    Raises:
        CompressionError: They are not exactly one compressed buffer of that size.
    """
    library = _zstandard()
    if library is None:
        raise CompressionError("a compressed buffer came, and zstandard is not installed here")
    source = _Source(read, travelling_bytes)
    decompressor = library.ZstdDecompressor(max_window_size=MOST_WINDOW_BYTES)
    try:
        with decompressor.stream_reader(source, READ_BYTES, read_across_frames=True) as stream:
            found = stream.readinto(into)
            behind = stream.read(len(_END_BYTE) + 1)
    except library.ZstdError as error:
        raise CompressionError(f"a compressed buffer is damaged: {error}") from error
    if source.ended:
        return False
    if found != into.nbytes or behind != _END_BYTE or source.left:
        raise CompressionError(f"a compressed buffer is not one of {into.nbytes} bytes, as was said")
    return True
