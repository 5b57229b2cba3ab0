"""Judges a decision: what a batch cost the consumer before and after it, and how sure that is.

Compared is the time lost per batch (waiting in ``next()``, work there, steps slowed down for want of a CPU), with one
and the same step added: so a consumer whose steps vary, or change meanwhile, is not taken for a better or worse loader.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field

from dpex.autotune.config import AutotuneConfig
from dpex.autotune.estimator import Windows
from dpex.autotune.types import Decision, Sample

LEAST_BATCHES = 24
_LEAST_WINDOWS = 2
_FEW, _SURELY, _MUCH_WORSE = 6, 2.0, 0.1
"""A try is broken off after so many batches if it is slower by more than this part, by its standard error. What is put
down to more workers must be beyond so many standard errors of what chance does."""
_ENOUGH = 4
"""How many times the batches needed settle it, however uncertain it is."""
_PATIENCE_S = 4.0
_SLOW_S = 2.0
_PATIENCE_BATCHES, _LONGEST_S = 3.0, 60.0
"""How many times as long as the slowest batch a trial lasts, and how long at most: the next batch in turn may be one
that was begun before the decision, and until it is there nothing of what was decided can be seen."""
_KEPT = 12
_EVEN = 0.5
_CLEARLY_MORE, _MOSTLY, _NOT_MUCH_SLOWER, _NO_FASTER = 1.5, 0.7, 0.6, 1.15
"""So many times the workers, of which so much went into dearer batches, so that the rate rose by less than this. Where
it fell by more than queues do, it is the work that has changed."""
_HALF = 0.5
_ADDING = ("too few", "spread")


@dataclass(frozen=True, kw_only=True)
class _Window:
    seconds: float
    batches: int
    lost_s: float
    waited_s: float
    head_s: float
    busy: float
    far: int
    tickets: int
    making_s: float
    is_full: bool


class Record:
    """Windows under one setting, the latest ones."""

    def __init__(self, kept: int = _KEPT) -> None:
        self._windows: deque[_Window] = deque(maxlen=kept)

    def add(self, sample: Sample, lost_s: float) -> None:
        """One window; ``lost_s``: seconds the consumer lost to loading in it."""
        workers_s = (sample.local.running + sample.remote.running) * sample.seconds
        busy = (sample.local.busy_s + sample.remote.busy_s) / workers_s if workers_s > 0 else 1.0
        far = sample.remote.tickets
        tickets = sample.local.tickets + sample.remote.tickets
        making_s = sample.local.busy_s - (sample.local.queued_s or 0.0) + sample.remote.busy_s
        self._windows.append(
            _Window(
                seconds=sample.seconds,
                batches=sample.batches,
                lost_s=lost_s,
                waited_s=sample.wait_s,
                head_s=sample.head_s,
                busy=busy,
                far=far,
                tickets=tickets,
                making_s=making_s,
                is_full=Windows.is_saturated(sample),
            )
        )

    def clear(self) -> None:
        """Forget them."""
        self._windows.clear()

    def __len__(self) -> int:
        return len(self._windows)

    @property
    def seconds(self) -> float:
        """Of all windows."""
        return sum(window.seconds for window in self._windows)

    @property
    def batches(self) -> int:
        """Of all windows."""
        return sum(window.batches for window in self._windows)

    @property
    def rate(self) -> float:
        """Batches per second."""
        return self.batches / self.seconds if self._windows else 0.0

    @property
    def stall(self) -> float:
        """Share of the time that was lost to loading."""
        return min(1.0, sum(window.lost_s for window in self._windows) / self.seconds) if self._windows else 0.0

    @property
    def wait(self) -> float:
        """Share of the time in which the consumer waited."""
        return min(1.0, sum(window.waited_s for window in self._windows) / self.seconds) if self._windows else 0.0

    @property
    def head(self) -> float:
        """Share of the time in which it waited while later batches were ready."""
        return min(1.0, sum(window.head_s for window in self._windows) / self.seconds) if self._windows else 0.0

    @property
    def busy(self) -> float:
        """Share of the workers' time in which they were at work."""
        return sum(w.busy * w.seconds for w in self._windows) / self.seconds if self._windows else 1.0

    @property
    def cost_s(self) -> float:
        """Worker's time for a batch, queueing for a CPU apart."""
        return sum(window.making_s for window in self._windows) / max(
            1, sum(window.tickets for window in self._windows)
        )

    @property
    def is_full(self) -> bool:
        """Whether the CPUs were mostly in use in some window, so that workers may have been in each other's way."""
        return any(window.is_full for window in self._windows)

    @property
    def gap_s(self) -> float:
        """For how long no batch has come now."""
        gap_s = 0.0
        for window in reversed(self._windows):
            if window.batches:
                break
            gap_s += window.seconds
        return gap_s

    @property
    def longest_gap_s(self) -> float:
        """The longest time in which no batch came."""
        longest = gap_s = 0.0
        for window in self._windows:
            gap_s = 0.0 if window.batches else gap_s + window.seconds
            longest = max(longest, gap_s)
        return longest

    def far_rate(self, latest: int) -> float:
        """Batches per second from remote workers in the latest windows."""
        windows = list(self._windows)[-latest:]
        return sum(w.far for w in windows) / sum(w.seconds for w in windows) if windows else 0.0

    def loss(self, slowest_s: float = 0.0) -> tuple[float, float]:
        """Seconds lost per batch, and their standard error (of a ratio of sums over windows); at the least what one
        batch more or less that takes ``slowest_s`` may cost."""
        batches, count = self.batches, len(self._windows)
        if not batches:
            return math.inf, math.inf
        loss = sum(window.lost_s for window in self._windows) / batches
        if count < 2:
            return loss, max(loss, slowest_s / batches)
        off = sum((window.lost_s - loss * window.batches) ** 2 for window in self._windows)
        return loss, max(math.sqrt(off * count / (count - 1)), slowest_s) / batches


