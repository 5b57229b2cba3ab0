"""Windows under one setting, the latest ones, and what they add up to. PURE."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass

from dpex.autotune.constants.judging import EVALUATION
from dpex.autotune.queueing import is_saturated
from dpex.autotune.types import Sample
from dpex.core.durations import remainder


@dataclass(frozen=True, kw_only=True)
class _JudgedWindow:
    seconds: float
    batches: int
    lost_s: float
    waited_s: float
    head_s: float
    busy: float
    far: int
    tickets: int
    made_s: float
    queued_s: float
    is_full: bool
    jam: float
    ready: int
    in_flight: int


class WindowRecord:
    """Windows under one setting, the latest ones."""

    def __init__(self, kept: int | None = None) -> None:
        self._windows: deque[_JudgedWindow] = deque(maxlen=kept or EVALUATION.recent_windows)

    def add(self, sample: Sample, lost_s: float, jam: float = 0.0) -> None:
        """One window; ``lost_s``: seconds the consumer lost to loading in it. ``jam``: batches that queued on the way
        from remote workers."""
        workers_s = (sample.local.running + sample.remote.running) * sample.seconds
        busy = (sample.local.busy_s + sample.remote.busy_s) / workers_s if workers_s > 0 else 1.0
        far = sample.remote.tickets
        tickets = sample.local.tickets + sample.remote.tickets
        self._windows.append(
            _JudgedWindow(
                seconds=sample.seconds,
                batches=sample.batches,
                lost_s=lost_s,
                waited_s=sample.wait_s,
                head_s=sample.head_s,
                busy=busy,
                far=far,
                tickets=tickets,
                made_s=sample.local.busy_s + sample.remote.busy_s,
                queued_s=sample.local.queued_s or 0.0,
                is_full=is_saturated(sample),
                jam=jam,
                ready=sample.ready,
                in_flight=sample.in_flight,
            )
        )

    def after(self, seconds: float) -> WindowRecord:
        """The same without the windows of its first seconds, but with as many as a standard error needs."""
        later = WindowRecord(self._windows.maxlen)
        later._windows.extend(self._windows)
        while len(later) > EVALUATION.least_windows and seconds > 0.0:
            seconds -= later._windows.popleft().seconds
        return later

    def clear(self) -> None:
        """Forget them."""
        self._windows.clear()

    def __len__(self) -> int:
        return len(self._windows)

    @property
    def seconds(self) -> float:
        """Of all windows."""
        return sum(window.seconds for window in self._windows)

    @property
    def batches(self) -> int:
        """Of all windows."""
        return sum(window.batches for window in self._windows)

    @property
    def tickets(self) -> int:
        """Batches that workers made in all windows."""
        return sum(window.tickets for window in self._windows)

    @property
    def rate(self) -> float:
        """Batches per second."""
        return self.batches / self.seconds if self._windows else 0.0

    @property
    def made_rate(self) -> float:
        """Batches per second that workers made."""
        return self.tickets / self.seconds if self._windows else 0.0

    @property
    def lost(self) -> float:
        """Share of the time that was lost to loading."""
        return min(1.0, sum(window.lost_s for window in self._windows) / self.seconds) if self._windows else 0.0

    @property
    def wait(self) -> float:
        """Share of the time in which the consumer waited."""
        return min(1.0, sum(window.waited_s for window in self._windows) / self.seconds) if self._windows else 0.0

    @property
    def head(self) -> float:
        """Share of the time in which it waited while later batches were ready."""
        return min(1.0, sum(window.head_s for window in self._windows) / self.seconds) if self._windows else 0.0

    @property
    def busy(self) -> float:
        """Share of the workers' time in which they were at work."""
        return sum(w.busy * w.seconds for w in self._windows) / self.seconds if self._windows else 1.0

    @property
    def cost_s(self) -> float:
        """Worker's time for a batch, queueing for a CPU apart; at least 0, also where that took longer by its clock."""
        made_s, queued_s = sum(w.made_s for w in self._windows), sum(w.queued_s for w in self._windows)
        return remainder(made_s, queued_s) / max(1, self.tickets)

    @property
    def lived_on_stock_s(self) -> float:
        """Seconds in which a batch was made, where clearly fewer were made than were delivered, else 0: what lay ready
        hid how slow the making had become."""
        made = sum(window.tickets for window in self._windows)
        drained = self.batches - made
        least = max(EVALUATION.least_batches, EVALUATION.drained * self.batches)
        return self.seconds / made if made and drained > least else 0.0

    @property
    def is_full(self) -> bool:
        """Whether the CPUs were mostly in use in some window, so that workers may have been in each other's way."""
        return any(window.is_full for window in self._windows)

    @property
    def gap_s(self) -> float:
        """For how long no batch has come now."""
        gap_s = 0.0
        for window in reversed(self._windows):
            if window.batches:
                break
            gap_s += window.seconds
        return gap_s

    @property
    def longest_gap_s(self) -> float:
        """The longest time in which no batch came."""
        longest = gap_s = 0.0
        for window in self._windows:
            gap_s = 0.0 if window.batches else gap_s + window.seconds
            longest = max(longest, gap_s)
        return longest

    @property
    def far(self) -> int:
        """Batches from remote workers."""
        return sum(window.far for window in self._windows)

    @property
    def jam(self) -> float:
        """Batches that queued on the way from remote workers, on average."""
        return sum(window.jam * window.seconds for window in self._windows) / self.seconds if self._windows else 0.0

    @property
    def fullest(self) -> int:
        """The most batches that were ready at the ends of two windows: after a pause of the loop one may be full."""
        ready = sorted(window.ready for window in self._windows)
        return ready[-2] if len(ready) > 1 else 0

    @property
    def in_flight(self) -> float:
        """Batches that were drawn and not ready, at the ends of windows, on average."""
        return sum(window.in_flight for window in self._windows) / len(self._windows) if self._windows else 0.0

    def loss(self, slowest_s: float = 0.0) -> tuple[float, float]:
        """Seconds lost per batch, and their standard error (of a ratio of sums over windows); at the least what one
        batch more or less that takes ``slowest_s`` may cost."""
        batches, count = self.batches, len(self._windows)
        if not batches:
            return math.inf, math.inf
        loss = sum(window.lost_s for window in self._windows) / batches
        if count < 2:
            return loss, max(loss, slowest_s / batches)
        return loss, max(self._error_of_sum([window.lost_s for window in self._windows], loss), slowest_s) / batches

    def time(self) -> tuple[float, float]:
        """Seconds per batch, the step included, and their standard error."""
        batches = self.batches
        if not batches:
            return math.inf, math.inf
        mean = self.seconds / batches
        if len(self) < 2:
            return mean, mean
        return mean, self._error_of_sum([window.seconds for window in self._windows], mean) / batches

    def _error_of_sum(self, parts: list[float], per_batch: float) -> float:
        off = sum((part - per_batch * w.batches) ** 2 for part, w in zip(parts, self._windows, strict=True))
        return math.sqrt(off * len(self) / (len(self) - 1))
