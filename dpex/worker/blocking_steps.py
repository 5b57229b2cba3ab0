"""Finds the steps of samples that block the event loop of a worker: they wait without an await. Linux only.

A step is the part of a sample between two awaits. No other sample of the worker gets on meanwhile. A long step blocks
the loop if its thread gave the CPU away itself, as in ``time.sleep`` or a synchronous request. A step that computes, or
from which other programs take the CPU, does not count.

The place and the system's counts of a step are looked up only after a long step, until a batch ends without one.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from resource import RUSAGE_THREAD, getrusage
from typing import Any

from dpex.measure.batch_times import BatchTimes, StepRow
from dpex.profile.live_timer import COLLATE
from dpex.system.clock import Clock, monotonic

LONG_S = 0.001
"""Seconds of a step that is long."""
_HERE = str(Path(__file__).parent)


def _of_thread() -> Any:
    return getrusage(RUSAGE_THREAD)


class BlockingSteps:
    """The steps of one process, by their place in the code. ``usage``: what the system counts of this thread."""

    def __init__(self, clock: Clock = monotonic, usage: Callable[[], Any] = _of_thread) -> None:
        self._clock, self._counts = clock, usage
        self._found: dict[str, tuple[int, float, float]] = {}
        self._has_found = self._looks = self._has_long = False
        self._began = 0.0
        self._rest_s = self._rest_cpu_s = 0.0
        """Seconds of batches without those of blocking steps, which may be of a batch that ends later."""
        self._from: tuple[str, int] | None = None
        self._usage: Any = None

    def begin(self, coroutine: Any) -> None:
        """Note that a step of a coroutine begins."""
        self._usage = None
        if self._looks:
            self._from, self._usage = _waits_at(coroutine), self._counts()
        self._began = self._clock()

    def end(self, coroutine: Any) -> None:
        """Note that the step has ended."""
        seconds = self._clock() - self._began
        if seconds < LONG_S:
            return
        self._looks = self._has_long = True
        before, after = self._usage, self._counts()
        if before is not None and after.ru_nvcsw > before.ru_nvcsw:
            place = _between(self._from, _waits_at(coroutine))
            cpu_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
            count, all_s, all_cpu_s = self._found.get(place, (0, 0.0, 0.0))
            self._found[place] = count + 1, all_s + seconds, all_cpu_s + cpu_s
            self._has_found = True

    def rows(self, dataset: Any, times: BatchTimes, *, draws: bool) -> tuple[StepRow, ...]:
        """Return the blocking steps since the batch before, and what else the batch took, which ends with ``times``.

        Return nothing before the first blocking step. ``draws``: samples draw random numbers.
        """
        self._looks, self._has_long = self._has_long, False
        if not self._has_found:
            return ()
        own, found, self._found = type(dataset).__name__, self._found, {}
        rows = [(f"{own} > {place}", *counts, 0) for place, counts in found.items()]
        self._rest_s += times.load_s - sum(row[2] for row in rows)
        self._rest_cpu_s += times.load_cpu_s - sum(row[3] for row in rows)
        first: StepRow = (own, times.samples, max(0.0, self._rest_s), max(0.0, self._rest_cpu_s), int(draws))
        self._rest_s, self._rest_cpu_s = min(0.0, self._rest_s), min(0.0, self._rest_cpu_s)
        return first, *rows, (COLLATE, 1, times.collate_s, times.collate_cpu_s, 0)


def _waits_at(coroutine: Any) -> tuple[str, int] | None:
    """Return the name and the line of the user's coroutine that waits; None before it begins and after its end."""
    while getattr(coroutine, "cr_frame", None) is not None:
        if not coroutine.cr_code.co_filename.startswith(_HERE):
            return coroutine.__qualname__, coroutine.cr_frame.f_lineno
        coroutine = coroutine.cr_await
    return None


def _between(before: tuple[str, int] | None, after: tuple[str, int] | None) -> str:
    """Return the place of a step in words."""
    if before is None:
        return "a sample as a whole" if after is None else f"{after[0]} up to its await in line {after[1]}"
    if after is None:
        return f"{before[0]} after its await in line {before[1]}"
    return f"{before[0]} between its awaits in lines {before[1]} and {after[1]}"
