"""The places where batches are made, and the settings of a loader. PURE."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

INLINE: Final = "inline"
"""The training process. It is no worker pool, but its batches are counted as the batches of a pool."""
LOCAL: Final = "local"
"""The pool of this machine."""
REMOTE: Final = "remote"
"""The pool of the Ray cluster."""
WORKER_POOLS = (LOCAL, REMOTE)
POOLS = (INLINE, *WORKER_POOLS)
"""Places where batches are made, as metrics and reports name them."""
KNOBS = (*WORKER_POOLS, "prefetch")
"""The settings that ``resize`` and the tuner change: workers of each pool, and prefetch. `Settings` has such fields."""


@dataclass(frozen=True, kw_only=True, order=True)
class Settings:
    """The workers and the prefetch of a loader.

    Attributes:
        local: The number of workers on this machine.
        remote: The number of workers on the cluster.
        prefetch: The maximum number of batches that are drawn and not yet delivered.
        is_prefetch_fixed: True if the user limits the prefetch. Then dpex does not exceed it for remote workers or tiny
            batches. Comparisons of settings ignore this field.
    """

    local: int = 0
    remote: int = 0
    prefetch: int = 2
    is_prefetch_fixed: bool = field(default=False, compare=False)

    @property
    def workers(self) -> int:
        """Workers of both pools."""
        return self.local + self.remote

    def __str__(self) -> str:
        if not self.workers:
            return "in-process"
        pools = [f"{count} {name}" for name in WORKER_POOLS if (count := getattr(self, name))]
        return f"{' + '.join(pools)}, prefetch {self.prefetch}"
