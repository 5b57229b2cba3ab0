"""The law chooses workers and prefetch by one model and a few rules. PURE: it takes the time from windows.

``docs/explanation/tuning.md`` has the rules: start (`initial_settings`), jump (`Law._grow`), judge (`Law._judge`),
probe (`Law._probe`), change (`Law._drop_evidence`) and give back (`Law._give_back`). `dpex.autotune.supervisor` keeps
the limits.
"""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass, replace

from dpex.autotune.config import AutotuneConfig, most_waiting
from dpex.autotune.constants import CONSTANTS, MOST_WORKERS
from dpex.autotune.law import wording
from dpex.autotune.law.evidence import Cusum, SettingStats, WorkEstimate
from dpex.autotune.law.model import Model, Start
from dpex.autotune.limits import Limits
from dpex.autotune.types import Decision, Reason
from dpex.measure.reading import Reading, Signal
from dpex.measure.settings import LOCAL, REMOTE, WORKER_POOLS, Settings
from dpex.measure.views import is_full, mean_s, median_s, net_mean_s, step_times

_ROUNDING_S = 1e-9

GROW, PROBE, BACK, GIVE_BACK = "grow", "probe", "back", "give back"


def initial_settings(limits: Limits, cpus: float, *, memory: float | None = None) -> Settings:
    """Return the settings of a loader without measurements, for the CPUs and free bytes that this rank may use."""
    room = math.inf if memory is None else max(CONSTANTS.start_workers // 2, memory // CONSTANTS.worker_bytes)
    workers = limits.clip(Settings(local=int(min(CONSTANTS.start_workers, max(1, int(cpus)), room))))
    return limits.clip(replace(workers, prefetch=int(CONSTANTS.start_depth * workers.workers)))


@dataclass(kw_only=True)
class Trial:
    """A change of workers whose effect is not known yet.

    Attributes:
        kind: `GROW`, `PROBE`, `BACK` or `GIVE_BACK`.
        at: The time of the change.
        old, new: The settings before and after it.
        before: The windows under ``old``.
        service_s, wall_s: Mean seconds of a batch before the change, without and with queueing for a CPU.
        median_s: Median seconds of a batch before the change.
        reverted: The trial of the growth that this change reverts.
        made: Batches that local workers made since the change.
    """

    kind: str
    at: float
    old: Settings
    new: Settings
    before: SettingStats
    service_s: float
    wall_s: float
    median_s: float
    reverted: Trial | None = None
    made: int = 0


@dataclass(frozen=True, kw_only=True)
class TrialResult:
    """The result of a trial: the relative gain of the rate, and whether further windows could change the result."""

    gain: float = 0.0
    is_bad: bool = False
    is_sure: bool = True


class Law:
    """The policy of dpex. See the module.

    Attributes:
        model: The model of the work; None before the first batches.
    """

    def __init__(self, config: AutotuneConfig, start: Settings, limits: Limits) -> None:
        self.config = config
        self.limits: Limits = limits
        self._hard: Limits = limits
        self._changed_at = self._settled_at = 0.0
        self._running = -1
        self._started_pass, self._started_workers = (-1, 0.0), 1
        self._shrink_after, self._failed_probes = config.shrink_after, 0
        self._depth = CONSTANTS.depth
        self._signal: Signal | None = None
        self._settings = start
        self._latest_reason: Reason | None = None
        self.model: Model | None = None
        self._cusums: defaultdict[str, Cusum] = defaultdict(Cusum)
        self._drop_evidence()
        self._is_fresh = config.start is None  # no early jump from the settings of another run

    def useful_remote(self, most: int) -> int | None:
        """Return the remote workers that would speed up training with room for ``most`` of them; None if unknown."""
        if self.model is None:
            return None
        model = self.model.with_remote(most)
        local, remote = model.best(self.config.headroom)
        wanted = Settings(local=local, remote=remote)
        is_better = model.rate(wanted).value > model.rate(model.now).value * (1.0 + self.config.gain)
        return remote if is_better else model.now.remote

    def observe(self, window: Reading, limits: Limits) -> Decision | None:
        """See `Policy.observe`."""
        if self._signal not in (None, window.signal):
            self._drop_evidence()
        if window.settings != self._settings:  # the supervisor has met a limit
            self._settings, self._latest_reason, self._changed_at = window.settings, "limit", window.at - window.seconds
        self._signal, self._hard = window.signal, limits
        changes = self._work.changes(window, is_steady=self._is_steady(window))
        is_growing = self._trial is not None and self._trial.kind == GROW
        if "step" in changes or (changes and not is_growing) or self._work.is_other_work(window, self._growth()):
            self._drop_evidence()
        self._work.add(window)
        if self._trial is not None:
            self._trial.made += window.local.tickets
        if not self._is_settled(window):
            return self._decide_early(window)
        self._record.add(window, self.config.wait_goal)
        return self._decide(window)

    def _growth(self) -> float:
        """Return the largest over the smallest number of workers in a trial and the trial that it reverts; else 1."""
        trial = self._trial
        if trial is None:
            return 1.0
        new = trial.new.workers
        old = trial.old.workers if trial.reverted is None else trial.reverted.old.workers
        return max(new, trial.old.workers) / max(1, min(new, old))

    def _decide_early(self, window: Reading) -> Decision | None:
        """Return a first jump as soon as the work is known, even without a window under the present setting."""
        if self._trial is not None:
            return None
        made = self._work.sum.tickets
        waits = window.blocked_s > self.config.wait_goal * window.seconds
        is_known = step_times(self._work.sum).steps and made >= max(1, min(CONSTANTS.enough_batches, self._running))
        if not self._is_fresh or not waits or not is_known:
            return None
        self.model = self._build_model(window)
        return self._grow(window)

    # -- measurements --------------------------------------------------------------------------------------------------

    def _drop_evidence(self) -> None:
        """Drop all measurements, because the work has changed. The setting stays."""
        self._work = WorkEstimate(self._cusums)
        self._record = SettingStats()
        self._trial: Trial | None = None
        self._is_fresh = True
        self._failed_workers: tuple[int, int] | None = None
        self._failed_trials, self._next_trial_at = 0, 0.0

    def _is_settled(self, window: Reading) -> bool:
        """Return True if the wanted workers had been running for the time of a batch when the window began."""
        running = window.local.running + window.remote.running
        missing = window.settings.workers - window.remote.unplaced - running
        if missing > 0 and window.at - self._changed_at < CONSTANTS.patience_s:
            return False
        if running != self._running:
            self._running, self._settled_at = running, window.at
            self._record = SettingStats()
        return self._is_steady(window)

    def _is_steady(self, window: Reading) -> bool:
        """Return True if the number of running workers has not changed since the window's first batch was begun."""
        since = min(self._work.service_s, CONSTANTS.most_settling_s)
        running = window.local.running + window.remote.running
        return running == self._running and window.at - window.seconds >= self._settled_at + since - _ROUNDING_S

    def _build_model(self, window: Reading) -> Model:
        """Return the model of the work as measured so far."""
        known, record = self._work.sum, self._record
        step, (rate, error) = step_times(known), record.rate()
        waits = record.blocked > self.config.wait_goal
        return Model.of(
            known,
            now=window.settings,
            step_s=step.net_s / step.steps,
            step_queued_s=step.queued_s / step.steps,
            others=self._work.others,
            is_full=is_full(record.sum),
            limits=self._hard,
            measured_rate=rate if waits and rate and record.has_rate else None,
            error=min(1.0, error / rate) if rate else 1.0,
            start=self._pass_start(window),
        )

    def _pass_start(self, window: Reading) -> Start | None:
        """Return the latest start of a pass; None unless each pass starts new workers."""
        if not window.starts_anew or not window.pass_batches:
            return None
        if self._started_pass != (window.epoch, window.start_s):
            self._started_pass, self._started_workers = (window.epoch, window.start_s), max(1, window.settings.local)
        return Start(seconds=window.start_s, workers=self._started_workers, batches=window.pass_batches)

    # -- deciding ------------------------------------------------------------------------------------------------------

    def _decide(self, window: Reading) -> Decision | None:
        if not self._work.service_s or not step_times(self._work.sum).steps:
            return None
        self.model = self._build_model(window)
        if self._trial is not None:
            decision = self._judge(window, self._trial)
            if decision is not None or self._trial is not None:
                return decision
        if self._record.blocked <= self.config.wait_goal:
            return self._give_back(window)
        return self._grow(window) or self._widen(window)

    def _grow(self, window: Reading) -> Decision | None:
        """Return a jump towards the model's best number of workers, if it is worth it."""
        now = window.settings
        if window.at < self._next_trial_at:
            return None
        local, remote = self._target(window)
        local, remote = max(local, now.local), max(remote, now.remote)
        assert self.model is not None
        if local + remote > max(now.workers, self.model.limits.most_prefetch(local)):
            return None
        if local + remote <= now.workers:
            return None
        model, new = self.model, Settings(local=local, remote=remote)
        if model.rate(new).value < (1.0 + self.config.gain) * model.rate(now).value:
            return None
        return self._change(window, local, remote, "too few", GROW)

    def _target(self, window: Reading) -> tuple[int, int]:
        """Return the model's best numbers of workers within one jump.

        If a number of workers has failed, a jump goes at most to the geometric mean of the failed and present numbers.
        """
        assert self.model is not None
        model, k, now = self.model, CONSTANTS, window.settings
        wanted = dict(zip(WORKER_POOLS, model.best(self.config.headroom, self._limits_of_waiting()), strict=True))
        if self._latest_reason is None and self.config.start is None:  # the start had to guess a worker's memory
            usual = initial_settings(self.limits, model.cpus).local
            wanted[LOCAL] = max(wanted[LOCAL], min(usual, model.limits.most_local(model.unevenness)))
        jump = max(math.ceil(k.jump * now.workers), k.jump_floor)
        if model.cpu_share > k.computes_from:  # the model knows this machine's CPUs; remote workers have their own
            jump = MOST_WORKERS
        most = dict.fromkeys(WORKER_POOLS, jump)
        for name, count in zip(WORKER_POOLS, self._failed_workers or (), strict=False):
            have = getattr(now, name)
            if count > have:
                most[name] = min(most[name], math.ceil(math.sqrt(max(1, have) * count)))
        return min(wanted[LOCAL], most[LOCAL]), min(wanted[REMOTE], most[REMOTE])

    def _limits_of_waiting(self) -> Limits:
        """Return the limits, including `AutotuneConfig.max_waiting`, or one worker per CPU if that is more."""
        assert self.model is not None
        hard = self.model.limits
        most = max(most_waiting(self.config, self.model.cpus), hard.least_local)
        return replace(hard, local=min(hard.local, most))

    def _widen(self, window: Reading) -> Decision | None:
        """Return a probe or a larger prefetch, because the model knows no better number of workers."""
        assert self.model is not None
        k, record, now, model = CONSTANTS, self._record, window.settings, self.model
        if len(record) < k.enough_windows:
            return None
        fit = model.limits.most_local(model.unevenness)
        if record.is_late and now.local > fit and model.unevenness > k.is_uneven_from:
            return self._change(window, fit, now.remote, "limit", None)  # prefetch makes better use of the memory
        if record.is_late or now.workers * model.step_s > model.local.service_s:
            self._depth = k.most_depth
        return self._probe(window) or self._change(window, now.local, now.remote, "spread", None)

    def _probe(self, window: Reading) -> Decision | None:
        """Return a small growth of one pool. After a failed probe, the other pool comes first.

        Local workers grow at most to the number that fills the CPUs.
        """
        assert self.model is not None
        k, now, model = CONSTANTS, window.settings, self.model
        if window.at < self._next_trial_at or model.start is not None:  # windows do not show the cost of a start
            return None
        fit = model.limits.most_local(model.unevenness)
        most = {LOCAL: min(fit, self._limits_of_waiting().local, model.workers_to_fill()), REMOTE: model.limits.remote}
        for name in WORKER_POOLS if self._failed_probes % 2 == 0 else reversed(WORKER_POOLS):
            have = getattr(now, name)
            sizes = {LOCAL: now.local, REMOTE: now.remote}
            sizes[name] = min(most[name], max(have + 1, math.ceil(have * k.probe_factor)))
            if sizes[name] > have and sum(sizes.values()) <= model.limits.most_prefetch(sizes[LOCAL]):
                return self._change(window, sizes[LOCAL], sizes[REMOTE], "explore", PROBE)
        return None

    def _give_back(self, window: Reading) -> Decision | None:
        """Return fewer workers, if some are idle and the loop has not waited for a while.

        Workers that take the training thread's CPU are given back earlier.
        """
        assert self.model is not None
        k, now, record, least = CONSTANTS, window.settings, self._record, self.model.limits
        if window.at < self._next_trial_at or len(record) * k.trial_windows < k.enough_windows * self._shrink_after:
            return None
        local, remote = self._target(window)
        if (record.sum.trainer_queued_s or 0.0) > self.config.wait_goal * record.sum.seconds and now.local > local:
            to = max(local, math.floor(now.local / k.give_back_factor)), max(now.remote, remote)
            return self._change(window, *to, "too many", GIVE_BACK)
        if record.is_draining(self.config.headroom) or record.calm < self._shrink_after:
            return None
        wanted = math.ceil(max(record.sum.busy_s / record.sum.seconds, self.model.local.service_s * self.model.demand))
        remote = max(min(now.remote, wanted - now.local), least.least_remote)
        local = max(min(now.local, wanted - remote), least.least_local, int(not remote))
        if local + remote >= now.workers:
            return None
        return self._change(window, local, remote, "too many", GIVE_BACK)

    # -- judging -------------------------------------------------------------------------------------------------------

    def _judge(self, window: Reading, trial: Trial) -> Decision | None:
        """End a trial once its effect is known. Return a decision if the change must be undone."""
        if self._has_changed_instead(trial):
            self._end_trial(window, trial, kept=False)
            self._drop_evidence()
            return None
        result = self._trial_result(window, trial)
        if not result.is_sure and len(self._record) < CONSTANTS.trial_windows:
            return None
        is_bad = result.is_bad and (trial.kind != BACK or result.is_sure)
        self._end_trial(window, trial, kept=not is_bad)
        if not is_bad:
            if trial.kind == PROBE and window.settings.workers >= sum(self._failed_workers or ()):
                self._failed_workers = None
            return None
        if trial.kind == GROW:
            return self._back_to_limit(window, trial, result)
        if trial.kind == PROBE:
            self._failed_probes += 1
        return self._change(window, trial.old.local, trial.old.remote, "undo", None)

    def _has_changed_instead(self, trial: Trial) -> bool:
        """Return True if batches stay slow after growth was taken back. Then the changed work has made them slow."""
        record, grown, k = self._record, trial.reverted, CONSTANTS
        if grown is None or len(record) < k.enough_windows or record.made.tickets < 2 * k.enough_batches:
            return False
        ratio = trial.old.workers / max(1, grown.old.workers)
        return bool(median_s(record.made) > ratio**k.exponent * grown.median_s)

    def _trial_result(self, window: Reading, trial: Trial) -> TrialResult:
        """Judge a change by the windows so far.

        Growth by ``ratio`` is good if the rate rises by the root of ``ratio``, or of demand over the old rate if that
        is less. It is also good if the median batch takes longer by less than the root of ``ratio``. A probe must raise
        the rate, and any other change must not reduce it.
        """
        assert self.model is not None
        k, record, now, own = CONSTANTS, self._record, window.settings, self.config
        if not len(record):
            return TrialResult(is_sure=False)
        made = trial.before.is_late or record.is_late
        (rate0, error0), (rate1, error1) = trial.before.rate(made=made), record.rate(made=made)
        rate0 = min(rate0, own.headroom * trial.old.workers / trial.service_s)  # a higher rate emptied the prefetch
        if not rate0:  # no rate is known; estimate it by Little's law from a few batches
            rate0, error0 = min(trial.old.workers / trial.wall_s, self.model.demand), 0.0
        gain, wide = rate1 / rate0 - 1.0, 2.0 * math.hypot(error0, error1) / rate0
        least, is_free = (k.equal_rates if trial.kind == PROBE else -k.equal_rates), False
        if trial.kind == GROW:
            ratio = now.workers / max(1, trial.old.workers)
            least = min(ratio, max(1.0, self.model.demand / rate0)) ** k.exponent - 1.0
            slower, bound = median_s(record.made) / trial.median_s, ratio**k.exponent
            is_free = slower < bound and record.made.tickets >= now.workers and now.remote <= trial.old.remote
        has_windows = len(record) >= k.enough_windows
        is_enough = has_windows and record.made.tickets >= k.enough_batches
        is_fine = has_windows and record.blocked <= own.wait_goal and not record.is_draining(own.headroom)
        return TrialResult(
            gain=gain,
            is_bad=not is_fine and not is_free and gain <= least,
            is_sure=is_fine or is_free or (is_enough and abs(gain - least) > wide),
        )

    def _back_to_limit(self, window: Reading, trial: Trial, result: TrialResult) -> Decision | None:
        """Return to the number of workers that the limit keeps busy, because more workers have not raised the rate.

        By Little's law this number is the present rate times the former time of a batch. All workers were busy before
        the growth. So the number is the former number of workers times the growth of the rate.
        """
        now, old = window.settings, trial.old
        gain = result.gain if result.gain > CONSTANTS.equal_rates else 0.0  # or noise would add a worker at each trial
        fewest = min(now.workers, math.ceil(old.workers * (1.0 + gain)))
        local = min(now.local, max(old.local, fewest - old.remote))
        remote = min(now.remote, max(old.remote, fewest - local))
        self._failed_workers = now.local, now.remote
        if not len(self._record):
            seen = replace(window, later_batches=trial.made, seconds=window.at - trial.at)
            self._record.add(seen, self.config.wait_goal)
        return self._change(window, local, remote, "undo", BACK, reverted=trial)

    def _end_trial(self, window: Reading, trial: Trial, *, kept: bool) -> None:
        """End the trial. A failed trial delays the next one."""
        self._trial = None
        if not kept:
            self._failed_trials += 1
            self._next_trial_at = window.at + CONSTANTS.pause * (window.at - trial.at) * 2 ** (self._failed_trials - 1)

    # -- changing ------------------------------------------------------------------------------------------------------

    def _change(
        self, window: Reading, local: int, remote: int, reason: Reason, kind: str | None, reverted: Trial | None = None
    ) -> Decision | None:
        """Return a decision for these workers, with their prefetch. A change of the prefetch alone must be worth it."""
        assert self.model is not None
        k, now, model, made = CONSTANTS, window.settings, self.model, self._record.made
        depth = max(self._depth, min(k.depth_by_slowest * model.unevenness, k.most_depth))
        wanted = Settings(local=local, remote=remote, prefetch=model.prefetch(local, remote, depth))
        new = self.limits.clip_change(window, wanted)
        if new == now:
            return None
        if (new.local, new.remote) == (now.local, now.remote):
            if kind is not None or new.prefetch < k.least_prefetch_change * now.prefetch:
                return None
            return self._decision(window, new, reason)
        if kind is not None:
            self._trial = Trial(
                kind=kind,
                at=window.at,
                old=now,
                new=new,
                before=self._record,
                service_s=net_mean_s(made, made.queueing_s or 0.0) or model.local.service_s,
                wall_s=mean_s(made) or model.local.service_s,
                median_s=median_s(made) or max(map(median_s, self._work.sum.pools.values())) or model.local.service_s,
                reverted=reverted,
            )
        if self._latest_reason == "too many" and new.workers > now.workers:
            self._shrink_after *= 2  # the workers that were given back are wanted again
        decision = self._decision(window, new, reason)
        self._record = SettingStats()
        self._is_fresh = False
        self._changed_at = self._settled_at = window.at
        return decision

    def _decision(self, window: Reading, new: Settings, reason: Reason) -> Decision:
        rate, wait, evidence = wording.expected(self.model, new, self._record, window)
        self._settings, self._latest_reason = new, reason
        return Decision.to(window, new, reason, rate=rate, wait=wait, evidence=evidence)
