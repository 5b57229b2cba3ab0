"""All numbers of the tuner that users do not set. `dpex.AutotuneConfig` has the others.

``docs/reference/controller-constants.md`` lists the regret without each constant of the law (`Constants`).
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Constants:
    """Constants of the law, with their units. Times and sizes of the work are measured instead."""

    start_workers: int = 8
    """Maximum number of workers at the start; half of it where memory may be short."""
    start_depth: float = 2.0
    """Batches in flight per worker at the start."""
    start_each: float = 1.0
    """Growth of the start time with each worker per CPU, relative to the part that does not depend on workers. On two
    cores the first batch came after 0.11 s with 2 workers, 0.15 s with 4 and 0.25 s with 14, which corresponds to
    0.3."""
    worker_bytes: float = 1.2e9
    """Bytes of free memory for each worker at the start, until its memory is measured."""
    uneven_room: float = 0.1
    """Memory for batches that wait for slow ones, as a share of each worker's own memory."""
    computes_from: float = 0.5
    """If CPU time exceeds this share of a batch's time in a worker, CPUs limit the rate, not the number of workers."""
    jump: float = 4.0
    """Maximum factor by which one decision raises the number of workers, if the work mostly waits."""
    jump_floor: int = 16
    """One decision may raise a pool to this many workers in any case, if the work mostly waits."""
    depth: float = 8.0
    """Batches in flight per worker."""
    most_depth: float = 32.0
    """Maximum batches in flight per worker, used where single late batches cause the waits."""
    depth_by_slowest: float = 2.0
    """Batches in flight per worker, as a multiple of the ratio of the slowest batch to the mean."""
    least_prefetch_change: float = 1.3
    """Minimum factor by which a decision raises the prefetch alone; otherwise the prefetch stays."""
    is_uneven_from: float = 2.0
    """If the slowest batch exceeds this many mean times, workers without memory for their batches are ended."""
    probe_factor: float = 1.3
    """Growth of the number of workers in a probe, as a factor."""
    give_back_factor: float = 1.3
    """Maximum factor by which one decision reduces local workers that take the training thread's CPU."""
    enough_windows: int = 3
    """Windows under a setting before its rate counts."""
    enough_batches: int = 8
    """Minimum batches for a rate or a slow quantile."""
    times: float = 3.0
    """Minimum time of windows before their rate counts, in mean times of a batch. Workers that began together finish
    together, so a shorter time may count batches without the time spent on them, or the reverse."""
    trial_windows: int = 8
    """Windows after which a trial is decided by the measurements so far."""
    pause: float = 3.0
    """Time without trials after a failed trial, as a multiple of the trial's time; each failure doubles it."""
    exponent: float = 0.5
    """Growth of workers by a factor g succeeds if the rate grows by g to this power, or the time of a batch by less."""
    apart: float = 2.0
    """The work has changed if recent batches take this many times the old slow quantile, scaled by the growth of
    workers."""
    slow_quantile: float = 0.9
    """The quantile of older times of batches in the comparison of `apart`."""
    alarm: float = 5.0
    """CUSUM threshold, in standard deviations. The work has changed if the sum of deviations exceeds it."""
    drift: float = 1.0
    """Deviation that the CUSUM takes for noise and subtracts from each deviation, in standard deviations."""
    cusum_from: int = 3
    """Minimum windows under a condition before a deviation from their mean counts."""
    cusum_memory: int = 16
    """Windows over which the mean and the variance of a CUSUM are taken."""
    least_sigma: float = 0.02
    """The smallest relative standard deviation that a CUSUM divides by."""
    equal_rates: float = 0.02
    """Relative difference of rates, or of times of a pass, that counts as equal."""
    memory_slack: float = 0.02
    """Share by which the prefetch may exceed the memory limit, because free memory is known with about this error."""
    patience_s: float = 30.0
    """Maximum wait for workers to start, in seconds."""
    most_settling_s: float = 30.0
    """Maximum seconds that windows leave out after a change. They leave out the mean time of a batch if it is less."""
    far: float = 0.1
    """Relative error of a prediction for twice or half the workers, in addition to the error of the measured rate."""
    recent: int = 64
    """Maximum number of remembered windows. A full sum of recent windows drops the older half at once."""


CONSTANTS = Constants()

# -- what can be a measurement -----------------------------------------------------------------------------------------

STOPPED_S, STOPPED = 30.0, 10.0
"""A window of more than `STOPPED_S` seconds and `STOPPED` times the previous window is dropped, because the process was
stopped and no thread read the clock."""
MOST_WORKERS = 10**5
"""More workers than any cluster has."""
NVML_SETTLES_S = 2.0
"""Seconds under a setting before NVML's values count, because dpex reads them once a second and they cover a second."""

# -- windows of measurements -------------------------------------------------------------------------------------------

SHORTEST_WINDOW_S = 0.05
"""Seconds of the first window after a decision. Later windows get longer."""
WINDOW_BATCHES, WINDOW_BATCHES_IF_STARVING = 4, 2
"""Minimum batches of a window, usually and while the consumer waits for most of its time. A window with fewer batches
waits a while for more."""
WINDOW_PATIENCE = 4.0
"""Maximum duration of a prolonged window, as a multiple of its planned length; at least 1 s."""
GLANCE_S = 0.125
"""Maximum seconds between two readings within a window, so that a sudden change is seen soon."""
SUDDEN = 0.5
"""The work has changed if the consumer waited for more than this share of its time since the last glance (a reading
within a window). A new window then begins with that glance."""
AWAY_S = 1.0
AWAY_STEPS = 10.0
"""A step of more than `AWAY_S` seconds and `AWAY_STEPS` mean steps is an absence: the consumer does something else."""
AWAY_UNKNOWN_S = 60.0
"""A first step of more seconds than this is an absence, because no mean step is known yet."""
AWAY_APART = 10
"""Minimum batches between two absences. A long step that follows sooner is no absence, because steps have become
slow."""

# -- the tuner's thread -----------------------------------------------------------------------------------------------

JOIN_S = 2.0
"""Seconds to wait for the end of the thread before Ray is shut down."""
ROOM_EVERY_S = 1.0
"""Seconds between two requests to the cluster for room, which are calls to Ray's head node."""
