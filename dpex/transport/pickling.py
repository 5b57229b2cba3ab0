"""Pickle batches and datasets, with their memory in buffers outside the pickle, and load them again.

A batch is a pickle with buffers. Python's protocol 5 keeps the memory of arrays out of the pickle. This module does the
same for all storages of PyTorch: plain tensors, and tensors that `torch.Tensor.__reduce_ex__` reduces to plain tensors
(sparse, quantised and nested tensors, parameters, subclasses with their attributes). So the pickle and its buffers
contain the whole batch. In contrast, the reductions of `torch.multiprocessing` leave a descriptor in the sending
process until the batch is read. Tensors on other devices than the CPU use these reductions.

dpex sends only those *spans* of a storage that plain tensors of the batch view. The spans form one new storage, so
views that shared memory still share it, and overlapping views still overlap. The storage of any other tensor is sent
whole, as by torch's own workers.

For a process on the same machine, a class that a script or a notebook defines is pickled by its name, even in a worker
that has not imported the script.

One pickle (protocol 5, cloudpickle) contains the dataset, the collate function and the init function, so objects that
they share stay shared, and a method of the dataset stays bound to it. For workers on other machines, arrays and the
storages of CPU tensors are raw buffers outside the pickle, which all workers of a node can share.

For other machines, Ray's own copy of cloudpickle makes the pickle, because users register modules and types with it.
This module need not import Ray, because a process connects to Ray before it sends a pickle to another machine.
"""

from __future__ import annotations

import io
import pickle
import sys
import threading
from bisect import bisect_right
from collections import ChainMap
from collections.abc import Sequence
from functools import cache
from multiprocessing.context import get_spawning_popen
from multiprocessing.reduction import ForkingPickler
from operator import attrgetter
from types import FunctionType
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
import torch.multiprocessing
from torch.multiprocessing.reductions import rebuild_typed_storage, reduce_tensor

from dpex._torch import DisableTorchFunctionSubclass, rebuild_from_type, rebuild_sparse_tensor
from dpex.errors import ShippingError
from dpex.transport.unpicklable import explain

Bytes = np.ndarray[Any, np.dtype[np.uint8]]

SPAN_ALIGN = 64
"""A sent span keeps its offset modulo this many bytes, so that its elements stay aligned. Spans that are at most this
far apart are merged."""
_OUTSIDE_BYTES = 1024
"""A dataset's buffer stays inside the pickle if it has fewer bytes than this."""


# -- batches -----------------------------------------------------------------------------------------------------------


def is_plain(value: Any) -> bool:
    """Return True for a CPU tensor that consists of memory, dtype, shape and strides, and nothing else."""
    return (
        type(value) is torch.Tensor
        and value.layout is torch.strided
        and value.is_cpu
        and not value.requires_grad
        and not value.is_quantized
        and not value.is_conj()
        and not value.is_neg()
        and not value.is_nested
        and not value._backward_hooks
        and not value.__dict__
    )


class BufferSpan(NamedTuple):
    """Bytes ``start`` to ``end`` of a storage, which are sent to offset ``at`` of a new storage."""

    start: int
    end: int
    at: int


class Memory:
    """A storage that is being pickled, and the spans of it that tensors view."""

    def __init__(self, storage: torch.UntypedStorage) -> None:
        self.storage: torch.UntypedStorage = storage
        self._spans: list[tuple[int, int]] = []
        self.marker: bytearray = bytearray(1)
        """Placeholder in the pickle for the storage's memory."""

    def __reduce__(self) -> tuple[Any, ...]:
        return _as_loaded, (pickle.PickleBuffer(self.marker),)

    def need(self, storage: torch.UntypedStorage, start: int, end: int) -> None:
        """Add a span that a tensor views. ``storage`` has the same address as ``self.storage``, but may be longer."""
        if storage.nbytes() > self.storage.nbytes():
            self.storage = storage
        self._spans.append((start, end))

    def pieces(self) -> list[BufferSpan]:
        """Return the spans, merged and sorted, each with its offset in the new storage."""
        pieces: list[BufferSpan] = []
        for start, end in sorted(self._spans):
            last = pieces[-1] if pieces else None
            if last is not None and start <= last.end + SPAN_ALIGN:
                pieces[-1] = last._replace(end=max(end, last.end))
            else:
                free = last.at + last.end - last.start if last is not None else 0
                pieces.append(BufferSpan(start, end, free + (start - free) % SPAN_ALIGN))
        return pieces

    def array(self) -> Bytes:
        whole = torch.empty(0, dtype=torch.uint8, device="cpu")
        return whole.set_(self.storage, 0, (self.storage.nbytes(),), (1,)).numpy()


