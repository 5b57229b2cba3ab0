"""The steps of a dataset's Compose: a copy of the dataset that runs the first ones only, and the rest, to be run later.

A Compose is any object with a list ``transforms`` that it applies in order to one value, such as torchvision's. The
result of the first steps is found in the sample by its identity: as the sample itself, or in tuples, lists and dicts.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from torch.utils.data import Dataset, IterableDataset

from dpex.cache.determinism import watched
from dpex.errors import CacheError, OptionError
from dpex.profile.live_timer import items_of, label, labels

_ATTRIBUTES = ("transform", "transforms")
Place = tuple[Any, ...]
"""The place of a value in a sample: the indices and keys that lead to it."""


class Cut(NamedTuple):
    """A dataset in two parts.

    Attributes:
        dataset: A copy that runs the first steps only, or the undivided dataset.
        first: The first steps, in place of the Compose, or None.
        later: The later steps, or None.
    """

    dataset: Any
    first: FirstSteps | None
    later: Any


class FirstSteps:
    """Stands in the place of a Compose, runs its first steps, and keeps their results."""

    def __init__(self, compose: Any) -> None:
        self.compose = compose
        self.forget()

    def forget(self) -> None:
        """Drop the values of the last samples."""
        self.results: list[Any] = []

    def __call__(self, *values: Any, **named: Any) -> Any:
        if named:
            given = inspect.signature(self.compose).bind(*values, **named)
            values, named = given.args, given.kwargs
        if len(values) != 1 or named:
            raise CacheError(
                f"{label(self.compose)} gets {len(values) + len(named)} values at once or by name, and upto= needs "
                "one that goes through all steps; cache a dataset that makes the deterministic part, and transform in "
                "another one around it"
            )
        self.results.append(self.compose(values[0]))
        return self.results[-1]

    def __getstate__(self) -> Any:
        return {"compose": self.compose}

    def __setstate__(self, state: Any) -> None:
        self.__init__(state["compose"])  # type: ignore[misc]


def cut(dataset: Any, upto: str) -> Cut:
    """Divide a dataset after the last step of its Compose whose class is ``upto``; before all steps if that is "".

    It is not divided if no steps are left: the key of its cache is then that of whole samples.

    Raises:
        OptionError: The dataset has no Compose, or this has no such step.
    """
    path, compose = _compose_of(dataset)
    if not path:
        raise OptionError(
            f"upto={upto!r}: {type(dataset).__name__} has no attribute transform or transforms with a list of steps; "
            "leave upto= out, or cache a dataset within"
        )
    names = [label(step) for step in compose.transforms]
    if upto and upto not in names:
        raise OptionError(f"upto={upto!r}: give one of {', '.join(dict.fromkeys(names))}, the steps of its {path[-1]}")
    number = len(names) - names[::-1].index(upto) if upto else 0
    if number == len(names):
        return Cut(dataset, None, None)
    first = FirstSteps(_part(compose, slice(number)))
    return Cut(_with(dataset, path, first), first, _part(compose, slice(number, None)))


def changed_at(place: Place, sample: Any, change: Callable[[Any], Any]) -> Any:
    """Return the sample with a changed item at the place."""
    if not place:
        return change(sample)
    key, *rest = place
    items = {each: changed_at(tuple(rest), part, change) if each == key else part for each, part in items_of(sample)}
    if isinstance(sample, Mapping):
        changed: Any = copy.copy(sample)
        changed.update(items)
        return changed
    return type(sample)(*items.values()) if hasattr(sample, "_fields") else type(sample)(items.values())


def step_labels(dataset: Any) -> tuple[str, ...] | None:
    """Return the label of the dataset's Compose, and those of its steps; () without one; None if `dpex.cached` refuses
    the dataset."""
    if not is_cachable(dataset):
        return None
    path, compose = _compose_of(dataset)
    return (label(compose), *labels(compose.transforms)) if path else ()


def is_cachable(dataset: Any) -> bool:
    """Return True for a map-style dataset with a length, which loads single samples or many at once."""
    has_samples = has_getitem(dataset) or callable(getattr(dataset, "__getitems__", None))
    return not isinstance(dataset, IterableDataset) and hasattr(dataset, "__len__") and has_samples


def load(dataset: Any, places: Sequence[int], *, in_bulk: bool) -> list[Any]:
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
    """Return True if a dataset has a ``__getitem__`` of its own: that of torch's base class only raises an error."""
    own = getattr(type(dataset), "__getitem__", None)
    return own is not None and own is not Dataset.__getitem__


def random_place(dataset: Any, index: int, *, in_bulk: bool = False) -> str:
    """Return the first random step of a dataset's Compose in words, and a remedy; "" without a random step."""
    path, compose = _compose_of(dataset)
    watch = watched(dataset, index, in_bulk=in_bulk) if path else None
    if watch is None:
        return ""
    compose = compose.compose if isinstance(compose, FirstSteps) else compose
    names, bare = labels(compose.transforms), list(map(label, compose.transforms))
    drawing = {name for step in watch.drawing for name in step}
    number = next((number for number, name in enumerate(names) if name in drawing), None)
    if number is None:
        return ""
    what = f"step {number + 1} of its {path[-1]}, {names[number]}, is random: "
    upto = bare[number - 1] if number else ""
    if upto not in bare[number:] and any(label(compose) in step[-1:] for step in watch.results):
        return f"{what}give upto={upto!r}"
    return f"{what}cache a dataset that makes the part before it, and transform in another one around it"


def _compose_of(dataset: Any) -> tuple[list[str], Any]:
    """Return the attributes that lead to the Compose of a dataset, or of one within it, and the Compose."""
    for attribute in _ATTRIBUTES:
        value = getattr(dataset, "__dict__", {}).get(attribute)
        if isinstance(value, FirstSteps) or isinstance(getattr(value, "transforms", None), (list, tuple)):
            return [attribute], value
    within = getattr(dataset, "dataset", None)
    path, compose = ([], None) if within is None else _compose_of(within)
    return ["dataset", *path] if path else [], compose


def _with(dataset: Any, path: Sequence[str], compose: Any) -> Any:
    """Return a copy of the dataset, and of those in it, with this in the place of its Compose."""
    attribute, *further = path
    changed = copy.copy(dataset)
    setattr(changed, attribute, _with(getattr(dataset, attribute), further, compose) if further else compose)
    return changed


def _part(compose: Any, part: slice) -> Any:
    found = copy.copy(compose)
    found.transforms = compose.transforms[part]
    return found
