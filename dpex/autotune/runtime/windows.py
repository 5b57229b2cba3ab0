"""The start and the end of a window of measurements, for the tuner. Pure except `machine_of`.

Windows are short at first and after each change (`MeasurementWindows.shorten`), and grow
(`MeasurementWindows.lengthen`). A window with few batches waits a while for more. No window contains the first batch of
a pass, the time between passes, long absences of the consumer (such as a validation), or time before a change was
carried out.

Between the ends of windows, the tuner reads the engines more often. Such a reading is a *glance*. If the consumer has
begun to wait for most of its time since the last glance, the work has changed. A short window then replaces the window
in progress, because that window mostly measured the former work.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from threading import Lock

from dpex.autotune.constants import (
    AWAY_APART,
    AWAY_S,
    AWAY_STEPS,
    AWAY_UNKNOWN_S,
    CONSTANTS,
    GLANCE_S,
    SHORTEST_WINDOW_S,
    SUDDEN,
    WINDOW_BATCHES,
    WINDOW_BATCHES_IF_STARVING,
    WINDOW_PATIENCE,
)
from dpex.measure.batch_times import RECENT
from dpex.measure.reading import EngineReport, Reading
from dpex.system import meter
from dpex.system.meter import MachineCounts


@dataclass(frozen=True)
class WindowMark:
    """A reading of an engine, and the kernel's counts at that time."""

    reading: Reading
    machine: MachineCounts

    def seconds_to(self, reading: Reading) -> float:
        """Seconds of the consumer from this mark to ``reading``."""
        return reading.seconds - self.reading.seconds

    def batches_to(self, reading: Reading) -> int:
        """Count of batches that the consumer got from this mark to ``reading``."""
        return reading.later_batches - self.reading.later_batches

    def progress_to(self, reading: Reading) -> tuple[int, float]:
        """Count of batches, and seconds of the consumer, from this mark to ``reading``."""
        return self.batches_to(reading), self.seconds_to(reading)

    def is_slower_to(self, reading: Reading, base: WindowMark) -> bool:
        """Return True if each of the latest local batches took far longer than the mean from ``base`` to this mark.

        The latest batches are those made from this mark to ``reading``, at most `RECENT`, and at least 2.
        """
        first, then, now = base.reading.local, self.reading.local, reading.local
        made = min(RECENT, now.tickets - then.tickets)
        mean_s = (then.busy_s - first.busy_s) / max(1, then.tickets - first.tickets)
        return made > 1 and min(now.services_s[-made:], default=0.0) > CONSTANTS.apart * mean_s > 0.0

    def waited_to(self, reading: Reading) -> float:
        """Share of the consumer's time from this mark to ``reading`` in which it waited, 0 to 1."""
        return (reading.blocked_s - self.reading.blocked_s) / max(1e-9, self.seconds_to(reading))


def between(before: WindowMark, after: WindowMark) -> Reading:
    """Return the window between two marks, without memory, cluster, GPU and other programs."""
    window = after.reading.since(before.reading)
    window = replace(window, seconds=window.blocked_s + window.next_busy_s + window.stepping_s)
    # the training thread is on no run queue before the first batch of a pass, because it sleeps, so only its CPU time
    # is reduced to the part that belongs to passes
    part = after.machine.part(before.machine, before.seconds_to(after.reading))
    window = after.machine.completed(window, before.machine, part)
    # the law does not know the CPUs of other machines, so their queueing stays part of a batch's time
    return window.with_pools(remote=replace(window.remote, queued_s=0.0, queue_known_s=0.0))


def machine_of(reading: Reading) -> MachineCounts:
    """Return the kernel's counts of an engine's processes and of the training thread."""
    return meter.read_machine(reading.pids, reading.thread)


