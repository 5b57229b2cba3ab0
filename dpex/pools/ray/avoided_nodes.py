"""Nodes of a cluster that get no workers: for a while, as agents failed there, or as they cannot serve a dataset. PURE.

After a single failure the agent is started again at once. A node that fails several times is left alone for a minute,
and other nodes do its work. It then gets another chance.
"""

from __future__ import annotations

import math
from collections import deque
from typing import NamedTuple

FAILURES = 3
"""A process may be killed twice by chance, by a person or when memory runs out; a third time it has a reason."""
WITHIN_S = 600.0
"""Failures that are further apart have nothing to do with one another. A start may take a minute before it fails."""
PAUSE_S = 60.0
"""In about that time a machine is restarted, or its memory is free again."""


class AvoidedNode(NamedTuple):
    """A node that gets no workers: its name for people, why, and until when."""

    place: str
    why: str
    until: float


class AvoidedNodes:
    """Failures by node. Times are seconds of any one clock."""

    def __init__(self) -> None:
        self._failed_at: dict[str, deque[float]] = {}
        self._avoided: dict[tuple[str, str], AvoidedNode] = {}

    def failed(self, node: str, place: str, why: str, now: float) -> str:
        """Count a failure; return why the node is left alone from now on, or ""."""
        failed_at = self._failed_at.setdefault(node, deque(maxlen=FAILURES))
        failed_at.append(now)
        if len(failed_at) < FAILURES or now - failed_at[0] > WITHIN_S:
            return ""
        failed_at.clear()
        text = (
            f"node {place} is left alone for {PAUSE_S:.0f} s, as it failed {FAILURES} times within {WITHIN_S:.0f} s; "
            f"the last time: {why}"
        )
        self._avoided[node, ""] = AvoidedNode(place, text, now + PAUSE_S)
        return text

    def unfit(self, node: str, place: str, kind: str, why: str) -> None:
        """Note that a node cannot serve datasets of that kind."""
        self._avoided[node, kind] = AvoidedNode(place, why, math.inf)

    def now(self, kind: str, now: float) -> dict[str, AvoidedNode]:
        """Return the nodes that get no workers for datasets of that kind now."""
        return {node: found for (node, of), found in self._avoided.items() if of in ("", kind) and now < found.until}
