"""The law: how many workers and how large a prefetch, from one model and a few rules. PURE, time is in the samples.

``docs/explanation/tuning.md`` has the rules: start (`start`), jump (`Law._grow`), judge (`Law._judge`), probe
(`Law._probe`), change (`Law._forget`) and give back (`Law._give_back`). `dpex.autotune.supervisor` keeps the limits.
"""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass, replace

from dpex.autotune.config import AutotuneConfig
from dpex.autotune.constants import CONSTANTS, MOST_WORKERS
from dpex.autotune.law import wording
from dpex.autotune.law.evidence import Cusum, SettingStats, WorkEstimate
from dpex.autotune.law.model import Model, Start
from dpex.autotune.limits import Limits
from dpex.autotune.types import Decision, Reason
from dpex.measure.reading import Reading, Signal
from dpex.measure.settings import LOCAL, REMOTE, WORKER_POOLS, Settings
from dpex.measure.views import mean_s, median_s, net_mean_s, step_times

_ROUNDING_S = 1e-9

GROW, PROBE, BACK, GIVE_BACK = "grow", "probe", "back", "give back"


def start(limits: Limits, cpus: float, *, memory: float | None = None) -> Settings:
    """The setting to begin with, on ``cpus`` CPUs and ``memory`` free bytes that are granted to this rank."""
    room = math.inf if memory is None else max(CONSTANTS.start_workers // 2, memory // CONSTANTS.worker_bytes)
    workers = limits.clip(Settings(local=int(min(CONSTANTS.start_workers, max(1, int(cpus)), room))))
    return limits.clip(replace(workers, prefetch=int(CONSTANTS.start_depth * workers.workers)))


@dataclass(kw_only=True)
class Trial:
    """A change of workers that is watched, and the setting and windows before it.

    Times of a batch before it are ``service_s``, the mean without queueing for a CPU, ``wall_s``, that with it, and
    ``median_s``. ``made`` counts the batches that workers made since. ``reverted`` is the growth that it
    reverts.
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
    """The result of a trial. gain: relative, of the rate. is_sure: further windows would not change it."""

    gain: float = 0.0
    is_bad: bool = False
    is_sure: bool = True


class Law:
    """The policy of dpex. See the module.

    Attributes:
        model: The model of the work; None before the first batches.
    """

    def __init__(self, config: AutotuneConfig, begin: Settings, limits: Limits) -> None:
        self.config = config
        self.limits: Limits = limits
        self._hard: Limits = limits
        self._asked_at = self._settled_at = 0.0
        self._running = -1
        self._pass, self._started = (-1, 0.0), 1
        self._shrink_after, self._turn = config.shrink_after, 0
        self._depth = CONSTANTS.depth
        self._signal: Signal | None = None
        self._settings = begin
        self._reason: Reason | None = None
        """Of the latest decision."""
        self.model: Model | None = None
        self._cusums: defaultdict[str, Cusum] = defaultdict(Cusum)
        self._forget()
        self._is_fresh = config.start is None  # the start of another run is not left for batches of starting workers

    def useful_remote(self, most: int) -> int | None:
        """The number of remote workers that would pay if the cluster had places for ``most``; None if unknown."""
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
            self._forget()
        if window.settings != self._settings:  # a limit was met
            self._settings, self._reason, self._asked_at = window.settings, "limit", window.at - window.seconds
        self._signal, self._hard = window.signal, limits
        changes = self._work.changes(window, is_steady=self._is_steady(window))
        is_growing = self._trial is not None and self._trial.kind == GROW
        if "step" in changes or (changes and not is_growing) or self._work.is_other_work(window, self._growth()):
            self._forget()
        self._work.add(window)
        if self._trial is not None:
            self._trial.made += window.local.tickets
        if not self._is_settled(window):
            return self._decide_early(window)
        self._record.add(window, self.config.wait_goal)
        return self._decide(window)

    def _growth(self) -> float:
        """Return the growth of workers that is on trial or is taken back, as a factor; 1 without one."""
        trial = self._trial
        if trial is None:
            return 1.0
        new = trial.new.workers
        old = trial.old.workers if trial.reverted is None else trial.reverted.old.workers
        return max(new, trial.old.workers) / max(1, min(new, old))

    def _decide_early(self, window: Reading) -> Decision | None:
        """Before the setting has been running for the time of a batch: take the first jump since the work became known,
        which needs no windows to compare with."""
        if self._trial is not None:
            return None
        made = self._work.sum.tickets
        waits = window.blocked_s > self.config.wait_goal * window.seconds
        is_known = step_times(self._work.sum).count and made >= min(CONSTANTS.enough_batches, self._running)
        if not self._is_fresh or not waits or not is_known:
            return None
        self.model = self._known(window)
        return self._grow(window)

    # -- measurements --------------------------------------------------------------------------------------------------

    def _forget(self) -> None:
        """The work is another: keep the setting only."""
        self._work = WorkEstimate(self._cusums)
        self._record = SettingStats()
        self._trial: Trial | None = None
        self._is_fresh = True
        self._failed: tuple[int, int] | None = None
        self._tries, self._try_at = 0, 0.0

    def _is_settled(self, window: Reading) -> bool:
        """Return True if the wanted workers had been running for the time of a batch when the window began."""
        running = window.local.running + window.remote.running
        missing = window.settings.workers - window.remote.unplaced - running
        if missing > 0 and window.at - self._asked_at < CONSTANTS.patience_s:
            return False
        if running != self._running:
            self._running, self._settled_at = running, window.at
            self._record = SettingStats()
        return self._is_steady(window)

    def _is_steady(self, window: Reading) -> bool:
        """Return True if all batches of the window were begun under the workers that run."""
        since = min(self._work.service_s(LOCAL), CONSTANTS.most_settling_s)
        running = window.local.running + window.remote.running
        return running == self._running and window.at - window.seconds >= self._settled_at + since - _ROUNDING_S

    def _known(self, window: Reading) -> Model:
        """The model as of this window."""
        known, record = self._work.sum, self._record
        step, (rate, error) = step_times(known), record.rate()
        waits = record.wait > self.config.wait_goal
        return Model.of(
            known,
            now=window.settings,
            step_s=step.net_s / step.count,
            step_queued_s=step.queued_s / step.count,
            others=self._work.others,
            limits=self._hard,
            unevenness=self._work.unevenness,
            measured_rate=rate if waits and rate and record.has_rate else None,
            error=min(1.0, error / rate) if rate else 1.0,
            queued_s=lambda pool: pool.queued_s,
            start=self._start_of(window),
        )

    def _start_of(self, window: Reading) -> Start | None:
        """Return the time of the latest start and its workers, where passes start workers anew."""
        if not window.starts_anew or not window.pass_batches:
            return None
        if self._pass != (window.epoch, window.start_s):
            self._pass, self._started = (window.epoch, window.start_s), max(1, window.settings.local)
        return Start(seconds=window.start_s, workers=self._started, batches=window.pass_batches)

    # -- deciding ------------------------------------------------------------------------------------------------------

    def _decide(self, window: Reading) -> Decision | None:
        if not self._work.service_s(LOCAL) or not step_times(self._work.sum).count:
            return None
        self.model = self._known(window)
        if self._trial is not None:
            decision = self._judge(window, self._trial)
            if decision is not None or self._trial is not None:
                return decision
        if self._record.wait <= self.config.wait_goal:
            return self._give_back(window)
        return self._grow(window) or self._widen(window)

    def _grow(self, window: Reading) -> Decision | None:
        """Towards what the model asks for."""
        now = window.settings
        if window.at < self._try_at:
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
        """The model's best within a jump, and half-way at most to what has failed, in the ratio."""
        assert self.model is not None
        model, k, now = self.model, CONSTANTS, window.settings
        wanted = dict(zip(WORKER_POOLS, model.best(self.config.headroom, self._most()), strict=True))
        if self._reason is None and self.config.start is None:  # memory is known now
            usual = start(self.limits, model.cpus).local
            wanted[LOCAL] = max(wanted[LOCAL], min(usual, model.limits.most_local(model.unevenness)))
        soon = max(math.ceil(k.jump * now.workers), k.jump_floor)
        if model.cpu_share > k.computes_from:  # the CPUs are the limit, which are known; remote workers have their own
            soon = MOST_WORKERS
        most = dict.fromkeys(WORKER_POOLS, soon)
        for name, count in zip(WORKER_POOLS, self._failed or (), strict=False):
            have = getattr(now, name)
            if count > have:
                most[name] = min(most[name], math.ceil(math.sqrt(max(1, have) * count)))
        return min(wanted[LOCAL], most[LOCAL]), min(wanted[REMOTE], most[REMOTE])

    def _most(self) -> Limits:
        """Limits, and what the user has for workers that wait."""
        assert self.model is not None
        hard = self.model.limits
        return replace(hard, local=min(hard.local, max(self.config.max_waiting, hard.least_local)))

    def _widen(self, window: Reading) -> Decision | None:
        """More batches in flight, or a probe."""
        assert self.model is not None
        k, record, now, model = CONSTANTS, self._record, window.settings, self.model
        if len(record) < k.enough_windows:
            return None
        fit = model.limits.most_local(model.unevenness)
        if record.is_late and now.local > fit and model.unevenness > k.is_uneven_from:
            return self._change(window, fit, now.remote, "limit", None)  # their memory is worth more as prefetch
        if record.is_late or now.workers * model.step_s > model.local.service_s:
            self._depth = k.most_depth
        return self._probe(window) or self._change(window, now.local, now.remote, "spread", None)

    def _probe(self, window: Reading) -> Decision | None:
        """A step up, not beyond what fills the CPUs, in one pool and after a failure in the other."""
        assert self.model is not None
        k, now, model = CONSTANTS, window.settings, self.model
        if window.at < self._try_at or model.start is not None:  # no window shows what more workers cost at the start
            return None
        fit = model.limits.most_local(model.unevenness)
        most = {LOCAL: min(fit, self._most().local, model.filling()), REMOTE: model.limits.remote}
        for name in WORKER_POOLS if self._turn % 2 == 0 else reversed(WORKER_POOLS):
            have = getattr(now, name)
            sizes = {LOCAL: now.local, REMOTE: now.remote}
            sizes[name] = min(most[name], max(have + 1, math.ceil(have * k.probe_factor)))
            if sizes[name] > have and sum(sizes.values()) <= model.limits.most_prefetch(sizes[LOCAL]):
                return self._change(window, sizes[LOCAL], sizes[REMOTE], "explore", PROBE)
        return None

    def _give_back(self, window: Reading) -> Decision | None:
        """Fewer workers where those there are do not all work, and the loop has not waited for a while; or where they
        take the training thread's CPU."""
        assert self.model is not None
        k, now, record, least = CONSTANTS, window.settings, self._record, self.model.limits
        if window.at < self._try_at or len(record) * k.trial_windows < k.enough_windows * self._shrink_after:
            return None
        local, remote = self._target(window)
        if record.queued > self.config.wait_goal and now.local > local:
            to = max(local, math.floor(now.local / k.give_back_factor)), max(now.remote, remote)
            return self._change(window, *to, "too many", GIVE_BACK)
        if record.is_draining(self.config.headroom) or record.calm < self._shrink_after:
            return None
        wanted = math.ceil(max(record.busy_workers, self.model.local.service_s * self.model.demand))
        remote = max(min(now.remote, wanted - now.local), least.least_remote)
        local = max(min(now.local, wanted - remote), least.least_local, int(not remote))
        if local + remote >= now.workers:
            return None
        return self._change(window, local, remote, "too many", GIVE_BACK)

    # -- judging -------------------------------------------------------------------------------------------------------

    def _judge(self, window: Reading, trial: Trial) -> Decision | None:
        """End a trial once its effect is known; return a decision if it must be undone."""
        if self._has_changed_instead(trial):
            self._close(window, trial, kept=False)
            self._forget()
            return None
        result = self._result(window, trial)
        if not result.is_sure and len(self._record) < CONSTANTS.trial_windows:
            return None
        is_bad = result.is_bad and (trial.kind != BACK or result.is_sure)
        self._close(window, trial, kept=not is_bad)
        if not is_bad:
            if trial.kind == PROBE and self._failed is not None and window.settings.workers >= sum(self._failed):
                self._failed = None
            return None
        if trial.kind == GROW:
            return self._back_to_limit(window, trial, result)
        if trial.kind == PROBE:
            self._turn += 1
        return self._change(window, trial.old.local, trial.old.remote, "undo", None)

    def _has_changed_instead(self, trial: Trial) -> bool:
        """Return True if batches are as slow after growth was taken back: not the growth but the work made them so."""
        record, grown, k = self._record, trial.reverted, CONSTANTS
        if grown is None or len(record) < k.enough_windows or record.made.tickets < 2 * k.enough_batches:
            return False
        ratio = trial.old.workers / max(1, grown.old.workers)
        return bool(median_s(record.made) > ratio**k.exponent * grown.median_s)

    def _result(self, window: Reading, trial: Trial) -> TrialResult:
        """Judge a change by the windows so far.

        Growth by ``ratio`` is good if the rate rises by the root of that, as far as the training loop takes it, or if
        the median batch takes longer by less than that root. A probe must gain, and any other change must not lose.
        """
        assert self.model is not None
        k, record, now, own = CONSTANTS, self._record, window.settings, self.config
        if not len(record):
            return TrialResult(is_sure=False)
        made = trial.before.is_late or record.is_late
        (rate0, error0), (rate1, error1) = trial.before.rate(made=made), record.rate(made=made)
        rate0 = min(rate0, own.headroom * trial.old.workers / trial.service_s)  # more were only taken from before
        if not rate0:  # by Little's law, of a few batches
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
        is_fine = has_windows and record.wait <= own.wait_goal and not record.is_draining(own.headroom)
        return TrialResult(
            gain=gain,
            is_bad=not is_fine and not is_free and gain <= least,
            is_sure=is_fine or is_free or (is_enough and abs(gain - least) > wide),
        )

    def _back_to_limit(self, window: Reading, trial: Trial, result: TrialResult) -> Decision | None:
        """Return to the number of workers that the limit keeps busy, as more workers have not raised the rate.

        By Little's law this number is the present rate times the former time of a batch. All workers were busy before,
        so it is their number, raised by the relative growth of the rate.
        """
        now, old = window.settings, trial.old
        gain = result.gain if result.gain > CONSTANTS.equal_rates else 0.0  # noise would add a worker at each trial
        fewest = min(now.workers, math.ceil(old.workers * (1.0 + gain)))
        local = min(now.local, max(old.local, fewest - old.remote))
        remote = min(now.remote, max(old.remote, fewest - local))
        self._failed = now.local, now.remote
        if not len(self._record):
            seen = replace(window, later_batches=trial.made, seconds=window.at - trial.at)
            self._record.add(seen, self.config.wait_goal)
        return self._change(window, local, remote, "undo", BACK, reverted=trial)

    def _close(self, window: Reading, trial: Trial, *, kept: bool) -> None:
        """End the trial. After a bad one the law waits before it tries again."""
        self._trial = None
        if not kept:
            self._tries += 1
            self._try_at = window.at + CONSTANTS.pause * (window.at - trial.at) * 2 ** (self._tries - 1)

    # -- changing ------------------------------------------------------------------------------------------------------

    def _change(
        self, window: Reading, local: int, remote: int, reason: Reason, kind: str | None, reverted: Trial | None = None
    ) -> Decision | None:
        """Other numbers of workers, with the prefetch for them; of the prefetch alone only if it is worth it."""
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
            return self._decided(window, new, reason)
        if kind is not None:
            self._trial = Trial(
                kind=kind,
                at=window.at,
                old=now,
                new=new,
                before=self._record,
                service_s=net_mean_s(made, made.queued_s) or model.local.service_s,
                wall_s=mean_s(made) or model.local.service_s,
                median_s=median_s(made) or self._work.median_s or model.local.service_s,
                reverted=reverted,
            )
        if self._reason == "too many" and new.workers > now.workers:
            self._shrink_after *= 2  # what was given back is wanted again
        decision = self._decided(window, new, reason)
        self._record = SettingStats()
        self._is_fresh = False
        self._asked_at = self._settled_at = window.at
        return decision

    def _decided(self, window: Reading, new: Settings, reason: Reason) -> Decision:
        rate, wait, evidence = wording.expected(self.model, new, self._record, window)
        self._settings, self._reason = new, reason
        return Decision.to(window, new, reason, rate=rate, wait=wait, evidence=evidence)
