"""Find the caches within a dataset."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable
from typing import Any

from dpex.cache.dataset import CachedDataset

_MOST_ITEMS = 64
"""Maximum items of a list in which `caches_in` searches for caches."""
_MOST_OBJECTS = 1000
"""Maximum objects whose parts `caches_in` searches, the nearest first."""


def caches_in(dataset: Any) -> list[CachedDataset]:
    """Return the cached datasets in a dataset: itself, or datasets in its attributes, lists and inner datasets."""
    caches: list[CachedDataset] = []
    seen: dict[int, Any] = {}
    waiting = deque([dataset])
    while waiting and len(seen) < _MOST_OBJECTS:
        one = waiting.popleft()
        if id(one) not in seen:
            seen[id(one)] = one
            waiting.extend(_parts_of(one))
            if isinstance(one, CachedDataset):
                caches.append(one)
    return caches


def _parts_of(one: Any) -> list[Any]:
    if isinstance(one, (list, tuple)):
        return [part for part in one[:_MOST_ITEMS] if hasattr(part, "__dict__") or isinstance(part, (list, tuple))]
    return [] if isinstance(one, CachedDataset) else list(getattr(one, "__dict__", {}).values())


def bytes_of(dataset: Any) -> Callable[[], dict[str, Any]]:
    """Return a function that returns the bytes of all caches in a dataset, by names of fields of `Reading`.

    The function keeps no dataset alive.
    """
    caches = [weakref.ref(one) for one in caches_in(dataset)]

    def present() -> dict[str, int]:
        found: dict[str, int] = {}
        for one in caches:
            cache = one()
            for where, stored in cache.stored().items() if cache is not None else ():
                name = f"cache_{where}_bytes"
                found[name] = found.get(name, 0) + stored.nbytes
        return found

    return present
