"""What the tuner does for every policy: legal windows by the best clock, limits, and outcomes of decisions. PURE.

A policy sees a window only if it measured something and the setting is inside the limits. A setting outside them is
brought inside by the supervisor itself, with a "limit" decision. A wish of the policy is clipped.

The outcome of a decision is written once the workers run and enough windows have passed, or with the next decision. An
"undo" marks the decision that it undoes as not kept.
"""

from __future__ import annotations

from dataclasses import replace

from dpex.autotune.config import AutotuneConfig, limits_of
from dpex.autotune.constants import CONSTANTS, STOPPED, STOPPED_S
from dpex.autotune.law import wording
from dpex.autotune.law.evidence import SettingStats
from dpex.autotune.law.law import Law
from dpex.autotune.limits import Limits
from dpex.autotune.measured import LossClock, is_legal
from dpex.autotune.trace import Recorder, TraceOrigin
from dpex.autotune.types import Decision, Outcome, Policy
from dpex.measure.reading import Reading
from dpex.measure.settings import Settings


class _Followed:
    """The windows since a decision: all of them, and those in which the workers ran that it asked for."""

    def __init__(self, at: float) -> None:
        self._at = at
        self._running = -1
        self._all, self._settled = SettingStats(), SettingStats()

    def add(self, window: Reading, goal: float) -> None:
        """Take in a window. Batches that other workers began are not in it, once it counts as settled."""
        self._all.add(window, goal)
        running = window.local.running + window.remote.running
        missing = window.settings.workers - window.remote.unplaced - running
        if running != self._running or (missing > 0 and window.at - self._at < CONSTANTS.patience_s):
            self._running, self._settled = running, SettingStats()
        else:
            self._settled.add(window, goal)

    @property
    def is_enough(self) -> bool:
        """True if the windows give a rate, or are many."""
        count = len(self._settled)
        return count >= CONSTANTS.trial_windows or (count >= CONSTANTS.enough_windows and self._settled.has_rate)

    def outcome(self, at: float, *, kept: bool) -> Outcome | None:
        """Return what was measured; None without a window."""
        seen = self._settled if len(self._settled) else self._all
        if not len(seen):
            return None
        return Outcome(rate=seen.rate()[0], wait=seen.sum.wait, kept=kept, at=at)


class Supervisor:
    """Supervises a policy.

    Args:
        config: The configuration. Its policy decides, and the law without one.
        start: The setting to begin with.
        limits: Those of the configuration, the loader and the user; None: those of the configuration.
        recorder: Receives windows, decisions and outcomes.
        former: The supervisor that this one replaces: its decisions, and the wait for an outcome, go on here.
        why: Why this one replaces it, else "".

    Attributes:
        policy: The policy.
        decisions: All that were taken, oldest first, with what they brought.
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
        """The setting to begin with."""
        return self._start

    def announce(self, at: float = 0.0) -> None:
        """Record that this policy begins; once."""
        if not self._is_announced and self._recorder is not None:
            self._is_announced = True
            origin = TraceOrigin(config=self.config, start=self._start, limits=self.limits, why=self._why)
            self._recorder.origin(origin, at)

    def useful_remote(self, most: int) -> int | None:
        """The number of remote workers that would pay if the cluster had places for ``most``; None if unknown."""
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
        return None if decision is None else self._taken(judged, decision)

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

    def _taken(self, window: Reading, decision: Decision) -> Decision:
        """Close the decision before, and note this one with its text."""
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
        """The decision that an "undo" takes back: the latest one of the policy."""
        own = [number for number, decision in enumerate(self.decisions) if decision.reason != "limit"]
        return own[-1] if own else None

    def _close(self, window: Reading, number: int, *, kept: bool) -> None:
        """Write what the latest decision brought, as far as it is known."""
        outcome = None if self._followed is None else self._followed.outcome(window.at, kept=kept)
        if outcome is not None and (self.decisions[number].outcome is None or not kept):
            self._write(number, outcome)

    def _write(self, number: int, outcome: Outcome) -> None:
        self.decisions[number] = replace(self.decisions[number], outcome=outcome)
        if self._recorder is not None:
            self._recorder.outcome(self._numbers[number], outcome)
