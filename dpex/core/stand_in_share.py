"""How much of its time the training process spends on standing in for workers that are on their way. PURE.

A loop that takes batches as fast as they come would have it do nothing else. Workers that start need CPU time of the
same machine, if they are on it, and threads of the training process, which share Python's lock. Every batch that is
made here in place of a logical worker is also made again by its worker, which takes the longer the more there are.
"""

from __future__ import annotations

SHARE = 0.5
"""The remaining time is for what starts the workers. The steps of the loop count as such."""
STRETCH_S = 0.005
"""Time that may be spent in advance. It is the interval in which Python's lock changes hands, so that pausing for less
would not help another thread."""


class StandInShare:
    """An account of seconds: time passing fills it at the rate of `SHARE`, making batches empties it.

    Once it is overdrawn, nothing is made until it is full.
    """

    __slots__ = ("_at", "_credit_s", "_is_paused")

    def __init__(self) -> None:
        self._credit_s = STRETCH_S
        self._is_paused = False
        self._at: float | None = None

    def made(self, began: float, ended: float) -> None:
        """A batch was made between these moments."""
        self._pass(began)
        self._credit_s -= (1.0 - SHARE) * (ended - began)
        self._at = ended
        self._is_paused = self._credit_s < 0.0

    def pause_s(self, now: float) -> float:
        """Seconds from now until the next batch may be made; 0.0 if it may be made at once."""
        self._pass(now)
        if self._credit_s >= STRETCH_S:
            self._is_paused = False
        return (STRETCH_S - self._credit_s) / SHARE if self._is_paused else 0.0

    def _pass(self, now: float) -> None:
        passed = 0.0 if self._at is None else max(0.0, now - self._at)
        self._at = now
        self._credit_s = min(STRETCH_S, self._credit_s + SHARE * passed)
