"""Samples as bytes, and back: the pickle of a sample, and beside it the memory of its arrays and tensors.

An encoded sample begins with the length of the pickle, the number of buffers and their lengths. The pickle and each
buffer follow, aligned to `ALIGNMENT` bytes, so that arrays and tensors can be views of the memory that holds them.

Arrays and tensors of a sample that share memory are written once, as one buffer, and share it again when they are read.
Objects that have no encoding here are pickled by their own methods.
"""

from __future__ import annotations

import ctypes
import io
import pickle
import struct
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.multiprocessing.reductions import rebuild_typed_storage

from dpex.errors import CacheError
from dpex.transport.pickling import is_plain

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

    Arrays and tensors are not copied, unless they share memory with others in the sample, or have gaps.
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
        pickler = SamplePickler(stream, keep_inside)
        pickler.dump(sample)
        if shared := _overlapping(pickler.spans):
            stream.seek(0)
            stream.truncate()
            buffers.clear()
            SamplePickler(stream, keep_inside, shared).dump(sample)
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


Span = tuple[int, int]
"""Addresses of the first byte of an array or tensor, and of the byte after its last one."""
_KEPT_ALIGNMENT = 16
"""Bytes: the alignment that the addresses of shared memory have in the buffer too. It suits all types of numbers."""


class SamplePickler(pickle.Pickler):
    """Pickle ordinary arrays and CPU tensors, and the storages of other ones, with their memory outside.

    Args:
        stream: Receives the pickle.
        buffer_callback: As of `pickle.Pickler`.
        shared: Memory that several arrays or tensors share. Those stay views of it. All others are made dense.

    Attributes:
        spans: The memory of each array and tensor in the pickle.
    """

    def __init__(
        self, stream: Any, buffer_callback: Callable[[Any], Any] | None = None, shared: Sequence[Span] = ()
    ) -> None:
        super().__init__(stream, 5, buffer_callback=buffer_callback)
        self.spans: list[Span] = []
        self._shared = [(*span, _copy_of(span)) for span in shared]

    def reducer_override(self, obj: Any) -> Any:
        """See `pickle.Pickler`."""
        if isinstance(obj, torch.UntypedStorage):
            array: Any = torch.empty(0, dtype=torch.uint8).set_(obj.cpu()).numpy()
            return _storage, (pickle.PickleBuffer(array),)
        if isinstance(obj, torch.TypedStorage):
            return rebuild_typed_storage, (obj._untyped_storage, obj.dtype)
        if type(obj) is np.ndarray:
            return self._array(obj)
        return self._tensor(obj) if is_plain(obj) else NotImplemented

    def _array(self, array: Any) -> Any:
        if array.dtype.hasobject or not array.nbytes:
            return NotImplemented
        found = self._within(array.__array_interface__["data"][0], array.shape, array.strides, array.itemsize)
        if found is None:
            return NotImplemented
        return _array_view, (*found, array.dtype, array.shape, array.strides, array.flags.writeable)

    def _tensor(self, tensor: torch.Tensor) -> Any:
        strides, size = tensor.stride(), tensor.itemsize
        if tensor.numel():
            found = self._within(tensor.data_ptr(), tensor.shape, [size * each for each in strides], size)
            if found is not None and not found[1] % size:
                return _tensor_view, (found[0], found[1] // size, tensor.dtype, tuple(tensor.shape), strides)
        order = sorted(range(tensor.dim()), key=lambda dim: -strides[dim])
        flat = tensor.permute(order).contiguous().view(-1).view(torch.uint8) if tensor.numel() else _EMPTY
        array: Any = flat.numpy()
        return _dense_tensor, (pickle.PickleBuffer(array), tensor.dtype, tuple(tensor.shape), tuple(order))

    def _within(self, address: int, shape: Any, strides: Any, itemsize: int) -> tuple[torch.UntypedStorage, int] | None:
        """Note the memory of an array. Return the copy of its shared memory, and its offset in the copy."""
        steps = [(extent - 1) * stride for extent, stride in zip(shape, strides, strict=True)]
        first = address + sum(step for step in steps if step < 0)
        self.spans.append((first, address + sum(step for step in steps if step > 0) + itemsize))
        for start, end, copy in self._shared:
            if start <= first < end:
                return copy, address - start + start % _KEPT_ALIGNMENT
        return None


def _overlapping(spans: Sequence[Span]) -> list[Span]:
    """Return the unions of spans that overlap."""
    unions: list[tuple[int, int, int]] = []
    for start, end in sorted(spans):
        if unions and start < unions[-1][1]:
            first, last, count = unions[-1]
            unions[-1] = first, max(last, end), count + 1
        else:
            unions.append((start, end, 1))
    return [(start, end) for start, end, count in unions if count > 1]


def _copy_of(span: Span) -> torch.UntypedStorage:
    start, end = span
    copy = torch.empty(start % _KEPT_ALIGNMENT + end - start, dtype=torch.uint8)
    ctypes.memmove(copy.data_ptr() + start % _KEPT_ALIGNMENT, start, end - start)
    return copy.untyped_storage()


_EMPTY = torch.empty(0, dtype=torch.uint8)


def _array_view(
    storage: torch.UntypedStorage, offset: int, dtype: Any, shape: Any, strides: Any, is_writable: bool
) -> Any:
    memory = torch.empty(0, dtype=torch.uint8).set_(storage).numpy()
    array: Any = np.ndarray(shape, dtype, memory.data, offset, strides)
    array.flags.writeable = is_writable
    return array


def _tensor_view(
    storage: torch.UntypedStorage, offset: int, dtype: torch.dtype, shape: Any, strides: Any
) -> torch.Tensor:
    return torch.empty(0, dtype=dtype).set_(storage, offset, shape, strides)


def _dense_tensor(buffer: Any, dtype: torch.dtype, shape: tuple[int, ...], order: tuple[int, ...]) -> torch.Tensor:
    """Return a tensor of that memory. ``order``: its dimensions by stride, the largest stride first."""
    if not len(buffer):
        return torch.empty(shape, dtype=dtype)
    laid_out = torch.frombuffer(_writable(buffer), dtype=dtype).view([shape[dim] for dim in order])
    return laid_out.permute([order.index(dim) for dim in range(len(order))])


def _storage(buffer: Any) -> torch.UntypedStorage:
    memory = torch.frombuffer(_writable(buffer), dtype=torch.uint8) if len(buffer) else _EMPTY.clone()
    return memory.untyped_storage()


def _writable(buffer: Any) -> Any:
    """Return the buffer, or a copy of a small one, which comes from inside the pickle."""
    return buffer if isinstance(buffer, memoryview) and not buffer.readonly else bytearray(buffer)


def is_same(one: Any, other: Any) -> bool:
    """Return True if two samples are equal bit for bit, types included."""
    return _bits(one) == _bits(other)


def _bits(value: Any) -> bytes:
    """Return a pickle that does not depend on which equal parts of the value are one object, if it has no cycles."""
    stream = io.BytesIO()
    pickler = SamplePickler(stream)
    pickler.fast = True
    try:
        pickler.dump(value)
        return stream.getvalue()
    except Exception:
        return b"".join(encoded(value).parts)
