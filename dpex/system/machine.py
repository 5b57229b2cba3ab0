"""What this machine has to spare, as it changes: CPU time of others and memory. Reads ``/proc``.

The parsers take text, so that they can be tested on any machine. `MachineMeter` is used by one thread and reads each
source no oftener than is worth it.
"""

from __future__ import annotations

import contextlib
import math
import os
import sys
import time
from collections.abc import Collection, Iterable
from pathlib import Path

from dpex.measure.samples import MachineSample
from dpex.system.clock import Clock, monotonic
from dpex.system.cpus import cgroup_cpus, cgroup_path, local_ranks, usable_cpus

OTHERS_EVERY_S = 0.5
"""The kernel counts CPU time in ticks of 10 ms: over less than this the noise would be larger than the news."""
OTHERS_FIRST_S = 0.1
"""At first something is better than nothing."""
MEMORY_EVERY_S = 1.0
"""How often the free memory is asked for, at most."""
WORKER_EVERY_S = 5.0
"""Adding up a process's pages takes the kernel a millisecond or two."""
_TICK_S = 1.0 / os.sysconf("SC_CLK_TCK")
_CGROUP_ROOT = Path("/sys/fs/cgroup")


def parse_busy(proc_stat: str, cpus: Iterable[int]) -> float:
    """Seconds these CPUs were busy since boot, from ``/proc/stat``'s text; stolen time counts, guests are in "user"."""
    wanted = {f"cpu{number}" for number in cpus}
    busy = 0
    for line in proc_stat.splitlines():
        if not line.startswith("cpu"):
            break
        name, *ticks = line.split()
        if name in wanted:
            user, nice, system, _, _, *rest = map(int, ticks[:8])
            busy += user + nice + system + sum(rest)
    return busy * _TICK_S


def parse_process(proc_pid_stat: str) -> float:
    """CPU seconds of a process, from ``/proc/<pid>/stat``'s text (its name may hold any character)."""
    fields = proc_pid_stat.rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) * _TICK_S


def parse_runnable(loadavg: str) -> int:
    """Threads that have or want a CPU, from ``/proc/loadavg``'s text, but for the one that reads it."""
    return max(0, int(loadavg.split()[3].partition("/")[0]) - 1)


def parse_available(proc_meminfo: str) -> int | None:
    """Bytes the machine could give, from ``/proc/meminfo``'s text."""
    for line in proc_meminfo.splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return None


def parse_private(smaps_rollup: str) -> int:
    """Bytes that only this process has, from ``/proc/<pid>/smaps_rollup``'s text."""
    lines = (line.split() for line in smaps_rollup.splitlines() if line.startswith("Private_"))
    return 1024 * sum(int(fields[1]) for fields in lines)


def parse_inactive(memory_stat: str) -> int:
    """Bytes of file cache that a cgroup would give up first, from its ``memory.stat``."""
    for line in memory_stat.splitlines():
        name, _, value = line.partition(" ")
        if name in ("inactive_file", "total_inactive_file"):
            return int(value)
    return 0


def _read(path: str | Path) -> str:
    with open(path) as file:  # noqa: PTH123  (Path.read_text takes twice as long)
        return file.read()


def cgroup_memory(root: Path = _CGROUP_ROOT) -> int | None:
    """Bytes this process's cgroup may still take, file cache it would give up counted as free; None: no limit."""
    with contextlib.suppress(OSError, ValueError):
        proc = _read("/proc/self/cgroup")
        rooms = [
            _room(place, *names)
            for base, controller, names in (
                (root, "", ("memory.max", "memory.current")),
                (root / "memory", "memory", ("memory.limit_in_bytes", "memory.usage_in_bytes")),
            )
            for place in {base / cgroup_path(proc, controller), base}
        ]
        return min((room for room in rooms if room is not None), default=None)
    return None


def _room(place: Path, limit_name: str, usage_name: str) -> int | None:
    with contextlib.suppress(OSError, ValueError):
        limit = _read(place / limit_name).strip()
        if limit != "max" and int(limit) < 1 << 60:
            inactive = parse_inactive(_read(place / "memory.stat"))
            return max(0, int(limit) - int(_read(place / usage_name)) + inactive)
    return None


