"""Measure the time in which workers and the training thread could have run and had no CPU, by the kernel's counts.

``/proc/<pid>/task/<tid>/schedstat`` holds nanoseconds on a CPU, nanoseconds on a run queue, and slices. Some kernels do
not keep it. Of many workers, some are read and stand for all.

The result is a ratio, `RunQueueTimes.delay`. In a window, workers also make batches whose results come later. So
seconds on run queues cannot be subtracted from the wall times of batches, but they can in proportion to CPU times.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from functools import reduce
from itertools import islice
from pathlib import Path
from typing import NamedTuple

from dpex.system.clock import monotonic

_ASKED = 16
"""The most processes that are read, evenly spread."""
_THREADS_ASKED = 128
"""The most threads of a process that are read; one takes 10 µs."""
_PROC = Path("/proc")
LOOK_EVERY_S = 0.25
"""Seconds between two readings of a meter."""


class RunQueueTimes(NamedTuple):
    """Seconds of threads on a CPU, and on run queues, where they could have run and had none."""

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
        """Return the times between two looks. Threads that have ended in between are left out.

        Processes that were not read before count with all their times. In the first window of workers there are no
        others, and decisions rest on it.
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
        self._looked_at = 0.0
        self._queued = QueueTimes()

    def delay_of(self, pids: Callable[[], Collection[int]]) -> float | None:
        """Return the recent seconds on run queues per CPU second, or None if the kernel does not report them."""
        now = monotonic()
        if now - self._looked_at > LOOK_EVERY_S:
            self._looked_at = now
            queued = read_queue_times(pids(), 0)
            ran, self._queued = queued.since(self._queued).workers, queued
            self._delay = None if ran is None else round(ran.delay, 3)
        return self._delay
