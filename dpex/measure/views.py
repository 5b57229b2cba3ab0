"""Figures that follow from a reading, each defined once for the tuner's law and for a diagnosis. PURE.

Figures of one reading alone are properties of `dpex.measure.reading.Reading` and
`dpex.measure.pool_reading.PoolReading`.
"""

from __future__ import annotations

from typing import NamedTuple

from dpex.measure.batch_times import RECENT
from dpex.measure.pool_reading import MOST_QUEUED, PoolReading
from dpex.measure.reading import Reading

_TINY = 1e-9


class StepTimes(NamedTuple):
    """Seconds of training steps, summed over ``count`` steps. queued_s: on a run queue, beyond ``net_s``."""

    net_s: float
    queued_s: float
    count: int


def without_queueing(wall_s: float, cpu_s: float, queued_s: float) -> float:
    """Return the part of ``wall_s`` without queueing for a CPU, at least its CPU time."""
    least_s = max(min(cpu_s, wall_s), (1.0 - MOST_QUEUED) * wall_s)
    return max(wall_s - queued_s, least_s)


def mean_s(pool: PoolReading) -> float:
    """Return the mean seconds that a worker was busy with a batch; 0 without a batch."""
    return pool.busy_s / pool.tickets if pool.tickets else 0.0


def net_mean_s(pool: PoolReading, queued_s: float) -> float:
    """Return the mean seconds of a batch without the ``queued_s`` of all batches on run queues; 0 without a batch."""
    return without_queueing(pool.busy_s, pool.cpu_s, queued_s) / pool.tickets if pool.tickets else 0.0


def median_s(pool: PoolReading) -> float:
    """Return the median seconds of the latest batches, or the mean if single times are unknown.

    A few slow batches move the mean and not the median.
    """
    ordered = sorted(pool.services_s[-RECENT:])
    middle = len(ordered) // 2
    return (ordered[middle] + ordered[~middle]) / 2 if ordered else mean_s(pool)


def step_times(reading: Reading) -> StepTimes:
    """Return the times of the training loop outside its waits, by the clock: steps, and work in ``next()``.

    Steps that have ended are counted if they are known, else all seconds between two calls. Queueing of the training
    thread is divided between waits and steps by their wall times.
    """
    total_s, count = reading.stepping_s + reading.next_busy_s, reading.later_batches
    queued = min(MOST_QUEUED, (reading.trainer_queued_s or 0.0) / max(_TINY, total_s))
    if reading.step_count is not None:
        total_s, count = reading.stepped_s + reading.next_busy_s, reading.step_count
    return StepTimes((1.0 - queued) * total_s, queued * total_s, count)
