"""Samples as bytes, and back: the pickle of a sample, and beside it the memory of its arrays and tensors.

An encoded sample begins with the length of the pickle, the number of buffers and their lengths. The pickle and each
buffer follow, aligned to `ALIGNMENT` bytes, so that arrays and tensors can be views of the memory that holds them.
"""

from __future__ import annotations

import io
import pickle
import struct
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from dpex.errors import CacheError

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
    """Encode a sample. Arrays and tensors are not copied. Raises CacheError for objects that cannot be pickled."""
    stream = io.BytesIO()
    buffers: list[memoryview] = []

    def keep_inside(buffer: pickle.PickleBuffer) -> bool:
        raw = buffer.raw()
        if raw.nbytes < _OUTSIDE_BYTES:
            return True
        buffers.append(raw)
        return False

    try:
        SamplePickler(stream, 5, buffer_callback=keep_inside).dump(sample)
    except Exception as error:
        raise CacheError(f"a sample with a {type(sample).__qualname__} cannot be cached: {error}") from error
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
    """Return the sample in ``memory``, a buffer that begins aligned. Raises ValueError if it is shorter than it says.

    Arrays and tensors are views of the memory, and writable if it is.
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
    """Pickle ordinary CPU tensors with their memory outside, and other tensors as torch pickles them."""

    def reducer_override(self, obj: Any) -> Any:
        """See `pickle.Pickler`."""
        if type(obj) is not torch.Tensor or obj.layout is not torch.strided or obj.device.type != "cpu":
            return NotImplemented
        if obj.requires_grad or obj.is_quantized or obj.is_conj() or obj.is_neg():
            return NotImplemented
        strides = obj.stride()
        order = sorted(range(obj.dim()), key=lambda dim: -strides[dim])
        flat = obj.permute(order).contiguous().view(-1).view(torch.uint8) if obj.numel() else _EMPTY
        array: Any = flat.numpy()
        return _tensor, (pickle.PickleBuffer(array), obj.dtype, tuple(obj.shape), tuple(order))


_EMPTY = torch.empty(0, dtype=torch.uint8)


def _tensor(buffer: Any, dtype: torch.dtype, shape: tuple[int, ...], order: tuple[int, ...]) -> torch.Tensor:
    """Return a tensor of that memory. ``order``: its dimensions by stride, the largest stride first."""
    if not len(buffer):
        return torch.empty(shape, dtype=dtype)
    if not isinstance(buffer, memoryview) or buffer.readonly:  # a small one, from inside the pickle
        buffer = bytearray(buffer)
    laid_out = torch.frombuffer(buffer, dtype=dtype).view([shape[dim] for dim in order])
    return laid_out.permute([order.index(dim) for dim in range(len(order))])


# -- comparing ---------------------------------------------------------------------------------------------------------


def is_same(one: Any, other: Any) -> bool:
    """Return True if two samples are equal bit for bit, types included."""
    if type(one) is not type(other):
        return False
    if isinstance(one, torch.Tensor):
        return _kind_of(one) == _kind_of(other) and _is_same_tensor(one.detach(), other.detach())
    if isinstance(one, np.ndarray) and not one.dtype.hasobject:
        return (one.dtype, one.shape) == (other.dtype, other.shape) and one.tobytes() == other.tobytes()
    if isinstance(one, Mapping):
        return list(one) == list(other) and all(is_same(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(is_same, one, other))
    return _bytes(one) == _bytes(other) or _is_equal(one, other)


def _kind_of(tensor: torch.Tensor) -> tuple[Any, ...]:
    return tensor.dtype, tensor.shape, tensor.layout, tensor.requires_grad


def _is_same_tensor(one: torch.Tensor, other: torch.Tensor) -> bool:
    if one.layout is not torch.strided:
        one, other = one.to_dense(), other.to_dense()
    if one.is_quantized or not one.numel():
        return bool(torch.equal(one, other))
    bits = [each.cpu().resolve_conj().resolve_neg().contiguous().view(-1).view(torch.uint8) for each in (one, other)]
    return bool(torch.equal(*bits))


def _bytes(value: Any) -> bytes:
    return b"".join(bytes(part) for part in encoded(value).parts)


def _is_equal(one: Any, other: Any) -> bool:
    """Return True if objects of the same class are equal although their pickles differ.

    Pickles of equal objects differ where one of them has a part twice and the other two equal parts.
    """
    if isinstance(one, (set, frozenset)):
        return bool(one == other)
    attributes = getattr(one, "__dict__", None)
    try:
        return bool(attributes) and is_same(attributes, other.__dict__)
    except CacheError:  # an attribute cannot be pickled, although the object can
        return False
