"""Measure CPUs, run queues and memory of the machine, for the tuner, for a diagnosis and for memory limits.

The readings come from ``/proc`` (proc(5)) and from cgroups.

- *Between two moments*: the CPU time of this process, its workers and other programs. `read_machine` reads the kernel's
  counts at both moments, and `MachineCounts.completed` adds their difference to the reading between them.

- *Run queues*: the time in which workers and the training thread could have run and had no CPU.
  ``/proc/<pid>/task/<tid>/schedstat`` holds nanoseconds on a CPU, nanoseconds on a run queue, and slices. Some kernels
  lack it. If there are many workers, only a sample of them is read. The result is a ratio, `RunQueueTimes.delay`, which
  is applied to the CPU time of batches. Seconds on run queues cannot be subtracted from the wall times of batches,
  because in a window workers also make batches whose results arrive later.

- *Now*: the CPU time and the memory that the machine has to spare. One thread, the tuner's, uses `MachineMeter`, which
  limits how often it reads each source.
"""

from __future__ import annotations

import contextlib
import math
import os
import sys
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import reduce
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

from dpex.measure.pool_reading import PoolReading
from dpex.measure.reading import Reading
from dpex.measure.settings import INLINE, LOCAL
from dpex.system.clock import Clock, monotonic
from dpex.system.cpus import affinity, cgroup_cpus, cgroup_memory, parts_of_cpus, usable_cpus

OTHERS_EVERY_S = 0.5
"""Seconds between readings of CPU times. The kernel counts in ticks of 10 ms, which is too coarse for shorter times."""
OTHERS_FIRST_S = 0.1
"""Seconds until the first reading, which is less precise."""
WITHIN = 0.5
"""A period tells of other programs if the training loop was in passes for at least this part of it. Otherwise it may
have been validating, and the workers of another loader are no other programs."""
MEMORY_EVERY_S = 1.0
"""Seconds between readings of the free memory."""
WORKER_EVERY_S = 5.0
"""Seconds between readings of the workers' memory. The kernel takes 1 to 2 ms to add up the pages of one."""
_MOST_READ = 8
"""Processes whose memory is read for one median."""
_PROC = Path("/proc")
_IDLE = slice(3, 5)
"""Indices of a CPU's idle time and its time of waiting for disks, in its line of ``/proc/stat``."""
_GUESTS = 8
"""Index in this line of the times of virtual machines, which are left out because earlier times include them."""
_ASKED = 16
"""Maximum processes that are read. They are evenly spread among all."""
_THREADS_ASKED = 128
"""Maximum threads of a process that are read. Each takes 10 µs."""
QUEUES_EVERY_S = 0.25
"""Seconds between two readings of a `DelayMeter`."""


# -- run queues --------------------------------------------------------------------------------------------------------


class RunQueueTimes(NamedTuple):
    """Seconds of threads on a CPU, and on run queues, where they wait for a CPU."""

    cpu_s: float = 0.0
    queued_s: float = 0.0

    @property
    def delay(self) -> float:
        """Seconds on run queues for each second on a CPU."""
        return self.queued_s / self.cpu_s if self.cpu_s > 0 else 0.0

    def plus(self, other: RunQueueTimes) -> RunQueueTimes:
        return RunQueueTimes(self.cpu_s + other.cpu_s, self.queued_s + other.queued_s)

    def since(self, then: RunQueueTimes) -> RunQueueTimes:
        """Return the times since ``then``."""
        return RunQueueTimes(max(0.0, self.cpu_s - then.cpu_s), max(0.0, self.queued_s - then.queued_s))


NOTHING = RunQueueTimes()


@dataclass(frozen=True, kw_only=True)
class QueueTimes:
    """Times of threads since each began: of worker processes by process and native id, of this process, and of its
    training thread. None: not known."""

    by_pid: Mapping[int, Mapping[int, RunQueueTimes]] = field(default_factory=dict)
    here: Mapping[int, RunQueueTimes] | None = None
    trainer: RunQueueTimes | None = None

    def since(self, then: QueueTimes) -> RunQueueGrowth:
        """Return the times between two readings. Threads that have ended in between are left out.

        Processes that were not read before count from their start. In the first window of workers this holds for all of
        them, and decisions depend on that window.
        """
        known = [_grown(then.by_pid.get(pid, {}), threads) for pid, threads in self.by_pid.items()]
        workers = total_times(known) if known else None
        here = None if self.here is None or then.here is None else _grown(then.here, self.here)
        trainer = None if self.trainer is None or then.trainer is None else self.trainer.since(then.trainer)
        return RunQueueGrowth(workers, here, trainer)

    @property
    def workers(self) -> RunQueueTimes | None:
        """Times of the workers' threads since each began; None: not known."""
        return total_times(ran for threads in self.by_pid.values() for ran in threads.values()) if self.by_pid else None


