"""Batches as trees: move what belongs on a device, and leave everything else as it is.

Containers are taken apart and put together by the rules of torch's ``pin_memory``: mappings, named tuples, tuples and
sequences keep their type where the type allows it. Only torch 2.4's lists in the place of plain tuples are not copied.
A value whose class has a ``to`` of its own moves itself; such types come before containers, as types with a
``pin_memory`` of their own do there.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, MutableMapping, MutableSequence, Sequence
from typing import Any

import torch

OnTensor = Callable[[torch.Tensor], Any]
OnOwn = Callable[[Any], Any]
_MOST_NESTED = 8
"""How deep attributes of a type that moves itself are searched for its tensors."""


def moves_itself(value: Any) -> bool:
    """Whether the class of this value has a method ``to``, as tensors have."""
    return callable(getattr(type(value), "to", None))


def mapped(value: Any, on_tensor: OnTensor, on_own: OnOwn) -> Any:
    """The same tree with ``on_tensor`` of each tensor and ``on_own`` of each value that moves itself."""
    if isinstance(value, torch.Tensor):
        return on_tensor(value)
    if moves_itself(value):
        return on_own(value)
    if isinstance(value, (str, bytes)):
        return value
    if isinstance(value, Mapping):
        return _mapped_mapping(value, on_tensor, on_own)
    if isinstance(value, tuple):
        items = (mapped(item, on_tensor, on_own) for item in value)
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    if isinstance(value, Sequence):
        return _mapped_sequence(value, on_tensor, on_own)
    return value


def _mapped_mapping(value: Mapping[Any, Any], on_tensor: OnTensor, on_own: OnOwn) -> Any:
    items = {key: mapped(item, on_tensor, on_own) for key, item in value.items()}
    try:
        if isinstance(value, MutableMapping):  # it may have more to it than its items
            clone = copy.copy(value)
            clone.update(items)
            return clone
        return type(value)(items)  # type: ignore[call-arg]
    except TypeError:
        return items


def _mapped_sequence(value: Sequence[Any], on_tensor: OnTensor, on_own: OnOwn) -> Any:
    items = [mapped(item, on_tensor, on_own) for item in value]
    try:
        if isinstance(value, MutableSequence):
            clone = copy.copy(value)
            for place, item in enumerate(items):
                clone[place] = item
            return clone
        return type(value)(items)  # type: ignore[call-arg]
    except TypeError:
        return items


def on_device(value: Any, device: torch.device) -> Any:
    """The tree on that device; copies from page-locked memory are only begun."""
    return mapped(value, lambda tensor: tensor.to(device, non_blocking=True), lambda own: _own_on_device(own, device))


def _own_on_device(value: Any, device: torch.device) -> Any:
    try:
        moved = value.to(device, non_blocking=True)
    except TypeError:  # its `to` takes a device alone
        moved = value.to(device)
    return value if moved is None else moved


def pinned(value: Any, on_tensor: OnTensor) -> Any:
    """The tree in page-locked memory: ``on_tensor`` of each tensor, and own types by their own ``pin_memory``."""
    return mapped(value, on_tensor, lambda own: own.pin_memory() if hasattr(own, "pin_memory") else own)


def lend(value: Any, lend_tensor: Callable[[torch.Tensor], None], lend_own: Callable[[Any], bool]) -> None:
    """Call ``lend_tensor`` with every strided tensor of a tree on a device.

    A value that moves itself is first given to ``lend_own``, which returns True if that has seen to its tensors.
    """
    for item in _leaves(value):
        if isinstance(item, torch.Tensor):
            for tensor in strided(item):
                lend_tensor(tensor)
        elif not lend_own(item):
            for tensor in _held_by(item, _MOST_NESTED, set()):
                lend_tensor(tensor)


def _leaves(value: Any) -> Iterator[Any]:
    """Tensors, and values that move themselves."""
    if isinstance(value, torch.Tensor) or moves_itself(value):
        yield value
    elif isinstance(value, (str, bytes)):
        return
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _leaves(item)
    elif isinstance(value, Sequence):
        for item in value:
            yield from _leaves(item)


def _held_by(value: Any, levels: int, seen: set[int]) -> Iterator[torch.Tensor]:
    """The strided tensors that a value holds as items, or as attributes if it moves itself: it moves these, too."""
    if id(value) in seen or levels == 0:
        return
    seen.add(id(value))
    if isinstance(value, torch.Tensor):
        yield from strided(value)
        return
    for inner in (*_items(value), *(_attributes(value) if moves_itself(value) else ())):
        yield from _held_by(inner, levels - 1, seen)


def _items(value: Any) -> list[Any]:
    if isinstance(value, Mapping):
        return list(value.values())
    return list(value) if isinstance(value, (list, tuple, set, frozenset)) else []


def _attributes(value: Any) -> list[Any]:
    slots = [name for kind in type(value).__mro__ for name in _slots(kind)]
    return [*getattr(value, "__dict__", {}).values(), *(getattr(value, name, None) for name in slots)]


def _slots(kind: type) -> tuple[str, ...]:
    slots = vars(kind).get("__slots__", ())
    return (slots,) if isinstance(slots, str) else tuple(slots)


def strided(tensor: torch.Tensor) -> list[torch.Tensor]:
    """The tensors in whose memory a tensor lies: itself, or the parts of a sparse, nested or composed one."""
    parts = _parts(tensor)
    return [tensor] if parts is None else [inner for part in parts for inner in strided(part)]


def _parts(tensor: torch.Tensor) -> list[torch.Tensor] | None:
    if hasattr(type(tensor), "__tensor_flatten__"):
        names, _ = tensor.__tensor_flatten__()  # type: ignore[attr-defined]
        return [getattr(tensor, name) for name in names]
    if tensor.layout is torch.strided:
        return None
    if tensor.layout is torch.sparse_coo:
        return [tensor._indices(), tensor._values()]
    if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        return [tensor.crow_indices(), tensor.col_indices(), tensor.values()]
    if tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        return [tensor.ccol_indices(), tensor.row_indices(), tensor.values()]
    return [tensor.values()]


def nbytes(value: Any) -> int:
    """The bytes of all tensors in a tree that are known: of values that move themselves, those in their attributes."""
    held = (inner for leaf in _leaves(value) for inner in _held_by(leaf, _MOST_NESTED, set()))
    return sum(tensor.nbytes for tensor in held)
