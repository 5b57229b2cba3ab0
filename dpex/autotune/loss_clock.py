"""The clock by which loading is judged, and the part of the wait that reaches the GPU. PURE.

A loop that does not synchronise runs ahead of the GPU: it may wait in ``next()`` while kernels are queued and lose
nothing, and its own step may take a tenth of the GPU's. So loading is judged by the best clock there is:

- *events*: CUDA events on the stream of the training loop. The loss is the time in which that stream waited for
  data. Its wait for copies and the device transform belongs to the step: no worker shortens it.
- *nvml*: where there are no events. No more can be lost than the time in which the GPU ran no kernel.
- *wait*: nothing is known of a GPU. The loss is the training loop's wait.

A window that was measured by the GPU's clock becomes a sample whose consumer is the GPU: ``wait_s`` and ``own_s`` are
what it waited, ``work_s`` the rest.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from dpex.autotune.checked import SHORTEST_S
from dpex.autotune.types import Sample, Settings, Signal
from dpex.measure.readable import remainder

LOOK_S = 2.0
"""Seconds under a setting before NVML tells of it: it is looked at once a second, and tells of the last second."""


@dataclass(frozen=True, kw_only=True)
class JudgedSample:
    """A window, by the clock that is named.

    Attributes:
        sample: The window; the times of its consumer are the GPU's where that is known.
        signal: Which clock it was.
        is_known: True if that clock tells anything of this window.
        is_new: True if the window before went by another clock.
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
    """A window in which CUDA events could be had; one without them stays as it is.

    Marks that the stream has not come to tell nothing yet. Where batches were taken meanwhile, the stream had other
    work; where none was, the training loop sits in ``next()``, and the amount of work that is left is unknown.
    """
    if sample.gpu_stall_s is None or not sample.batches:
        return sample
    stall_s, step_s = sample.gpu_stall_s, sample.gpu_step_s + sample.feed_wait_s
    if sample.gpu_steps:  # the marks that were read are of a time that is over: a share of it is the window's too
        stall_s *= sample.seconds / max(SHORTEST_S, stall_s + step_s)
    return _with_loss(sample, min(stall_s, sample.seconds))


def _by_nvml(sample: Sample) -> Sample:
    idle_s = max(0.0, 1.0 - (sample.gpu_busy or 0.0)) * sample.seconds
    return _with_loss(sample, min(sample.wait_s + sample.own_s, idle_s))


def _with_loss(sample: Sample, lost_s: float) -> Sample:
    """The window of a consumer with a loss: the end of each stay in ``next()``, where batches are handed out."""
    own_s = min(lost_s, sample.own_s)
    wait_s = lost_s - own_s
    return replace(
        sample,
        wait_s=wait_s,
        own_s=own_s,
        work_s=remainder(sample.seconds, lost_s),
        head_s=min(sample.head_s, wait_s),
    )
