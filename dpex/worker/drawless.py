"""Which batches are made by torch's code alone, which draws nothing: they need no random states of their own.

Told by what runs, and only by that: a dataset of whose batches many have not drawn may draw in the next. Where all of
it is torch's (a `TensorDataset`, `range`, or torch's own compositions of these; torch's collate function; integers for
indices) no code of the user's runs, and what does is indexing and stacking.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils.data import ConcatDataset, StackDataset, Subset, TensorDataset

from dpex._torch import collate as torch_collate
from dpex._torch import count_dispatch_modes, count_function_modes

_COLLATE = torch_collate.default_collate_fn_map
_AS_IMPORTED = dict(_COLLATE)
_INTEGERS = {int}


def draws_nothing(dataset: Any, collate_fn: Any) -> bool:
    """Whether `is_torchs_alone` is to be asked of this loader's batches; as they are now, to be asked at each pass."""
    are_torchs = all(function.__module__ == torch_collate.__name__ for function in _AS_IMPORTED.values())
    return collate_fn is torch_collate.default_collate and are_torchs and _is_torchs(dataset)


def is_torchs_alone(index: Any) -> bool:
    """Whether the batch of this index is, of a dataset that `draws_nothing`: nobody looks on, and indices are plain."""
    return (
        type(index) is list
        and set(map(type, index)) == _INTEGERS
        and not count_function_modes()
        and not count_dispatch_modes()
        and _COLLATE == _AS_IMPORTED
    )


def _is_torchs(dataset: Any) -> bool:
    kind = type(dataset)
    if kind is range:
        return True
    if kind not in _PARTS or not _is_unpatched(kind):
        return False
    return _PARTS[kind](vars(dataset))


def _is_unpatched(kind: type) -> bool:
    methods = (getattr(kind, name, None) for name in ("__getitem__", "__getitems__"))
    return all(method is None or method.__module__ == TensorDataset.__module__ for method in methods)


def _of_tensors(attributes: dict[str, Any]) -> bool:
    return attributes.keys() == {"tensors"} and all(type(tensor) is torch.Tensor for tensor in attributes["tensors"])


def _of_indices(attributes: dict[str, Any]) -> bool:
    if attributes.keys() != {"dataset", "indices"} or not _is_torchs(attributes["dataset"]):
        return False
    indices = attributes["indices"]
    return type(indices) is range or (type(indices) in (list, tuple) and set(map(type, indices)) == _INTEGERS)


def _of_parts(attributes: dict[str, Any]) -> bool:
    return attributes.keys() == {"datasets", "cumulative_sizes"} and all(map(_is_torchs, attributes["datasets"]))


def _of_columns(attributes: dict[str, Any]) -> bool:
    columns: Any = attributes.get("datasets")
    if attributes.keys() != {"datasets", "_length"} or type(columns) not in (tuple, dict):
        return False
    return all(map(_is_torchs, columns.values() if type(columns) is dict else columns))


_PARTS: dict[Any, Callable[[dict[str, Any]], bool]] = {
    TensorDataset: _of_tensors,
    Subset: _of_indices,
    ConcatDataset: _of_parts,
    StackDataset: _of_columns,
}
"""What such a dataset consists of, by its very class: attributes that torch does not set may be a user's methods."""
