"""Nodes that are avoided for a while because their agents failed repeatedly. PURE.

After a single failure the agent is started again at once. A node that fails several times in a minute is left alone for
a while, and other nodes do its work. It then gets another chance. If it fails again soon after, it is left alone at
once, and for twice as long.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field
from typing import NamedTuple

FAILURES = 3
"""A process may be killed twice by chance, by a person or when memory runs out; a third time it has a reason."""
WITHIN_S = 60.0
"""Failures that are further apart have nothing to do with one another."""
FIRST_S = 30.0
"""About the time in which a machine is restarted, or its memory is free again."""
LONGEST_S = 600.0
"""A node that was repaired serves again after no more than this."""


class LeftAlone(NamedTuple):
    """A node that is left alone: its name for people, and why."""

    place: str
    why: str


@dataclass(kw_only=True)
class _Node:
    """The latest failures of a node, its pause in seconds, and when that ends."""

    failed_at: deque[float] = field(default_factory=lambda: deque(maxlen=FAILURES))
    pause_s: float = 0.0
    until: float = -math.inf
    report: LeftAlone | None = None


class FailingNodes:
    """Failures by node. Times are seconds of any one clock."""

    def __init__(self) -> None:
        self._nodes: dict[str, _Node] = {}

    def failed(self, node: str, place: str, why: str, now: float) -> LeftAlone | None:
        """Count a failure; return the report on the node if it is left alone from now on, else None."""
        known = self._nodes.setdefault(node, _Node())
        known.failed_at.append(now)
        has_relapsed = now - known.until < max(WITHIN_S, known.pause_s)
        often = len(known.failed_at) == FAILURES and now - known.failed_at[0] <= WITHIN_S
        if not (has_relapsed or often):
            return None
        known.pause_s = min(LONGEST_S, 2.0 * known.pause_s) if has_relapsed else FIRST_S
        known.until = now + known.pause_s
        known.failed_at.clear()
        how = "again, soon after its pause" if has_relapsed else f"{FAILURES} times within {WITHIN_S:.0f} s"
        text = f"node {place} is left alone for {known.pause_s:.0f} s, as it failed {how}; the last time: {why}"
        known.report = LeftAlone(place, text)
        return known.report

    def left_alone(self, now: float) -> dict[str, LeftAlone]:
        """Return the nodes that are left alone now, with the reports on them."""
        return {node: known.report for node, known in list(self._nodes.items()) if known.report and now < known.until}
