"""The waits of the latest batches, one by one, so that the ranks of a job can be compared batch by batch. PURE."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field

KEPT = 10_000
"""Batches whose waits are kept, the latest: 120 KB for a loader."""


@dataclass(frozen=True, eq=False)
class Waits:
    """The waits of batches ``first``, ``first + 1``, ... of a loader.

    Attributes:
        first: The number of the first batch, from 0.
        seconds: The wait for each batch; 0 for the first batch of a pass.
        at: The monotonic time of each delivery.
    """

    first: int = 0
    seconds: array[float] = field(default_factory=lambda: array("f"))
    at: array[float] = field(default_factory=lambda: array("d"))

    @property
    def end(self) -> int:
        """The number of the batch that follows."""
        return self.first + len(self.seconds)

    def then(self, later: Waits) -> Waits:
        """Return these waits and those of a later iterator, whose batches follow."""
        if later.first:
            return Waits(self.end + later.first, later.seconds, later.at)
        return Waits(self.first, self.seconds + later.seconds, self.at + later.at).latest()

    def since(self, earlier: Waits) -> Waits:
        """Return the waits for batches that an earlier value has not; they are numbered from there."""
        skipped = max(0, earlier.end - self.first)
        return Waits(max(0, self.first - earlier.end), self.seconds[skipped:], self.at[skipped:])

    def counted(self) -> Waits:
        """Return a value without the waits, from which `since` subtracts the same."""
        return Waits(self.end)

    def latest(self) -> Waits:
        """Return a copy of the latest `KEPT`."""
        first = max(self.first, self.end - KEPT)
        return Waits(first, self.seconds[first - self.first :], self.at[first - self.first :])


class WaitLog:
    """Collects the waits of an iterator."""

    __slots__ = ("_waits",)

    def __init__(self) -> None:
        self._waits = Waits()

    def add(self, waited_s: float, now: float) -> None:
        """Note a batch that was delivered."""
        waits = self._waits
        if len(waits.seconds) >= 2 * KEPT:
            self._waits = waits = waits.latest()
        waits.at.append(now)
        waits.seconds.append(waited_s)

    def read(self) -> Waits:
        """Return the waits so far."""
        return self._waits.latest()
