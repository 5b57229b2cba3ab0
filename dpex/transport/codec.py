"""Encode a batch as a message, and decode it.

A batch becomes raw buffers and a small tree of plain values, which `marshal` writes in about a microsecond. Small
buffers are part of the message. Large buffers are in slots of the worker's arena. The receiving process (the taker)
views the slots without a copy.

Tensors keep their dtype, shape and strides. Tensors that share memory still share it after decoding. The fast encoding
supports contiguous tensors that share no memory, and plain containers (list, tuple, dict, numbers, strings). A batch
with any other value is pickled, with its memory still in raw buffers (see `pickling`).
"""

from __future__ import annotations

import ctypes
import io
import marshal
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from dpex.transport.arena import Arena, SlotRef, tensor_over
from dpex.transport.pickling import BufferSpan, BufferTable, LoadedMemory, Memory, dump_batch, is_plain, unpack

INLINE_BYTES = 4096
"""Maximum bytes of a buffer inside the message."""
MESSAGE_BYTES = 32768
"""Maximum bytes of all buffers inside one message. Each further buffer has a slot."""
MANY_OBJECTS = 32
"""Maximum number of objects (containers and values, not tensors) that are encoded one by one. A batch with more is
pickled. Measured with tuples of two numbers: 20 take 14 µs one by one and 7 µs pickled, 250 take 157 µs and 17 µs."""
LONG_LEAF = 1 << 20
"""A longer str or bytes object is pickled, because `marshal` accepts less than 2 GiB and makes one more copy."""

_LEAF, _INLINE, _SLOT, _LIST, _TUPLE, _DICT, _PICKLE, _SPILL, _MEMORY = range(9)
_PLAIN = frozenset({int, float, bool, str, bytes, type(None), complex})
_TEXTS = frozenset({str, bytes})
_KEYS = frozenset({int, str, bool, bytes})
_DTYPES = sorted(
    {d for d in vars(torch).values() if isinstance(d, torch.dtype) and not str(d).startswith("torch.q")}, key=str
)
_DTYPE_CODE = {dtype: code for code, dtype in enumerate(_DTYPES)}

Node = tuple[Any, ...]
Lease = Callable[[int, int, int], np.ndarray[Any, Any]]
"""``lease(segment, slot, nbytes)`` returns a writable uint8 array over a slot, on the taker's side."""
Dump = Callable[[Any, io.BytesIO, BufferTable], None]
"""``dump(batch, stream, table)`` pickles a batch to ``stream``, and adds its memory to ``table`` as buffers."""


class _ExoticError(Exception):
    """The fast encoding does not support this value."""


