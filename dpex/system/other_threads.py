"""Whether other threads of this process ran meanwhile, told by their CPU clocks (Linux).

Threads of dpex's own are left out, as they draw no random numbers, and so are threads that began while a ticket was
made: those are the dataset's.
"""

from __future__ import annotations

import math
import sys
import threading
import time
from collections.abc import Callable, Sequence
from weakref import WeakSet

Clocks = dict[threading.Thread, float]
"""CPU time of each thread, ns; infinity: it has ended."""
_count: Callable[[], int] = getattr(threading, "_active", {0: None, 1: None}).__len__
"""Threads there are, or at least 2: ``threading.active_count`` takes five times as long."""
_OWN = "dpex-"
_SCHED_PER_THREAD = 6
"""Linux: CPUCLOCK_PERTHREAD_MASK | CPUCLOCK_SCHED. The clock of a thread that has ended is an error, where
``time.pthread_getcpuclockid`` may crash."""


def is_alone() -> bool:
    """Whether this process has one thread, as far as Python knows; False where that cannot be told."""
    return _count() == 1


class OtherThreads:
    """Used by one thread at a time; ``is_able``: whether anything can be told here."""

    is_able = sys.platform == "linux"

    def __init__(self) -> None:
        self._of_datasets: WeakSet[threading.Thread] = WeakSet()
        self._seen: Sequence[threading.Thread] = ()
        self._watched: list[tuple[threading.Thread, int]] = []

    def clocks(self) -> Clocks:
        """The CPU times of all others; empty when there are none."""
        if not self.is_able or is_alone():
            return {}
        everybody = threading.enumerate()
        if everybody != self._seen:
            self._seen, self._watched = everybody, [(thread, _clock(thread)) for thread in self._foreign(everybody)]
        me = threading.current_thread()
        return {thread: _cpu_ns(clock) for thread, clock in self._watched if thread is not me}

    def ran_since(self, before: Clocks) -> str | None:
        """The name of one that ran since then; None: none did, so that whoever is new was started by the dataset."""
        for thread, ns in before.items():
            if _cpu_ns(_clock(thread)) > ns:
                return thread.name
        if not is_alone() and (everybody := threading.enumerate()) != self._seen:
            known = {threading.current_thread(), *before}
            self._of_datasets.update(thread for thread in self._foreign(everybody) if thread not in known)
        return None

    def _foreign(self, threads: Sequence[threading.Thread]) -> list[threading.Thread]:
        return [it for it in threads if not it.name.startswith(_OWN) and it not in self._of_datasets]


def _clock(thread: threading.Thread) -> int:
    return (~(thread.native_id or 0) << 3) | _SCHED_PER_THREAD


def _cpu_ns(clock: int) -> float:
    try:
        return time.clock_gettime_ns(clock)
    except OSError:  # it has ended, which it had to run for
        return math.inf
