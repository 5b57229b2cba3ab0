"""Batches as trees: move tensors to a device, and leave all other values as they are.

Containers are taken apart and put together by the rules of torch's ``pin_memory``: mappings, named tuples, tuples and
sequences keep their type where the type allows it. The only exception is that plain tuples stay tuples, whereas torch
2.4 turns them into lists. A value whose class has a ``to`` of its own moves itself. Such types are tested before
containers, like types with a ``pin_memory`` of their own in torch's function. torch's pytree is not used, because it
knows only Python's own mappings and sequences.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, MutableMapping, MutableSequence, Sequence
from typing import Any

import torch

OnTensor = Callable[[torch.Tensor], Any]
OnOwn = Callable[[Any], Any]
_LEAVES = frozenset({str, bytes, int, float, bool, type(None)})


def moves_itself(value: Any) -> bool:
    """Return True if the class of this value has a method ``to``, as tensors have."""
    return callable(getattr(type(value), "to", None))


def mapped(value: Any, on_tensor: OnTensor, on_own: OnOwn) -> Any:
    """Return the tree with each tensor replaced by ``on_tensor(tensor)``, and each value that moves itself by
    ``on_own(value)``."""
    if isinstance(value, torch.Tensor):
        return on_tensor(value)
    if moves_itself(value):
        return on_own(value)
    if isinstance(value, (str, bytes)):
        return value
    if isinstance(value, Mapping):
        items = {key: mapped(item, on_tensor, on_own) for key, item in value.items()}
        return _with_items(value, items, items.items(), isinstance(value, MutableMapping))
    if isinstance(value, tuple):
        parts = (mapped(item, on_tensor, on_own) for item in value)
        return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
    if isinstance(value, Sequence):
        made = [mapped(item, on_tensor, on_own) for item in value]
        return _with_items(value, made, enumerate(made), isinstance(value, MutableSequence))
    return value


def _with_items(value: Any, items: Any, pairs: Any, is_mutable: bool) -> Any:
    """Return a container of the type of ``value``, or ``items`` if the type cannot be built from them."""
    try:
        if not is_mutable:
            return type(value)(items)
        clone = copy.copy(value)  # a copy keeps attributes other than the items
        for place, item in pairs:
            clone[place] = item
        return clone
    except TypeError:
        return items


def on_device(value: Any, device: torch.device) -> Any:
    """Return the tree on ``device``. Copies from page-locked memory may still be under way."""
    return mapped(value, lambda tensor: tensor.to(device, non_blocking=True), lambda own: _own_on_device(own, device))


def _own_on_device(value: Any, device: torch.device) -> Any:
    try:
        moved = value.to(device, non_blocking=True)
    except TypeError:  # its `to` takes only a device
        moved = value.to(device)
    return value if moved is None else moved


def pinned(value: Any, on_tensor: OnTensor) -> Any:
    """Return the tree in page-locked memory. ``on_tensor`` pins each tensor, and values with a ``pin_memory()`` pin
    themselves."""
    return mapped(value, on_tensor, lambda own: own.pin_memory() if hasattr(own, "pin_memory") else own)


def tensors(value: Any, is_done: Callable[[Any], bool] = lambda own: False) -> Iterator[torch.Tensor]:
    """Yield each strided tensor whose memory a tree uses, once.

    The tensors of a value that moves itself are those in its items and attributes. Values for which ``is_done`` returns
    True are left out.
    """
    return _tensors(value, is_done, {})


def _tensors(value: Any, is_done: Callable[[Any], bool], seen: dict[int, Any]) -> Iterator[torch.Tensor]:
    if type(value) in _LEAVES or id(value) in seen:
        return
    seen[id(value)] = value  # kept alive, because another object could get the `id` of a temporary item
    if isinstance(value, torch.Tensor):
        yield from strided(value)
        return
    is_own = moves_itself(value)
    if is_own and is_done(value):
        return
    for inner in (*_items(value), *(_attributes(value) if is_own else ())):
        yield from _tensors(inner, is_done, seen)


def _items(value: Any) -> list[Any]:
    if isinstance(value, Mapping):
        return list(value.values())
    is_container = isinstance(value, (Sequence, set, frozenset)) and not isinstance(value, (str, bytes, range))
    return list(value) if is_container else []


def _attributes(value: Any) -> list[Any]:
    slots = [name for kind in type(value).__mro__ for name in _slots(kind)]
    return [*getattr(value, "__dict__", {}).values(), *(getattr(value, name, None) for name in slots)]


def _slots(kind: type) -> tuple[str, ...]:
    slots = vars(kind).get("__slots__", ())
    return (slots,) if isinstance(slots, str) else tuple(slots)


def strided(tensor: torch.Tensor) -> list[torch.Tensor]:
    """Return the tensors that own a tensor's memory: itself, or the parts of a sparse, nested or composed tensor."""
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
    """Return the bytes of all `tensors` of a tree."""
    return sum(tensor.nbytes for tensor in tensors(value))