Buffer = Memory | Bytes
"""A buffer beside a pickle: a storage, or the bytes of an array."""


class BufferTable:
    """The buffers beside the pickle of a batch. Picklers call `add_buffer` and `reduce`.

    The table refers to its `Memory` objects, and they do not refer to the table. A cycle of references would keep
    storages, and so slots, until the next garbage collection.
    """

    def __init__(self) -> None:
        self.buffers: list[Buffer] = []
        self._by_address: dict[int, Memory] = {}
        self._by_marker: dict[int, Memory] = {}

    def add_buffer(self, buffer: pickle.PickleBuffer) -> None:
        raw = buffer.raw()
        memory = self._by_marker.get(id(raw.obj))
        self.buffers.append(np.frombuffer(raw, np.uint8) if memory is None else memory)

    def reduce(self, obj: Any) -> Any:
        """Return the reduction of a tensor or storage on the CPU; NotImplemented for any other object."""
        if isinstance(obj, torch.Tensor):
            return self._tensor(obj) if obj.device.type == "cpu" else NotImplemented
        if isinstance(obj, torch.UntypedStorage):
            return self._whole(obj) if obj.device.type == "cpu" else NotImplemented
        if isinstance(obj, torch.TypedStorage) and obj._untyped_storage.device.type == "cpu":
            return rebuild_typed_storage, (obj._untyped_storage, obj.dtype)
        return NotImplemented

    def _tensor(self, tensor: torch.Tensor) -> Any:
        if is_plain(tensor):
            shape, stride, offset = tuple(tensor.shape), tensor.stride(), int(tensor.storage_offset())
            memory = self._view(tensor.untyped_storage(), tensor.dtype, offset, shape, stride)
            return plain_view, (memory, tensor.dtype, offset, shape, stride)
        if tensor.requires_grad and not tensor.is_leaf and type(tensor) in (torch.Tensor, torch.nn.Parameter):
            return reduce_tensor(tensor)  # raises an error that names the remedy
        reduced = tensor.__reduce_ex__(pickle.HIGHEST_PROTOCOL)
        if not isinstance(reduced, tuple) or len(reduced) != 2:
            return reduced
        rebuild, args = reduced
        if rebuild is rebuild_sparse_tensor:
            return rebuild_sparse, (*args, tensor.requires_grad)
        if rebuild is rebuild_from_type and tensor.is_leaf:
            rebuild_base, kind, base_args, state = args
            if base_args[_REQUIRES_GRAD : _REQUIRES_GRAD + 1] == (True,):
                base_args = (*base_args[:_REQUIRES_GRAD], False, *base_args[_REQUIRES_GRAD + 1 :])
                return rebuild_leaf, (rebuild_base, kind, base_args, state)
        return reduced

    def _view(self, storage: torch.UntypedStorage, dtype: torch.dtype, offset: int, shape: Any, stride: Any) -> Memory:
        memory = self._memory(storage)
        if 0 not in shape:
            last = offset + sum((extent - 1) * step for extent, step in zip(shape, stride, strict=True))
            memory.need(storage, offset * dtype.itemsize, (last + 1) * dtype.itemsize)
        return memory

    def _whole(self, storage: torch.UntypedStorage) -> Any:
        memory = self._memory(storage)
        if storage.nbytes():
            memory.need(storage, 0, storage.nbytes())
        return whole_storage, (memory,)

    def _memory(self, storage: torch.UntypedStorage) -> Memory:
        """Return the `Memory` of a storage. Storages at one address share it; an empty storage gets a new one."""
        address = storage.data_ptr()
        known = self._by_address.get(address) if address else None
        if known is None:
            known = self._by_address[address] = Memory(storage)
            self._by_marker[id(known.marker)] = known
        return known


def dump_batch(batch: Any, stream: io.BytesIO, memories: BufferTable) -> None:
    """Pickle a batch to ``stream`` for a trainer on the same machine, and add its memory to ``memories``."""
    _BatchPickler(stream, memories).dump(batch)


