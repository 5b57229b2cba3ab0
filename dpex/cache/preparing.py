"""Prepare samples, and find out if they are random: by draws from known generators, and by a second preparation."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from torch.utils.data import Dataset, IterableDataset

from dpex.cache.encoding import is_same
from dpex.errors import CacheError
from dpex.system.clock import monotonic
from dpex.worker import sample_guard
from dpex.worker.batch_seeding import call_seeded
from dpex.worker.draws import global_marks
from dpex.worker.own_generators import OwnGenerators

Result = TypeVar("Result")
SEED = 0x2345_6789_5EED_0002
"""The seed of all generators while a sample is prepared again."""


def prepared(prepare: Callable[[], Result], prepared_by: Any = None) -> tuple[Result, float, bool]:
    """Prepare samples. Return them, the seconds that it took, and True if a random generator was drawn from.

    The global generators count and, unless ``prepared_by`` is None, the generators in that dataset.
    """
    own = None if prepared_by is None else OwnGenerators(prepared_by, None)
    states, before = own and own.states(), global_marks()
    began = monotonic()
    found = prepare()
    took_s = monotonic() - began
    return found, took_s, global_marks() != before or bool(own and not is_same(own.states(), states))


def prepared_again(prepare: Callable[[], Result], prepared_by: Any) -> Result:
    """Prepare samples under another seed, and restore all generators afterwards.

    The time limit of `dpex.SamplePolicy` begins anew.
    """
    if sample_guard.watch_of_process is not None:
        sample_guard.watch_of_process.begin_again()
    return call_seeded(SEED, lambda _: prepare(), None, OwnGenerators(prepared_by, None))


def is_cachable(dataset: Any) -> bool:
    """Return True for a map-style dataset with a length, which loads single samples or many at once."""
    has_samples = has_getitem(dataset) or callable(getattr(dataset, "__getitems__", None))
    return not isinstance(dataset, IterableDataset) and hasattr(dataset, "__len__") and has_samples


def load_samples(dataset: Any, places: Sequence[int], *, in_bulk: bool) -> list[Any]:
    """Return the samples of these places, by ``__getitems__`` if ``in_bulk``.

    Raises:
        CacheError: ``__getitems__`` returned something else than a list with a sample for each place.
    """
    if not in_bulk:
        return [dataset[place] for place in places]
    found = dataset.__getitems__(list(places))
    if not isinstance(found, (list, tuple)) or len(found) != len(places):
        raise CacheError(
            f"{type(dataset).__name__}.__getitems__ returned a {type(found).__name__} for {len(places)} indices, and "
            "samples can only be cached from a list with one for each index; return a list, and collate it later"
        )
    return list(found)


def has_getitem(dataset: Any) -> bool:
    """Return True if a dataset has a ``__getitem__`` of its own. The method of torch's base class only raises an
    error."""
    own = getattr(type(dataset), "__getitem__", None)
    return own is not None and own is not Dataset.__getitem__
