"""What of the training loop's wait the GPU feels, and how long the GPU takes for a step. PURE.

A loop that does not synchronise runs ahead of the GPU: it may wait in ``next()`` while kernels are queued and lose
nothing, and its own step may take a tenth of the GPU's. So loading is judged by the best clock there is:

- *events*: CUDA events on the stream of the training loop. What is lost is the time in which that stream waited for
  data; a step is what the stream took from one return of ``next()`` to the next entry, the slower of loop and GPU.
  Where batches are brought to the device, the stream's wait for copies and ``device_transform`` belongs to the step:
  no worker shortens it.
- *nvml*: where there are no events. No more can be lost than the time in which the GPU ran no kernel. NVML tells of
  about the last second, and is looked at once a second: for a while after a change it tells of what was before.
- *wait*: nothing is known of a GPU. What is lost is the training loop's wait.

A window that was measured by the GPU's clock becomes a sample whose consumer is the GPU: ``wait_s`` and ``own_s`` are
what it waited, ``work_s`` the rest. Nothing behind this module asks which clock it was, but for what it says.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from dpex.autotune.constants.measuring import GPU
from dpex.autotune.types import Sample, Settings, Signal
from dpex.core.durations import remainder

_LEAST_S = 1e-9
"""What divides by seconds takes no less."""


@dataclass(frozen=True, kw_only=True)
class FeltSample:
    """A window, by the clock that is named.

    Attributes:
        sample: The window; the times of its consumer are the GPU's where that is known.
        signal: Which clock it was.
        is_known: Whether that clock tells anything of this window.
        is_new: Whether the window before went by another clock.
        steps, step_s: How many steps were timed, and their seconds.
        part: The part of the training loop's time in ``next()`` that was lost, 0 to 1. A loop that runs ahead of its
            GPU loses none of it, one that synchronises in each step loses all.
        spread: The standard deviation of steps over their mean, None if unknown.
        launch_s: What the training loop itself takes for a step, as far as nothing held it up; None if unknown.
        waited: The share of the time in which the training loop was in ``next()``.
        copies: The share of the time in which the GPU's stream waited for batches that were made already.
    """

    sample: Sample
    signal: Signal = "wait"
    is_known: bool = True
    is_new: bool = False
    steps: int = 0
    step_s: float = 0.0
    part: float = 1.0
    spread: float | None = None
    launch_s: float | None = None
    waited: float = 0.0
    copies: float = 0.0

    @property
    def is_gpu(self) -> bool:
        """Whether the times are the GPU's."""
        return self.signal != "wait"

    @property
    def is_held_up_elsewhere(self) -> bool:
        """Whether the GPU idles although batches are ready: what it waits for is not the loader."""
        sample, busy = self.sample, self.sample.gpu_busy
        if not self.is_gpu or busy is None or not sample.ready:
            return False
        lost = (sample.wait_s + sample.own_s) / max(_LEAST_S, sample.seconds)
        return busy < GPU.idle and lost < GPU.hardly_lost


class Felt:
    """Chooses the clock, window by window."""

    def __init__(self) -> None:
        self._signal: Signal | None = None
        self._settings: Settings | None = None
        self._since_s = 0.0

    def of(self, sample: Sample) -> FeltSample:
        """The window by the best clock that there is for it."""
        self._since_s = self._since_s + sample.seconds if sample.settings == self._settings else 0.0
        self._settings = sample.settings
        found = self._by_best_clock(sample)
        is_new = self._signal is not None and found.signal != self._signal
        self._signal = found.signal
        return replace(found, is_new=is_new)

    def _by_best_clock(self, sample: Sample) -> FeltSample:
        if sample.gpu_stall_s is not None:
            return by_events(sample)
        if sample.gpu_busy is not None:
            return _by_nvml(sample, is_known=self._since_s >= GPU.look_s)
        return FeltSample(sample=sample)


def by_events(sample: Sample) -> FeltSample:
    """A window in which CUDA events could be had.

    Marks that the stream has not come to tell nothing yet. Where batches were taken meanwhile, the stream had other
    work; where none was, the training loop sits in ``next()``, and nobody can tell for how long there still is work.
    """
    inside_s, stall_s = sample.wait_s + sample.own_s, sample.gpu_stall_s or 0.0
    if not sample.batches:
        return FeltSample(sample=sample, signal="events", waited=_share(inside_s, sample))
    step_s = sample.gpu_step_s + sample.feed_wait_s
    if sample.gpu_steps:  # the marks that were read are of a time that is over: a share of it is the window's too
        stall_s *= sample.seconds / max(_LEAST_S, stall_s + step_s)
    lost_s = min(stall_s, sample.seconds)
    part = min(1.0, lost_s / inside_s) if inside_s > 0 else 0.0
    is_starved = lost_s >= GPU.starved * sample.seconds
    return FeltSample(
        sample=_with_loss(sample, lost_s),
        signal="events",
        steps=sample.gpu_steps,
        step_s=step_s,
        part=part,
        spread=sample.gpu_step_spread,
        launch_s=sample.work_s / sample.batches if is_starved else None,
        waited=_share(inside_s, sample),
        copies=_share(sample.feed_wait_s, sample),
    )


def _by_nvml(sample: Sample, *, is_known: bool) -> FeltSample:
    inside_s = sample.wait_s + sample.own_s
    waited = _share(inside_s, sample)
    if not is_known:
        return FeltSample(sample=sample, signal="nvml", is_known=False, waited=waited)
    idle_s = (1.0 - (sample.gpu_busy or 0.0)) * sample.seconds
    felt = _with_loss(sample, min(inside_s, idle_s))
    return FeltSample(
        sample=felt,
        signal="nvml",
        steps=sample.batches,
        step_s=felt.work_s,
        part=min(1.0, idle_s / inside_s) if inside_s > 0 else 1.0,
        spread=sample.step_spread,
        waited=waited,
    )


def _with_loss(sample: Sample, lost_s: float) -> Sample:
    """The window of a consumer that lost so much: of each stay in ``next()`` the end, where batches are handed out."""
    own_s = min(lost_s, sample.own_s)
    wait_s = lost_s - own_s
    return replace(
        sample,
        wait_s=wait_s,
        own_s=own_s,
        work_s=remainder(sample.seconds, lost_s),
        head_s=min(sample.head_s, wait_s),
    )


def _share(seconds: float, sample: Sample) -> float:
    return min(1.0, seconds / max(_LEAST_S, sample.seconds))
