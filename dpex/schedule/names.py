"""Names of the places where batches are made, and names and attributes of the user's own objects. PURE.

Apart from the code that uses them, as folders of many layers share them.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from itertools import chain
from typing import Any, Final

INLINE: Final = "inline"
"""The training process. It is no worker pool, but counts batches as one."""
LOCAL: Final = "local"
"""The pool of this machine."""
REMOTE: Final = "remote"
"""The pool of the Ray cluster."""
WORKER_POOLS = (LOCAL, REMOTE)
POOLS = (INLINE, *WORKER_POOLS)
"""As metrics and reports count batches."""
KNOBS = (*WORKER_POOLS, "prefetch")
"""The settings that ``resize`` and the tuner change: workers of each pool, and prefetch. Also names of fields."""


def encodable(name: str) -> str:
    r"""The name as UTF-8 can hold it: a byte of a file name that is no UTF-8 becomes the six letters ``\udcff``.

    Names that differ stay different, but for those that hold such letters themselves.
    """
    return name.encode("utf-8", "backslashreplace").decode()


def attribute(thing: Any, name: str) -> Any:
    """Return ``thing.name``, or None if the attribute is missing or reading it raises any exception.

    A dataset may forward unknown attributes to a table and raise KeyError, and may hold a dead weak proxy or a stand-in
    for something that is not there. All attributes that dpex reads of such objects and torch does not are read here.
    """
    try:
        return getattr(thing, name, None)
    except Exception:
        return None


def is_a(thing: Any, kinds: type | tuple[type, ...]) -> bool:
    """Return True if ``thing`` is an instance of ``kinds``, and False if testing that raises any exception."""
    try:
        return isinstance(thing, kinds)
    except Exception:
        return False


# -- asynchronous datasets ---------------------------------------------------------------------------------------------

_READING = ("__getitem__", "__getitems__")
_MOST_WRAPPERS = 8
"""Datasets around a dataset that are looked through."""


def is_asynchronous(dataset: Any) -> bool:
    """Return True if the dataset has an ``async def __getitem__`` or ``__getitems__``, or one that it wraps has.

    Wrappers are those that hand on what they read, as torch's `Subset`, `ConcatDataset` and `StackDataset`.
    """
    return any(map(_is_async_itself, (dataset, *inner_datasets(dataset, only_torchs=True))))


def _is_async_itself(dataset: Any) -> bool:
    methods = (inspect.getattr_static(type(dataset), name, None) for name in _READING)
    return any(inspect.iscoroutinefunction(each) or getattr(each, "is_asynchronous", False) for each in methods)


def inner_datasets(dataset: Any, *, only_torchs: bool = False, levels: int = _MOST_WRAPPERS) -> Iterator[Any]:
    """Yield the datasets in the attributes ``dataset`` and ``datasets``, at any depth.

    Args:
        dataset: The outer dataset.
        only_torchs: Look only into classes whose ``__getitem__`` is torch's own.
        levels: The largest depth.
    """
    method = inspect.getattr_static(type(dataset), "__getitem__", None)
    if not levels or (only_torchs and not getattr(method, "__module__", "").startswith("torch.utils.data")):
        return
    held = attribute(dataset, "__dict__") or {}
    several = held.get("datasets", ())
    several = several.values() if isinstance(several, dict) else several if isinstance(several, (list, tuple)) else ()
    for each in chain(several, (held["dataset"],) if "dataset" in held else ()):
        yield each
        yield from inner_datasets(each, only_torchs=only_torchs, levels=levels - 1)
