"""Decides: learns from each window, has the policies asked, and watches what the decisions bring.

A step has four parts. The window is checked, put by the GPU's clock where there is one (`dpex.autotune.felt`), and the
estimate of the work learns from it. Once what was asked for is
running, the window counts for the settings that it was measured under, and for the decision that is on trial
(`dpex.autotune.trials`). All that is known then becomes a `Situation`. The manager asks the policies about it
(`dpex.autotune.manager`), and what they suggest without an objection becomes a decision.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from dpex.autotune import limits, wording
from dpex.autotune.ceiling import Ceilings
from dpex.autotune.checked import SampleChecker
from dpex.autotune.config import AutotuneConfig
from dpex.autotune.constants.judging import EVALUATION, SETTLING
from dpex.autotune.constants.worker_count import WALLS
from dpex.autotune.estimator import WorkEstimator
from dpex.autotune.evaluation import FailedTrial
from dpex.autotune.failed_changes import FailedChanges
from dpex.autotune.felt import Felt, FeltSample
from dpex.autotune.manager import PolicyManager
from dpex.autotune.model import Estimate
from dpex.autotune.outlook import Thinker, plausible
from dpex.autotune.planner import Bounds, best
from dpex.autotune.policies import POLICIES
from dpex.autotune.policies.base import Policy, Suggestion
from dpex.autotune.policies.undo import Undo
from dpex.autotune.situation import Outlook, Recent, Situation
from dpex.autotune.trials import Trials
from dpex.autotune.types import Decision, Sample, Settings, Veto
from dpex.autotune.window_record import WindowRecord
from dpex.core.durations import remainder

_ROUNDING_S = 1e-9
"""Ends of windows are sums of floats."""


class Controller:
    """See the module. ``start``: the setting to begin with.

    ``decisions``: all of them, oldest first, with what they brought. ``vetoes``: what was suggested in the latest
    window and not done, and why.
    """

    def __init__(self, config: AutotuneConfig, start: Settings) -> None:
        self.config = config
        self._start = start
        self._checker = SampleChecker()
        self._felt = Felt()
        self._work = WorkEstimator()
        self._failures = FailedChanges(config.remember_s)
        self._ceilings = Ceilings(config.remember_s)
        self._trials = Trials(config, self._work, self._failures, self._ceilings)
        self._manager = PolicyManager(self._failures)
        self._thinker = Thinker(config)
        self._record, self._long = WindowRecord(), WindowRecord(EVALUATION.long_windows)
        self._settled_at = self._asked_at = 0.0
        self._running = -1
        self._unplaced_windows = 0
        self._changed: tuple[str, ...] = ()
        self.decisions = self._trials.decisions
        self.vetoes: tuple[Veto, ...] = ()
        self._latest: Situation | None = None

    def begin(self) -> Settings:
        """The setting to begin with."""
        return self._start

    def step(self, sample: Sample) -> Decision | None:
        """Take a window in, any legal one (see `dpex.autotune.types`); a change of settings, or None."""
        self.vetoes = ()
        checked = self._checker.check(sample)
        if checked is None or not (checked.batches or checked.wait_s):
            return None  # nothing was measured, or the training loop was elsewhere: a validation, a checkpoint
        return self._take(self._felt.of(checked))

    def useful_remote(self, most: int) -> int | None:
        """The number of remote workers that would pay if the cluster had places for ``most``, None if not known.

        It is the present number where the model expects nothing of more. Asks the model, which takes milliseconds.
        """
        state = self._latest
        if state is None:
            return None
        plan = best(state.work, replace(state.bounds, remote=max(most, state.bounds.remote)), self.config)
        outlook = plausible(Outlook(best=plan, here=state.outlook.here), state.recent)
        least = (1.0 + self.config.gain) * max(state.recent.rate, outlook.here.rate)
        return plan.settings.remote if outlook.best.rate >= least else state.now.remote

    def _take(self, felt: FeltSample) -> Decision | None:
        sample = felt.sample
        if felt.is_new:
            self._trials.clock_changed(sample.at)
            self._forget_windows()
        changed = self._work.add(felt)
        undoing = self._learn_anew(felt, changed) if changed else None
        if undoing is not None:
            return undoing
        self._unplaced_windows = self._unplaced_windows + 1 if sample.remote.unplaced else 0
        if not self._is_settled(sample) or not self._work.known or not felt.is_known:
            return None
        lost_s = self._count(sample)
        changed = self._trials.changed_meanwhile(sample, lost_s)
        if changed:
            return self._learn_anew(felt, changed)
        if not self._trials.is_open or self._unplaced_windows >= WALLS.unplaced_windows:
            return self._decide(self._situation(felt))
        verdict = self._trials.judge(sample, lost_s)
        if not verdict.is_over:
            return None
        return self._decide(self._situation(felt, verdict.failed, verdict.held_up_s))

    def _count(self, sample: Sample) -> float:
        """Put the window down to the present settings; seconds that were lost to loading in it."""
        lost_s = remainder(sample.seconds, self._work.stepping_s)
        self._record.add(sample, lost_s, self._work.link.jammed)
        self._long.add(sample, lost_s)
        self._ceilings.look(sample, self._record, self._work.usual_s)
        return lost_s

    # -- learning ------------------------------------------------------------------------------------------------------

    def _learn_anew(self, felt: FeltSample, changed: tuple[str, ...]) -> Decision | None:
        """The work has changed; a decision only where that does not explain how bad the latest one was."""
        if self._trials.shows_queueing:
            return None  # no change of the work, but what more workers bring: the trial goes on
        self._changed, self._latest = changed, None
        failed = self._trials.work_changed(felt.sample.at)
        self._manager.work_changed()
        self._forget_windows()
        return None if failed is None else self._decide(self._situation(felt, failed), (Undo(),))

    def _is_settled(self, sample: Sample) -> bool:
        """Whether what was asked for is running, or will not be for a while, and the window saw nothing else."""
        running = sample.local.running + sample.remote.running
        if running != self._running:
            self._running = running
            self._settled_at = sample.at
            self._forget_windows()
        asked_s = sample.at - self._asked_at
        is_missing = sample.settings.workers - sample.remote.unplaced > running
        if is_missing and (self._trials.is_open or asked_s < SETTLING.patience_s):
            return asked_s > SETTLING.longest_s
        return sample.at - sample.seconds >= self._settled_at - _ROUNDING_S

    def _forget_windows(self) -> None:
        self._record.clear()
        self._long.clear()

    # -- what is known -------------------------------------------------------------------------------------------------

    def _situation(self, felt: FeltSample, failed: FailedTrial | None = None, held_up_s: float = 0.0) -> Situation:
        sample = felt.sample
        known, ceilings, cpus = self._work, self._ceilings, sample.machine.cpus
        work = known.estimate(cpus, ceilings.all.at(sample.at), ceilings.link.at(sample.at))
        bounds = limits.bounds(self.config, sample, known.batch_bytes, work.waiting)
        recent = Recent.of(self._record)
        return Situation(
            config=self.config,
            sample=sample,
            felt=felt,
            recent=recent,
            long_rate=self._long.rate,
            rate_error=self._rate_error(),
            work=work,
            unlimited=known.estimate(cpus, math.inf, math.inf),
            bounds=bounds,
            think=partial(self._outlook, work, bounds, sample.settings, recent),
            batch_bytes=known.batch_bytes,
            variation=known.variation(),
            tickets=known.tickets,
            is_crowded=known.is_crowded,
            is_queueing=ceilings.all.is_known(sample.at),
            asked_at=self._asked_at,
            explored_at=self._trials.explored_at,
            explore_pause_s=self._trials.explore_pause_s,
            changed_at=self._trials.changed_at,
            unplaced_windows=self._unplaced_windows,
            agreed=self._manager.agreed,
            failed=failed,
            held_up_s=held_up_s,
        )

    def _outlook(self, work: Estimate, bounds: Bounds, now: Settings, recent: Recent) -> Outlook:
        known = self._work
        return plausible(self._thinker.think(work, known.dearer(work), bounds, now, known.variation()), recent)

    def _rate_error(self) -> float:
        """Relative standard error of the rate under the present settings, 1 if it is not known."""
        loss_s, error_s = self._long.loss(self._work.slowest_s())
        return min(1.0, error_s / max(1e-9, self._work.step_s + loss_s)) if math.isfinite(error_s) else 1.0

    # -- deciding ------------------------------------------------------------------------------------------------------

    def _decide(self, state: Situation, policies: Sequence[Policy] = POLICIES) -> Decision | None:
        self._latest = state
        suggestion = self._manager.ask(state, policies)
        self.vetoes = self._manager.vetoes
        if suggestion is None:
            return None
        decision = _decision(state, suggestion, self._changed)
        self._changed = ()
        self._trials.begin(decision, self._record, state.sample.ready, is_copying=state.is_copying)
        self._record = WindowRecord()
        self._long.clear()
        self._asked_at = state.at
        self._unplaced_windows = 0
        return decision


def _decision(state: Situation, suggestion: Suggestion, changed: tuple[str, ...]) -> Decision:
    plan, felt = suggestion.plan, state.felt
    text = wording.changed(changed, suggestion.text) if changed else suggestion.text
    return Decision(
        at=state.at,
        old=state.now,
        new=plan.settings,
        reason=suggestion.reason,
        text=wording.by_gpu(text, state.evidence, is_held_up=felt.is_held_up_elsewhere) if felt.is_gpu else text,
        evidence=dict(suggestion.evidence),
        predicted_rate=plan.rate,
        predicted_wait=plan.wait,
        signal=felt.signal,
    )
