"""How long workers wait for a CPU, as the kernel of their machine tells."""

from __future__ import annotations

from collections.abc import Iterable

from dpex.pools.local.handles import ProcessHandle
from dpex.system.clock import monotonic
from dpex.system.run_queue import Queued, look

LOOK_EVERY_S = 0.25
"""How often the kernel is asked; it takes 10 µs for each thread."""


class DelayMeter:
    """Remembers the last look."""

    def __init__(self) -> None:
        self._delay: float | None = None
        self._looked_at = 0.0
        self._queued = Queued()

    def of(self, processes: Iterable[ProcessHandle]) -> float | None:
        """Seconds that these were on run queues for each second on a CPU, lately; None: not known."""
        now = monotonic()
        if now - self._looked_at > LOOK_EVERY_S:
            self._looked_at = now
            queued = look([handle.pid for handle in processes if handle.pid and handle.exitcode is None], 0)
            ran, self._queued = queued.since(self._queued).workers, queued
            self._delay = None if ran is None else round(ran.delay, 3)
        return self._delay
