"""Facts that trainings must have in common to share batches, as texts that can be compared and shown.

A batch is a function of its samples, the dataset, the collate function and its seed. The samples are compared batch by
batch. The other facts are compared here, once for each pass. A dataset or a sampler is described by its type, its
length and its constructor's arguments, if these have the same text in every process. Its content is not compared.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset, Sampler

from dpex.worker.setup import WorkerSetup

Facts = dict[str, str]
_MOST_LETTERS = 200
"""Characters of a value in a message."""
_MOST_ITEMS = 16
"""Items of a sequence that is compared by its values. A longer one is compared by its length."""
_LEVELS = 3
"""Depth to which datasets in datasets are compared, such as a Subset of a ConcatDataset of an ImageFolder."""
_REMEDIES = {
    "base seed": "Seed both alike before iter(), by torch.manual_seed(...) or generator=",
    "version of torch": "Use one version of torch",
}


def facts_of(name: str, setup: WorkerSetup, index_sampler: Any) -> Facts:
    """Return the facts that all trainings of share ``name`` must have in common."""
    return {
        "share": name,
        **_described("dataset", setup.dataset),
        **_described("sampler", index_sampler),
        "collate_fn": _named(setup.collate_fn),
        "worker_init_fn": _named(setup.worker_init_fn),
        "base seed": str(setup.base_seed),
        "modes of torch": str(setup.modes),
        "version of torch": str(torch.__version__),
    }


def difference(known: Mapping[str, str], other: Mapping[str, str]) -> str:
    """Why a training with the ``other`` facts cannot share with those that have the ``known`` ones; "" if it can."""
    for name in dict.fromkeys([*known, *other]):
        there, here = known.get(name, "not there"), other.get(name, "not there")
        if there != here:
            return (
                f"share={known['share']!r}: the {name} of this training is {here}, and that of the training which "
                f"began to share is {there}. {_REMEDIES.get(name, 'Give both the same')}, or give another "
                "name to one of them"
            )
    return ""


def other_order(facts: Mapping[str, str], epoch: int, number: int, known: Any, other: Any) -> str:
    """Why a training cannot share that draws ``other`` samples for a batch than those that are ``known``."""
    return (
        f"share={facts['share']!r}: batch {number} of pass {epoch} has the samples {_shortened(repr(other))} in this "
        f"training, and {_shortened(repr(known))} in another. Have both draw the same order (one seed, one sampler, "
        "one set_epoch()), or give another name to one of them"
    )


def _described(what: str, value: Any, levels: int = _LEVELS) -> Facts:
    """A dataset or a sampler by its type, its length and what it was made with."""
    found = {f"type of the {what}": _named(type(value))}
    if hasattr(type(value), "__len__"):
        found[f"length of the {what}"] = _length(value)
    for name, item in _made_with(value).items():
        place = f"{name} of the {what}"
        if (text := _text(item)) is not None:
            found[place] = text
        elif levels > 1 and isinstance(item, Sampler if isinstance(value, Sampler) else Dataset):
            found |= _described(place, item, levels - 1)
    return found


def _made_with(value: Any) -> dict[str, Any]:
    """Return the attributes whose names are those of arguments of the constructor."""
    attributes = getattr(value, "__dict__", {})
    with contextlib.suppress(TypeError, ValueError):
        parameters = inspect.signature(type(value)).parameters
        names = {name: name if name in attributes else f"_{name}" for name in parameters}
        return {name: attributes[own] for name, own in names.items() if own in attributes}
    return {}


def _length(value: Any) -> str:
    try:
        return str(len(value))
    except Exception:
        return "unknown"


def _text(value: Any) -> str | None:
    """Return a text that is the same for that value in all processes, or None."""
    if isinstance(value, (torch.Tensor, np.ndarray)):
        return f"{tuple(value.shape)} of {value.dtype}"
    if isinstance(value, (list, tuple)) and len(value) > _MOST_ITEMS:
        return f"a {type(value).__name__} of {len(value)}"
    if isinstance(value, (torch.Generator, Sampler, Dataset)):
        return None
    if hasattr(value, "__qualname__"):
        return _named(value)
    try:
        text = repr(value)
    except Exception:
        return None
    return None if " at 0x" in text else _shortened(text)


def _named(value: Any) -> str:
    """A function or a type by its name; an object that is called, by its type."""
    if value is None:
        return "None"
    function = getattr(value, "func", value)
    function = function if hasattr(function, "__qualname__") else type(function)
    return f"{function.__module__}.{function.__qualname__}"


def _shortened(text: str) -> str:
    return text if len(text) <= _MOST_LETTERS else f"{text[:_MOST_LETTERS]}… ({len(text)} characters)"
