"""CPU time of this process, its workers and other programs between two moments.

The windows of the tuner and the counts of a diagnosis are measured by the same code: a `MachineCounts` at each end, and
`MachineCounts.completed` of the reading between them.
"""

from __future__ import annotations

import os
import time
from collections.abc import Collection
from dataclasses import dataclass, field, replace
from typing import Any

from dpex.measure.pool_reading import PoolReading
from dpex.measure.reading import Reading
from dpex.measure.settings import INLINE, LOCAL
from dpex.system import run_queue
from dpex.system.clock import monotonic
from dpex.system.cpus import parts_of_machine
from dpex.system.machine import CpuUse, cpu_used, others_s
from dpex.system.run_queue import QueueTimes, RunQueueTimes


@dataclass(frozen=True, kw_only=True)
class MachineCounts:
    """The kernel's counts at one moment."""

    at: float
    """Time of the counts, in seconds."""
    cpu_s: float
    """CPU seconds of this process."""
    queued: QueueTimes = field(default_factory=QueueTimes)
    """Times of threads on a CPU, and on run queues."""
    used: CpuUse | None = None
    """CPU seconds of all programs, and of this process with its workers; None: not asked, or unknown."""

    def part(self, since: MachineCounts, seconds: float) -> float:
        """Return ``seconds`` as a part of the time since earlier counts, 0 to 1."""
        return min(1.0, max(0.0, seconds) / max(1e-6, self.at - since.at))

    def completed(self, found: Reading, since: MachineCounts, cpu_part: float, queued_part: float = 1.0) -> Reading:
        """Return ``found``, the reading between these counts and earlier ones, with the CPU time of that period.

        ``cpu_part``, ``queued_part``: The parts of this process's CPU time, and of the training thread's time on run
        queues, that belong to passes.
        """
        lived_s, ran = max(1e-6, self.at - since.at), self.queued.since(since.queued)
        makers = {INLINE: ran.here, LOCAL: ran.workers}
        others: dict[str, Any] = {}
        if self.used is not None and since.used is not None:
            parts = parts_of_machine(os.environ, found.sharing_ranks)
            others = {"others_s": others_s(self.used, since.used, parts), "others_over_s": lived_s}
        return replace(
            found,
            trainer_cpu_s=max(0.0, self.cpu_s - since.cpu_s) * cpu_part,
            trainer_queued_s=None if ran.trainer is None else ran.trainer.queued_s * queued_part,
            pools={name: with_queue(pool, makers.get(name)) for name, pool in found.pools.items()},
            **others,
        )


def read_own_cpu() -> MachineCounts:
    """Return the CPU time of this process alone."""
    return MachineCounts(at=monotonic(), cpu_s=time.process_time())


def read_machine(pids: Collection[int], thread: int, own: Collection[int] | None = None) -> MachineCounts:
    """Return the counts now.

    Args:
        pids: Workers whose run queues are read.
        thread: The native id of the training thread; 0: unknown.
        own: The local workers, which are no other programs; None: other programs are not asked for.
    """
    queued = run_queue.read_queue_times(pids, thread)
    return replace(read_own_cpu(), queued=queued, used=None if own is None else cpu_used(own))


def with_queue(pool: PoolReading, ran: RunQueueTimes | None) -> PoolReading:
    """Return the pool with the time that its batches spent on run queues, by the delay of their workers."""
    return pool if ran is None else replace(pool, queued_s=pool.cpu_s * ran.delay, queue_known_s=pool.busy_s)
