"""The measurements of the work: means over recent windows, and changes of them. PURE."""

from __future__ import annotations

import math
from collections import defaultdict, deque
from dataclasses import dataclass, field

from dpex.autotune.constants import CONSTANTS
from dpex.autotune.law.model import net_s
from dpex.measure.batch_times import RECENT
from dpex.measure.pool_reading import PoolReading
from dpex.measure.reading import Reading
from dpex.measure.settings import WORKER_POOLS


class Mean:
    """Seconds per batch over the latest windows."""

    def __init__(self) -> None:
        self._rows: deque[tuple[float, int]] = deque(maxlen=CONSTANTS.recent)
        self.count: int = 0
        self.value: float = 0.0

    def add(self, seconds: float, count: int) -> None:
        """Take in a window with that many batches."""
        if count:
            self._rows.append((seconds, count))
            self.count = sum(number for _, number in self._rows)
            self.value = sum(total for total, _ in self._rows) / self.count


class Cusum:
    """Two-sided CUSUMs on the logarithm of a time (Page, 1954), one per condition. Its noise outlives `forget`."""

    def __init__(self) -> None:
        self._variance, self._seen = 0.0, 0
        self._sums: dict[object, tuple[int, float, float, float]] = {}

    def forget(self) -> None:
        """Begin anew, with another mean."""
        self._sums = {}

    def add(self, seconds: float, under: object = None) -> bool:
        """Take in a window's mean; True if it is no longer what it was under this condition."""
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


class ServiceTimes:
    """The times of a batch. wall: seconds in a worker. cpu: its CPU seconds. queued: seconds on run queues.

    Queueing is subtracted from sums over windows. In one short window on a busy machine, the kernel's counts and the
    batches that arrived are of different work, and what exceeds a batch's time there is missing elsewhere.
    """

    def __init__(self) -> None:
        self.wall: Mean = Mean()
        self.cpu: Mean = Mean()
        self.queued: Mean = Mean()
        self._latest: deque[float] = deque(maxlen=CONSTANTS.recent)

    def add(self, *pools: PoolReading) -> None:
        """Take in a window of these pools together."""
        count = sum(pool.tickets for pool in pools)
        self.wall.add(sum(pool.busy_s for pool in pools), count)
        self.cpu.add(sum(pool.cpu_s for pool in pools), count)
        self.queued.add(sum(pool.queued_s for pool in pools), count)
        self._latest.extend(second for pool in pools for second in pool.services_s)

    @property
    def count(self) -> int:
        """Batches in these windows."""
        return self.wall.count

    @property
    def median_s(self) -> float:
        """Median of the latest batches, robust to a few slow batches; the mean if single times are unknown."""
        ordered = sorted(self._latest)
        middle = len(ordered) // 2
        return (ordered[middle] + ordered[~middle]) / 2 if ordered else self.wall.value

    @property
    def most_s(self) -> float:
        """The time within which nine in ten of the latest batches were made; infinite while few are known."""
        if len(self._latest) < CONSTANTS.enough_batches:
            return math.inf
        return sorted(self._latest)[int(CONSTANTS.slow_quantile * len(self._latest))]

    @property
    def net_s(self) -> float:
        """Seconds of a batch without queueing for a CPU, at least the CPU time; 0 without a window."""
        return net_s(self.wall.value, self.cpu.value, self.queued.value)


@dataclass
class PoolEstimate:
    """The times of a pool. slowest_s: of its slowest batch. sum: all its windows."""

    times: ServiceTimes = field(default_factory=ServiceTimes)
    slowest_s: float = 0.0
    sum: PoolReading = field(default_factory=PoolReading)

    def is_other_work(self, pool: PoolReading, growth: float) -> bool:
        """Return True if all batches of a window took far longer than nine in ten of those before.

        Where storage, a link or CPUs are full, ``growth`` times the workers take up to ``growth`` times as long.
        """
        latest_s = pool.services_s[-RECENT:]
        return len(latest_s) > 1 and min(latest_s) > CONSTANTS.apart * growth * self.times.most_s

    def add(self, pool: PoolReading) -> None:
        """Take in a window."""
        if pool.tickets:
            self.times.add(pool)
            self.slowest_s = max(self.slowest_s, *pool.services_s[-RECENT:], 0.0)
            self.sum = self.sum.then(pool)