class _BatchPickler(ForkingPickler):
    """Uses the reductions of `multiprocessing` for objects that are not PyTorch's."""

    def __init__(self, stream: io.BytesIO, memories: BufferTable) -> None:
        super().__init__(stream, pickle.HIGHEST_PROTOCOL, True, memories.add_buffer)
        self._memories = memories

    def reducer_override(self, obj: Any) -> Any:
        reduced = self._memories.reduce(obj)
        return _by_name(obj) if reduced is NotImplemented else reduced


class _ErrorPickler(pickle.Pickler):
    def reducer_override(self, obj: Any) -> Any:
        return _by_name(obj)


def dump_error(error: Any) -> bytes:
    """Pickle a wrapped exception for a trainer on the same machine."""
    stream = io.BytesIO()
    _ErrorPickler(stream, pickle.HIGHEST_PROTOCOL).dump(error)
    return stream.getvalue()


def _by_name(obj: Any) -> Any:
    """Reduce a class or function of the script to its name. pickle itself would look the name up in this process."""
    if not isinstance(obj, (type, FunctionType)) or obj.__module__ != "__main__" or "<" in obj.__qualname__:
        return NotImplemented
    return _of_script, (obj.__qualname__,)


def _of_script(name: str) -> Any:
    return attrgetter(name)(sys.modules["__main__"])


# -- batches that arrived ----------------------------------------------------------------------------------------------


class LoadedMemory:
    """A received storage, which holds only the sent spans of the worker's storage.

    ``pieces``: For each span, its start and its end in the worker's storage and its start in ``storage``, in bytes.
    """

    def __init__(self, storage: torch.UntypedStorage, pieces: Sequence[tuple[int, int, int]]) -> None:
        self.storage = storage
        self._starts = [start for start, _, _ in pieces]
        self._shifts = [at - start for start, _, at in pieces]

    def element(self, dtype: torch.dtype, offset: int) -> int:
        """Return the new offset of a view whose old offset is ``offset``, in elements; 0 if all spans begin later."""
        start = offset * dtype.itemsize
        span = bisect_right(self._starts, start) - 1
        return (start + self._shifts[span]) // dtype.itemsize if span >= 0 else 0


def _as_loaded(memory: Any) -> Any:
    """Return ``memory``. A pickle calls this once per storage, so that all views of it refer to one `LoadedMemory`."""
    return memory


def whole_storage(memory: LoadedMemory) -> torch.UntypedStorage:
    return memory.storage


def plain_view(memory: LoadedMemory, dtype: torch.dtype, offset: int, shape: Any, stride: Any) -> torch.Tensor:
    return torch.empty(0, dtype=dtype, device="cpu").set_(memory.storage, memory.element(dtype, offset), shape, stride)


_REQUIRES_GRAD = 4
"""Index of the argument ``requires_grad`` of torch's `_rebuild_tensor_v2`."""


def rebuild_leaf(rebuild: Any, kind: type, args: Any, state: Any) -> torch.Tensor:
    """Rebuild a tensor of a subclass, and then have it require a gradient. In the other order it would be no leaf."""
    tensor: torch.Tensor = rebuild_from_type(rebuild, kind, args, state)
    with DisableTorchFunctionSubclass():
        return tensor.requires_grad_()


def rebuild_sparse(layout: torch.layout, data: Any, requires_grad: bool) -> torch.Tensor:
    """Rebuild a sparse tensor. torch's own function leaks: it keeps each tensor in a list until a file is loaded."""
    if layout is torch.sparse_coo:
        indices, values, size, is_coalesced = data
        tensor = torch.sparse_coo_tensor(indices, values, size, is_coalesced=is_coalesced, device="cpu")
    else:
        tensor = torch.sparse_compressed_tensor(*data, layout=layout, device="cpu")
    return tensor.requires_grad_() if requires_grad else tensor


# -- datasets ----------------------------------------------------------------------------------------------------------


class PickledDataset(NamedTuple):
    """A pickle (``header``), and the uint8 arrays that it refers to (``buffers``), as views of the original memory."""

    header: bytes
    buffers: list[Bytes]


def cloud_dumps(obj: Any, *, remote: bool = False) -> bytes:
    """Pickle with cloudpickle, in one piece, for a new process on this machine, or for a remote process (``remote``).

    While `multiprocessing` spawns a process, its reductions apply, so that locks, queues and shared tensors are sent.
    """
    stream = io.BytesIO()
    kind = _remote_pickler() if remote else _pickler()
    if get_spawning_popen() is not None:
        kind = _spawning_pickler(kind)
    _dump(kind(stream, 5), obj)
    return stream.getvalue()