class Encoder:
    """Encodes the batches of one worker; ``dump`` pickles batches that the fast encoding does not support.

    ``nbytes``: bytes of the buffers of the last batch.
    """

    def __init__(self, arena: Arena, dump: Dump = dump_batch) -> None:
        self.nbytes: int = 0
        self._arena = arena
        self._dump = dump
        self._reset()

    def _reset(self) -> None:
        self._inline_bytes = 0
        self._objects = 0
        self.nbytes = 0
        self._storages: set[int] = set()
        self._seen: set[int] = set()
        self._keep: list[Any] = []
        self._handed_over: list[SlotRef] = []

    def encode(self, batch: Any) -> Node:
        """Return the batch as a tree for `marshal`. From now on, the taker holds the slots that the tree refers to."""
        self._reset()
        try:
            try:
                return self._node(batch)
            except _ExoticError:
                self._take_back()
                self._reset()
                return self._pickled(batch)
        except BaseException:
            self._take_back()
            raise
        finally:
            self._keep.clear()

    def _hand_over(self, ref: SlotRef) -> None:
        self._arena.hand_over(ref)
        self._handed_over.append(ref)

    def _take_back(self) -> None:
        """Free the slots of a message that is not sent, because no taker receives the message and frees them."""
        for ref in self._handed_over:
            self._arena.take_back(ref)
        self._handed_over.clear()

    def _node(self, value: Any) -> Node:
        kind = type(value)
        if kind is not torch.Tensor:
            self._objects += 1
            if self._objects > MANY_OBJECTS:
                raise _ExoticError
        if kind in _PLAIN:
            if kind in _TEXTS and len(value) > LONG_LEAF:
                raise _ExoticError
            return (_LEAF, value)
        if id(value) in self._seen:
            raise _ExoticError  # one object in two places: only a pickle preserves its identity
        self._seen.add(id(value))
        if kind is torch.Tensor:
            return self._tensor(value)
        if kind is list or kind is tuple:
            kinds = set(map(type, value))
            if kinds <= _PLAIN:
                if not kinds.isdisjoint(_TEXTS):
                    texts = value if kinds <= _TEXTS else [one for one in value if type(one) in _TEXTS]
                    if max(map(len, texts)) > LONG_LEAF:
                        raise _ExoticError
                return (_LEAF, value)
            return (_LIST if kind is list else _TUPLE, [self._node(item) for item in value])
        if kind is dict and set(map(type, value)) <= _KEYS:
            return (_DICT, list(value), [self._node(item) for item in value.values()])
        raise _ExoticError

    def _tensor(self, tensor: torch.Tensor) -> Node:
        code = _DTYPE_CODE.get(tensor.dtype)
        if code is None or not is_plain(tensor) or not tensor.nbytes or not tensor.is_contiguous():
            raise _ExoticError
        storage = tensor.untyped_storage().data_ptr()
        if storage in self._storages:
            raise _ExoticError  # two tensors share memory: a pickle contains the memory once
        self._storages.add(storage)
        shape = tuple(tensor.shape)
        strides = tensor.stride() if 1 in shape else None  # the stride of a dimension of size 1 is arbitrary
        return (*self._buffer(tensor, storage), code, shape, strides)

    def _buffer(self, tensor: torch.Tensor, storage: int) -> Node:
        start, nbytes = tensor.data_ptr(), tensor.nbytes
        if nbytes > INLINE_BYTES and start == storage and (node := self._in_slot(tensor, start, nbytes)):
            return node
        if self._goes_inline(nbytes):
            self.nbytes += nbytes
            return (_INLINE, ctypes.string_at(start, nbytes))
        return self._copy_to_slot(tensor.view(-1).view(torch.uint8).numpy())

    def _in_slot(self, owner: Any, address: int, nbytes: int) -> Node | None:
        """Return a node that refers to the slot at ``address``; None if `Arena.slot_at` finds no slot."""
        ref = self._arena.slot_at(address)
        if ref is None:
            return None
        self.nbytes += nbytes
        self._keep.append(owner)
        self._hand_over(ref)
        return (_SLOT, *ref, nbytes)

    def _copy(self, source: np.ndarray[Any, Any]) -> Node:
        if self._goes_inline(source.nbytes):
            self.nbytes += source.nbytes
            return (_INLINE, source.tobytes())
        return self._copy_to_slot(source)

    def _copy_to_slot(self, source: np.ndarray[Any, Any]) -> Node:
        self.nbytes += source.nbytes
        base, node = self._slot(source.nbytes)
        base[:] = source
        return node

    def _goes_inline(self, nbytes: int) -> bool:
        if nbytes > INLINE_BYTES or self._inline_bytes + nbytes > MESSAGE_BYTES:
            return False
        self._inline_bytes += nbytes
        return True

    def _slot(self, nbytes: int) -> tuple[np.ndarray[Any, Any], Node]:
        base, ref = self._arena.array(nbytes)
        self._hand_over(ref)
        self._keep.append(base)
        return base, (_SLOT, *ref, nbytes)

    def _pickled(self, batch: Any) -> Node:
        stream = io.BytesIO()
        memories = BufferTable()
        self._dump(batch, stream, memories)
        nodes = [self._memory(b) if isinstance(b, Memory) else self._copy(b) for b in memories.buffers]
        return (_PICKLE, self._copy(np.frombuffer(stream.getvalue(), np.uint8)), nodes)

    def _memory(self, memory: Memory) -> Node:
        pieces, source = memory.pieces(), memory.array()
        nbytes = pieces[-1].at + pieces[-1].end - pieces[-1].start if pieces else 0
        if len(pieces) == 1 and pieces[0].start == 0:
            buffer = self._in_slot(source, memory.storage.data_ptr(), nbytes) or self._copy(source[:nbytes])
        else:
            buffer = self._gather(source, pieces, nbytes)
        return (_MEMORY, buffer, [tuple(piece) for piece in pieces])

    def _gather(self, source: np.ndarray[Any, Any], pieces: list[BufferSpan], nbytes: int) -> Node:
        self.nbytes += nbytes
        inline = self._goes_inline(nbytes)
        target, node = (np.zeros(nbytes, np.uint8), ()) if inline else self._slot(nbytes)
        for start, end, at in pieces:
            target[at : at + end - start] = source[start:end]
        return (_INLINE, target.tobytes()) if inline else node

    def spill(self, node: Node) -> Node:
        """Write ``node``, which is too long for a message, to a slot. Return a node that refers to the slot."""
        data = marshal.dumps(node)
        try:
            base, spilled = self._slot(len(data))
        except BaseException:
            self._take_back()
            raise
        base[:] = np.frombuffer(data, np.uint8)
        self._keep.clear()
        return (_SPILL, spilled)


