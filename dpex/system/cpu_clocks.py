"""Measure the CPU time of a batch, with that of the threads that libraries start for it (codecs, BLAS).

A worker reads the clock of its process, `time.process_time`. In the training process, other threads belong to the
training step, to other loaders and to dpex. There, for some of the batches, `HelperThreads` compares the CPU time of
each thread during a step with that while the next batch is made.
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
"""Seconds of a ticket below which reading a CPU clock, up to 1 µs, is a noticeable cost."""
CPU_CLOCK_EVERY = 16
"""Tiny tickets for each reading of the clock."""
LOOK_EVERY_S = 0.25
"""Seconds between two looks for helpers, or more if looks would take more than `LOOK_SHARE` of the time."""
LOOK_SHARE = 0.002
"""The share of the time that looking for helpers may take."""
LEAST_MAKING_S = 0.0005
"""Seconds of a batch below which no thread has time to help, so that none is looked for."""
SPIN_S = 0.005
"""OpenMP's threads spin for some milliseconds after the last parallel region of a step (GOMP_SPINCOUNT)."""
_IDLE_S, _IDLE_SHARE = 0.0001, 0.02
_KEPT = 0.9
"""Weight of the past for each batch that is looked at: about the latest ten count."""
_TASKS = Path("/proc/self/task")


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


def thread_clock(native_id: int) -> int:
    """The number of the CPU clock of a thread of this process on Linux, for `time.clock_gettime`."""
    return (~native_id << 3) | 6  # the kernel's CPUCLOCK_PERTHREAD_MASK | CPUCLOCK_SCHED


class ThreadSighting(NamedTuple):
    """CPU seconds of other threads by native id, and those of dpex's own together."""

    threads: Mapping[int, float]
    own_s: float


class HelperThreads:
    """CPU time of other threads for the batches that the calling thread makes in the training process.

    ``each_s`` is the mean of their CPU seconds for a batch. Call `begin` before a batch while ``is_looking``, and `end`
    after it then or once ``due`` has come. A thread helps if it rests during the step, or if it computes much longer
    while the batch is made than during the step and the spinning after it. dpex's own threads are left out.
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
        """Begin a batch."""
        seen = self._seen()
        self._begun = self._process_s() - self._thread_s(), seen

    def end(self, now: float, made_s: float) -> None:
        """End a batch at ``now``, which took ``made_s``."""
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
        """Return the CPU seconds of helpers for each second of a batch that took ``made_s``."""
        return self.each_s / made_s if made_s >= LEAST_MAKING_S else 0.0


def _helps(making_s: float, step_s: float) -> bool:
    """Return True for a thread that helps, by its CPU seconds while a batch was made and in the step before."""
    return step_s <= _IDLE_S + _IDLE_SHARE * making_s or making_s > step_s + SPIN_S


def other_threads() -> ThreadSighting:
    """Return the threads of this process but for the calling one; none if the system does not list them."""
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
