"""Decides: computes the wanted setting from what was measured, moves there in one step, judges, undoes, remembers.

A decision is judged once what it asked for is running. What did not help is undone and not tried again at once; a
growth that brought less than it should shows a ceiling that lies elsewhere (storage, link, memory), which the model
knows from then on. Capacity is given back only after several windows that agree.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

from dpex.autotune import wording
from dpex.autotune.ceiling import Ceiling
from dpex.autotune.checked import MOST_WORKERS, Checker
from dpex.autotune.config import AutotuneConfig
from dpex.autotune.estimator import Windows
from dpex.autotune.evaluation import LEAST_BATCHES, Record, Trial
from dpex.autotune.limits import Guard
from dpex.autotune.model import Estimate, Flow
from dpex.autotune.policy import DEEPEST_PER_WORKER, Bounds, Plan, best, expect, half_way
from dpex.autotune.types import Decision, Outcome, Reason, Sample, Settings

_PATIENCE_S = 8.0
_NEW = 100
_EARLY_S = 1.0
_STARVED = 0.03
_DISAPPOINTING = 0.85
_SPREAD = 0.5
_UNEVEN = 0.25
_MUCH_LESS = 0.75
_SHRINK_S = 1.5
_SAME = 0.05
_DISAPPOINTED = 0.95
_FULL = 0.85
_HOPEFUL = 0.9
_HEADED = 0.03
_BUSY = 0.93
_LOST_AFTER = 2
_LONG = 40
_ALONE_WINDOWS = 3
_ALONE_AFTER_S = 0.3
_ALONE_MOST_S = 0.5
_ALONE_FREE_S = 0.0001
"""A batch that takes no longer costs so little that in-process is tried first and soon."""
_ALONE_LEAST, _ALONE_LEAST_IF_FULL, _ALONE_LEAST_IF_COPYING = 0.75, 0.45, 0.25
"""In-process is tried if the model expects so much of the present rate of it. Where workers fill the CPUs their batches
take up to twice the CPU time that one process alone takes (caches, memory, locks), and most where they are copied."""
_COPYING = 1e9
"""Bytes per second of CPU time from which making a batch is taken for mere copying."""
_ALONE_MOST_WAITING = 0.3
_EAGER = 4
_AMPLE = 1.5
_JAMMED = 0.25
_JAMMED_AFTER = 3
_DEEPER = 4
_SHORT_AFTER_S = 4.0
"""A number of workers that lasted so long and is too few now is remembered as too few, and not gone back to soon."""
_RECURRING = 2
"""So many changes in `_RESTLESS_S` are ups and downs of the same work: what was too few once will be so again."""
_CALM_S, _CALM_TICKETS = 10.0, 300
"""Seconds and batches since the work began, or changed, before capacity is given back where costs vary: a slow stretch
of it must have had its turn."""
_WORTH_BYTES = 64e6
"""Memory of batches in flight that is worth a change by itself: what one more worker process takes."""
_RESTLESS_S = 30.0
"""Work that changed more than once in this time may do so again: capacity is given back more slowly."""
_DEEPEST = 2 * DEEPEST_PER_WORKER
_HELD_UP_S, _HELD_UP = 1.0, 2.0
"""One batch holds up all others: so long at least, and so many times as long as the slowest known."""
_BLOCKED, _IDLE = 0.5, 0.5
"""In such a window, this share of the time later batches are ready, and workers are busy for less than that share."""


class Controller:
    """See the module. ``start``: the setting to begin with."""

    def __init__(self, config: AutotuneConfig, start: Settings) -> None:
        self.config = config
        self.decisions: list[Decision] = []
        self._settings = start
        self._checker = Checker()
        self._windows = Windows()
        self._guard = Guard(config)
        self._record, self._long = Record(), Record(_LONG)
        self._trial: Trial | None = None
        self._settled_at = 0.0
        self._asked_at = 0.0
        self._was_running = -1
        self._agreeing: list[Plan] = []
        self._in_favour = 0
        self._lost = 0
        self._jammed = 0
        self._thought: tuple[tuple[Bounds, Settings], tuple[float, ...], Plan, Plan] | None = None
        self._ceiling, self._far_ceiling = Ceiling(config.remember_s), Ceiling(config.remember_s)
        self._explored_at = 0.0
        self._pause_s = config.explore_s / _EAGER
        self._changed: tuple[str, ...] = ()
        self._changes: list[float] = []

    def begin(self) -> Settings:
        """The setting to begin with."""
        return self._settings

    def step(self, sample: Sample) -> Decision | None:
        """Take a window in, any legal one (see `dpex.autotune.types`); a change of settings, or None."""
        checked = self._checker.check(sample)
        return None if checked is None else self._take(checked)

    def _take(self, sample: Sample) -> Decision | None:
        self._settings = sample.settings
        if not sample.batches and not sample.wait_s:
            return None  # the trainer was elsewhere: a validation, a checkpoint
        changed = self._windows.add(sample)
        if changed:
            self._reopen(sample, changed)
        self._lost = self._lost + 1 if sample.remote.unplaced else 0
        if not self._is_settled(sample) or not self._windows.known:
            return None
        lost_s = max(0.0, sample.seconds - self._windows.stepping_s)
        self._record.add(sample, lost_s)
        self._long.add(sample, lost_s)
        self._look_for_ceilings(sample)
        if self._trial is None or self._lost >= _LOST_AFTER:
            return self._plan(sample)
        self._trial.add(sample, lost_s)
        if self._is_held_up(self._trial, sample):
            self._close(self._trial, sample, kept=True)
            gap_s, self._trial = self._trial.since.gap_s, None
            return self._deepen_now(sample, gap_s)
        judged, undoing = self._judge(self._trial, sample)
        return self._plan(sample) if judged and undoing is None else undoing

    # -- settling --------------------------------------------------------------------------------------------------

    def _reopen(self, sample: Sample, changed: tuple[str, ...]) -> None:
        if self._trial is not None and self._trial.shows_queueing(self._windows):
            return  # no change of the work, but what more workers bring: the trial goes on
        if self._trial is not None and self._trial.since.batches:
            self._close(self._trial, sample, kept=True)
        self._changed = changed
        self._pause_s = self.config.explore_s / _EAGER
        self._changes = [at for at in self._changes if sample.at - at < _RESTLESS_S] + [sample.at]
        if len(self._changes) < _RECURRING:
            self._guard.forget()
        self._ceiling.forget()
        self._far_ceiling.forget()
        self._trial = None
        self._agreeing.clear()
        self._record.clear()
        self._long.clear()

    def _is_settled(self, sample: Sample) -> bool:
        """Whether what was asked for is running, or will not be for a while, and the window saw nothing else."""
        running = sample.local.running + sample.remote.running
        if running != self._was_running:
            self._was_running = running
            self._settled_at = sample.at
            self._record.clear()
            self._long.clear()
        missing = sample.settings.workers - sample.remote.unplaced > running
        if missing and (self._trial is not None or sample.at - self._asked_at < _PATIENCE_S):
            return sample.at - self._asked_at > 10 * _PATIENCE_S
        return sample.at - sample.seconds >= self._settled_at - 1e-9

    # -- judging ---------------------------------------------------------------------------------------------------

    def _judge(self, trial: Trial, sample: Sample) -> tuple[bool, Decision | None]:
        """Look at what the last decision brought, once enough is known; undo it if it was no good."""
        if not trial.is_over(self._windows, self.config):
            return False, None
        self._trial = None
        kept = trial.was_good(self._windows, self.config)
        self._close(trial, sample, kept=kept)
        if trial.decision.reason == "explore":
            self._explored_at = sample.at
            self._pause_s = self.config.explore_s / (_EAGER if kept else 1)
        if kept and trial.decision.reason in ("explore", "spread"):  # the model does not know why, and would go back
            back, value = _kind(trial.decision.new, trial.decision.old)
            self._guard.remember(back, sample.at, value)
        self._learn_ceiling(trial, sample)
        return True, None if kept else self._undo(sample, trial)

    def _close(self, trial: Trial, sample: Sample, *, kept: bool) -> None:
        """Write down what a decision brought."""
        outcome = Outcome(rate=trial.since.rate, stall=trial.since.stall, kept=kept, at=sample.at)
        self.decisions[-1] = replace(trial.decision, outcome=outcome)

    def _is_held_up(self, trial: Trial, sample: Sample) -> bool:
        """Whether one batch holds up all others, for far longer than any was known to take, and workers idle."""
        gap_s = trial.since.gap_s
        idle = sample.local.busy_s + sample.remote.busy_s < _IDLE * sample.seconds * sample.settings.workers
        blocked = sample.head_s > _BLOCKED * sample.seconds and idle
        return blocked and gap_s > max(_HELD_UP_S, _HELD_UP * self._windows.slowest_s())

    def _deepen_now(self, sample: Sample, gap_s: float) -> Decision | None:
        """No trial can tell anything until that batch is there, and more batches in flight are all that helps."""
        now = sample.settings
        work = self._windows.estimate(sample.host.cpus, math.inf, math.inf)
        bounds = self._guard.bounds(sample, self._windows.batch_bytes, work.waiting)
        deeper = replace(now, depth=min(bounds.most_depth(now.local), _DEEPER * now.depth, _DEEPEST * now.workers))
        if deeper.depth <= now.depth:
            return None
        text = wording.held_up(now, deeper, gap_s)
        return self._decide(sample, expect(work, deeper), "spread", text, self._evidence(work))

    def _learn_ceiling(self, trial: Trial, sample: Sample) -> None:
        """A growth that helps far less than it should, even by what is known since: something else holds here.

        Spread service times make rates too uncertain to say so.
        """
        decision, rate = trial.decision, trial.since.rate
        if decision.new.workers <= decision.old.workers:
            return
        if sample.at < self._far_ceiling.until or self._jammed or trial.since.wait < _STARVED:
            return
        if not trial.shows_queueing(self._windows):
            work = self._windows.estimate(sample.host.cpus, math.inf, math.inf)
            expected = _DISAPPOINTING * expect(work, decision.new).rate
            if self._windows.variation() >= _SPREAD or rate >= expected or trial.paid_off:
                return
        self._ceiling.learn(max(rate, trial.before.rate), sample.at)

    def _undo(self, sample: Sample, trial: Trial) -> Decision | None:
        decision = trial.decision
        kind, value = _kind(decision.old, decision.new)
        self._guard.remember(kind, sample.at, value)
        gain, error = trial.gain(self._windows)
        rates = (trial.before.rate, trial.since.rate, decision.predicted_rate)
        if trial.shows_queueing(self._windows):
            costs = (trial.before.cost_s, trial.since.cost_s)
            text = wording.queueing(decision.new, decision.old, costs, rates[:2])
        else:
            text = wording.undone(decision.new, decision.old, gain, error, rates)
        evidence = {"rate_before": trial.before.rate, "rate_after": trial.since.rate}
        plan = Plan(
            settings=decision.old,
            rate=trial.before.rate,
            stall=trial.before.stall,
            flow=Flow(demand=trial.since.rate, capacity=trial.since.rate, slowdown=1.0),
        )
        return self._decide(sample, plan, "undo", text, evidence)

    # -- planning --------------------------------------------------------------------------------------------------

    def _plan(self, sample: Sample) -> Decision | None:
        now, config = sample.settings, self.config
        work = self._windows.estimate(sample.host.cpus, self._ceiling.at(sample.at), self._far_ceiling.at(sample.at))
        bounds = self._guard.bounds(sample, self._windows.batch_bytes, work.waiting)
        evidence = self._evidence(work)
        forced = self._forced(sample, work, bounds, evidence)
        if forced is not None:
            return forced
        plan, here = self._think(work, bounds, now)
        plan, here = self._at_most(plan), self._at_most(here)
        rate = self._record.rate
        wanted = plan.settings
        if wanted == now:
            self._agreeing.clear()
            self._in_favour = 0
            return self._explore(sample, rate, here, bounds, evidence)
        first = self._is_copying(work) or work.here_s < _ALONE_FREE_S
        alone = self._explore_alone(sample, bounds, evidence) if first else None
        if alone is not None:
            return alone
        faster = plan.rate >= (1.0 + config.gain) * max(rate, here.rate, 1e-9)
        if faster and not self._forbids(now, wanted, sample.at):
            self._agreeing.clear()
            self._in_favour += 1
            if self._in_favour < self._votes(plan.rate / max(rate, 1e-9), sample.at):
                return None
            plan = self._cautiously(work, now, plan, bounds)
            if sample.local.queued_s is None:
                plan = half_way(work, now, plan, _idle(sample))
            if plan.settings == now or (plan.settings.depth < now.depth and self._record.head > _HEADED):
                return None  # workers in the place of batches that are known to be too few
            reason = self._why(now, plan.settings)
            self._remember_shortage(sample, plan.settings)
            return self._decide(sample, plan, reason, wording.faster(now, plan.settings, plan.rate, evidence), evidence)
        self._in_favour = 0
        return self._maybe_give_back(sample, plan, here, evidence) or self._explore(
            sample, rate, here, bounds, evidence
        )

    def _remember_shortage(self, sample: Sample, wanted: Settings) -> None:
        """What was enough for a while and is not now will be too little again, unless the work changes for good."""
        now = sample.settings
        if not now.workers:
            self._guard.remember("to in-process", sample.at)
        elif wanted.local > now.local > 0 and sample.at - self._asked_at >= _SHORT_AFTER_S:
            self._guard.remember("fewer local", sample.at, now.local)

    def _evidence(self, work: Estimate) -> dict[str, float]:
        return {
            "rate": self._record.rate,
            "stall": self._record.stall,
            "step_ms": work.step_s * 1e3,
            "worker_cpu_ms": work.cpu_s * 1e3,
            "worker_wait_ms": work.wait_s * 1e3,
            "cpus": work.cpus,
            "others": work.others,
        }

    def _forced(self, sample: Sample, work: Estimate, bounds: Bounds, evidence: Mapping[str, float]) -> Decision | None:
        """What cannot stay as it is: more memory than there is, or remote workers that there is no place for."""
        now = sample.settings
        allowed = self._allowed(sample, now)
        if allowed != now:
            plan = expect(work, allowed)
            free = float(sample.host.memory_free or 0)
            text = wording.too_much_memory(now, allowed, free)
            return self._decide(sample, plan, "limit", text, {**evidence, "memory_free": free})
        if self._lost >= _LOST_AFTER and now.remote > bounds.remote:
            plan = best(work, bounds, self.config)
            text = wording.no_place(now, plan.settings, sample.remote.unplaced, plan.rate)
            return self._decide(sample, plan, "lost", text, {**evidence, "unplaced": float(sample.remote.unplaced)})
        return None

    @staticmethod
    def _cautiously(work: Estimate, now: Settings, plan: Plan, bounds: Bounds) -> Plan:
        """A move that keeps what there is, where that is as fast: what is too much is given back later."""
        wanted = plan.settings
        if not wanted.workers:
            return plan
        kept = Settings(local=max(now.local, wanted.local), remote=max(now.remote, wanted.remote))
        depth = max(wanted.depth, min(now.depth, bounds.most_depth(wanted.local)))
        if kept.workers > wanted.workers and kept.workers <= bounds.most_depth(kept.local):
            kept = replace(kept, depth=min(depth, bounds.most_depth(kept.local)))
            if expect(work, kept).rate >= _DISAPPOINTED * plan.rate:
                return replace(plan, settings=kept)
        return replace(plan, settings=replace(wanted, depth=depth))

    def _at_most(self, plan: Plan) -> Plan:
        """Workers make the waiting shorter and nothing else: a rate beyond what is left without it is an error."""
        if not plan.settings.workers or len(self._record) < 2:
            return plan
        hope = self._record.rate / max(0.02, 1.0 - self._record.stall)
        return replace(plan, rate=min(plan.rate, max(self._record.rate, hope)))

    def _think(self, work: Estimate, bounds: Bounds, now: Settings) -> tuple[Plan, Plan]:
        """The best plan and what to expect of the present setting; thought out anew only if something has changed."""
        seconds = (work.step_s, work.step_s + work.step_cpu_s + work.own_s, work.far_s, work.far_s + work.travel_s)
        making = (work.cpu_s + work.wait_s, work.cpu_s + work.wait_s + 2.0 * work.cpu_s, work.here_s)
        ceilings = (1.0 / work.ceiling, 1.0 / work.far_ceiling)
        dearer = self._windows.dearer(work)
        rest = (work.cpus, work.cpus + work.others, *ceilings, 0.5 + self._windows.variation())
        errors = (dearer.cpu_s + dearer.wait_s, 10.0 + work.correlation, 10.0 + dearer.correlation)
        numbers = (*seconds, *making, *rest, *errors)
        depth = min(bounds.depth, DEEPEST_PER_WORKER * (bounds.local + bounds.remote))
        key = (replace(bounds, depth=depth, memory=_rounded(bounds.memory)), now)
        if self._thought is None or self._thought[0] != key or not _same(numbers, self._thought[1]):
            self._thought = (key, numbers, self._best(work, dearer, bounds, now), expect(work, now))
        return self._thought[2:]

    def _best(self, work: Estimate, dearer: Estimate, bounds: Bounds, now: Settings) -> Plan:
        """The best plan; one with less than now must do even if batches are dearer than they seem."""
        plan = best(work, bounds, self.config)
        less = (plan.settings.workers, plan.settings.depth) < (now.workers, now.depth)
        if not less or dearer == work or not plan.settings.workers:
            return plan
        careful = best(dearer, bounds, self.config).settings
        if (careful.workers, careful.depth) <= (plan.settings.workers, plan.settings.depth):
            return plan
        return expect(work, careful if (careful.workers, careful.depth) < (now.workers, now.depth) else now)

    def _look_for_ceilings(self, sample: Sample) -> None:
        """Remote workers that idle while the consumer starves, and batches that queue on the way from them: the link
        carries no more than what comes through."""
        jammed = self._windows.jammed > max(2.0, _JAMMED * sample.remote.running)
        self._jammed = self._jammed + 1 if jammed and self._record.wait > _STARVED else 0
        if self._jammed >= _JAMMED_AFTER and sample.at >= self._far_ceiling.until:
            self._far_ceiling.learn(self._record.far_rate(_JAMMED_AFTER), sample.at)

    def _explore(
        self, sample: Sample, rate: float, here: Plan, bounds: Bounds, evidence: Mapping[str, float]
    ) -> Decision | None:
        """Where batches are waited for and the model knows nothing better: a small step, now and then.

        Deeper, if later batches were ready or the model finds that the setting should be faster than it is; else, on a
        full machine, one worker less (caches, memory), and on another some more (waiting that overlaps).
        """
        now, record = sample.settings, self._record
        if not now.workers or record.stall < _STARVED or sample.remote.unplaced:
            return None
        alone = self._explore_alone(sample, bounds, evidence)
        if alone is not None or record.wait < _STARVED:
            return alone
        idle = record.busy < _BUSY  # else no depth helps: nobody has time to make more
        headed = idle and record.head > max(_HEADED, record.wait / 3) and record.batches >= 2 * LEAST_BATCHES
        deeper = replace(now, depth=min(bounds.most_depth(now.local), _DEEPER * now.depth, _DEEPEST * now.workers))
        known_why = sample.at < self._far_ceiling.until
        if headed and not known_why and deeper.depth > now.depth and not self._guard.forbids("deeper", sample.at):
            hope = rate * (1.0 + record.head / 2)
            plan = Plan(settings=deeper, rate=hope, stall=evidence["stall"], flow=here.flow)
            text = wording.out_of_turn(now, deeper, record.head, hope)
            return self._decide(sample, plan, "spread", text, {**evidence, "head": record.head})
        due = sample.at - max(self._explored_at, self._asked_at) >= self._pause_s
        if not due or sample.wait_s < _STARVED * sample.seconds:
            return None
        full = self._is_full(sample)
        disappointed = self._long.rate * (1.0 + 2.0 * self._uncertainty()) < _DISAPPOINTED * here.rate
        queueing = sample.at < self._ceiling.until  # more were too many: of fewer each may be faster
        if not disappointed and not queueing and not (full and self._windows.is_crowded):
            return None
        steps = [deeper] if disappointed and idle and not queueing else []
        step = 1 if full else max(1, now.local // 4)
        local = now.local - step if full or queueing else now.local + step
        if now.local and max(1, bounds.least_local) <= local <= bounds.local:
            deep = min(bounds.most_depth(local), max(now.depth, 2 * (local + now.remote)))
            if local + now.remote <= deep:
                steps.append(replace(now, local=local, depth=deep))
        wanted = next((s for s in steps if self._is_worth_a_trial(s, sample, queueing)), None)
        if wanted is None:
            return None
        plan = Plan(settings=wanted, rate=rate, stall=evidence["stall"], flow=here.flow)
        text = wording.trial(now, wanted, evidence)
        return self._decide(sample, plan, "explore", text, evidence)

    def _is_worth_a_trial(self, wanted: Settings, sample: Sample, queueing: bool) -> bool:
        """Whether the model thinks that it costs little to try. It knows nothing of what workers queue for."""
        now = sample.settings
        if wanted == now or self._forbids(now, wanted, sample.at):
            return False
        work = self._windows.estimate(sample.host.cpus, math.inf, math.inf)
        return queueing or expect(work, wanted).rate >= _HOPEFUL * expect(work, now).rate

    def _explore_alone(self, sample: Sample, bounds: Bounds, evidence: Mapping[str, float]) -> Decision | None:
        now = sample.settings
        alone = self._alone(sample, bounds) if now.workers and self._record.stall >= _STARVED else None
        if alone is None:
            return None
        return self._decide(
            sample, alone, "explore", wording.trial_in_process(now, alone.settings, alone.rate, evidence), evidence
        )

    def _alone(self, sample: Sample, bounds: Bounds) -> Plan | None:
        """Making batches in the training process, if a moment of it costs little and nobody knows that it is slower.

        What workers measure says little about it: there they are in each other's way for caches and memory, hand
        batches over, and have one thread each for what may use several. Least of all where batches are but copied.
        """
        now, record = sample.settings, self._record
        if bounds.least_local or bounds.least_remote or now.remote or self._forbids(now, Settings(depth=1), sample.at):
            return None
        work = self._windows.estimate(sample.host.cpus, math.inf, math.inf)
        enough = len(record) >= _ALONE_WINDOWS and record.seconds >= _ALONE_AFTER_S
        if not enough and (work.here_s > _ALONE_FREE_S or record.batches < _NEW or len(record) < 2):
            return None
        plan = expect(work, Settings(depth=1))
        cheap = work.here_s * LEAST_BATCHES < _ALONE_MOST_S and work.wait_s < _ALONE_MOST_WAITING * work.here_s
        least = _ALONE_LEAST_IF_FULL if self._is_full(sample) else _ALONE_LEAST
        least = _ALONE_LEAST_IF_COPYING if self._is_copying(work) else least
        return plan if cheap and plan.rate >= least * record.rate else None

    @staticmethod
    def _is_full(sample: Sample) -> bool:
        """Whether workers and training loop keep the CPUs busy."""
        return sample.local.cpu_s + sample.host.trainer_cpu_s > _FULL * sample.host.cpus * sample.seconds

    def _is_copying(self, work: Estimate) -> bool:
        return self._windows.batch_bytes > _COPYING * work.here_s

    def _forbids(self, old: Settings, new: Settings, now: float) -> bool:
        kind, value = _kind(old, new)
        return self._guard.forbids(kind, now, value)

    def _uncertainty(self) -> float:
        """Relative standard error of the rate under the present setting."""
        loss, error = self._long.loss(self._windows.slowest_s())
        return min(1.0, error / max(1e-9, self._windows.step_s + loss)) if math.isfinite(error) else 1.0

    def _votes(self, gain: float, now: float) -> int:
        """Windows in a row that must be for a change: one at first, or for much; more for little in steady work."""
        if self._windows.tickets < _NEW or gain > 2.0:
            return 1
        return (2 if gain > 1.2 else 3) - (now < _EARLY_S)

    def _maybe_give_back(
        self, sample: Sample, plan: Plan, here: Plan, evidence: Mapping[str, float]
    ) -> Decision | None:
        """Fewer would do: once enough windows in a row have said so."""
        now, wanted = sample.settings, plan.settings
        cheaper = wanted.workers <= now.workers - max(1, now.workers // 10) or self._saves_memory(now, wanted)
        less = self.config.gain if wanted.workers <= _MUCH_LESS * now.workers else self.config.stall_goal
        fast = plan.rate >= (1.0 - less) * max(here.rate, self._record.rate)
        if not cheaper or not fast or self._forbids(now, wanted, sample.at):
            self._agreeing.clear()
            return None
        self._agreeing.append(plan)
        beyond_doubt = plan.flow.capacity >= _AMPLE * plan.flow.demand and self._windows.variation() < _UNEVEN
        hasty = sample.at - self._asked_at < _SHRINK_S
        if len(self._agreeing) < self._agreement(plan) or hasty or not self._knows_enough(sample, beyond_doubt):
            return None
        plan = max(self._agreeing, key=lambda agreed: (agreed.settings.workers, agreed.settings.depth))
        if 0 < plan.settings.workers < now.workers:
            depth = max(plan.settings.depth, min(now.depth, _DEEPEST * plan.settings.workers))
            plan = replace(plan, settings=replace(plan.settings, depth=depth))
        self._agreeing.clear()
        text = wording.fewer(now, plan.settings, plan.rate, evidence)
        return self._decide(sample, plan, "too many", text, evidence)

    def _knows_enough(self, sample: Sample, beyond_doubt: bool) -> bool:
        """Whether the work has been seen for long enough to give anything back."""
        tickets = self._windows.tickets
        if self._windows.variation() < _UNEVEN:
            return tickets >= (LEAST_BATCHES if beyond_doubt else _NEW)
        since_s = sample.at - (self._changes[-1] if self._changes else 0.0)
        return since_s >= _CALM_S and tickets >= _CALM_TICKETS

    def _saves_memory(self, now: Settings, wanted: Settings) -> bool:
        """Whether as many workers would do with much less memory in batches that are drawn."""
        saved = (now.depth - wanted.depth) * self._windows.batch_bytes
        return wanted.workers == now.workers and 2 * wanted.depth <= now.depth and saved >= _WORTH_BYTES

    def _agreement(self, plan: Plan) -> int:
        """Windows that must agree that fewer will do: few where that is beyond doubt, many where times are spread."""
        least = self.config.shrink_after
        if (plan.flow.capacity >= _AMPLE * plan.flow.demand or not plan.settings.workers) and len(self._changes) < 2:
            return max(1, least // 2)
        return least * (2 if self._windows.variation() > _SPREAD else 1) * max(1, len(self._changes))

    def _why(self, old: Settings, new: Settings) -> Reason:
        if not new.workers:
            return "in-process"
        if new.workers == old.workers:
            return "spread" if new.depth != old.depth and new.local == old.local else "elsewhere"
        return "too few" if new.workers > old.workers else "too many"

    def _allowed(self, sample: Sample, wanted: Settings) -> Settings:
        """The nearest setting within the hard walls. What runs remotely may stay: it is lost when it is lost."""
        walls = self._guard.walls(sample, self._windows.batch_bytes)
        if wanted.local > sample.settings.local:  # beside what is held now, however little is to be held later
            beside = walls.memory - sample.held * walls.batch_bytes
            fits = int(beside / walls.worker_bytes) if walls.worker_bytes > 0 and math.isfinite(beside) else walls.local
            walls = replace(walls, local=min(walls.local, max(sample.settings.local, fits)))
        most = self.config.max_remote if self.config.max_remote is not None else MOST_WORKERS
        return replace(walls, remote=max(walls.remote, min(sample.settings.remote, most))).within(wanted)

    def _decide(
        self, sample: Sample, plan: Plan, reason: Reason, text: str, evidence: Mapping[str, float]
    ) -> Decision | None:
        """The one gate through which every change goes; None if the walls leave nothing of it."""
        allowed = self._allowed(sample, plan.settings)
        if allowed == sample.settings:
            return None
        if allowed != plan.settings:
            plan = expect(self._windows.estimate(sample.host.cpus, math.inf, math.inf), allowed)
            text = wording.cut(text, allowed)
        if self._changed:
            text, self._changed = wording.changed(self._changed, text), ()
        decision = Decision(
            at=sample.at,
            old=sample.settings,
            new=plan.settings,
            reason=reason,
            text=text,
            evidence=dict(evidence),
            predicted_rate=plan.rate,
            predicted_stall=plan.stall,
        )
        self.decisions.append(decision)
        record = self._record
        needed = max(LEAST_BATCHES, 2 * min(sample.settings.depth, 2 * sample.settings.workers + sample.ready))
        skipped = 0 if plan.settings.workers else LEAST_BATCHES // 2  # memory is touched for the first time
        self._trial = Trial(decision, record, needed, skipped) if reason != "undo" else None
        self._record = Record()
        self._long.clear()
        self._asked_at = sample.at
        self._in_favour = self._lost = 0
        return decision


def _idle(sample: Sample) -> float:
    """CPUs that nobody uses."""
    used = (sample.local.cpu_s + sample.host.trainer_cpu_s) / max(1e-9, sample.seconds)
    return max(0.0, sample.host.cpus - used - sample.host.others)


def _rounded(memory: float) -> float:
    """Memory to some five percent: what is free varies all the time."""
    return memory if math.isinf(memory) or memory <= 0 else round(math.log(memory) / _SAME)


def _same(now: tuple[float, ...], before: tuple[float, ...]) -> bool:
    return all(a == b or abs(a - b) <= _SAME * abs(b) for a, b in zip(now, before, strict=True))


def _kind(old: Settings, new: Settings) -> tuple[str, int]:
    """What sort of change it is, and to which number, for remembering."""
    if not new.workers or not old.workers:
        return ("to in-process" if not new.workers else "to workers"), 0
    for lane in ("remote", "local"):
        change = getattr(new, lane) - getattr(old, lane)
        if change:
            return f"{'more' if change > 0 else 'fewer'} {lane}", getattr(new, lane)
    return ("deeper" if new.depth > old.depth else "shallower"), new.depth