def pack(obj: Any) -> PickledDataset:
    """Pickle ``obj`` with its large buffers outside. They are views, so a later change of ``obj`` changes them."""
    stream = io.BytesIO()
    buffers: list[Bytes] = []

    def keep_inside(buffer: pickle.PickleBuffer) -> bool:
        raw = buffer.raw()
        if raw.nbytes < _OUTSIDE_BYTES:
            return True
        buffers.append(np.frombuffer(raw, np.uint8))
        return False

    _dump(_dataset_pickler(_remote_pickler())(stream, 5, buffer_callback=keep_inside), obj)
    return PickledDataset(stream.getvalue(), buffers)


def dump_remote(batch: Any, stream: io.BytesIO, memories: BufferTable) -> None:
    """Pickle a batch to ``stream`` for a trainer on another machine, and add its memory to ``memories``.

    Classes and functions that the trainer cannot import travel by value.
    """
    _dump(_batch_pickler(_remote_pickler())(stream, memories), batch)


def unpack(header: Any, buffers: Sequence[Any]) -> Any:
    """Return the object that was pickled. Its arrays and tensors lie in ``buffers``, and are writable if those are.

    For a batch, ``buffers`` contains a `LoadedMemory` for each storage, and the bytes of each array.
    """
    return pickle.loads(header, buffers=buffers)


def _pickler() -> Any:
    from cloudpickle import CloudPickler

    return CloudPickler


def _remote_pickler() -> Any:
    rays = sys.modules.get("ray.cloudpickle")
    return _pickler() if rays is None else rays.CloudPickler


@cache
def _spawning_pickler(base: Any) -> Any:
    """Return a subclass of ``base`` with the reductions of `multiprocessing`. A C pickler reads them when created."""
    own: Any = ForkingPickler

    class SpawningPickler(base):  # type: ignore[misc]
        dispatch_table: ClassVar[Any] = ChainMap(own._extra_reducers, base.dispatch_table)

    return SpawningPickler


@cache
def _dataset_pickler(base: Any) -> Any:
    class DatasetPickler(base):  # type: ignore[misc]
        def reducer_override(self, obj: Any) -> Any:
            reduced = reduce_storage(obj)
            return super().reducer_override(obj) if reduced is NotImplemented else reduced

    return DatasetPickler


@cache
def _batch_pickler(base: Any) -> Any:
    class RemoteBatchPickler(base):  # type: ignore[misc]
        def __init__(self, stream: io.BytesIO, memories: BufferTable) -> None:
            super().__init__(stream, pickle.HIGHEST_PROTOCOL, buffer_callback=memories.add_buffer)
            self._memories = memories

        def reducer_override(self, obj: Any) -> Any:
            reduced = self._memories.reduce(obj)
            return super().reducer_override(obj) if reduced is NotImplemented else reduced

    return RemoteBatchPickler


def reduce_storage(obj: Any) -> Any:
    """Return the reduction of a CPU storage, which leaves its memory to ``buffer_callback``; else NotImplemented."""
    if isinstance(obj, torch.UntypedStorage) and obj.device.type == "cpu":
        flat: Any = torch.empty(0, dtype=torch.uint8, device="cpu").set_(obj, 0, (obj.nbytes(),), (1,)).numpy()
        return _as_storage, (pickle.PickleBuffer(flat),)
    if isinstance(obj, torch.TypedStorage) and obj._untyped_storage.device.type == "cpu":
        return rebuild_typed_storage, (obj._untyped_storage, obj.dtype)
    return NotImplemented


def _as_storage(buffer: Any) -> torch.UntypedStorage:
    memory = torch.frombuffer(buffer, dtype=torch.uint8) if len(buffer) else torch.empty(0, dtype=torch.uint8)
    return memory.untyped_storage()


def is_shipping() -> bool:
    """Return True while this thread pickles an object for a process that is a part of this run."""
    return get_spawning_popen() is not None or getattr(_thread, "is_shipping", False)


_thread = threading.local()


def _dump(pickler: Any, obj: Any) -> None:
    _thread.is_shipping = True
    try:
        pickler.dump(obj)
    except Exception as error:
        raise ShippingError(explain(obj, error, _is_picklable)) from error
    finally:
        _thread.is_shipping = False


def _is_picklable(value: Any) -> bool:
    """Return True if a remote worker can receive ``value``."""
    try:
        _dataset_pickler(_remote_pickler())(io.BytesIO(), 5, buffer_callback=lambda _: False).dump(value)
    except Exception:
        return False
    return True
