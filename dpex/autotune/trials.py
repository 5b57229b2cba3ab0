"""Each decision is on trial until it is known what it brought; what it taught is remembered. PURE.

At most one decision is on trial. It ends when enough is known, when the work changes, when one batch holds up all
others (nothing can be seen until that is there), or with the next decision. A decision that did not help is handed
back as a `FailedTrial`: `dpex.autotune.policies.undo` says what follows from it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from dpex.autotune.ceiling import Ceilings
from dpex.autotune.config import AutotuneConfig
from dpex.autotune.constants.judging import EVALUATION
from dpex.autotune.constants.learning import TRIALS
from dpex.autotune.constants.trying import COMMON, IN_PROCESS
from dpex.autotune.estimator import WorkEstimator
from dpex.autotune.evaluation import Evaluation, FailedTrial
from dpex.autotune.failed_changes import FailedChanges, change
from dpex.autotune.planner import expect
from dpex.autotune.types import Decision, Outcome, Sample
from dpex.autotune.way_back import WayBack
from dpex.autotune.window_record import WindowRecord


@dataclass(frozen=True, kw_only=True)
class TrialVerdict:
    """What a window says of the decision on trial.

    failed: it is over, and did not help. held_up_s: it is over, as one batch has held up all others for so long.
    """

    is_over: bool
    failed: FailedTrial | None = None
    held_up_s: float = 0.0


class Trials:
    """See the module. ``decisions``: all decisions, oldest first, with what they brought.

    ``explored_at``: when the latest trial of something unknown ended; ``explore_pause_s``: how long after it there is
    another. ``changed_at``: when the work changed lately.
    """

    def __init__(
        self, config: AutotuneConfig, work: WorkEstimator, failures: FailedChanges, ceilings: Ceilings
    ) -> None:
        self.decisions: list[Decision] = []
        self.explored_at = 0.0
        self.explore_pause_s = config.explore_s / TRIALS.eager
        self.changed_at: tuple[float, ...] = ()
        self._config = config
        self._work = work
        self._failures = failures
        self._ceilings = ceilings
        self._open: Evaluation | None = None
        self._failed: FailedTrial | None = None
        self._way_back: WayBack | None = None

    @property
    def is_open(self) -> bool:
        """Whether a decision is on trial."""
        return self._open is not None

    def begin(self, decision: Decision, before: WindowRecord, ready: int, *, is_copying: bool = False) -> None:
        """It was taken. ``before``: windows under the settings before it; ``ready``: batches that were ready;
        ``is_copying``: batches are only copied, and what workers copy slows down steps."""
        self.decisions.append(decision)
        self._open = self._way_back = None
        if decision.reason == "undo":  # what comes back was judged before
            self._way_back = None if self._failed is None else WayBack(self._failed, decision)
            return
        old = decision.old
        needed = max(EVALUATION.least_batches, 2 * min(old.prefetch, 2 * old.workers + ready))
        remote = EVALUATION.remote_skipped * max(0, decision.new.remote - old.remote)
        self._open = trial = Evaluation(decision, before, needed, skipped_remote=remote, usual_s=self._work.usual_s)
        if not decision.new.workers:  # memory is touched for the first time, as it was by workers
            trial.skipped, trial.before = EVALUATION.least_batches // 2, before.after(IN_PROCESS.warm_up_s)
            trial.with_steps = is_copying

    # -- when the work changes -----------------------------------------------------------------------------------------

    @property
    def shows_queueing(self) -> bool:
        """Whether dearer batches are no change of the work, but what more workers bring."""
        return self._open is not None and self._open.is_in_vain(self._work)

    def clock_changed(self, now: float) -> None:
        """Loading is judged by another clock from now on: what was before cannot be compared with what comes."""
        trial, self._open = self._open, None
        if trial is not None and trial.since.batches:
            self._close(trial, now, kept=True)

    def work_changed(self, now: float) -> FailedTrial | None:
        """Begin to learn anew; a failed trial only where the change does not explain how bad the decision was."""
        self._way_back = None
        trial, self._open = self._open, None
        is_bad = trial is not None and trial.is_worse_than_dearer
        if trial is not None and trial.since.batches:
            self._close(trial, now, kept=not is_bad)
        self.explore_pause_s = self._config.explore_s / TRIALS.eager
        self.changed_at = (*(at for at in self.changed_at if now - at < TRIALS.restless_s), now)
        if len(self.changed_at) < TRIALS.recurring:
            self._failures.forget()
        self._ceilings.forget()
        return self._fail(trial, now) if trial is not None and is_bad else None

    def changed_meanwhile(self, sample: Sample, lost_s: float) -> tuple[str, ...]:
        """Take a window in; in words, what of the work has changed during the trial that was undone latest."""
        return () if self._way_back is None else self._way_back.add(sample, lost_s, self._work)

    # -- judging -------------------------------------------------------------------------------------------------------

    def judge(self, sample: Sample, lost_s: float) -> TrialVerdict:
        """Take a window in; what it says of the decision on trial, which there must be."""
        trial = self._open
        assert trial is not None
        trial.add(sample, lost_s)
        if self._is_held_up(trial, sample):
            self._open = None
            self._close(trial, sample.at, kept=True)
            return TrialVerdict(is_over=True, held_up_s=trial.since.gap_s)
        has_jammed = self._ceilings.is_jammed and trial.was_slowed_by_remote
        if not has_jammed and not trial.is_over(self._work, self._config):
            return TrialVerdict(is_over=False)
        self._open = None
        kept = not has_jammed and trial.was_good(self._work, self._config)
        self._close(trial, sample.at, kept=kept)
        self._learn(trial, sample, kept=kept)
        return TrialVerdict(is_over=True, failed=None if kept else self._fail(trial, sample.at))

    def _is_held_up(self, trial: Evaluation, sample: Sample) -> bool:
        """Whether one batch holds up all others, for far longer than any was known to take, and workers idle."""
        gap_s, work = trial.since.gap_s, self._work
        busy_s = sample.local.busy_s + sample.remote.busy_s
        idle = busy_s < TRIALS.idle * sample.seconds * sample.settings.workers
        blocked = sample.head_s > TRIALS.blocked * sample.seconds and idle and not work.link.is_stuck
        return blocked and gap_s > max(TRIALS.held_up_s, TRIALS.held_up_times * work.slowest_s())

    def _close(self, trial: Evaluation, now: float, *, kept: bool) -> None:
        """Write down what a decision brought."""
        outcome = Outcome(rate=trial.since.rate, wait=trial.since.lost, kept=kept, at=now)
        self.decisions[-1] = replace(trial.decision, outcome=outcome)

    # -- what is learnt from it ----------------------------------------------------------------------------------------

    def _learn(self, trial: Evaluation, sample: Sample, *, kept: bool) -> None:
        decision, now = trial.decision, sample.at
        if decision.reason == "explore":
            self.explored_at = now
            self.explore_pause_s = self._config.explore_s / (TRIALS.eager if kept else 1)
        if kept and decision.reason in ("explore", "spread"):  # the model does not know why, and would go back
            self._failures.remember(change(decision.new, decision.old), now)
        if trial.makes_less(self._work):
            self._ceilings.all.learn(trial.came_before, now)
        elif self._shows_ceiling(trial, sample):
            self._ceilings.all.learn(max(trial.since.rate, trial.before.rate), now)

    def _shows_ceiling(self, trial: Evaluation, sample: Sample) -> bool:
        """Whether a growth helped far less than it should, even by what is known since: something else is the limit.

        Spread service times make rates too uncertain to say so.
        """
        decision = trial.decision
        if decision.new.workers <= decision.old.workers or trial.makes_more:
            return False
        if self._ceilings.link.is_known(sample.at) or self._ceilings.is_jammed or trial.since.wait < COMMON.starved:
            return False
        return trial.shows_queueing(self._work) or self._is_disappointing(trial, sample.machine.cpus)

    def _is_disappointing(self, trial: Evaluation, cpus: float) -> bool:
        work = self._work.estimate(cpus, math.inf, math.inf)
        expected = TRIALS.disappointing * expect(work, trial.decision.new).rate
        is_even = self._work.variation() < TRIALS.spread
        return is_even and trial.since.rate < expected and not trial.paid_off

    def _fail(self, trial: Evaluation, now: float) -> FailedTrial:
        """It did not help; it is not done again soon, unless it was a trial that may yet turn out to help."""
        self._failed = failed = trial.failure(self._work)
        decision = trial.decision
        may_help = failed.gain > 0.0 and failed.gain + failed.error >= self._config.gain
        if decision.reason != "explore" or trial.is_in_process or not may_help:
            self._failures.remember(change(decision.old, decision.new), now)
        return failed