class RunQueueGrowth(NamedTuple):
    """Times between two readings, for the workers that were read, all threads of this process, and its training
    thread."""

    workers: RunQueueTimes | None
    here: RunQueueTimes | None
    trainer: RunQueueTimes | None


def _grown(then: Mapping[int, RunQueueTimes], now: Mapping[int, RunQueueTimes]) -> RunQueueTimes:
    return total_times(ran.since(then.get(thread, NOTHING)) for thread, ran in now.items())


def total_times(rans: Iterable[RunQueueTimes]) -> RunQueueTimes:
    return reduce(RunQueueTimes.plus, rans, NOTHING)


def parse_schedstat(text: str) -> RunQueueTimes:
    cpu_ns, queued_ns = text.split()[:2]
    return RunQueueTimes(int(cpu_ns) * 1e-9, int(queued_ns) * 1e-9)


def read_queue_times(pids: Collection[int], thread: int, proc: Path = _PROC) -> QueueTimes:
    """Read the times; ``thread`` is the training thread's native id, 0 if unknown."""
    step = max(1, len(pids) // _ASKED)
    by_pid = {}
    for pid in sorted(pids)[::step][:_ASKED]:
        with contextlib.suppress(OSError, ValueError, IndexError):
            by_pid[pid] = _process_threads(proc / str(pid) / "task")
    here = None
    with contextlib.suppress(OSError, ValueError, IndexError):
        here = _process_threads(proc / "self" / "task")
    return QueueTimes(by_pid=by_pid, here=here, trainer=here.get(thread) if here is not None else None)


def own_queue_s(file: str = "/proc/thread-self/schedstat") -> float | None:
    """Return the seconds of the calling thread on run queues since it began; None: not known. It takes 5 to 10 µs."""
    with contextlib.suppress(OSError, ValueError, IndexError), open(file, "rb", buffering=0) as counts:  # noqa: PTH123
        return parse_schedstat(counts.read(128).decode()).queued_s
    return None


def _process_threads(tasks: Path) -> dict[int, RunQueueTimes]:
    """Return the times by thread. Threads of libraries come and go, so one may end before it is read."""
    found = {}
    for task in islice(tasks.iterdir(), _THREADS_ASKED):
        # Path.read_text takes twice as long
        with contextlib.suppress(FileNotFoundError, ProcessLookupError), open(task / "schedstat") as file:  # noqa: PTH123
            found[int(task.name)] = parse_schedstat(file.read())
    if not found:
        raise FileNotFoundError(tasks)
    return found


class DelayMeter:
    """Measures the waits of processes for a CPU, reading by reading."""

    def __init__(self) -> None:
        self._delay: float | None = None
        self._read_at = 0.0
        self._queued = QueueTimes()

    def delay_of(self, pids: Callable[[], Collection[int]]) -> float | None:
        """Return the recent seconds on run queues per CPU second, or None if the kernel does not report them."""
        now = monotonic()
        if now - self._read_at > QUEUES_EVERY_S:
            self._read_at = now
            queued = read_queue_times(pids(), 0)
            ran, self._queued = queued.since(self._queued).workers, queued
            self._delay = None if ran is None else round(ran.delay, 3)
        return self._delay


# -- CPUs and memory ---------------------------------------------------------------------------------------------------


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
    """Return the CPU seconds of this process and of ``pids``. A process that has ended counts 0."""
    ticks = 0
    for pid in pids:
        with contextlib.suppress(OSError):
            fields = (_PROC / str(pid) / "stat").read_text().rpartition(")")[2].split()
            ticks += int(fields[11]) + int(fields[12])
    return time.process_time() + ticks / os.sysconf("SC_CLK_TCK")


def private_bytes(pids: Collection[int]) -> float:
    """Return the median private memory of the first `_MOST_READ` of these processes (the lower median); 0: unknown."""
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
    """Return the numbers from those lines of a file that begin with ``name``."""
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
            return CpuUse(busy_s(affinity()), _spent_s(pids))
    return None


def others_s(now: CpuUse, before: CpuUse, parts: float, own_s: float = 0.0) -> float:
    """Return the CPU seconds of other programs on this rank's part of the machine, which has ``parts`` equal parts.

    ``own_s``: At least so many are of this process and its workers. A worker that has ended is missing in ``now``. The
    other parts are assumed to be used as much as this one, because they run the same program.
    """
    return max(0.0, now.all_s - before.all_s - max(own_s, now.own_s - before.own_s) * parts) / parts


# -- between two moments -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class MachineCounts:
    """The kernel's counts at one moment.

    Attributes:
        at: Time of the counts on the monotonic clock, in seconds.
        cpu_s: CPU seconds of this process.
        queued: Times of threads on a CPU, and on run queues.
        used: CPU seconds of all programs, and of this process with its workers; None: not asked, or unknown.
    """

    at: float
    cpu_s: float
    queued: QueueTimes = field(default_factory=QueueTimes)
    used: CpuUse | None = None

    def part(self, since: MachineCounts, seconds: float) -> float:
        """Return ``seconds`` as a fraction, 0 to 1, of the time between the counts ``since`` and these counts."""
        return min(1.0, max(0.0, seconds) / max(1e-6, self.at - since.at))

    def completed(
        self, found: Reading, since: MachineCounts, cpu_part: float, queued_part: float = 1.0, workers_s: float = 0.0
    ) -> Reading:
        """Return ``found``, the reading between these counts and earlier ones, with the CPU time of that period.

        ``cpu_part``, ``queued_part``: The parts of this process's CPU time, and of the training thread's time on run
        queues, that belong to passes. ``workers_s``: CPU seconds of local workers for batches of that period.
        """
        lived_s, ran = max(1e-6, self.at - since.at), self.queued.since(since.queued)
        makers = {INLINE: ran.here, LOCAL: ran.workers}
        others: dict[str, Any] = {}
        if self.used is not None and since.used is not None:
            parts, own_s = parts_of_cpus(os.environ, found.sharing_ranks), self.cpu_s - since.cpu_s + workers_s
            others = {"others_s": others_s(self.used, since.used, parts, own_s), "others_over_s": lived_s}
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
        own: The local workers, which do not count as other programs; None: other programs are not measured.
    """
    queued = read_queue_times(pids, thread)
    return replace(read_own_cpu(), queued=queued, used=None if own is None else cpu_used(own))


def with_queue(pool: PoolReading, ran: RunQueueTimes | None) -> PoolReading:
    """Return the pool with the time that its batches spent on run queues, by the delay of their workers."""
    return pool if ran is None else replace(pool, queued_s=pool.cpu_s * ran.delay, queue_known_s=pool.busy_s)


# -- what the machine has to spare -------------------------------------------------------------------------------------


class MachineMeter:
    """Reads the machine for the tuner.

    Each rank has an equal part of the machine's CPUs. Ranks that share their batches have one part together.
    """

    def __init__(self, clock: Clock = monotonic) -> None:
        self._clock = clock
        self._parts = parts_of_cpus(os.environ)
        self._usable = usable_cpus()
        self._within_s = 0.0
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

    def counts(
        self, pids: Collection[int], workers: int = 0, sharing_ranks: int = 1, seconds: float = math.inf
    ) -> dict[str, Any]:
        """Return the fields of `Reading` about the machine. Other programs' times span the latest two readings.

        ``pids``: The processes of the local workers, which may outnumber ``workers``. ``seconds``: The training loop's
        time in passes since the last call. While another loader's pass runs, its workers are no other programs.
        """
        now, self._parts = self._clock(), parts_of_cpus(os.environ, sharing_ranks)
        self._within_s += seconds
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
        """Measure the private memory of workers. Their median estimates the memory of one more worker.

        The maximum would be too large, because the first worker has a copy of the dataset's objects that others share.
        Copies of objects grow during an epoch, so an earlier, larger median decays by only 10 % per reading.
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
        seconds, before = now - self._others_at, self._used
        has_all = not self._pids - pids  # the CPU time of workers that ended is unknown
        if before is not None and has_all and self._within_s >= WITHIN * seconds:
            self._others_s = min(self.cpus * seconds, others_s(used, before, self._parts))
            self._others_over_s = seconds
        self._used, self._pids, self._others_at, self._within_s = used, pids, now, 0.0