def slots_of(node: Node, lease: Lease) -> dict[tuple[int, int], np.ndarray[Any, Any]]:
    """Lease all slots that a node refers to, and return them by segment and slot."""
    kind = node[0]
    parts: Any = ()
    if kind == _SLOT:
        return {(node[1], node[2]): lease(*node[1:4])}
    if kind in (_LIST, _TUPLE, _DICT):
        parts = node[-1]
    elif kind == _SPILL:
        _, segment, slot, nbytes = node[1]
        base: Any = lease(segment, slot, nbytes)  # once: before a second lease the slot would be free for a moment
        return {(segment, slot): base, **slots_of(marshal.loads(base), lease)}
    elif kind == _MEMORY:
        parts = (node[1],)
    elif kind == _PICKLE:
        parts = node[1], *node[2]
    found: dict[tuple[int, int], np.ndarray[Any, Any]] = {}
    for part in parts:
        found |= slots_of(part, lease)
    return found


def codec_signature() -> str:
    """Return the names of this torch's dtypes. The sending and the receiving process must have the same ones."""
    return ",".join(str(dtype).removeprefix("torch.") for dtype in _DTYPES)


def decode(node: Node, lease: Lease) -> Any:
    """Return the batch. Its tensors and arrays are writable, and own their memory for as long as they live."""
    kind = node[0]
    if kind == _LEAF:
        return node[1]
    if kind == _INLINE:
        _, data, code, shape, strides = node
        return _viewed(bytearray(data), code, shape, strides)
    if kind == _SLOT:
        _, segment, slot, nbytes, code, shape, strides = node
        return _viewed(lease(segment, slot, nbytes), code, shape, strides)
    if kind == _LIST:
        return [decode(item, lease) for item in node[1]]
    if kind == _TUPLE:
        return tuple([decode(item, lease) for item in node[1]])
    if kind == _DICT:
        return dict(zip(node[1], [decode(item, lease) for item in node[2]], strict=True))
    if kind == _SPILL:
        return decode(marshal.loads(_bytes_of(node[1], lease)), lease)
    buffers = [_memory_of(n, lease) if n[0] == _MEMORY else _bytes_of(n, lease) for n in node[2]]
    return unpack(_bytes_of(node[1], lease), buffers)


def _memory_of(node: Node, lease: Lease) -> LoadedMemory:
    _, buffer, pieces = node
    if not pieces:
        return LoadedMemory(torch.empty(0, dtype=torch.uint8, device="cpu").untyped_storage(), pieces)
    return LoadedMemory(tensor_over(_bytes_of(buffer, lease), torch.uint8).untyped_storage(), pieces)


def _bytes_of(node: Node, lease: Lease) -> Any:
    return bytearray(node[1]) if node[0] == _INLINE else lease(*node[1:4])


def _viewed(base: Any, code: int, shape: Any, strides: Any) -> torch.Tensor:
    flat = tensor_over(base, _DTYPES[code])
    if strides is None:
        return flat if len(shape) == 1 else flat.view(shape)
    return flat.as_strided(shape, strides)
