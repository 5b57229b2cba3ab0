"""What the workers of one place, or the training process, have made so far, as the simulated loader counts it."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from dpex.measure.batch_times import RECENT
from dpex.measure.pool_reading import PoolReading
from dpex.system.meter import RunQueueTimes


@dataclass
class PoolCounts:
    """Sums over batches; seconds. ``cpu_s``: as the clocks show it. ``latest_s``: wall time of each of the latest."""

    tickets: int = 0
    load_s: float = 0.0
    encode_s: float = 0.0
    cpu_s: float = 0.0
    queued_s: float = 0.0
    latest_s: deque[float] = field(default_factory=lambda: deque(maxlen=RECENT))

    def made(self, cpu_s: float, encode_s: float, wall_s: float, queued_s: float) -> None:
        """One more; what of ``wall_s`` is not encoding counts as reading."""
        self.tickets += 1
        self.load_s += wall_s - encode_s
        self.encode_s += encode_s
        self.cpu_s += cpu_s + encode_s
        self.queued_s += max(0.0, queued_s)
        self.latest_s.append(wall_s)

    @property
    def ran(self) -> RunQueueTimes:
        """CPU and run queues, as the kernel would count them."""
        return RunQueueTimes(self.cpu_s, self.queued_s)

    def reading(self, requested: int = 0, running: int = 0) -> PoolReading:
        """Sums so far, and workers now."""
        return PoolReading(
            requested=requested,
            running=running,
            tickets=self.tickets,
            load_s=self.load_s,
            encode_s=self.encode_s,
            load_cpu_s=self.cpu_s,
            services_s=tuple(self.latest_s),
        )
