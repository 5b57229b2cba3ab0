"""Judges a decision: what a batch cost the consumer before and after it, and how sure that is.

Compared is the time lost per batch (waiting in ``next()``, work there, steps slowed down for want of a CPU), with one
and the same step added: so a consumer whose steps vary, or change meanwhile, is not taken for a better or worse loader.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from dpex.autotune.config import AutotuneConfig
from dpex.autotune.constants.judging import EVALUATION
from dpex.autotune.constants.trying import COMMON, IN_PROCESS
from dpex.autotune.estimator import WorkEstimator
from dpex.autotune.types import Decision, Sample, Settings
from dpex.autotune.window_record import WindowRecord

_ADDING = ("too few", "spread")
_HAD_TO_BE = ("start", "undo", "changed", "limit", "lost")
"""Reasons of decisions that are kept whatever they brought."""


@dataclass(frozen=True, kw_only=True)
class FailedTrial:
    """A decision that is not kept: what was compared. Rates are batches per second.

    lost_before: share of the time lost to loading before it. cost_before_s, cost_since_s: worker's time for a batch.
    gain, error: by which part the rate rose, by what batches cost, and the standard error of that. knee: where the
    workers queue for something of which there is no more, the settings that get as much out of it; else None.
    """

    decision: Decision
    rate_before: float
    rate_since: float
    lost_before: float
    cost_before_s: float
    cost_since_s: float
    gain: float
    error: float
    knee: Settings | None = None


@dataclass
class Evaluation:
    """A decision that is not judged yet: how it was before, and what came in since it took effect.

    skipped: so many batches, at first, tell nothing. skipped_remote: nor does what comes before remote workers made
    so many, for as long as a trial lasts. usual_s: what a worker took for a batch, by all that was known at the time.
    with_steps: steps are compared as well.
    """

    decision: Decision
    before: WindowRecord
    batches_needed: int
    skipped: int = 0
    skipped_remote: int = 0
    usual_s: float = 0.0
    with_steps: bool = False
    skipped_s: float = field(default=0.0, init=False)
    has_looked_again: bool = field(default=False, init=False)
    since: WindowRecord = field(default_factory=lambda: WindowRecord(EVALUATION.trial_windows))

    def add(self, sample: Sample, lost_s: float) -> None:
        """A window since it took effect; those with the batches that tell nothing do not count."""
        if self.skipped > 0:
            self.skipped -= sample.batches
        elif self.skipped_remote > 0 and self.skipped_s < EVALUATION.patience_s:
            self.skipped_remote -= sample.remote.tickets
            self.skipped_s += sample.seconds
        else:
            self.since.add(sample, lost_s)

    def _later_s(self, work: WorkEstimator, later: float) -> float:
        """Seconds per batch since the decision, as they would be had batches not become dearer meanwhile by chance.

        Only where workers were added, or batches in flight, and the CPUs are not full. By what chance does not explain
        they became dearer because more were asked for at once: a storage gives no more. With as many workers as before
        no more is asked for at once.
        """
        was_s, now_s = self.before.cost_s, self.since.cost_s
        if self.decision.reason not in _ADDING or not 0.0 < was_s < now_s:
            return later
        if self.decision.new.workers == self.decision.old.workers:
            return max(work.step_s, later * was_s / now_s)
        if self.since.is_full:
            return later
        chance = _chance(work, self.before.batches, self.since.batches)
        return max(work.step_s, later / min(now_s / was_s, 1.0 + EVALUATION.surely * chance))

    def gain(self, work: WorkEstimator) -> tuple[float, float]:
        """By which part the rate rose, by what batches cost, and the standard error of that."""
        (then, was_error), (later, now_error) = self._times(work)
        if not math.isfinite(later):
            return -1.0, 0.0
        if not math.isfinite(then):
            return 0.0, 1.0
        return then / later - 1.0, (then / later) * math.hypot(was_error / then, now_error / later)

    def _times(self, work: WorkEstimator) -> tuple[tuple[float, float], tuple[float, float]]:
        """Seconds per batch before it and since, each with its standard error: with one and the same step, unless steps
        are compared."""
        if self.with_steps:
            return self.before.time(), self.since.time()
        step_s, slowest_s = work.step_s, work.slowest_s()
        (was, was_error), (now, now_error) = self.before.loss(slowest_s), self.since.loss(slowest_s)
        was = max(was, self.before.lived_on_stock_s - step_s)
        then, later = max(1e-9, step_s + was), max(1e-9, self._later_s(work, step_s + now))
        was_error = max(was_error, was * work.uncertainty(self.before.batches))
        now_error = max(now_error, now * work.uncertainty(self.since.batches))
        return (then, was_error), (later, now_error)

    def is_over(self, work: WorkEstimator, config: AutotuneConfig) -> bool:
        """Whether enough is known, or there was time enough."""
        since = self.since
        if self._is_hopeless(work) or self.makes_less(work) or self.makes_more:
            return True
        if since.batches < self.batches_needed or len(since) < EVALUATION.least_windows:
            least_s = EVALUATION.slow_patience_s if since.batches < EVALUATION.least_batches else EVALUATION.patience_s
            return since.seconds >= max(least_s, self._patience_s(work)) and len(since) > 1
        gain, error = self.gain(work)
        if abs(gain - self._needed(config)) >= error:
            return not self._looks_again(gain)
        is_promising = self.is_in_process and gain > 0.0
        is_enough = since.batches >= EVALUATION.enough * self.batches_needed and not is_promising
        return is_enough or since.seconds >= max(EVALUATION.patience_s, self._patience_s(work))

    def _looks_again(self, gain: float) -> bool:
        """Whether in-process loading is a little slower at a first look: it may warm up, and gets a second one."""
        if self.has_looked_again or not self.is_in_process or not -IN_PROCESS.warming_up <= gain < 0.0:
            return False
        self.has_looked_again = True
        self.since.clear()
        return True

    @property
    def is_in_process(self) -> bool:
        """Whether batches are made in the training process on trial."""
        return self.decision.reason == "explore" and not self.decision.new.workers

    @property
    def paid_off(self) -> bool:
        """Whether each further worker brought half as much, at least, as those before it."""
        return self.since.rate >= self._paid_off_from * self.before.rate

    @property
    def was_slowed_by_remote(self) -> bool:
        """Whether more remote workers brought less, once as many batches as are needed tell: the first ones of a link
        come late, and hold up others that are made."""
        decision, since = self.decision, self.since
        is_known = decision.new.remote > decision.old.remote and since.batches >= self.batches_needed
        return is_known and since.rate < self.before.rate

    @property
    def is_worse_than_dearer(self) -> bool:
        """Whether as many workers or more brought far less than batches that became dearer explain."""
        if self.decision.new.workers < self.decision.old.workers or self.since.batches < EVALUATION.few_batches:
            return False
        was_s, now_s = self.before.cost_s, self.since.cost_s
        dearer = max(1.0, now_s / was_s) if was_s > 0 else 1.0
        return self.since.rate < EVALUATION.collapsed * self.before.rate / dearer

    def is_in_vain(self, work: WorkEstimator) -> bool:
        """Whether the workers that were added are in the others' way: all queue, or even make less."""
        return self.makes_less(work) or self.shows_queueing(work)

    def shows_queueing(self, work: WorkEstimator) -> bool:
        """Whether batches became dearer by as much as there are more workers, so that these brought nothing: they queue
        for something of which there is no more, a storage or a lock."""
        more, was_s, now_s = self._more, self.cost_before_s, self.since.cost_s
        if more < EVALUATION.clearly_more or not was_s or self.since.tickets < EVALUATION.few_batches:
            return False
        chance = _chance(work, self.before.tickets, self.since.tickets)
        explained = now_s / was_s - 1.0 >= max(EVALUATION.mostly * (more - 1.0), EVALUATION.surely * chance)
        return (
            explained
            and EVALUATION.not_much_slower * self.came_before
            < self.since.made_rate
            < EVALUATION.no_faster * self.came_before
        )

    def makes_less(self, work: WorkEstimator) -> bool:
        """Whether more workers have made surely fewer batches than those before them would have made meanwhile, though
        the training loop waited for more.

        Nothing is said before these would have made one for each worker that there is now: all begin at once, and if
        they are as fast together as the former ones were, they end when so much time has passed.
        """
        since, would = self.since, self.came_before * self.since.seconds
        if self._more < EVALUATION.clearly_more or since.wait < COMMON.starved:
            return False
        if would < EVALUATION.in_turn * self.decision.new.workers:
            return False
        most = since.tickets + EVALUATION.surely * math.sqrt(since.tickets + 1.0)
        chance = work.uncertainty(since.tickets)
        return most * (1.0 + EVALUATION.surely * chance) < EVALUATION.far_fewer * would

    @property
    def makes_more(self) -> bool:
        """Whether each further worker has surely made half as much, at least, as those before it."""
        decision, since = self.decision, self.since
        if decision.reason not in _ADDING or self._more < EVALUATION.clearly_more:
            return False
        if since.tickets < decision.new.workers:
            return False
        least = since.tickets - EVALUATION.surely * math.sqrt(since.tickets)
        return least >= self._paid_off_from * self.made_before * since.seconds

    @property
    def cost_before_s(self) -> float:
        """Worker's time for a batch before it: in the latest windows, or in all, if these say more, as those batches
        end first that are short."""
        return max(self.before.cost_s, self.usual_s)

    @property
    def made_before(self) -> float:
        """Batches per second that the workers made before it; by Little's law where too few were seen."""
        before, cost_s = self.before, self.cost_before_s
        if before.tickets >= EVALUATION.least_batches:
            return before.made_rate
        return self.decision.old.workers / cost_s if cost_s > 0 else 0.0

    @property
    def came_before(self) -> float:
        """Batches per second before it: what was delivered or what was made, whichever is less."""
        return min(self.before.rate, self.made_before) if self.before.rate else self.made_before

    @property
    def _more(self) -> float:
        """How many times as many workers there are."""
        return self.decision.new.workers / max(1, self.decision.old.workers)

    @property
    def _paid_off_from(self) -> float:
        """By how many times the rate must be higher for a growth to have paid off."""
        return 1.0 + EVALUATION.paid_off * (self._more - 1.0)

    def knee(self) -> Settings:
        """Where workers queue: as many as make what came, at what a batch costs without a queue (Little's law); no
        fewer than before and fewer than were tried."""
        old, new = self.decision.old, self.decision.new
        enough = math.ceil(self.since.rate * self.cost_before_s)
        workers = min(max(enough, old.workers), new.workers - 1)
        local = min(new.local, max(old.local, workers - old.remote))
        remote = old.remote
        prefetch = max(old.prefetch, round(new.prefetch * (local + remote) / new.workers))
        return Settings(local=local, remote=remote, prefetch=prefetch)

    def _is_hopeless(self, work: WorkEstimator) -> bool:
        """Whether a mere try has made things so much worse that a few batches tell."""
        if self.decision.reason != "explore" or self.since.batches < EVALUATION.few_batches:
            return False
        gain, error = self.gain(work)
        return gain + error < -EVALUATION.much_worse

    def _patience_s(self, work: WorkEstimator) -> float:
        slowest_s = max(work.slowest_s(), self.since.longest_gap_s)
        return min(EVALUATION.longest_s, EVALUATION.slowest_batches * slowest_s)

    def _needed(self, config: AutotuneConfig) -> float:
        """The gain that makes it worth keeping."""
        decision = self.decision
        fewer = decision.new.workers < decision.old.workers
        if decision.reason == "explore":
            return EVALUATION.fewer_part * config.gain if fewer else config.gain
        same = decision.new.workers == decision.old.workers
        if fewer or (same and decision.new.prefetch < decision.old.prefetch) or self.since.lost <= config.wait_goal:
            return -config.gain
        promised = decision.predicted_rate / max(1e-9, self.before.rate) - 1.0
        return min(config.gain, EVALUATION.promised_part * promised)

    def was_good(self, work: WorkEstimator, config: AutotuneConfig) -> bool:
        """Whether to keep what it changed."""
        if self.decision.reason in _HAD_TO_BE:
            return True
        if self.is_in_vain(work):
            return False
        if self.makes_more:
            return True
        if not self.before.rate:  # not a batch had been delivered
            return self.since.made_rate >= self.made_before
        gain, error = self.gain(work)
        return gain + self._benefit_of_doubt(work) * error >= self._needed(config)

    def _benefit_of_doubt(self, work: WorkEstimator) -> float:
        """Standard errors that are added to the gain. What is uncertain is kept, but not what was only a trial; a
        greater prefetch, which costs memory and caches, where batches take much the same time if it is as likely as
        not to help."""
        if self.decision.reason == "explore":
            return -EVALUATION.trial_doubt
        return 0.0 if self.decision.reason == "spread" and work.variation() < EVALUATION.even else 1.0

    def failure(self, work: WorkEstimator) -> FailedTrial:
        """What is known of it, once it is not kept."""
        gain, error = self.gain(work)
        return FailedTrial(
            decision=self.decision,
            rate_before=self.before.rate,
            rate_since=self.since.rate,
            lost_before=self.before.lost,
            cost_before_s=self.cost_before_s,
            cost_since_s=self.since.cost_s,
            gain=gain,
            error=error,
            knee=self.knee() if self.is_in_vain(work) else None,
        )


def _chance(work: WorkEstimator, before: int, since: int) -> float:
    """Standard error of by which part batches became dearer, where it is chance alone, of so many before and since."""
    return math.hypot(work.uncertainty(before), work.uncertainty(since))
