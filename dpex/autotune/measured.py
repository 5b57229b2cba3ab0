"""Drop windows that measured nothing, and judge the others by the best clock that there is. PURE.

`is_legal` refuses a window with an impossible number, such as a time that is negative or not finite. Sums of a record
never shrink, so only a broken clock or counter gives one.

`LossClock` chooses the clock by which loading is judged, and finds the part of the wait that reaches the GPU. A
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

from dataclasses import replace

from dpex.autotune.constants import LOOK_S
from dpex.autotune.types import Sample
from dpex.measure.readable import remainder
from dpex.measure.settings import Settings

_TINY = 1e-9
_MOST = 1e18
"""Larger than any time, size or count."""


def is_legal(sample: Sample) -> bool:
    """Return True if each number of a window is possible. Only the free memory may be negative."""
    parts = (sample, sample.local, sample.remote, sample.machine)
    numbers = (value for part in parts for name, value in vars(part).items() if name != "memory_free")
    return all(0.0 <= value <= _MOST for value in numbers if isinstance(value, (int, float)))


# -- the clock of the loss ---------------------------------------------------------------------------------------------


class LossClock:
    """Chooses the clock, window by window."""

    def __init__(self) -> None:
        self._settings: Settings | None = None
        self._since_s = 0.0

    def of(self, sample: Sample) -> Sample | None:
        """Return the window by the best clock that there is for it; None if that clock has not measured yet."""
        self._since_s = self._since_s + sample.seconds if sample.settings == self._settings else 0.0
        self._settings = sample.settings
        if sample.gpu_stall_s is not None:
            return replace(by_events(sample), signal="events")
        if sample.gpu_busy is not None:
            return replace(_by_nvml(sample), signal="nvml") if self._since_s >= LOOK_S else None
        return sample


def by_events(sample: Sample) -> Sample:
    """Return the window by CUDA events. Without CUDA events it stays unchanged.

    Pending events carry no information. If the loop took batches meanwhile, the stream had other work. Otherwise the
    training loop is in ``next()``, and the remaining work of the stream is unknown.
    """
    if sample.gpu_stall_s is None or not sample.batches:
        return sample
    stall_s, step_s = sample.gpu_stall_s, sample.gpu_step_s + sample.feed_wait_s
    if sample.gpu_steps:  # events completed before this window: scale their stall to its length
        stall_s *= sample.seconds / max(_TINY, stall_s + step_s)
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
