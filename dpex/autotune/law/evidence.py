"""The measurements of the work: sums of recent windows, and changes of the work. PURE."""

from __future__ import annotations

import math
from collections import defaultdict, deque
from typing import Generic, TypeVar

from dpex.autotune.constants import CONSTANTS
from dpex.measure.batch_times import RECENT
from dpex.measure.pool_reading import PoolReading
from dpex.measure.reading import Reading
from dpex.measure.record import Record
from dpex.measure.settings import WORKER_POOLS
from dpex.measure.views import mean_s, net_mean_s, step_times

_R = TypeVar("_R", bound=Record)


class RecentSum(Generic[_R]):
    """The sum of the latest windows, at most `Constants.recent` of them. A full sum drops the older half at once."""

    def __init__(self, empty: _R) -> None:
        self.sum: _R = empty
        self._empty, self._earlier, self._later = empty, empty, empty
        self._count = 0

    def add(self, window: _R) -> None:
        """Add a window. The older half is dropped as a whole, because subtracting windows would cause errors."""
        if self._count == CONSTANTS.recent // 2:
            self._earlier, self._later, self._count = self._later, self._empty, 0
        self._later, self._count = self._later.then(window), self._count + 1
        self.sum = self._earlier.then(self._later)


class Cusum:
    """Two-sided CUSUMs on the logarithm of a time (Page, 1954), one per condition. `reset` keeps the variance."""

    def __init__(self) -> None:
        self._variance, self._seen = 0.0, 0
        self._sums: dict[object, tuple[int, float, float, float]] = {}

    def reset(self) -> None:
        """Forget the means and sums."""
        self._sums = {}

    def add(self, seconds: float, under: object = None) -> bool:
        """Take in a window's mean. Return True if the mean under this condition has changed."""
        if seconds <= 0:
            return False
        k, x = CONSTANTS, math.log(seconds)
        count, mean, up, down = self._sums.get(under, (0, x, 0.0, 0.0))
        apart = x - mean
        if count >= k.cusum_from:
            z = apart / max(k.least_sigma, math.sqrt(self._variance))
            up, down = (max(0.0, each + min(way, k.alarm) - k.drift) for each, way in ((up, z), (down, -z)))
        if count:
            self._seen += 1
            self._variance += (apart * apart - self._variance) / min(self._seen, k.cusum_memory)
        self._sums[under] = count + 1, mean + apart / min(count + 1, k.cusum_memory), up, down
        return max(up, down) > k.alarm


class WorkEstimate:
    """The measurements of the work since it last changed.

    Attributes:
        sum: The sum of recent windows with steps; for a pool, of recent windows in which the pool made batches.
    """

    def __init__(self, cusums: defaultdict[str, Cusum] | None = None) -> None:
        self.sum: Reading = Reading()
        self._windows = RecentSum(Reading())
        self._pools = {name: RecentSum(PoolReading()) for name in WORKER_POOLS}
        self._others: deque[float] = deque(maxlen=CONSTANTS.recent)
        self._cusums = defaultdict(Cusum) if cusums is None else cusums
        for each in self._cusums.values():
            each.reset()

    def add(self, window: Reading) -> None:
        """Take in a window."""
        if step_times(window).steps:  # CUDA events say nothing about a window without a step
            self._windows.add(window)
        for name, pool in self._pools.items():
            made: PoolReading = getattr(window, name)
            if made.tickets:
                pool.add(made)
        self._others.append(window.others or 0.0)
        self.sum = self._windows.sum.with_pools(**{name: pool.sum for name, pool in self._pools.items()})

    @property
    def others(self) -> float:
        """The maximum of the CPUs that other programs used in recent windows, because such programs come and go."""
        return max(self._others, default=0.0)

    def changes(self, window: Reading, *, is_steady: bool) -> tuple[str, ...]:
        """Return the names of times that have changed: "step" and pools.

        Service times of a pool are compared only between windows with the same number of workers, and only if all
        batches were begun with that number (``is_steady``), because workers slow each other down.
        """
        found, workers = [], (window.settings.local, window.settings.remote)
        step = step_times(window)
        seen: list[tuple[str, object, float, int]] = [("step", None, step.net_s, step.steps)]
        for name in WORKER_POOLS if is_steady else ():
            pool: PoolReading = getattr(window, name)
            seen.append((name, workers, pool.busy_s, pool.tickets))
        for name, under, seconds, number in seen:
            if number > 1 and self._cusums[name].add(seconds / number, under):
                found.append(name)
        return tuple(found)

    def is_other_work(self, window: Reading, growth: float) -> bool:
        """Return True if all batches of a pool took far longer than the 90th percentile of earlier batches.

        If storage, a link or CPUs are saturated, ``growth`` times the workers take up to ``growth`` times as long.
        """

        def is_other(pool: PoolReading, before: PoolReading) -> bool:
            latest_s, before_s = pool.services_s[-RECENT:], sorted(before.services_s[-RECENT:])
            if len(latest_s) < 2 or len(before_s) < CONSTANTS.enough_batches:
                return False
            most_s = before_s[int(CONSTANTS.slow_quantile * len(before_s))]
            return min(latest_s) > CONSTANTS.apart * growth * most_s

        return any(is_other(getattr(window, name), pool.sum) for name, pool in self._pools.items())

    @property
    def service_s(self) -> float:
        """Mean seconds of a local batch without queueing. Without local batches: of a remote batch, or 0."""
        pools = (self._pools[name].sum for name in WORKER_POOLS)
        return next((net_mean_s(pool, pool.queueing_s or 0.0) for pool in pools if pool.tickets), 0.0)


