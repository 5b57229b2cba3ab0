"""Decide which parts of a dataset are timed separately: its transforms, their parts, and the datasets within.

Steps are attributes that can be called and whose name holds "transform" or "augment", or that have a list of
``transforms`` (as torchvision's and albumentations' ``Compose``), ``nn.Sequential``, and the same within those.
Datasets within are attributes that are datasets, or hold nothing else (`Subset`, `ConcatDataset` and the like).
"""

from __future__ import annotations

import functools
import inspect
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from torch import nn
from torch.utils.data import Dataset, IterableDataset

from dpex.profile.call_timer import StepWatch

_NAMES = ("transform", "augment")
_LONGEST = 80
"""Characters of a name: tables stay readable."""


def _is_steps(name: str, value: Any) -> bool:
    """A list of callables by one of the names, such as a ``Compose``'s."""
    if not any(part in name.lower() for part in _NAMES) or not isinstance(value, (list, tuple, nn.ModuleList)):
        return False
    return type(value) in (list, tuple, nn.ModuleList) and len(value) > 0 and all(map(callable, value))


def _is_step(name: str, value: Any) -> bool:
    """A callable by one of the names, or with a list of ``transforms``."""
    if not callable(value) or isinstance(value, (type, Dataset)):
        return False
    if any(part in name.lower() for part in _NAMES):
        return True
    held = value._modules.get("transforms") if isinstance(value, nn.Module) else None
    return isinstance(held or inspect.getattr_static(value, "transforms", None), (list, tuple, nn.ModuleList))


def _holds_datasets(value: Any) -> bool:
    """A dataset, or a list or dict of nothing but datasets."""
    if type(value) in (list, tuple):
        return bool(value) and all(isinstance(item, Dataset) for item in value)
    if type(value) is dict:
        return bool(value) and all(isinstance(item, Dataset) for item in value.values())
    return isinstance(value, Dataset)


def label(step: Any) -> str:
    """Return the name of a step: of a function, or of a class."""
    if isinstance(step, functools.partial):
        return label(step.func)
    name = getattr(step, "__name__", None)
    return (name if isinstance(name, str) else type(step).__name__)[:_LONGEST]


def _labelled(steps: Iterable[Any]) -> Iterator[tuple[Any, str]]:
    """Yield each step with its label; steps of the same name get numbers."""
    seen: Counter[str] = Counter()
    for step in steps:
        name = label(step)
        seen[name] += 1
        yield step, name if seen[name] == 1 else f"{name} #{seen[name]}"


def watch_of(dataset: Any, cpu: Callable[[], float]) -> StepWatch | None:
    """Return a watch that knows all steps of a dataset; None if reading its attributes raises an error."""
    watch = StepWatch(cpu=cpu)
    try:
        _TransformFinder(dataset, watch)
    except Exception:
        return None
    return watch


class _TransformFinder:
    """Visits the steps of a dataset, each once."""

    def __init__(self, dataset: Any, watch: StepWatch) -> None:
        self._watch = watch
        self._seen: dict[int, Any] = {id(dataset): dataset}
        self._parts(dataset, datasets=True)

    def _parts(self, owner: Any, *, datasets: bool) -> None:
        attributes = getattr(owner, "__dict__", None)
        if type(attributes) is not dict:
            return
        modules = attributes.get("_modules") if isinstance(owner, nn.Module) else None
        if modules and isinstance(owner, nn.Sequential):
            self._all(modules.values())
        for name, value in [*attributes.items(), *(modules or {}).items()]:
            if datasets and _holds_datasets(value):
                self._datasets(value)
            elif _is_steps(name, value):
                self._all(value)
            elif _is_step(name, value):
                self._step(value, label(value))

    def _datasets(self, value: Any) -> None:
        inner = value.values() if type(value) is dict else value if type(value) in (list, tuple) else (value,)
        for dataset in inner:
            if self._is_new(dataset):
                if not isinstance(dataset, IterableDataset):
                    for name in ("__getitem__", "__getitems__"):
                        self._watch.add_method(dataset, name, f"{label(dataset)}.{name}")
                self._parts(dataset, datasets=True)

    def _all(self, steps: Any) -> None:
        for step, name in _labelled(steps):
            self._step(step, name)

    def _step(self, step: Any, name: str) -> None:
        if self._is_new(step):
            self._watch.add(step, name)
            self._parts(step, datasets=False)

    def _is_new(self, thing: Any) -> bool:
        is_new = id(thing) not in self._seen
        self._seen[id(thing)] = thing  # lives while its id is known
        return is_new
