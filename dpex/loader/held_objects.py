"""Find the attribute of a dataset that holds the most bytes of Python objects, in a bounded number of steps."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any

from dpex.diagnose.copies import HeldObjects

_SAMPLED = 32
"""Number of items of a container from which the size of all items is estimated."""
_DEEPEST = 3
"""Maximum nesting depth of containers, and of datasets that wrap each other. Deeper ones are not counted."""
_CONTAINERS = (list, tuple, dict, set, frozenset)


def largest_container(dataset: Any) -> HeldObjects:
    """Return the largest container of objects among the attributes of a dataset, estimated from a sample of items."""
    found = [_described(name, value) for name, value in _attributes(dataset, _DEEPEST)]
    return max(found, key=lambda one: one.nbytes, default=HeldObjects())


def _attributes(dataset: Any, levels: int) -> Iterator[tuple[str, Any]]:
    if type(dataset) in _CONTAINERS:
        yield "dataset", dataset
    for name, value in list(getattr(dataset, "__dict__", {}).items()):
        if type(value) in _CONTAINERS:
            yield name, value
        elif name in ("dataset", "_dataset") and levels:
            yield from _attributes(value, levels - 1)


def _described(name: str, container: Any) -> HeldObjects:
    sample = _sample_of(container)
    if not sample:
        return HeldObjects()
    kind, each = type(sample[-1]).__name__, sum(_bytes_of(one, _DEEPEST) for one in sample) // len(sample)
    return HeldObjects(
        text=f"`{name}`: a {type(container).__name__} of {len(container):,} {kind}",
        nbytes=sys.getsizeof(container) + len(container) * each * (1 + isinstance(container, dict)),
    )


def _sample_of(container: Any) -> list[Any]:
    if isinstance(container, (list, tuple)):
        return list(container[:: max(1, len(container) // _SAMPLED)][:_SAMPLED])
    if isinstance(container, dict):
        items: Iterable[tuple[Any, Any]] = islice(container.items(), _SAMPLED // 2)
        return [one for item in items for one in item]
    return list(islice(container, _SAMPLED))


def _bytes_of(one: Any, levels: int) -> int:
    nbytes = sys.getsizeof(one) if type(one).__module__ == "builtins" else 0
    if type(one) in _CONTAINERS and levels and (within := _sample_of(one)):
        count = len(one) * (1 + isinstance(one, dict))
        nbytes += count * sum(_bytes_of(each, levels - 1) for each in within) // len(within)
    return nbytes