class MachineMeter:
    """See the module."""

    def __init__(self, clock: Clock = monotonic) -> None:
        self._clock = clock
        self._ranks = local_ranks(os.environ)
        self._affinity = (
            os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set(range(os.cpu_count() or 1))
        )
        self.cpus = max(0.5, usable_cpus() / self._ranks)
        self.used_by_ranks: float | None = None
        """CPUs that the job's other ranks keep busy, if they told; else each is taken to use as many as this one."""
        self._limited = cgroup_cpus() is not None
        self._others = 0.0
        self._others_at = -math.inf
        self._others_known = False
        self._busy = self._own = 0.0
        self._pids: frozenset[int] = frozenset()
        self._memory: int | None = None
        self._memory_at = -math.inf
        self._worker_bytes = 0.0
        self._worker_at = -math.inf

    def sample(self, pids: Collection[int], trainer_cpu_s: float, workers: int = 0) -> MachineSample:
        """Now; ``pids`` are the processes of the local workers, which may be more in number than those."""
        now = self._clock()
        if now - self._others_at >= (OTHERS_EVERY_S if self._others_known else OTHERS_FIRST_S):
            self._measure_others(now, frozenset(pids))
        if now - self._memory_at >= MEMORY_EVERY_S:
            self._memory, self._memory_at = _free_memory(), now
        self._measure_worker(now, tuple(pids), workers)
        return MachineSample(
            cpus=self.cpus,
            others=self._others,
            trainer_cpu_s=trainer_cpu_s,
            memory_free=self._memory,
            worker_bytes=self._worker_bytes,
            runnable=self._runnable(),
        )

    def _runnable(self) -> float | None:
        """This rank's share of all; not comparable where a quota or an affinity leaves us some of the CPUs only."""
        if self._limited or sys.platform != "linux" or len(self._affinity) < (os.cpu_count() or 1):
            return None
        with contextlib.suppress(OSError, ValueError, IndexError):
            return parse_runnable(_read("/proc/loadavg")) / self._ranks
        return None

    def _measure_worker(self, now: float, pids: tuple[int, ...], workers: int) -> None:
        """What one process takes for itself, and the next time another, by worker: the most that was seen."""
        if now - self._worker_at >= WORKER_EVERY_S and pids:
            self._worker_at = now
            with contextlib.suppress(OSError, ValueError, IndexError):
                pid = pids[int(now) % len(pids)]
                private = parse_private(_read(f"/proc/{pid}/smaps_rollup"))
                self._worker_bytes = max(0.9 * self._worker_bytes, private / max(1.0, workers / len(pids)))

    def _measure_others(self, now: float, pids: frozenset[int]) -> None:
        """CPUs that others kept busy since last time. With a quota their CPU time is not taken from ours."""
        if self._limited or sys.platform != "linux":
            return
        with contextlib.suppress(OSError, ValueError, IndexError):
            busy = parse_busy(_read("/proc/stat"), self._affinity)
            own = time.process_time() + sum(map(_process_cpu, pids))
            if self._others_at > -math.inf and not self._pids - pids:  # else what those who left did is not known
                seconds = now - self._others_at
                own_cpus = (own - self._own) / seconds
                ranks = own_cpus * (self._ranks - 1) if self.used_by_ranks is None else self.used_by_ranks
                others = ((busy - self._busy) / seconds - own_cpus - ranks) / self._ranks
                self._others = min(self.cpus, max(0.0, others))
                self._others_known = True
            self._busy, self._own, self._pids = busy, own, pids
            self._others_at = now


def _process_cpu(pid: int) -> float:
    try:
        return parse_process(_read(f"/proc/{pid}/stat"))
    except (OSError, ValueError, IndexError):
        return 0.0


def _free_memory() -> int | None:
    free = None
    with contextlib.suppress(OSError, ValueError, IndexError):
        free = parse_available(_read("/proc/meminfo"))
    limited = cgroup_memory()
    if free is None or limited is None:
        return limited if free is None else free
    return min(free, limited)


def cpu_used(pids: Iterable[int]) -> tuple[float, float]:
    """CPU seconds so far: of everybody on the CPUs that this process may use, and of it with these processes."""
    affinity = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1)
    return parse_busy(_read("/proc/stat"), affinity), time.process_time() + sum(map(_process_cpu, pids))
