"""Names of the places where batches are made, and names and attributes of the user's own objects. PURE.

Apart from the code that uses them, as folders of many layers share them.
"""

from __future__ import annotations

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
