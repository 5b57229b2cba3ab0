"""Names and attributes of the user's own objects. PURE.

These functions have a module of their own, because folders of several layers use them.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from itertools import chain
from typing import Any


def encodable(name: str) -> str:
    r"""Return the name in a form that UTF-8 can hold. A lone surrogate, which Python uses for a byte that is not valid
    UTF-8 in a file name, becomes six letters such as ``\udcff``.

    Different names stay different, unless one contains such letters itself.
    """
    return name.encode("utf-8", "backslashreplace").decode()


def attribute(thing: Any, name: str) -> Any:
    """Return ``thing.name``, or None if the attribute is missing or reading it raises any exception.

    A dataset may forward unknown attributes to a table and raise KeyError, and may hold a dead weak proxy or a stand-in
    for a missing object. dpex uses this function for all attributes of users' objects that torch does not read.
    """
    try:
        return getattr(thing, name, None)
    except Exception:
        return None


def length_of(thing: Any) -> int | None:
    """Return ``len(thing)``, or None if there is no length or asking for it raises any exception.

    A stream has none, and a sampler of the user may know its own only while it is iterated.
    """
    try:
        return len(thing)
    except Exception:
        return None


def is_a(thing: Any, kinds: type | tuple[type, ...]) -> bool:
    """Return True if ``thing`` is an instance of ``kinds``, and False if testing that raises any exception."""
    try:
        return isinstance(thing, kinds)
    except Exception:
        return False


# -- asynchronous datasets ---------------------------------------------------------------------------------------------


def lanes(batch_size: int, concurrency: int) -> int:
    """Return how many batches a worker makes at a time to load ``concurrency`` samples at a time; at least two."""
    return max(2, -(-concurrency // max(1, batch_size)))


READING = ("__getitem__", "__getitems__")
_NO_DATASETS = (str, bytes, bytearray, list, tuple, dict, range)
_MOST_DATASETS = 64
"""Maximum number of objects in a dataset that are inspected."""


def is_asynchronous(dataset: Any) -> bool:
    """Return True if the dataset, or one that it wraps, is an `AsyncDataset` or has an ``async def __getitem__``.

    An `AsyncDataset` in a wrapper that is not torch's does not count, because the wrapper may read it synchronously.
    """
    return any(
        _is_async_itself(each) and (is_torchs or not reads_either_way(each))
        for each, is_torchs in with_inner_datasets(dataset)
    )


def async_datasets(dataset: Any) -> list[Any]:
    """Return the asynchronous datasets among a dataset and the datasets that it wraps, the outermost first."""
    return [each for each, _ in with_inner_datasets(dataset) if _is_async_itself(each)]


def reads_either_way(dataset: Any) -> bool:
    """Return True for an `AsyncDataset`."""
    return hasattr(type(dataset), "reads_either_way")


def _is_async_itself(dataset: Any) -> bool:
    if (attribute(dataset, "__dict__") or {}).get("is_asynchronous"):  # it decodes by an async function
        return True
    methods = (inspect.getattr_static(type(dataset), name, None) for name in READING)
    return reads_either_way(dataset) or any(map(inspect.iscoroutinefunction, methods))


def with_inner_datasets(dataset: Any) -> Iterator[tuple[Any, bool]]:
    """Yield a dataset, and the datasets that it holds as attributes or in ``datasets``, at any depth.

    The second value is True if all wrappers around the dataset are torch's, which pass samples on unchanged.
    """
    waiting, seen = [(dataset, True)], {id(dataset)}
    for each, is_torchs in waiting:
        yield each, is_torchs
        method = inspect.getattr_static(type(each), "__getitem__", None)
        is_torchs = is_torchs and getattr(method, "__module__", "").startswith("torch.utils.data")
        held = attribute(each, "__dict__") or {}
        several = held.get("datasets", ())
        several = several.values() if is_a(several, dict) else several if is_a(several, (list, tuple)) else ()
        for inner in chain(several, held.values()):
            if len(seen) >= _MOST_DATASETS:
                break
            is_one = hasattr(type(inner), "__getitem__") and not is_a(inner, _NO_DATASETS)
            if is_one and id(inner) not in seen:
                seen.add(id(inner))
                waiting.append((inner, is_torchs))
