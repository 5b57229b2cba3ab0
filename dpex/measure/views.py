"""Figures that follow from a reading, each defined once for the tuner's law and for a diagnosis. PURE.

Figures of one reading alone are properties of `dpex.measure.reading.Reading` and
`dpex.measure.pool_reading.PoolReading`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from dpex.measure.batch_times import RECENT
from dpex.measure.causes import OWN
from dpex.measure.pool_reading import MOST_QUEUED, PoolReading
from dpex.measure.reading import Reading
from dpex.measure.settings import INLINE, LOCAL

_FULL = 0.9
"""CPUs are full from this busy share on. More computing workers would then only take CPUs from each other."""
_COMPUTES = 0.5
"""A worker computes rather than waits if CPU time exceeds this share of its busy time."""
_TINY = 1e-9


class StepTimes(NamedTuple):
    """Seconds of all ``steps`` training steps. ``queued_s``: Seconds on a run queue, which ``net_s`` leaves out."""

    net_s: float
    queued_s: float
    steps: int


def without_queueing(wall_s: float, cpu_s: float, queued_s: float) -> float:
    """Return the part of ``wall_s`` without queueing for a CPU, at least its CPU time."""
    least_s = max(min(cpu_s, wall_s), (1.0 - MOST_QUEUED) * wall_s)
    return max(wall_s - queued_s, least_s)


def mean_s(pool: PoolReading) -> float:
    """Return the mean seconds that a worker was busy with a batch; 0 without a batch."""
    return pool.busy_s / pool.tickets if pool.tickets else 0.0


def net_mean_s(pool: PoolReading, queued_s: float) -> float:
    """Return the mean seconds of a batch without queueing for a CPU; 0 without a batch.

    ``queued_s``: Seconds of the pool's workers on run queues, summed over all batches.
    """
    return without_queueing(pool.busy_s, pool.cpu_s, queued_s) / pool.tickets if pool.tickets else 0.0


def median_s(pool: PoolReading) -> float:
    """Return the median seconds of the latest batches, or the mean if single times are unknown.

    A few slow batches move the mean and not the median.
    """
    ordered = sorted(pool.services_s[-RECENT:])
    middle = len(ordered) // 2
    return (ordered[middle] + ordered[~middle]) / 2 if ordered else mean_s(pool)


def unevenness(services_s: Sequence[float]) -> float:
    """Return the ratio of the slowest batch's time to the mean time, at least 1."""
    total_s = sum(services_s)
    return max(1.0, max(services_s) * len(services_s) / total_s) if total_s > 0 else 1.0


def step_times(reading: Reading) -> StepTimes:
    """Return the times of the training loop outside its waits, by the clock: steps, and work in ``next()``.

    Use it for windows, in which most waits have no cause yet.

    If the count of ended steps is known, only their seconds count; otherwise all seconds between two calls. Queueing of
    the training thread is divided between waits and steps by their wall times.
    """
    total_s, count = reading.stepping_s + reading.next_busy_s, reading.later_batches
    queued = min(MOST_QUEUED, (reading.trainer_queued_s or 0.0) / max(_TINY, total_s))
    if reading.step_count is not None:
        total_s, count = reading.stepped_s + reading.next_busy_s, reading.step_count
    return StepTimes((1.0 - queued) * total_s, queued * total_s, count)


def free_steps_s(reading: Reading) -> float:
    """Return the seconds that the training loop would take without waits and without queueing, from times by cause.

    Use it for whole runs. Waits for page-locked memory are included, because no worker makes them shorter. With CUDA
    events, the steps of the GPU's stream count if they take longer.
    """
    busy_s = reading.transfer_s + sum(reading.causes.get(name, 0.0) for name in (*OWN, "h2d"))
    loop_s = reading.work_s - reading.held_s + without_queueing(busy_s, 0.0, reading.loop_queued_s)
    stall_s = reading.gpu_running_stall_s
    return loop_s if stall_s is None else max(loop_s, reading.running_s - stall_s - reading.held_s)


def cpus_used(reading: Reading) -> Mapping[str, float]:
    """Return the mean number of busy CPUs of this machine, by the name of the programs that used them."""
    wall_s = max(_TINY, reading.wall_s)
    made_s = {name: reading.pools[name].cpu_s if name in reading.pools else 0.0 for name in (LOCAL, INLINE)}
    return {
        "the workers": (made_s[LOCAL] + reading.read_cpu_s) / wall_s,
        "the training process": max(reading.trainer_cpu_s, made_s[INLINE]) / wall_s,
        "other programs": reading.others or 0.0,
    }


def is_full(reading: Reading) -> bool:
    """Return True if hardly any CPU of this machine was idle."""
    return reading.wall_s > 0 and sum(cpus_used(reading).values()) >= _FULL * reading.cpus


def queued_s(pool: PoolReading, *, has_full_cpus: bool) -> float:
    """Return the seconds of a pool's workers on run queues.

    Without a report of the kernel, this is all time beyond CPU time if the CPUs are full and the workers compute, or 0.
    """
    if pool.queueing_s is not None:
        return pool.queueing_s
    return pool.busy_s - pool.cpu_s if has_full_cpus and pool.cpu_s > _COMPUTES * pool.busy_s else 0.0