class MeasurementWindows:
    """Windows of several engines, to which the caller gives numbers. A window counts the engine with most progress.

    Several threads may use it.

    Args:
        machine: Returns the kernel's counts at each end of a window.

    Attributes:
        length_s: Seconds that the present window is to last.
    """

    def __init__(self, machine: Callable[[Reading], MachineCounts] = machine_of) -> None:
        self.length_s: float = SHORTEST_WINDOW_S
        self._machine = machine
        self._bases: dict[int, WindowMark] = {}
        self._glances: dict[int, WindowMark] = {}
        self._away: dict[int, int] = {}
        self._waited = 1.0
        self._ended: deque[int] = deque()
        """Engines that have ended since the last reading."""
        self._lock = Lock()

    def shorten(self) -> None:
        """Use the shortest window after a change or a start."""
        self.length_s = SHORTEST_WINDOW_S

    def lengthen(self, longest_s: float) -> None:
        """Double the length of the next window, up to ``longest_s``."""
        self.length_s = min(longest_s, 2 * self.length_s)

    def go_on(self, window: Reading, longest_s: float, *, is_changed: bool) -> None:
        """Set the length of the next window: short after a change, unchanged while workers start, else doubled."""
        running = window.local.running + window.remote.running
        coming = window.local.requested + window.remote.requested - window.remote.unplaced
        if is_changed:
            self.shorten()
        elif running == coming or running >= window.settings.workers:
            self.lengthen(longest_s)

    @property
    def pause_s(self) -> float:
        """Seconds from the end of a window to the first reading in the next window."""
        return min(GLANCE_S, self.length_s)

    def clear(self) -> None:
        """Begin a new window with the next reading."""
        with self._lock:
            self._bases.clear()
            self._glances.clear()

    def forget(self, number: int) -> None:
        """Drop an engine that has ended, at the next report. Idempotent.

        The garbage collector may call this method in a thread that holds the lock, so the method takes no lock.
        """
        self._ended.append(number)

    def turn(self, reports: Iterable[tuple[int, EngineReport]]) -> Reading | float:
        """Return the window that ends with these reports, or the seconds until the next reports are due."""
        with self._lock:
            while self._ended:
                number = self._ended.popleft()
                for known in (self._bases, self._glances, self._away):
                    known.pop(number, None)
            return self._turn(list(reports))

    def _turn(self, reports: list[tuple[int, EngineReport]]) -> Reading | float:
        there = {number for number, _ in reports}
        self._bases = {number: base for number, base in self._bases.items() if number in there}
        self._glances = {number: glance for number, glance in self._glances.items() if number in there}
        moved = [(number, report.reading) for number, report in reports if self._has_base(number, report)]
        if not moved:
            return self.length_s
        number, reading = max(moved, key=lambda pair: self._bases[pair[0]].progress_to(pair[1]))
        if self._starves_suddenly(reports):
            return self.length_s
        base = self._bases[number]
        seconds, waiting = base.seconds_to(reading), base.waited_to(reading)
        if seconds < 0.98 * self.length_s:
            return min(GLANCE_S, max(SHORTEST_WINDOW_S / 5, self.length_s - seconds))
        least = WINDOW_BATCHES_IF_STARVING if waiting > SUDDEN else WINDOW_BATCHES
        few = base.batches_to(reading) < least and seconds < max(1.0, WINDOW_PATIENCE * self.length_s)
        if few or reading.away_s > max(AWAY_S / 4, AWAY_STEPS / 2 * _step_s(reading)):
            return min(GLANCE_S, max(SHORTEST_WINDOW_S / 2, self.length_s / 4))
        for other, report in reports:
            self._bases[other] = self._mark(report.reading)
        self._waited = waiting
        return between(base, self._bases[number])

    def _mark(self, reading: Reading) -> WindowMark:
        return WindowMark(reading, self._machine(reading))

    def _starves_suddenly(self, reports: Sequence[tuple[int, EngineReport]]) -> bool:
        """Return True if the consumer waited or batches were slow since the last glance, and restart windows there."""
        if self._waited > SUDDEN / 2:
            self._glances.clear()
            return False
        now = [(number, report.reading) for number, report in reports]
        if any(found.at - self._glances[n].reading.at < GLANCE_S / 2 for n, found in now if n in self._glances):
            return False
        before, self._glances = self._glances, {number: self._mark(found) for number, found in now}
        known = [(before[number], self._bases[number], found) for number, found in now if number in before]
        if not any(then.waited_to(found) > SUDDEN or then.is_slower_to(found, base) for then, base, found in known):
            return False
        for number in self._glances:
            if number in before:
                self._bases[number] = max(before[number], self._bases[number], key=lambda mark: mark.reading.at)
        self._waited, self.length_s = 1.0, SHORTEST_WINDOW_S
        return True

    def _has_base(self, number: int, report: EngineReport) -> bool:
        """Return True if the engine has an open window. Otherwise, and in a resize or an absence, open a new one."""
        entry, reading = self._bases.get(number), report.reading
        if entry is not None and entry.progress_to(reading) < (0, 0.0):
            entry = None  # another engine has this number now
        if entry is None or report.resizing or self._is_away(number, reading, entry.reading):
            self._bases[number] = self._mark(reading)
            self._glances.pop(number, None)
            return False
        return True

    def _is_away(self, number: int, reading: Reading, base: Reading) -> bool:
        """Return True if the consumer does, or did until now, something else than training."""
        left_at = self._away.get(number)
        if left_at is not None and reading.later_batches == left_at:
            return True
        if left_at is not None and base.later_batches == left_at:
            return True  # it has just come back
        seldom = left_at is None or reading.later_batches - left_at >= AWAY_APART
        if seldom and reading.away_s > max(AWAY_S, AWAY_STEPS * _step_s(reading)):
            self._away[number] = reading.later_batches
            return True
        return False


def _step_s(reading: Reading) -> float:
    """Return the mean seconds of a step so far, without the present one."""
    steps = reading.later_batches
    return (reading.stepping_s - reading.away_s) / steps if steps else AWAY_UNKNOWN_S / AWAY_STEPS
