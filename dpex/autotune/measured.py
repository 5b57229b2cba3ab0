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

A window that was measured by the GPU's clock becomes a window whose consumer is the GPU: ``blocked_s`` and
``next_busy_s`` are what it waited, ``stepping_s`` the rest.
"""

from __future__ import annotations

from dataclasses import replace

from dpex.autotune.constants import LOOK_S
from dpex.measure.readable import remainder
from dpex.measure.reading import Reading
from dpex.measure.settings import Settings

_TINY = 1e-9
_MOST = 1e18
"""Larger than any time, size or count."""


def is_legal(window: Reading) -> bool:
    """Return True if each number of a window is possible. Only the free memory may be negative."""
    parts = (window, window.local, window.remote)
    numbers = (value for part in parts for name, value in vars(part).items() if name != "memory_free")
    return all(0.0 <= value <= _MOST for value in numbers if isinstance(value, (int, float)))


# -- the clock of the loss ---------------------------------------------------------------------------------------------


class LossClock:
    """Chooses the clock, window by window."""

    def __init__(self) -> None:
        self._settings: Settings | None = None
        self._since_s = 0.0

    def of(self, window: Reading) -> Reading | None:
        """Return the window by the best clock that there is for it; None if that clock has not measured yet."""
        self._since_s = self._since_s + window.seconds if window.settings == self._settings else 0.0
        self._settings = window.settings
        if window.gpu_running_stall_s is not None:
            return replace(by_events(window), signal="events")
        if window.kernel_ratio is not None:
            return replace(_by_nvml(window), signal="nvml") if self._since_s >= LOOK_S else None
        return window


def by_events(window: Reading) -> Reading:
    """Return the window by CUDA events. Without CUDA events it stays unchanged.

    Pending events carry no information. If the loop took batches meanwhile, the stream had other work. Otherwise the
    training loop is in ``next()``, and the remaining work of the stream is unknown.
    """
    if window.gpu_running_stall_s is None or not window.later_batches:
        return window
    stall_s, step_s = window.gpu_running_stall_s, window.gpu_steps_s + (window.feed_wait_s or 0.0)
    if window.gpu_steps:  # events completed before this window: scale their stall to its length
        stall_s *= window.seconds / max(_TINY, stall_s + step_s)
    return _with_loss(window, min(stall_s, window.seconds))


def _by_nvml(window: Reading) -> Reading:
    idle_s = max(0.0, 1.0 - (window.kernel_ratio or 0.0)) * window.seconds
    return _with_loss(window, min(window.blocked_s + window.next_busy_s, idle_s))


def _with_loss(window: Reading, lost_s: float) -> Reading:
    """The window of a consumer with a loss: the end of each stay in ``next()``, where batches are handed out."""
    busy_s = min(lost_s, window.next_busy_s)
    wait_s = lost_s - busy_s
    return replace(
        window,
        blocked_s=wait_s,
        next_busy_s=busy_s,
        stepping_s=remainder(window.seconds, lost_s),
        step_count=None,
        straggler_s=min(window.straggler_s, wait_s),
    )
