"""What a simulated rank did, for looking back."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass, field

from dpex.autotune.types import Decision, Settings

_TINY = 1e-12


@dataclass
class Mark:
    """One sampling window of a rank, for looking back. memory: the most that it held in it."""

    at: float
    settings: Settings
    running: int
    rate: float
    stall: float
    memory: float


@dataclass
class History:
    """What a rank did: windows, decisions, delivery times, and worker-seconds by lane.

    beyond_room: decisions for more remote workers than the cluster had room for.
    """

    marks: list[Mark] = field(default_factory=list)
    decisions: list[Decision] = field(default_factory=list)
    beyond_room: list[Decision] = field(default_factory=list)
    delivered: list[float] = field(default_factory=list)
    local_s: float = 0.0
    remote_s: float = 0.0

    def rate(self, start: float, end: float) -> float:
        """Batches per second delivered between two moments."""
        return self.count(start, end) / max(_TINY, end - start)

    def count(self, start: float, end: float) -> int:
        """Batches delivered after ``start`` and up to ``end``."""
        return bisect_right(self.delivered, end) - bisect_right(self.delivered, start)
