"""Pickles the dataset for workers of other machines, once: a small header and raw buffers.

The dataset, the collate function and the init function travel in one pickle (protocol 5, Ray's cloudpickle), so that
objects which they share stay shared and a bound method stays bound to *this* dataset. Arrays and the storages of CPU
tensors lie outside the pickle, as raw buffers that a whole node can share.

An error names an object that cannot be pickled by the path of attributes that leads to it.
"""

from __future__ import annotations

import io
import pickle
from collections import ChainMap
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from multiprocessing.context import get_spawning_popen
from multiprocessing.reduction import ForkingPickler
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.multiprocessing.reductions import rebuild_typed_storage

from dpex.errors import ShippingError
from dpex.system.ray_package import import_ray
from dpex.transport.out_of_band import BufferTable

Bytes = np.ndarray[Any, np.dtype[np.uint8]]

_OUTSIDE_BYTES = 1024
"""A buffer shorter than this stays inside the pickle."""
_SEARCH_LEVELS = 6
"""Levels of a dataset in which the attribute that cannot be pickled is searched."""
_SEARCH_VALUES = 2000
"""Values that are tried in that search: each is pickled once more."""


class PickledDataset(NamedTuple):
    """A pickle (``header``) and the uint8 arrays that it refers to (``buffers``), viewed where they lay."""

    header: bytes
    buffers: list[Bytes]

    @property
    def nbytes(self) -> int:
        """Bytes of the header and all buffers."""
        return len(self.header) + sum(buffer.nbytes for buffer in self.buffers)


def cloud_dumps(obj: Any) -> bytes:
    """Pickle with cloudpickle, in one piece, for a process that is being started on this machine.

    While `multiprocessing` spawns a process its own reductions hold, so that locks, queues and shared tensors travel.
    """
    stream = io.BytesIO()
    pickler = _picklers()[0](stream, 5)
    if get_spawning_popen() is not None:
        own: Any = ForkingPickler
        pickler.dispatch_table = ChainMap(own._extra_reducers, type(pickler).dispatch_table)
    _dump(pickler, obj)
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

    _dump(_picklers()[1](stream, 5, buffer_callback=keep_inside), obj)
    return PickledDataset(stream.getvalue(), buffers)


def dump_far(batch: Any, stream: io.BytesIO, memories: BufferTable) -> None:
    """Pickle a batch for a trainer on another machine, its memory left to ``memories``.

    Classes and functions that the trainer cannot import travel by value.
    """
    _dump(_batch_pickler()(stream, memories), batch)


def unpack(header: bytes | memoryview, buffers: Sequence[Any]) -> Any:
    """Return the object that was packed. Its arrays and tensors lie in ``buffers``, and are writable if those are."""
    return pickle.loads(header, buffers=buffers)


# -- pickling ----------------------------------------------------------------------------------------------------------


@cache
def _picklers() -> tuple[Any, Any]:
    """Return Ray's cloudpickle as it is, and a subclass of it that pickles the storages of tensors out of band."""
    base = import_ray("ray.cloudpickle").CloudPickler

    class DatasetPickler(base):  # type: ignore[misc, valid-type]
        def reducer_override(self, obj: Any) -> Any:
            if isinstance(obj, torch.UntypedStorage) and obj.device.type == "cpu":
                flat = torch.empty(0, dtype=torch.uint8, device="cpu").set_(obj, 0, (obj.nbytes(),), (1,))
                array: Any = flat.numpy()
                return _as_storage, (pickle.PickleBuffer(array),)
            if isinstance(obj, torch.TypedStorage) and obj._untyped_storage.device.type == "cpu":
                return rebuild_typed_storage, (obj._untyped_storage, obj.dtype)
            return super().reducer_override(obj)

    return base, DatasetPickler


@cache
def _batch_pickler() -> Any:
    class FarBatchPickler(_picklers()[0]):  # type: ignore[misc]
        def __init__(self, stream: io.BytesIO, memories: BufferTable) -> None:
            super().__init__(stream, pickle.HIGHEST_PROTOCOL, buffer_callback=memories.keep)
            self._memories = memories

        def reducer_override(self, obj: Any) -> Any:
            reduced = self._memories.reduce(obj)
            return super().reducer_override(obj) if reduced is NotImplemented else reduced

    return FarBatchPickler


def _as_storage(buffer: Any) -> torch.UntypedStorage:
    memory = torch.frombuffer(buffer, dtype=torch.uint8) if len(buffer) else torch.empty(0, dtype=torch.uint8)
    return memory.untyped_storage()


# -- naming what cannot travel -----------------------------------------------------------------------------------------


def _dump(pickler: Any, obj: Any) -> None:
    try:
        pickler.dump(obj)
    except Exception as error:
        raise ShippingError(_explain(obj, error)) from error


def _explain(obj: Any, error: Exception) -> str:
    path, value = _find_culprit(obj, "", (), iter(range(_SEARCH_VALUES))) or ("", obj)
    kind = type(value)
    name = kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
    return (
        f"{path.removeprefix('.setup').removeprefix('.') or 'the object'} (a {name}) cannot be pickled: {error}; "
        "leave it out of the pickle (__getstate__) or open it lazily in the worker"
    )


def _find_culprit(value: Any, path: str, above: tuple[int, ...], budget: Iterator[int]) -> tuple[str, Any] | None:
    """Return the deepest part that fails by itself, and its path; None if ``value`` fails only for a part above it."""
    above = (*above, id(value))
    innocent = False
    for step, part in _parts(value) if len(above) <= _SEARCH_LEVELS else ():
        if id(part) in above:
            innocent = True
        elif next(budget, None) is not None and not _travels(part):
            found = _find_culprit(part, path + step, above, budget)
            if found is not None:
                return found
            innocent = True
    return None if innocent and len(above) > 1 else (path, value)


def _travels(value: Any) -> bool:
    try:
        _picklers()[1](io.BytesIO(), 5, buffer_callback=lambda _: False).dump(value)
    except Exception:
        return False
    return True


def _parts(value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        yield from ((f"[{key!r}]", part) for key, part in value.items())
    elif isinstance(value, (list, tuple, set, frozenset)):
        yield from ((f"[{i}]", part) for i, part in enumerate(value))
    attributes = getattr(value, "__dict__", None)
    if isinstance(attributes, dict):
        yield from ((f".{name}", part) for name, part in attributes.items())
    yield from _parts_of_functions(value)


def _parts_of_functions(value: Any) -> Iterator[tuple[str, Any]]:
    function = getattr(value, "__func__", value)
    if function is not value:
        yield ".__self__", value.__self__
    names = getattr(getattr(function, "__code__", None), "co_freevars", ())
    for name, cell in zip(names, getattr(function, "__closure__", None) or (), strict=False):
        try:
            yield f".{name}", cell.cell_contents
        except ValueError:
            continue
    if hasattr(value, "func") and hasattr(value, "args"):  # functools.partial
        yield ".func", value.func
        yield ".args", value.args
        yield ".keywords", getattr(value, "keywords", {})
