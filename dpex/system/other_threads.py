"""Whether other threads of this process ran meanwhile, told by their CPU clocks (Linux).

Threads of dpex's own and of Ray's core are left out, as they draw no random numbers, and so are threads that began
while a ticket was made: those are the dataset's.
"""

from __future__ import annotations

import math
import sys
import threading
import time
from collections.abc import Sequence
from weakref import WeakSet

from dpex._ray import runs_in_own_threads

Clocks = dict[threading.Thread, float]
"""CPU time of each thread, ns; infinity: it has ended."""
_active: dict[int, threading.Thread | None] = getattr(threading, "_active", {0: None, 1: None})
_count = _active.__len__
"""Threads there are, or at least 2: ``threading.active_count`` takes five times as long."""
_everybody = _active.values
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
        self._nobody_beside = 0

    def are_none(self) -> bool:
        """Whether there is nobody else: no other thread, or the same ones as when `clocks` last found nobody among
        them. Asking takes a tenth of what `clocks` takes."""
        if _count() == 1:
            return True
        return threading.get_ident() == self._nobody_beside and [*_everybody()] == self._seen

    def clocks(self) -> Clocks:
        """The CPU times of all others; empty when there are none."""
        if not self.is_able or is_alone():
            return {}
        everybody = threading.enumerate()
        if everybody != self._seen:
            self._seen, self._watched = everybody, [(thread, _clock(thread)) for thread in self._foreign(everybody)]
        me = threading.current_thread()
        clocks = {thread: _cpu_ns(clock) for thread, clock in self._watched if thread is not me}
        self._nobody_beside = 0 if clocks else threading.get_ident()
        return clocks

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
        return [it for it in threads if not _draws_nothing(it) and it not in self._of_datasets]


def _draws_nothing(thread: threading.Thread) -> bool:
    return thread.name.startswith(_OWN) or runs_in_own_threads(_module_of(thread))


def _module_of(thread: threading.Thread) -> str:
    """The module of the function that a thread runs, or else of its class; empty where that is not known."""
    return getattr(getattr(thread, "_target", None) or type(thread), "__module__", None) or ""


def _clock(thread: threading.Thread) -> int:
    return (~(thread.native_id or 0) << 3) | _SCHED_PER_THREAD


def _cpu_ns(clock: int) -> float:
    try:
        return time.clock_gettime_ns(clock)
    except OSError:  # it has ended, which it had to run for
        return math.inf