class SettingStats:
    """The windows under one setting.

    Attributes:
        sum: The sum of all these windows.
        made: The batches of both pools in recent windows.
        calm: Number of the latest consecutive windows without a wait.
    """

    def __init__(self) -> None:
        self.sum: Reading = Reading()
        self.made: PoolReading = PoolReading()
        self.calm: int = 0
        self._made = RecentSum(self.made)
        self._rows: deque[tuple[int, int, float]] = deque(maxlen=CONSTANTS.recent)

    def add(self, window: Reading, goal: float) -> None:
        """Take in a window. ``goal``: The maximum share of blocked time that counts as no wait."""
        made = window.local.plus(window.remote)
        self._rows.append((window.later_batches, made.tickets, window.seconds))
        self._made.add(made)
        self.sum, self.made = self.sum.then(window), self._made.sum
        self.calm = self.calm + 1 if window.blocked_s <= goal * window.seconds else 0

    def __len__(self) -> int:
        return len(self._rows)

    @property
    def blocked(self) -> float:
        """Share of the time that the training loop was blocked in ``next()``."""
        return self.sum.blocked_s / self.sum.seconds if self.sum.seconds else 0.0

    @property
    def has_rate(self) -> bool:
        """True if the windows are long enough for a rate."""
        return self.made.tickets > 0 and self.sum.seconds >= CONSTANTS.times * mean_s(self.made)

    @property
    def is_late(self) -> bool:
        """True if, for most of the wait, later batches were ready and only the next one was missing."""
        return self.sum.straggler_s > 0.5 * self.sum.blocked_s

    def is_draining(self, headroom: float) -> bool:
        """Return True if the loop took more than ``headroom`` times the batches made, so that the prefetch empties."""
        return headroom * sum(row[1] for row in self._rows) < sum(row[0] for row in self._rows)

    def rate(self, *, made: bool = False) -> tuple[float, float]:
        """Return the batches per second that were delivered (or made, if ``made``), and the standard error."""
        rows = [(row[int(made)], row[2]) for row in self._rows]
        total, seconds = (sum(each) for each in zip(*rows, strict=True)) if rows else (0, 0.0)
        if not seconds:
            return 0.0, math.inf
        rate, error = total / seconds, math.sqrt(max(1.0, total)) / seconds
        if len(rows) >= 3:
            squares = sum((count - rate * each_s) ** 2 for count, each_s in rows)
            seen = math.sqrt(len(rows) / (len(rows) - 1) * squares) / seconds
            error = seen if total > 2 * len(rows) else max(error, seen)
        return rate, error
