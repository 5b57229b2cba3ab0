"""What a simulated rank did, for looking back."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass, field

from dpex.autotune.types import Decision
from dpex.measure.settings import Settings

_TINY = 1e-12
_TENTH_S = 0.1


@dataclass(kw_only=True)
class Mark:
    """One sampling window of a rank, for looking back. memory: the most that it held in it."""

    at: float
    seconds: float
    settings: Settings
    running: int
    rate: float
    wait: float
    memory: float


class MachineBytes:
    """The most memory that all ranks together held, by tenths of a second."""

    def __init__(self) -> None:
        self._most: dict[int, float] = {}

    def note(self, at: float, held: float) -> None:
        """So many bytes are held."""
        tenth = int(at / _TENTH_S)
        self._most[tenth] = max(held, self._most.get(tenth, 0.0))

    def most(self, start: float, end: float) -> float:
        """In the tenths that begin after ``start`` and before ``end``."""
        return max((held for tenth, held in self._most.items() if start < tenth * _TENTH_S < end), default=0.0)


@dataclass
class History:
    """What a rank did: windows, decisions, delivery times, and worker-seconds by pool.

    beyond_room: decisions for more remote workers than the cluster had room for. machine_bytes: see
    `MachineBytes`, the same for all ranks.
    """

    machine_bytes: MachineBytes = field(default_factory=lambda: MachineBytes())

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
