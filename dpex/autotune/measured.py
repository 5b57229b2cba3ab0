"""Convert reports of clocks, counters and the system to a sample that the law can judge. PURE.

A legal sample (`dpex.autotune.types`) may hold nearly any number. `SampleChecker` decides once which of them are
measurements. Behind it no number but that of free memory is negative, and none is larger than a machine allows.

1. A window whose own times are no times is left out, and so is one in which all stood still. Times that add up to far
   more than the window become shares of it.

2. A pool whose times are no times has no tickets in that window. Its number of workers is still known.

3. Any other impossible number becomes the value for "unknown": None where the type allows it, else 0. The CPUs stay
   what they were.

4. Time never goes back. Where the clock does, the window's own length is taken to have passed.

`LossClock` then chooses the clock by which loading is judged, and finds the part of the wait that reaches the GPU. A
loop that does not synchronise runs ahead of the GPU: it may wait in ``next()`` while kernels are queued and lose
nothing, and its own step may take a tenth of the GPU's. So loading is judged by the best clock there is:

- *events*: CUDA events on the stream of the training loop. The loss is the time in which that stream waited for
  data. Its wait for copies and the device transform belongs to the step: no worker shortens it.
- *nvml*: where there are no events. No more can be lost than the time in which the GPU ran no kernel.
- *wait*: nothing is known of a GPU. The loss is the training loop's wait.

A window that was measured by the GPU's clock becomes a sample whose consumer is the GPU: ``wait_s`` and ``busy_s`` are
what it waited, ``work_s`` the rest.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, replace
from typing import Any, TypeVar

from dpex.autotune.constants import (
    LEAST_CPUS,
    LEAST_S,
    LONGEST_S,
    LOOK_S,
    MOST_COUNT,
    MOST_CPUS,
    MOST_TIMES,
    MOST_WORKERS,
    STOPPED,
    STOPPED_S,
)
from dpex.autotune.types import Sample, Signal
from dpex.measure.readable import remainder
from dpex.measure.samples import PoolSample
from dpex.schedule.prefetch import Settings

_WORKERS = frozenset({"local", "remote", "requested", "running", "unplaced", "room", "granted"})
_Values = TypeVar("_Values")


class SampleChecker:
    """Checks the samples of one run, in their order."""

    def __init__(self) -> None:
        self._cpus = 1.0
        self._at = self._offset = self._seconds = 0.0

    def check(self, sample: Sample) -> Sample | None:
        """Return a sample to calculate with; None if the window measured nothing."""
        times = (sample.seconds, sample.wait_s, sample.busy_s, sample.work_s)
        if not all(_is_time(value) for value in times) or sample.seconds < LEAST_S or self._stood_still(sample):
            return None
        total_s = sum(times[1:])
        factor = sample.seconds / total_s if total_s > MOST_TIMES * sample.seconds else 1.0
        wait_s, busy_s, work_s = (factor * value for value in times[1:])
        if 0 < sample.machine.cpus < math.inf:
            self._cpus = min(max(sample.machine.cpus, LEAST_CPUS), MOST_CPUS)
        found, settings = _checked(sample), _checked(sample.settings)
        return replace(
            found,
            at=self._passed(sample),
            settings=replace(settings, prefetch=max(1, settings.prefetch)),
            wait_s=wait_s,
            busy_s=busy_s,
            work_s=work_s,
            steps=found.steps if _is_time(sample.steps_s) else None,
            steps_s=factor * found.steps_s,
            straggler_s=min(wait_s, found.straggler_s),
            local=_pool(sample.local),
            remote=_pool(sample.remote),
            machine=replace(_checked(sample.machine), cpus=self._cpus),
            gpu_steps=found.gpu_steps if _is_time(sample.gpu_step_s) else 0,
        )

    def _stood_still(self, sample: Sample) -> bool:
        """Return True if the process, or the whole machine, was stopped in the window."""
        usual_s, self._seconds = self._seconds, sample.seconds
        return sample.seconds > max(STOPPED_S, STOPPED * usual_s)

    def _passed(self, sample: Sample) -> float:
        """Monotonic time of the end of the window, in seconds."""
        at = sample.at + self._offset
        if not self._at <= at <= self._at + LONGEST_S:
            at = self._at + sample.seconds
            self._offset = at - sample.at if math.isfinite(sample.at) else self._offset
        self._at = at
        return at


def _is_time(value: float) -> bool:
    return 0.0 <= value <= LONGEST_S


def _pool(pool: PoolSample) -> PoolSample:
    found = _checked(pool)
    if not all(_is_time(value) for value in (pool.load_s, pool.collate_s, pool.encode_s, pool.cpu_s)):
        return replace(
            found, tickets=0, load_s=0.0, collate_s=0.0, encode_s=0.0, cpu_s=0.0, queued_s=None, services_s=()
        )
    return replace(found, services_s=tuple(each for each in pool.services_s if LEAST_S <= each <= LONGEST_S))


def _checked(values: _Values) -> _Values:
    """Return the values with each number within its possible range."""
    changes: dict[str, Any] = {}
    for field in fields(values):  # type: ignore[arg-type]
        value = getattr(values, field.name)
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            changes[field.name] = _number(field.name, value, None if field.default is None else 0)
    return replace(values, **changes)  # type: ignore[type-var]


def _number(name: str, value: float, unknown: int | None) -> float | None:
    if isinstance(value, int):
        least = -MOST_COUNT if name == "memory_free" else 0
        return max(least, min(value, MOST_WORKERS if name in _WORKERS else MOST_COUNT))
    if not 0.0 <= value <= (LONGEST_S if name.endswith("_s") else MOST_COUNT):
        return None if unknown is None else 0.0
    return value if value >= LEAST_S else 0.0


# -- the clock of the loss ---------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class JudgedSample:
    """A window of measurements, by the clock ``signal``.

    Attributes:
        sample: The window. Its consumer's times are the GPU's, if known.
        signal: The clock.
        is_known: True if the clock has measured in this window.
        is_new: True if the previous window had another clock.
    """

    sample: Sample
    signal: Signal = "wait"
    is_known: bool = True
    is_new: bool = False


class LossClock:
    """Chooses the clock, window by window."""

    def __init__(self) -> None:
        self._signal: Signal | None = None
        self._settings: Settings | None = None
        self._since_s = 0.0

    def of(self, sample: Sample) -> JudgedSample:
        """The window by the best clock that there is for it."""
        self._since_s = self._since_s + sample.seconds if sample.settings == self._settings else 0.0
        self._settings = sample.settings
        found = self._by_best_clock(sample)
        is_new = self._signal is not None and found.signal != self._signal
        self._signal = found.signal
        return replace(found, is_new=is_new)

    def _by_best_clock(self, sample: Sample) -> JudgedSample:
        if sample.gpu_stall_s is not None:
            return JudgedSample(sample=by_events(sample), signal="events")
        if sample.gpu_busy is not None:
            is_known = self._since_s >= LOOK_S
            return JudgedSample(sample=_by_nvml(sample) if is_known else sample, signal="nvml", is_known=is_known)
        return JudgedSample(sample=sample)


def by_events(sample: Sample) -> Sample:
    """Return the window by CUDA events. Without CUDA events it stays unchanged.

    Pending events carry no information. If the loop took batches meanwhile, the stream had other work. Otherwise the
    training loop is in ``next()``, and the remaining work of the stream is unknown.
    """
    if sample.gpu_stall_s is None or not sample.batches:
        return sample
    stall_s, step_s = sample.gpu_stall_s, sample.gpu_step_s + sample.feed_wait_s
    if sample.gpu_steps:  # events completed before this window: scale their stall to its length
        stall_s *= sample.seconds / max(LEAST_S, stall_s + step_s)
    return _with_loss(sample, min(stall_s, sample.seconds))


def _by_nvml(sample: Sample) -> Sample:
    idle_s = max(0.0, 1.0 - (sample.gpu_busy or 0.0)) * sample.seconds
    return _with_loss(sample, min(sample.wait_s + sample.busy_s, idle_s))


def _with_loss(sample: Sample, lost_s: float) -> Sample:
    """The window of a consumer with a loss: the end of each stay in ``next()``, where batches are handed out."""
    busy_s = min(lost_s, sample.busy_s)
    wait_s = lost_s - busy_s
    return replace(
        sample,
        wait_s=wait_s,
        busy_s=busy_s,
        work_s=remainder(sample.seconds, lost_s),
        steps=None,
        straggler_s=min(sample.straggler_s, wait_s),
    )
