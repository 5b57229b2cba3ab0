"""What of a dataset is a step whose time is told: its transforms, their parts, and the datasets within.

Steps are attributes that can be called and whose name holds "transform" or "augment", or that have a list of
``transforms`` (as torchvision's and albumentations' ``Compose``), ``nn.Sequential``, and the same within those.
Datasets within are attributes that are datasets, or hold nothing else (`Subset`, `ConcatDataset` and the like).
"""

from __future__ import annotations

import functools
import inspect
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any

from torch import nn
from torch.utils.data import Dataset

_NAMES = ("transform", "augment")
_LONGEST = 80


def is_steps(name: str, value: Any) -> bool:
    """A list of callables by one of the names, such as a ``Compose``'s."""
    if not any(part in name.lower() for part in _NAMES) or not isinstance(value, (list, tuple, nn.ModuleList)):
        return False
    return type(value) in (list, tuple, nn.ModuleList) and len(value) > 0 and all(map(callable, value))


def is_step(name: str, value: Any) -> bool:
    """A callable by one of the names, or with a list of ``transforms``."""
    if not callable(value) or isinstance(value, (type, Dataset)):
        return False
    if any(part in name.lower() for part in _NAMES):
        return True
    held = value._modules.get("transforms") if isinstance(value, nn.Module) else None
    return isinstance(held or inspect.getattr_static(value, "transforms", None), (list, tuple, nn.ModuleList))


def holds_datasets(value: Any) -> bool:
    """A dataset, or a list or dict of nothing but datasets."""
    if type(value) in (list, tuple):
        return bool(value) and all(isinstance(item, Dataset) for item in value)
    if type(value) is dict:
        return bool(value) and all(isinstance(item, Dataset) for item in value.values())
    return isinstance(value, Dataset)


def label(step: Any) -> str:
    """What a step is called: a function's name, or a class's."""
    if isinstance(step, functools.partial):
        return label(step.func)
    name = getattr(step, "__name__", None)
    return (name if isinstance(name, str) else type(step).__name__)[:_LONGEST]


def labelled(steps: Iterable[Any]) -> Iterator[tuple[Any, str]]:
    """Each with its label; those that share a name get numbers."""
    seen: Counter[str] = Counter()
    for step in steps:
        name = label(step)
        seen[name] += 1
        yield step, name if seen[name] == 1 else f"{name} #{seen[name]}"
