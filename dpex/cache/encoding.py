"""Encode samples as bytes and decode them: the pickle of a sample, followed by the memory of its arrays and tensors.

An encoded sample begins with the length of the pickle, the number of buffers and their lengths. The pickle and each
buffer follow, aligned to `ALIGNMENT` bytes, so that arrays and tensors can be views of the memory that holds them.

Each array and tensor has a buffer of its own. Objects that have no encoding here are pickled by their own methods.
"""

from __future__ import annotations

import io
import pickle
import struct
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from dpex.errors import CacheError
from dpex.transport.pickling import is_plain, reduce_storage

ALIGNMENT = 64
"""Bytes. It suits all types of NumPy and torch, and the vector instructions of today's CPUs."""
_OUTSIDE_BYTES = 512
"""A buffer shorter than this stays inside the pickle."""
_HEAD = struct.Struct("<QQ")


class Encoded(NamedTuple):
    """A sample as consecutive pieces of memory.

    Attributes:
        parts: The pieces. They may view arrays of the sample, so they are valid until the sample changes.
        nbytes: Bytes of all pieces.
    """

    parts: Sequence[bytes | memoryview]
    nbytes: int


def encoded(sample: Any) -> Encoded:
    """Encode a sample. Raises CacheError for objects that cannot be pickled.

    Arrays and tensors are not copied, unless they have gaps.
    """
    stream = io.BytesIO()
    buffers: list[memoryview] = []

    def keep_inside(buffer: pickle.PickleBuffer) -> bool:
        raw = buffer.raw()
        if raw.nbytes < _OUTSIDE_BYTES:
            return True
        buffers.append(raw)
        return False

    try:
        SamplePickler(stream, keep_inside).dump(sample)
    except Exception as error:
        try:
            stream, buffers = io.BytesIO(pickle.dumps(sample, 5)), []
        except Exception:
            raise CacheError(f"a sample cannot be cached: {error}") from error
    pickled = stream.getvalue()
    head = _HEAD.pack(len(pickled), len(buffers)) + struct.pack(f"<{len(buffers)}Q", *(each.nbytes for each in buffers))
    parts: list[bytes | memoryview] = []
    nbytes = 0
    pieces: tuple[bytes | memoryview, ...] = (head, pickled, *buffers)
    for each in pieces:
        gap = -nbytes % ALIGNMENT
        if gap:
            parts.append(bytes(gap))
        parts.append(each)
        nbytes += gap + len(each)
    return Encoded(parts, nbytes)


def decoded(memory: Any) -> Any:
    """Return the sample in ``memory``, a buffer with an aligned start. Raises ValueError if the sample was cut off.

    Arrays and tensors are views of the memory, and are writable if the memory is.
    """
    view = memoryview(memory).cast("B")
    if len(view) < _HEAD.size:
        raise ValueError(f"an encoded sample has at least {_HEAD.size} bytes, not {len(view)}")
    pickled_bytes, count = _HEAD.unpack_from(view)
    end = _HEAD.size + 8 * count
    if len(view) < end:
        raise ValueError(f"{count} buffers were announced in a sample of {len(view)} bytes")
    lengths = struct.unpack_from(f"<{count}Q", view, _HEAD.size)
    pieces = []
    for length in (pickled_bytes, *lengths):
        start = end + -end % ALIGNMENT
        end = start + length
        pieces.append(view[start:end])
    if end > len(view):
        raise ValueError(f"an encoded sample of {end} bytes was cut off after {len(view)}")
    return pickle.loads(pieces[0], buffers=pieces[1:])


class SamplePickler(pickle.Pickler):
    """Pickles plain CPU tensors without gaps, and others by their storages. ``buffer_callback`` gets their memory."""

    def __init__(self, stream: Any, buffer_callback: Callable[[Any], Any] | None = None) -> None:
        super().__init__(stream, 5, buffer_callback=buffer_callback)

    def reducer_override(self, obj: Any) -> Any:
        if not is_plain(obj):
            return reduce_storage(obj)
        strides = obj.stride()
        order = sorted(range(obj.dim()), key=lambda dim: -strides[dim])
        flat: Any = obj.permute(order).contiguous().view(-1).view(torch.uint8) if obj.numel() else _EMPTY
        return _dense_tensor, (pickle.PickleBuffer(flat.numpy()), obj.dtype, tuple(obj.shape), tuple(order))


_EMPTY = torch.empty(0, dtype=torch.uint8)


def _dense_tensor(buffer: Any, dtype: torch.dtype, shape: tuple[int, ...], order: tuple[int, ...]) -> torch.Tensor:
    """Return a tensor in the memory of ``buffer``. ``order``: its dimensions by stride, the largest stride first."""
    if not len(buffer):
        return torch.empty(shape, dtype=dtype)
    laid_out = torch.frombuffer(_writable(buffer), dtype=dtype).view([shape[dim] for dim in order])
    return laid_out.permute([order.index(dim) for dim in range(len(order))])


def _writable(buffer: Any) -> Any:
    """Return the buffer, or a writable copy of a small buffer that was inside the pickle."""
    return buffer if isinstance(buffer, memoryview) and not buffer.readonly else bytearray(buffer)


def is_same(one: Any, other: Any) -> bool:
    """Return True if two samples are equal bit for bit, types included."""
    return _bits(one) == _bits(other)


def _bits(value: Any) -> bytes:
    """Return a pickle without memo, so that shared and equal parts give the same bytes; with memo if it has cycles."""
    stream = io.BytesIO()
    pickler = SamplePickler(stream)
    pickler.fast = True
    try:
        pickler.dump(value)
        return stream.getvalue()
    except Exception:
        return b"".join(encoded(value).parts)
