"""The pickled state of a dataset and a collate function: has it changed, and how was it at first.

It is for objects that are pickled in a millisecond. A function or class that cannot be pickled by name is compared by
its identity, with the values that it is bound to. What pickling leaves out is not compared.
"""

from __future__ import annotations

import io
import math
import pickle
import types
from contextlib import suppress
from typing import Any

import numpy as np
import torch

from dpex.errors import ShippingError
from dpex.system.clock import monotonic

MOST_BYTES = 1 << 20
"""A larger pickle takes more than a millisecond to make or to compare."""
SAME_S = 0.02
"""Seconds that pickling may take for a dataset that has not changed: twenty times what it took at first, and more only
of one that has grown."""


class SlowError(Exception):
    """Pickling takes too long."""


class PickledState:
    """Objects as they are now. Equal states are those of objects in which nothing has changed.

    Args:
        objects: The objects.
        most_s: Seconds that pickling may take.

    Attributes:
        code: The classes and functions in the pickle.

    Raises:
        SlowError: It takes longer, or the pickle is larger than `MOST_BYTES`.
        Exception: An object cannot be pickled.
    """

    def __init__(self, *objects: Any, most_s: float = math.inf) -> None:
        sink = _Sink(most_s)
        pickler = _Pickler(sink)
        pickler.dump(objects)
        sink.check()
        self._pickle, self._by_identity, self.code = b"".join(sink.parts), pickler.by_identity, pickler.code

    def __eq__(self, other: object) -> bool:
        return isinstance(other, PickledState) and self._pickle == other._pickle

    __hash__ = None  # type: ignore[assignment]

    def restored(self) -> Any:
        """Return copies of the objects as they were, in the process that has pickled them."""
        return _Unpickler(self._pickle, self._by_identity).load()


def as_at_first(state: PickledState, dataset: Any, collate_fn: Any) -> tuple[Any, Any]:
    """Return dataset and collate function: these, or if they have changed, copies as they were at first.

    Raises:
        ShippingError: They have changed, and their pickle cannot be read.
    """
    with suppress(Exception):  # such as that of a file that a sample has opened, which cannot be pickled
        if PickledState(dataset, collate_fn, most_s=SAME_S) == state:
            return dataset, collate_fn
    try:
        dataset, collate_fn = state.restored()
    except Exception as error:
        raise ShippingError(
            f"{type(dataset).__name__} has changed while a worker read samples, and cannot be made anew for the next "
            f"epoch, as its pickle cannot be read: {error!r}; give overlap_epochs=False, so that each epoch has new "
            "workers"
        ) from error
    return dataset, collate_fn


class _Sink:
    """The file of a pickler. It raises `SlowError` if that takes too long."""

    def __init__(self, most_s: float) -> None:
        self.parts: list[bytes] = []
        self._size = 0
        self._until = monotonic() + most_s

    def write(self, part: Any) -> int:
        self.check(len(part))
        self.parts.append(bytes(part))
        self._size += len(part)
        return len(part)

    def check(self, more: int = 0) -> None:
        if self._size + more > MOST_BYTES or monotonic() > self._until:
            raise SlowError


class _Pickler(pickle.Pickler):
    def __init__(self, sink: _Sink) -> None:
        super().__init__(sink, 5)
        self._sink = sink
        self.by_identity: dict[int, Any] = {}
        self.code: list[type | types.FunctionType] = []

    def reducer_override(self, obj: Any) -> Any:
        self._sink.check(obj.nbytes if isinstance(obj, (np.ndarray, torch.Tensor)) else 0)
        if not isinstance(obj, (type, types.FunctionType)):
            return NotImplemented
        self.code.append(obj)
        if "<" in obj.__qualname__:  # no import finds it
            self.by_identity[id(obj)] = obj
            cells = getattr(obj, "__closure__", None) or ()
            defaults = getattr(obj, "__defaults__", None), getattr(obj, "__kwdefaults__", None)
            return _identity, (id(obj), [_content(cell) for cell in cells], defaults)
        return NotImplemented


class _Unpickler(pickle.Unpickler):
    def __init__(self, data: bytes, by_identity: dict[int, Any]) -> None:
        super().__init__(io.BytesIO(data))
        self._by_identity = by_identity

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == (__name__, _identity.__name__):
            return self._found
        return super().find_class(module, name)

    def _found(self, key: int, contents: list[Any], defaults: tuple[Any, Any]) -> Any:
        """Return the class, or the function with the values to which it was bound."""
        found = self._by_identity[key]
        if isinstance(found, type):
            return found
        cells = tuple(map(types.CellType, contents))
        made = types.FunctionType(found.__code__, found.__globals__, found.__name__, defaults[0], cells)
        made.__kwdefaults__, made.__qualname__ = defaults[1], found.__qualname__
        vars(made).update(vars(found))
        return made


def _content(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # nothing yet
        return None


def _identity(*_: Any) -> None:
    """Stand in a pickle for a function or class. It is never called."""
