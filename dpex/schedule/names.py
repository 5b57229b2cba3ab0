"""Names of the places where batches are made, and names that users give in a form that can be written everywhere. PURE.

A module of its own, as metrics, pages and pools share it.
"""

from __future__ import annotations

from typing import Final

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