@dataclass
class Trial:
    """A decision that is not judged yet: how it was before, and what came in since it took effect.

    skipped: so many batches, at first, tell nothing.
    """

    decision: Decision
    before: Record
    batches_needed: int
    skipped: int = 0
    since: Record = field(default_factory=lambda: Record(64))

    def add(self, sample: Sample, lost_s: float) -> None:
        """A window since it took effect; those with the first ``skipped`` batches do not count."""
        if self.skipped > 0:
            self.skipped -= sample.batches
        else:
            self.since.add(sample, lost_s)

    def _later_s(self, work: Windows, later: float) -> float:
        """Seconds per batch since the decision, as they would be had batches not become dearer meanwhile by chance.

        Only where workers were added, or batches in flight, and the CPUs are not full. By what chance does not explain
        they became dearer because more were asked for at once: a storage gives no more.
        """
        was_s, now_s = self.before.cost_s, self.since.cost_s
        if self.decision.reason not in _ADDING or self.since.is_full or not 0.0 < was_s < now_s:
            return later
        chance = self._chance(work)
        return max(work.step_s, later / min(now_s / was_s, 1.0 + _SURELY * chance))

    def _chance(self, work: Windows) -> float:
        """Standard error of how much dearer batches became, where it is chance alone."""
        return math.hypot(work.uncertainty(self.before.batches), work.uncertainty(self.since.batches))

    def gain(self, work: Windows) -> tuple[float, float]:
        """By which part the rate rose, by what batches cost, and the standard error of that."""
        step_s, slowest_s = work.step_s, work.slowest_s()
        (was, was_error), (now, now_error) = self.before.loss(slowest_s), self.since.loss(slowest_s)
        if not math.isfinite(now):
            return -1.0, 0.0
        if not math.isfinite(was):
            return 0.0, 1.0
        then, later = max(1e-9, step_s + was), max(1e-9, self._later_s(work, step_s + now))
        was_error = max(was_error, was * work.uncertainty(self.before.batches))
        now_error = max(now_error, now * work.uncertainty(self.since.batches))
        return then / later - 1.0, (then / later) * math.hypot(was_error / then, now_error / later)

    def is_over(self, work: Windows, config: AutotuneConfig) -> bool:
        """Whether enough is known, or there was time enough."""
        since = self.since
        if self._is_hopeless(work):
            return True
        if since.batches < self.batches_needed or len(since) < _LEAST_WINDOWS:
            least_s = _SLOW_S if since.batches < LEAST_BATCHES else _PATIENCE_S
            return since.seconds >= max(least_s, self._patience_s(work)) and len(since) > 1
        gain, error = self.gain(work)
        sure = abs(gain - self._needed(config)) >= error
        return (
            sure
            or since.batches >= _ENOUGH * self.batches_needed
            or since.seconds >= max(_PATIENCE_S, self._patience_s(work))
        )

    @property
    def paid_off(self) -> bool:
        """Whether each further worker brought half as much, at least, as those before it."""
        more = self.decision.new.workers / max(1, self.decision.old.workers)
        return self.since.rate >= (1.0 + _HALF * (more - 1.0)) * self.before.rate

    def shows_queueing(self, work: Windows) -> bool:
        """Whether batches became dearer by as much as there are more workers, so that these brought nothing: they queue
        for something of which there is no more, a storage or a lock."""
        more = self.decision.new.workers / max(1, self.decision.old.workers)
        was_s, now_s = self.before.cost_s, self.since.cost_s
        if more < _CLEARLY_MORE or not was_s or self.since.batches < _FEW:
            return False
        chance = self._chance(work)
        explained = now_s / was_s - 1.0 >= max(_MOSTLY * (more - 1.0), _SURELY * chance)
        return explained and _NOT_MUCH_SLOWER * self.before.rate < self.since.rate < _NO_FASTER * self.before.rate

    def _is_hopeless(self, work: Windows) -> bool:
        """Whether a mere try has made things so much worse that a few batches tell."""
        if self.decision.reason != "explore" or self.since.batches < _FEW:
            return False
        gain, error = self.gain(work)
        return gain + error < -_MUCH_WORSE

    def _patience_s(self, work: Windows) -> float:
        slowest_s = max(work.slowest_s(), self.since.longest_gap_s)
        return min(_LONGEST_S, _PATIENCE_BATCHES * slowest_s)

    def _needed(self, config: AutotuneConfig) -> float:
        """The gain that makes it worth keeping."""
        decision = self.decision
        fewer = decision.new.workers < decision.old.workers
        if decision.reason == "explore":
            return config.gain / 4 if fewer else config.gain
        same = decision.new.workers == decision.old.workers
        if fewer or (same and decision.new.depth < decision.old.depth) or self.since.stall <= config.stall_goal:
            return -config.gain
        return min(config.gain, (decision.predicted_rate / max(1e-9, self.before.rate) - 1.0) / 4)

    def was_good(self, work: Windows, config: AutotuneConfig) -> bool:
        """Whether to keep what it changed. What is uncertain is kept, but not what was only a try; greater depth, which
        costs memory and caches, where batches take much the same time if it is as likely as not to help."""
        gain, error = self.gain(work)
        if self.decision.reason in ("start", "undo", "changed", "limit", "lost") or not self.before.rate:
            return True
        if self.shows_queueing(work):
            return False
        reason, even = self.decision.reason, work.variation() < _EVEN
        benefit_of_doubt = -0.5 if reason == "explore" else 0.0 if reason == "spread" and even else 1.0
        return gain + benefit_of_doubt * error >= self._needed(config)
