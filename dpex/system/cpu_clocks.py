"""Measure the CPU time of a batch, with that of the threads that libraries start for it (codecs, BLAS).

The clock is that of the process, `time.process_time`. A worker has its process to itself. In the training process other
threads count as well while a batch is made there, such as those of another loader.
"""

from __future__ import annotations

import time
from collections.abc import Callable

TINY_S = 0.0003
"""Seconds of a ticket below which reading a CPU clock, up to 1 µs, is a noticeable cost."""
CPU_CLOCK_EVERY = 16
"""Tiny tickets for each reading of the clock."""


class SampledCpu:
    """Measure the CPU seconds of tickets by ``clock``, a system call.

    Of tiny tickets the clock is read for each `CPU_CLOCK_EVERY`-th, which stands for all.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._unclocked = 0
        self._began_s = 0.0
        self._ratio = 1.0

    def begin(self) -> float:
        """Begin a ticket; return the time."""
        if not self._unclocked:
            self._began_s = self._clock()
        return time.perf_counter()

    def end(self, wall_s: float) -> float:
        """End a ticket that took ``wall_s``; return its CPU seconds."""
        if self._unclocked:
            cpu_s = wall_s * self._ratio
        else:
            cpu_s = self._clock() - self._began_s
            self._ratio = cpu_s / wall_s if wall_s > 0 else 1.0
        self._unclocked = 0 if wall_s > TINY_S else (self._unclocked + 1) % CPU_CLOCK_EVERY
        return cpu_s
