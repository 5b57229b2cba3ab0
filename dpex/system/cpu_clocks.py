"""CPU clocks that count what making a batch costs, with the threads that libraries start for it (codecs, BLAS).

* A worker that has its process to itself reads the process's clock (`time.process_time`).
* In the training process other threads belong to the training step, to other loaders and to dpex as well.
  `HelperThreads` compares, now and then, what each thread does during a step and while the next batch is made.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

from dpex.measure.readable import remainder

TINY_S = 0.0003
"""Beside a ticket that takes less, reading a CPU clock, up to 1 µs, is not nothing."""
CPU_CLOCK_EVERY = 16
"""Of tiny tickets the clock is read for each so-manyth, which makes it a sixteenth as dear."""
LOOK_EVERY_S = 0.25
"""How often helpers of the training process are looked for, unless that took more than `LOOK_SHARE` of the time."""
LOOK_SHARE = 0.002
"""The share of the time that looking for helpers may take."""
LEAST_MAKING_S = 0.0005
"""A batch that takes less gives no thread time to help; of those nothing is looked at."""
SPIN_S = 0.005
"""OpenMP's threads spin for some milliseconds after the step's last parallel region (GOMP_SPINCOUNT), as if at work."""
_IDLE_S, _IDLE_SHARE = 0.0001, 0.02
_KEPT = 0.9
"""What is left of the past with each batch that is looked at: the latest ten count."""
_TASKS = Path("/proc/self/task")


class SampledCpu:
    """CPU seconds of one ticket after the other, by ``clock``, a system call. Of tiny tickets it is read for each
    `CPU_CLOCK_EVERY`-th, which stands for all."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._unclocked = 0
        self._began_s = 0.0
        self._ratio = 1.0

    def begin(self) -> float:
        """A ticket begins; returns the time."""
        if not self._unclocked:
            self._began_s = self._clock()
        return time.perf_counter()

    def end(self, wall_s: float) -> float:
        """It ended, and took so long; returns its CPU seconds."""
        if self._unclocked:
            cpu_s = wall_s * self._ratio
        else:
            cpu_s = self._clock() - self._began_s
            self._ratio = cpu_s / wall_s if wall_s > 0 else 1.0
        self._unclocked = 0 if wall_s > TINY_S else (self._unclocked + 1) % CPU_CLOCK_EVERY
        return cpu_s


def thread_clock(native_id: int) -> int:
    """The number of the CPU clock of a thread of this process on Linux, for `time.clock_gettime`."""
    return (~native_id << 3) | 6  # the kernel's CPUCLOCK_PERTHREAD_MASK | CPUCLOCK_SCHED


class ThreadSighting(NamedTuple):
    """CPU seconds of other threads by native id, and those of dpex's own together."""

    threads: Mapping[int, float]
    own_s: float


class HelperThreads:
    """What other threads of the training process compute for the batches that the calling thread makes there.

    ``each_s``: their CPU seconds for a batch, on average; on a busy machine these vary less than wall time does. Call
    `begin` before a making while ``is_looking``, and `end` after one then or once ``due`` has come. A thread helps that
    rests during the step, or works for much longer while the batch is made than it did during the step and would spin
    afterwards. Threads of dpex's own are left out.
    """

    def __init__(
        self,
        look: Callable[[], ThreadSighting] | None = None,
        process_s: Callable[[], float] = time.process_time,
        thread_s: Callable[[], float] = time.thread_time,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._look = look or other_threads
        self._process_s, self._thread_s, self._clock = process_s, thread_s, clock
        self._before = ThreadSighting({}, 0.0)
        self._begun: tuple[float, ThreadSighting] | None = None
        self._helped_s = self._batches = self._took_s = 0.0
        self.is_looking = False
        self.each_s = 0.0
        self.due = 0.0

    def begin(self) -> None:
        """The making of a batch begins."""
        seen = self._seen()
        self._begun = self._process_s() - self._thread_s(), seen

    def end(self, now: float, made_s: float) -> None:
        """It has ended at ``now``, after so many seconds."""
        begun, self._begun = self._begun, None
        if begun is not None:
            self.is_looking = False
            self._learn(self._helped(*begun))
            self.due = now + max(LOOK_EVERY_S, self._took_s / LOOK_SHARE)
            self._took_s = 0.0
        elif made_s >= LEAST_MAKING_S:
            self._before, self.is_looking = self._seen(), True
        else:
            self.is_looking, self.due = False, now + LOOK_EVERY_S

    def _helped(self, others_s: float, at_begin: ThreadSighting) -> float:
        others_s = self._process_s() - self._thread_s() - others_s
        at_end, begun, before = self._seen(), at_begin.threads, self._before.threads
        helped_s, seen_s = 0.0, at_end.own_s - at_begin.own_s
        for thread, cpu_s in at_end.threads.items():
            making_s = remainder(cpu_s, begun.get(thread, 0.0))  # a new thread may have the id of one that ended
            seen_s += making_s
            if thread not in begun or _helps(making_s, begun[thread] - before.get(thread, begun[thread])):
                helped_s += making_s
        came_and_went_s = others_s - seen_s - SPIN_S  # threads that were started for this batch alone
        return helped_s + max(0.0, came_and_went_s)

    def _seen(self) -> ThreadSighting:
        began = self._clock()
        seen = self._look()
        self._took_s += self._clock() - began
        return seen

    def _learn(self, helped_s: float) -> None:
        self._batches = self._batches * _KEPT + 1.0
        self._helped_s = self._helped_s * _KEPT + helped_s
        self.each_s = self._helped_s / self._batches

    def ratio(self, made_s: float) -> float:
        """CPU seconds of helpers for each second of a batch that took so long to make."""
        return self.each_s / made_s if made_s >= LEAST_MAKING_S else 0.0


def _helps(making_s: float, step_s: float) -> bool:
    """Whether a thread helps that used so much CPU while a batch was made, and so much in the step before it."""
    return step_s <= _IDLE_S + _IDLE_SHARE * making_s or making_s > step_s + SPIN_S


def other_threads() -> ThreadSighting:
    """The threads of this process but for the calling one; none where the system does not tell."""
    own = {thread.native_id for thread in threading.enumerate() if thread.name.startswith("dpex-")}
    found: dict[int, float] = {}
    try:
        threads = set(map(int, os.listdir(_TASKS))) - {threading.get_native_id()}  # noqa: PTH208  (twice as fast)
    except OSError:
        return ThreadSighting(found, 0.0)
    for thread in threads:
        try:
            found[thread] = time.clock_gettime(thread_clock(thread))
        except OSError:
            continue  # it has ended
    return ThreadSighting(
        {thread: s for thread, s in found.items() if thread not in own}, sum(found.get(t or 0, 0.0) for t in own)
    )
