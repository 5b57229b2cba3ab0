"""Run a policy: check its windows, choose their clock, keep the limits, and write outcomes of decisions. PURE.

A policy sees a window only if the window measured something and its setting is inside the limits. The supervisor itself
brings a setting outside the limits inside, with a "limit" decision. It clips the settings that the policy wants.

A loop that does not synchronise runs ahead of the GPU. It may wait in ``next()`` while kernels are queued and lose
nothing, and its step may take a tenth of the GPU's time. So `LossClock` judges loading by the best available clock:

- *events*: CUDA events on the stream of the training loop. The loss is the time in which that stream waited for data.
  Waits for copies and for the device transform belong to the step, because no worker shortens them.
- *nvml*: Without events, the loss is at most the time in which the GPU ran no kernel.
- *wait*: Without a known GPU, the loss is the training loop's wait.

A window by the GPU's clock has the GPU as its consumer: ``blocked_s`` and ``next_busy_s`` are the GPU's waits, and
``stepping_s`` is the rest.

The outcome of a decision is written once the workers run and enough windows have passed, or with the next decision. An
"undo" marks the decision that it undoes as not kept.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from dpex.autotune.config import AutotuneConfig, limits_of
from dpex.autotune.constants import CONSTANTS, NVML_SETTLES_S, STOPPED, STOPPED_S
from dpex.autotune.law import wording
from dpex.autotune.law.evidence import SettingStats
from dpex.autotune.law.law import Law
from dpex.autotune.limits import Limits
from dpex.autotune.types import Decision, Outcome, Policy
from dpex.measure.readable import remainder
from dpex.measure.reading import Reading
from dpex.measure.settings import Settings

if TYPE_CHECKING:
    from dpex.autotune.runtime.trace import Recorder

_TINY = 1e-9
_MOST = 1e18
"""Larger than any time, size or count."""


def is_legal(window: Reading) -> bool:
    """Return True if each number of a window is possible: finite, and negative only in the free memory.

    The sums of a record never shrink, so only a broken clock or counter gives an impossible number.
    """
    parts = (window, window.local, window.remote)
    numbers = (value for part in parts for name, value in vars(part).items() if name != "memory_free")
    return all(0.0 <= value <= _MOST for value in numbers if isinstance(value, (int, float)))


# -- the clock of the loss ---------------------------------------------------------------------------------------------


class LossClock:
    """Chooses the clock of each window; see the module."""

    def __init__(self) -> None:
        self._settings: Settings | None = None
        self._since_s = 0.0

    def of(self, window: Reading) -> Reading | None:
        """Return the window by its best clock, or None if that clock has not measured yet.

        A window by the GPU's clock, even one without a batch, has no ``step_count``. A sum of windows would else have
        the count of the few that have one, and `step_times` would divide the seconds of all windows by it.
        """
        self._since_s = self._since_s + window.seconds if window.settings == self._settings else 0.0
        self._settings = window.settings
        if window.gpu_running_stall_s is not None:
            return replace(by_events(window), signal="events", step_count=None)
        if window.kernel_ratio is not None:
            is_settled = self._since_s >= NVML_SETTLES_S
            return replace(_by_nvml(window), signal="nvml", step_count=None) if is_settled else None
        return window


def by_events(window: Reading) -> Reading:
    """Return the window by CUDA events. Return it unchanged if it has no events or no batch.

    Events that are pending count as no loss if the loop took batches, because the stream had other work. If the loop
    took none, it is in ``next()``, and how much work the stream still has is unknown.
    """
    if window.gpu_running_stall_s is None or not window.later_batches:
        return window
    stall_s, step_s = window.gpu_running_stall_s, window.gpu_steps_s + (window.feed_wait_s or 0.0)
    if window.gpu_steps:  # timed steps may have begun before the window, so scale their stall
        stall_s *= window.seconds / max(_TINY, stall_s + step_s)
    return _with_loss(window, min(stall_s, window.seconds))


def _by_nvml(window: Reading) -> Reading:
    idle_s = max(0.0, 1.0 - (window.kernel_ratio or 0.0)) * window.seconds
    return _with_loss(window, min(window.blocked_s + window.next_busy_s, idle_s))


def _with_loss(window: Reading, lost_s: float) -> Reading:
    """Return the window with ``lost_s`` as its loss: busy seconds in ``next()`` first, then blocked seconds."""
    busy_s = min(lost_s, window.next_busy_s)
    wait_s = lost_s - busy_s
    return replace(
        window,
        blocked_s=wait_s,
        next_busy_s=busy_s,
        stepping_s=remainder(window.seconds, lost_s),
        straggler_s=min(window.straggler_s, wait_s),
    )


# -- decisions and their outcomes --------------------------------------------------------------------------------------


class _Followed:
    """The windows since a decision: all windows, and the settled ones, in which the requested workers ran."""

    def __init__(self, at: float) -> None:
        self._at = at
        self._running = -1
        self._all, self._settled = SettingStats(), SettingStats()

    def add(self, window: Reading, goal: float) -> None:
        """Count a window. It is settled if as many workers ran as in the window before, and no start is awaited."""
        self._all.add(window, goal)
        running = window.local.running + window.remote.running
        missing = window.settings.workers - window.remote.unplaced - running
        if running != self._running or (missing > 0 and window.at - self._at < CONSTANTS.patience_s):
            self._running, self._settled = running, SettingStats()
        else:
            self._settled.add(window, goal)

    @property
    def is_enough(self) -> bool:
        """True if enough settled windows give a rate, or if there are at least `Constants.trial_windows` of them."""
        count = len(self._settled)
        return count >= CONSTANTS.trial_windows or (count >= CONSTANTS.enough_windows and self._settled.has_rate)

    def outcome(self, at: float, *, kept: bool) -> Outcome | None:
        """Return the measured rate and wait; None without a window."""
        seen = self._settled if len(self._settled) else self._all
        if not len(seen):
            return None
        return Outcome(rate=seen.rate()[0], wait=seen.sum.wait, kept=kept, at=at)


class Supervisor:
    """Supervises a policy.

    Args:
        config: The configuration, with the policy. Without a policy, the law of dpex decides.
        start: The setting to begin with.
        limits: The limits of the configuration, the loader and the user. None: The limits of the configuration alone.
        recorder: Receives windows, decisions and outcomes.
        former: The supervisor that this one replaces. Its decisions and its pending outcome are continued.
        why: The reason for the replacement, or "".

    Attributes:
        policy: The policy.
        decisions: All decisions with their outcomes, the oldest first.
    """

    def __init__(
        self,
        config: AutotuneConfig,
        start: Settings,
        limits: Limits | None = None,
        *,
        recorder: Recorder | None = None,
        former: Supervisor | None = None,
        why: str = "",
    ) -> None:
        self.config = config
        self.limits: Limits = limits or limits_of(config)
        self.policy: Policy = (config.policy or Law)(config, start, self.limits)
        self.decisions: list[Decision] = [] if former is None else list(former.decisions)
        self._numbers: list[int] = [] if former is None else list(former._numbers)
        self._followed: _Followed | None = None if former is None else former._followed
        self._start = start
        self._clock, self._seconds = LossClock(), 0.0
        self._recorder, self._is_announced = recorder, recorder is None
        self._why = why

    def begin(self) -> Settings:
        """Return the setting to begin with."""
        return self._start

    def announce(self, at: float = 0.0) -> None:
        """Record the start of this policy, once."""
        if not self._is_announced and self._recorder is not None:
            self._is_announced = True
            self._recorder.origin(self.config, self._start, self.limits, self._why, at)

    def useful_remote(self, most: int) -> int | None:
        """Return the remote workers that would speed up training with room for ``most`` of them; None if unknown."""
        ask = getattr(self.policy, "useful_remote", None)
        return None if ask is None else ask(most)

    def step(self, window: Reading) -> Decision | None:
        """Take in a window; return a change of settings, or None."""
        self.announce(window.at)
        if self._recorder is not None:
            self._recorder.window(window)
        usual_s, self._seconds = self._seconds, window.seconds
        was_stopped = window.seconds > max(STOPPED_S, STOPPED * usual_s)
        if was_stopped or not window.seconds or not (window.later_batches or window.blocked_s) or not is_legal(window):
            return None
        judged = self._clock.of(window)
        if judged is None:
            return None
        self._follow(judged)
        decision = self._decide(judged)
        return None if decision is None else self._record(judged, decision)

    def _decide(self, window: Reading) -> Decision | None:
        inside = self.limits.inside(window)
        if inside != window.settings:
            return Decision.to(window, inside, "limit")
        wish = self.policy.observe(window, self.limits.in_window(window))
        if wish is None:
            return None
        new = self.limits.clip_change(window, wish.new)
        changed = replace(wish, at=window.at, old=window.settings, new=new, signal=window.signal)
        return None if new == window.settings else changed

    def _record(self, window: Reading, decision: Decision) -> Decision:
        """Close the previous decision, and append this one with its text."""
        undone = self._undone() if decision.reason == "undo" else None
        self._close(window, len(self.decisions) - 1, kept=undone != len(self.decisions) - 1)
        failed = None if undone is None else self.decisions[undone]
        if failed is not None and failed.outcome is not None and failed.outcome.kept:
            self._write(undone or 0, replace(failed.outcome, kept=False))
        text = decision.text or wording.decided(decision, window, failed)
        decision = replace(decision, text=text, outcome=None)
        self.decisions.append(decision)
        self._numbers.append(0 if self._recorder is None else self._recorder.decision(decision))
        self._followed = _Followed(window.at)
        return decision

    # -- outcomes ------------------------------------------------------------------------------------------------------

    def _follow(self, window: Reading) -> None:
        if self._followed is None:
            return
        self._followed.add(window, self.config.wait_goal)
        last = len(self.decisions) - 1
        if self.decisions[last].outcome is None and self._followed.is_enough:
            self._close(window, last, kept=True)

    def _undone(self) -> int | None:
        """Return the number of the policy's latest decision, which an "undo" takes back."""
        own = [number for number, decision in enumerate(self.decisions) if decision.reason != "limit"]
        return own[-1] if own else None

    def _close(self, window: Reading, number: int, *, kept: bool) -> None:
        """Write the outcome of the latest decision, as far as it is known."""
        outcome = None if self._followed is None else self._followed.outcome(window.at, kept=kept)
        if outcome is not None and (self.decisions[number].outcome is None or not kept):
            self._write(number, outcome)

    def _write(self, number: int, outcome: Outcome) -> None:
        self.decisions[number] = replace(self.decisions[number], outcome=outcome)
        if self._recorder is not None:
            self._recorder.outcome(self._numbers[number], outcome)