class WorkEstimate:
    """The measurements of the work since it last changed."""

    def __init__(self, watched: defaultdict[str, Cusum] | None = None) -> None:
        self.step: Mean = Mean()
        self.step_queued: Mean = Mean()
        self.trainer_cpu: Mean = Mean()
        self.pools: dict[str, PoolEstimate] = {name: PoolEstimate() for name in WORKER_POOLS}
        self._watched = defaultdict(Cusum) if watched is None else watched
        for each in self._watched.values():
            each.forget()
        self._others: deque[float] = deque(maxlen=CONSTANTS.recent)

    def add(self, window: Reading) -> None:
        """Take in a window."""
        (step_s, queued_s), count = steps(window)
        self.step.add(step_s, count)
        self.step_queued.add(queued_s, count)
        self.trainer_cpu.add(window.trainer_cpu_s, window.later_batches)
        for name, pool in self.pools.items():
            pool.add(getattr(window, name))
        self._others.append(window.others or 0.0)

    @property
    def others(self) -> float:
        """CPUs that other programs used lately, at most: they come and go, and come again."""
        return max(self._others, default=0.0)

    def changes(self, window: Reading, *, is_steady: bool) -> tuple[str, ...]:
        """Names of the times that are no longer what they were: "step" and pools. Service times of a pool are compared
        under the same number of workers, and if all batches were begun under it (``is_steady``): others hold each other
        up more, or less."""
        found, workers = [], (window.settings.local, window.settings.remote)
        (step_s, _), count = steps(window)
        seen: list[tuple[str, object, float, int]] = [("step", None, step_s, count)]
        for name in WORKER_POOLS if is_steady else ():
            pool: PoolReading = getattr(window, name)
            seen.append((name, workers, pool.busy_s, pool.tickets))
        for name, under, seconds, number in seen:
            if number > 1 and self._watched[name].add(seconds / number, under):
                found.append(name)
        return tuple(found)

    def is_other_work(self, window: Reading, growth: float) -> bool:
        """Return True if the batches of a pool became far slower than ``growth`` times the workers can make them."""
        return any(pool.is_other_work(getattr(window, name), growth) for name, pool in self.pools.items())

    def service_s(self, name: str) -> float:
        """Seconds of a batch in a pool without queueing for a CPU; those of the other pool where it has no batches."""
        other = next(pool for pool in WORKER_POOLS if pool != name)
        return self.pools[name].times.net_s or self.pools[other].times.net_s

    @property
    def median_s(self) -> float:
        """The longest of the pools' medians; 0 without a batch."""
        return max(pool.times.median_s for pool in self.pools.values())

    @property
    def unevenness(self) -> float:
        """The slowest batch over the mean, at least 1."""
        slowest_s = max(pool.slowest_s for pool in self.pools.values())
        return max(1.0, slowest_s / max(1e-9, self.service_s("local")))


def steps(window: Reading) -> tuple[tuple[float, float], int]:
    """Return the seconds of steps and those in which the training thread waited for a CPU, and the number of steps."""
    total_s = window.stepping_s + window.next_busy_s
    queued = min(CONSTANTS.most_queued, (window.trainer_queued_s or 0.0) / max(1e-9, total_s))
    count = window.later_batches
    if window.step_count is not None:
        total_s, count = window.stepped_s + window.next_busy_s, window.step_count
    return ((1.0 - queued) * total_s, queued * total_s), count


class SettingStats:
    """Sums over the windows under one setting."""

    def __init__(self) -> None:
        self._rows: deque[tuple[int, int, float]] = deque(maxlen=CONSTANTS.recent)
        self.sum: Reading = Reading()
        self.times: ServiceTimes = ServiceTimes()
        self.calm: int = 0

    def add(self, window: Reading, goal: float) -> None:
        """Take in a window."""
        local, remote = window.local, window.remote
        made = local.tickets + remote.tickets
        self._rows.append((window.later_batches, made, window.seconds))
        self.sum = self.sum.then(window)
        self.times.add(local, remote)
        self.calm = self.calm + 1 if window.blocked_s <= goal * window.seconds else 0

    def __len__(self) -> int:
        return len(self._rows)

    @property
    def wait(self) -> float:
        """Share of the time that the training loop was blocked in ``next()``."""
        return self.sum.blocked_s / self.sum.seconds if self.sum.seconds else 0.0

    @property
    def lost(self) -> float:
        """Share of the time that was lost to loading, 0 to 1: blocked in ``next()`` or busy there."""
        return min(1.0, (self.sum.blocked_s + self.sum.next_busy_s) / max(1e-9, self.sum.seconds))

    @property
    def queued(self) -> float:
        """Share of the time that the training thread waited for a CPU."""
        return (self.sum.trainer_queued_s or 0.0) / self.sum.seconds if self.sum.seconds else 0.0

    @property
    def busy_workers(self) -> float:
        """Workers that were busy on average."""
        return (self.sum.local.busy_s + self.sum.remote.busy_s) / self.sum.seconds

    @property
    def has_rate(self) -> bool:
        """True if the windows are long enough for a rate."""
        return self.times.count > 0 and self.sum.seconds >= CONSTANTS.times * self.times.wall.value

    @property
    def is_late(self) -> bool:
        """True if mostly the next batch in turn is missing."""
        return self.sum.straggler_s > 0.5 * self.sum.blocked_s

    def is_draining(self, headroom: float) -> bool:
        """Return True if the loop takes older batches rather than new batches."""
        return headroom * sum(row[1] for row in self._rows) < sum(row[0] for row in self._rows)

    def rate(self, *, made: bool = False) -> tuple[float, float]:
        """Batches per second that were delivered, or made, and the standard error of that."""
        seconds = sum(row[2] for row in self._rows)
        if not seconds:
            return 0.0, math.inf
        which = int(made)
        total, windows = sum(row[which] for row in self._rows), len(self._rows)
        rate = total / seconds
        error = math.sqrt(max(1.0, total)) / seconds
        if windows >= 3:
            squares = sum((row[which] - rate * row[2]) ** 2 for row in self._rows)
            seen = math.sqrt(windows / (windows - 1) * squares) / seconds
            error = seen if total > 2 * windows else max(error, seen)
        return rate, error
