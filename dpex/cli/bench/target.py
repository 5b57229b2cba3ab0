"""Finds what ``dpex bench`` measures, from ``module:attribute``."""

from __future__ import annotations

import importlib
import inspect
from pathlib import Path
from typing import Any

from torch.utils.data import DataLoader, IterableDataset, default_collate, default_convert

from dpex.cli.bench.measure import BenchError, BenchSubject

_SHOWN = 12
"""Names of a module that are offered where the one given is none of them."""


def resolve(target: str) -> Any:
    """The object that ``module:attribute`` names.

    Raises:
        BenchError: there is none.
    """
    name, colon, path = target.partition(":")
    if not (name and colon and path):
        raise BenchError(f"{target!r}: give module:attribute, such as my_package.data:train_set")
    try:
        found: Any = importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise
        raise BenchError(f"{target!r}: there is no module {error.name!r} in {Path.cwd()} or on Python's path") from None
    for part in path.split("."):
        if not hasattr(found, part):
            raise BenchError(f"{target!r}: {_named(found)} has no {part!r}; it has {_choice(found)}")
        found = getattr(found, part)
    return found


def _named(found: Any) -> str:
    return str(getattr(found, "__name__", None) or f"a {type(found).__name__}")


def _choice(found: Any) -> str:
    """What else there is, in words."""
    attributes = getattr(found, "__dict__", {})
    names = [name for name, value in attributes.items() if not (name.startswith("_") or inspect.ismodule(value))]
    return ", ".join(names[-_SHOWN:]) or "nothing to choose from"


def subject(target: str, batch_size: int | None = None, collate: str | None = None) -> BenchSubject:
    """What is to be measured, from the names.

    Raises:
        BenchError: there is nothing of that name, or it is no dataset.
    """
    found = resolve(target)
    if isinstance(found, type) or (callable(found) and not _is_dataset(found) and not isinstance(found, DataLoader)):
        found = _called(target, found)
    collate_fn: Any = None
    size: int | None = batch_size or 32
    if isinstance(found, DataLoader):
        collate_fn = found.collate_fn
        size = batch_size or _size_of(found)
        found = found.dataset
    if not _is_dataset(found):
        raise BenchError(
            f"{target!r}: a {type(found).__name__} is no dataset; give one with __getitem__ and __len__, or an "
            "IterableDataset, or a function without arguments that returns one"
        )
    iterable = isinstance(found, IterableDataset)
    if not iterable and len(found) == 0:
        raise BenchError(f"{target!r}: the dataset has no samples")
    if collate is not None:
        collate_fn = resolve(collate)
        if not callable(collate_fn):
            raise BenchError(f"--collate {collate!r}: a {type(collate_fn).__name__} cannot be called")
    usual = default_convert if size is None else default_collate
    return BenchSubject(name=target, dataset=found, batch_size=size, collate_fn=collate_fn or usual, iterable=iterable)


def _called(target: str, factory: Any) -> Any:
    try:
        inspect.signature(factory).bind()
    except (TypeError, ValueError) as error:
        raise BenchError(f"{target!r}: it cannot be called without arguments ({error}); name one that can") from None
    return factory()


def _size_of(loader: Any) -> int | None:
    """Samples of its batches; those of a batch sampler may differ in size, and the first is taken."""
    if loader.batch_size is not None or loader.batch_sampler is None:
        return loader.batch_size  # type: ignore[no-any-return]
    return len(next(iter(loader.batch_sampler)))


def _is_dataset(found: Any) -> bool:
    if isinstance(found, (IterableDataset, str, bytes, type)):
        return isinstance(found, IterableDataset)
    return hasattr(type(found), "__getitem__") and hasattr(type(found), "__len__")
