"""The CPU time and memory that this machine has to spare, as they change.

The readings come from ``/proc`` (proc(5)) and from cgroups. `MachineMeter` is used by one thread, the tuner's, and
limits how often it reads each source.
"""

from __future__ import annotations

import contextlib
import math
import os
import sys
import time
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Any, NamedTuple

from dpex.system.clock import Clock, monotonic
from dpex.system.cpus import cgroup_cpus, cgroup_memory, parts_of_machine, usable_cpus

OTHERS_EVERY_S = 0.5
"""Seconds between readings of CPU times. The kernel counts in ticks of 10 ms, which is too coarse for shorter times."""
OTHERS_FIRST_S = 0.1
"""Seconds until the first reading, which is less precise."""
MEMORY_EVERY_S = 1.0
"""Seconds between readings of the free memory."""
WORKER_EVERY_S = 5.0
"""Seconds between readings of the workers' memory. The kernel adds up the pages of each in a millisecond or two."""
_MOST_READ = 8
"""Processes whose memory is read for one median."""
_PROC = Path("/proc")
_IDLE = slice(3, 5)
"""Places of the times in which a CPU was idle or waited for a disk, in its line of ``/proc/stat``."""
_GUESTS = 8
"""Place from which on that line repeats times that it has counted before: the times of virtual machines."""


def busy_s(cpus: Collection[int], proc: Path = _PROC) -> float:
    """Return the seconds that these CPUs have been busy since boot, stolen time included. A CPU that is offline counts
    0."""
    names, ticks = {f"cpu{number}" for number in cpus}, 0
    for line in (proc / "stat").read_text().splitlines():
        name, *times = line.split()
        if name in names:
            ticks += sum(map(int, times[:_GUESTS])) - sum(map(int, times[_IDLE]))
    return ticks / os.sysconf("SC_CLK_TCK")


def _spent_s(pids: Iterable[int]) -> float:
    """Return the CPU seconds of this process and of these. A process that has ended counts 0."""
    ticks = 0
    for pid in pids:
        with contextlib.suppress(OSError):
            fields = (_PROC / str(pid) / "stat").read_text().rpartition(")")[2].split()
            ticks += int(fields[11]) + int(fields[12])
    return time.process_time() + ticks / os.sysconf("SC_CLK_TCK")


class MachineMeter:
    """Reads the machine for the tuner.

    The ranks of a machine have an equal part of its CPUs each, and ranks that share their batches have one part
    together.
    """

    def __init__(self, clock: Clock = monotonic) -> None:
        self._clock = clock
        self._parts = parts_of_machine(os.environ)
        self._usable = usable_cpus()
        self._others_s = self._others_over_s = 0.0
        self._others_at = -math.inf
        self._used: CpuUse | None = None
        self._pids: frozenset[int] = frozenset()
        self._memory: int | None = None
        self._memory_at = -math.inf
        self._worker_bytes = 0.0
        self._worker_at = -math.inf

    @property
    def cpus(self) -> float:
        return max(0.5, self._usable / self._parts)

    def counts(self, pids: Collection[int], workers: int = 0, sharing_ranks: int = 1) -> dict[str, Any]:
        """Return the fields of `Reading` about the machine. Other programs count since the previous reading.

        ``pids``: The processes of the local workers, which may outnumber ``workers``.
        """
        now, self._parts = self._clock(), parts_of_machine(os.environ, sharing_ranks)
        if now - self._others_at >= (OTHERS_EVERY_S if self._others_over_s else OTHERS_FIRST_S):
            self._measure_others(now, frozenset(pids))
        if now - self._memory_at >= MEMORY_EVERY_S:
            self._memory, self._memory_at = free_memory(), now
        self._measure_worker(now, tuple(pids), workers)
        return {
            "cpus": self.cpus,
            "others_s": self._others_s,
            "others_over_s": self._others_over_s,
            "memory_free": self._memory,
            "worker_bytes": self._worker_bytes,
        }

    def _measure_worker(self, now: float, pids: tuple[int, ...], workers: int) -> None:
        """Measure the private memory of workers; the median is the cost of one more.

        The worker that started first has a copy of the dataset's objects which the others share, so the largest says
        nothing of the next. Copies of objects grow during an epoch, so an earlier, larger median still counts.
        """
        if now - self._worker_at >= WORKER_EVERY_S and pids:
            self._worker_at = now
            first = int(now) % len(pids)
            each = private_bytes(pids[first:] + pids[:first]) / max(1.0, workers / len(pids))
            self._worker_bytes = max(0.9 * self._worker_bytes, each)

    def _measure_others(self, now: float, pids: frozenset[int]) -> None:
        """Measure the CPUs that other programs kept busy since the last call."""
        used = cpu_used(pids)
        if used is None:
            return
        if self._used is not None and not self._pids - pids:  # of workers that ended, the CPU time is not known
            seconds = now - self._others_at
            self._others_s = min(self.cpus * seconds, others_s(used, self._used, self._parts))
            self._others_over_s = seconds
        self._used, self._pids, self._others_at = used, pids, now


def _affinity() -> Collection[int]:
    return os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1)


def private_bytes(pids: Collection[int]) -> float:
    """Return the median of the memory that these processes have for themselves, the lower one of two; 0: unknown."""
    found = []
    for pid in list(pids)[:_MOST_READ]:
        with contextlib.suppress(OSError):
            found.append(sum(_kilobytes(_PROC / str(pid) / "smaps_rollup", "Private_")) * 1024)
    return float(sorted(found)[(len(found) - 1) // 2]) if found else 0.0


def free_memory() -> int | None:
    """Return the bytes that this process and its cgroup may still take; None: unknown."""
    limited = cgroup_memory()
    with contextlib.suppress(OSError):
        free = sum(_kilobytes(_PROC / "meminfo", "MemAvailable:")) * 1024
        return free if limited is None else min(free, limited)
    return limited


def _kilobytes(file: Path, name: str) -> list[int]:
    """Return the numbers in the lines of a file whose names begin with ``name``."""
    return [int(line.split()[1]) for line in file.read_text().splitlines() if line.startswith(name)]


class CpuUse(NamedTuple):
    """CPU seconds on the CPUs that this process may use: of all programs, and of this process with its workers."""

    all_s: float
    own_s: float


def cpu_used(pids: Iterable[int]) -> CpuUse | None:
    """Return the CPU seconds so far; ``pids`` are the workers.

    None: They are unknown, or a quota makes other programs irrelevant.
    """
    if sys.platform == "linux" and cgroup_cpus() is None:
        with contextlib.suppress(OSError, ValueError, IndexError):  # /proc may be closed to this process
            return CpuUse(busy_s(_affinity()), _spent_s(pids))
    return None


def others_s(now: CpuUse, before: CpuUse, parts: float) -> float:
    """Return the CPU seconds of other programs on this rank's part of the machine, of which there are ``parts``.

    The other parts are assumed to be used as much as this one, because they run the same program.
    """
    return max(0.0, now.all_s - before.all_s - (now.own_s - before.own_s) * parts) / parts
