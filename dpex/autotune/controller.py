"""Decides: computes the wanted setting from what was measured, moves there in one step, judges, undoes, remembers.

A decision is judged once what it asked for is running. What did not help is undone and not tried again at once; a
growth that brought less than it should shows a ceiling that lies elsewhere (storage, link, memory), which the model
knows from then on. Capacity is given back only after several windows that agree.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

from dpex.autotune.config import AutotuneConfig
from dpex.autotune.guard import Guard
from dpex.autotune.model import Estimate, Flow
from dpex.autotune.policy import DEEPEST_PER_WORKER, Bounds, Plan, best, expect
from dpex.autotune.types import Decision, Outcome, Reason, Sample, Settings
from dpex.autotune.window import Windows

_TRIAL_BATCHES = 24
_PATIENCE_S = 8.0
_BEFORE = 4
_NEW = 100
_IDLE = 0.7
_STARVED = 0.05
_DISAPPOINTING = 0.8
_SPREAD = 0.5
_ROOMY = 4
_SAME = 0.05
_DISAPPOINTED = 0.96
_FULL = 0.85


@dataclass
class _Trial:
    """A decision that is not judged yet: how it was before, and what came in since it took effect."""

    decision: Decision
    rate_before: float
    stall_before: float
    batches: int = 0
    seconds: float = 0.0
    lost_s: float = 0.0


class Controller:
    """See the module. ``start``: the setting to begin with."""

    def __init__(self, config: AutotuneConfig, start: Settings) -> None:
        self.config = config
        self.decisions: list[Decision] = []
        self._settings = start
        self._windows = Windows()
        self._guard = Guard(config)
        self._trial: _Trial | None = None
        self._settled_at = 0.0
        self._asked_at = 0.0
        self._was_running = -1
        self._agreeing: list[Plan] = []
        self._in_favour = 0
        self._thought: tuple[tuple[Bounds, Settings], tuple[float, ...], Plan, Plan] | None = None
        self._recent: list[tuple[float, float, float]] = []
        self._ceiling = self._far_ceiling = math.inf
        self._ceiling_until = self._far_ceiling_until = 0.0
        self._explored_at = 0.0

    def begin(self) -> Settings:
        """The setting to begin with."""
        return self._settings

    def step(self, sample: Sample) -> Decision | None:
        """Take a window in; a change of settings, or None."""
        self._settings = sample.settings
        if not sample.batches and not sample.wait_s:
            return None  # the trainer was elsewhere: a validation, a checkpoint
        if self._windows.add(sample):
            self._reopen()
        if not self._is_settled(sample) or not self._windows.known:
            return None
        self._look_for_ceilings(sample)
        self._recent.append((sample.seconds, sample.batches, sample.wait_s + sample.own_s))
        del self._recent[:-_BEFORE]
        if self._trial is None:
            return self._plan(sample)
        judged, undoing = self._judge(self._trial, sample)
        return self._plan(sample) if judged and undoing is None else undoing

    # -- settling --------------------------------------------------------------------------------------------------

    def _reopen(self) -> None:
        self._guard.forget()
        self._ceiling = self._far_ceiling = math.inf
        self._trial = None
        self._agreeing.clear()
        self._recent.clear()

    def _is_settled(self, sample: Sample) -> bool:
        """Whether what was asked for is running, or will not be for a while, and the window saw nothing else."""
        running = sample.local.running + sample.remote.running
        if running != self._was_running:
            self._was_running = running
            self._settled_at = sample.at
            self._recent.clear()
        missing = sample.settings.workers - sample.remote.unplaced > running
        if missing and (self._trial is not None or sample.at - self._asked_at < _PATIENCE_S):
            return sample.at - self._asked_at > 10 * _PATIENCE_S
        return sample.at - sample.seconds >= self._settled_at - 1e-9

    # -- judging ---------------------------------------------------------------------------------------------------

    def _judge(self, trial: _Trial, sample: Sample) -> tuple[bool, Decision | None]:
        """Look at what the last decision brought, once enough is known; undo it if it was no good."""
        trial.batches += sample.batches
        trial.seconds += sample.seconds
        trial.lost_s += sample.wait_s + sample.own_s
        needed = _TRIAL_BATCHES * (1.0 + 4.0 * self._windows.variation() ** 2)
        if trial.batches < needed and trial.seconds < (2.0 if trial.batches < _TRIAL_BATCHES else 10.0):
            return False, None
        self._trial = None
        decision = trial.decision
        rate = trial.batches / trial.seconds
        stall = min(1.0, trial.lost_s / trial.seconds)
        kept = self._was_good(trial, rate, stall)
        index = len(self.decisions) - 1
        self.decisions[index] = replace(decision, outcome=Outcome(rate=rate, stall=stall, kept=kept, at=sample.at))
        if decision.reason == "explore":
            self._explored_at = sample.at
        self._learn_ceiling(trial, rate, sample)
        return True, None if kept else self._undo(sample, trial, rate)

    def _learn_ceiling(self, trial: _Trial, rate: float, sample: Sample) -> None:
        """A growth that helps far less than it should, even by what is known since: something else holds here.

        Spread service times make rates too uncertain to say so.
        """
        decision = trial.decision
        grew = decision.new.workers > decision.old.workers
        if grew and sample.at >= self._far_ceiling_until and self._windows.variation() < _SPREAD:
            work = self._windows.estimate(sample.host.cpus, math.inf, math.inf)
            if rate < _DISAPPOINTING * expect(work, decision.new).rate:
                self._ceiling = max(rate, trial.rate_before)
                self._ceiling_until = sample.at + self.config.remember_s

    def _was_good(self, trial: _Trial, rate: float, stall: float) -> bool:
        decision, gain = trial.decision, self.config.gain
        if decision.reason == "explore":
            needed = 0.25 * gain if decision.new.workers < decision.old.workers else gain
            return rate >= trial.rate_before * (1.0 + needed)
        if decision.reason in ("start", "undo", "changed", "limit", "lost") or not trial.rate_before:
            return True
        if decision.new.workers < decision.old.workers or decision.new.depth < decision.old.depth:
            return rate >= (1.0 - gain) * trial.rate_before
        if stall <= self.config.stall_goal:
            return rate >= (1.0 - gain) * trial.rate_before
        hoped = decision.predicted_rate / trial.rate_before - 1.0
        return rate >= trial.rate_before * (1.0 + min(gain, hoped / 4))

    def _undo(self, sample: Sample, trial: _Trial, rate: float) -> Decision:
        decision = trial.decision
        kind = _kind(decision.old, decision.new)
        self._guard.remember(kind, sample.at)
        change = f"{(rate / trial.rate_before - 1) * 100:+.0f} %" if trial.rate_before else "nothing"
        text = f"back to {decision.old}: {decision.new} brought {change}, expected {decision.predicted_rate:.3g}/s"
        evidence = {"rate_before": trial.rate_before, "rate_after": rate}
        plan = Plan(
            settings=decision.old,
            rate=trial.rate_before,
            stall=trial.stall_before,
            flow=Flow(demand=rate, capacity=rate, slowdown=1.0),
        )
        return self._decide(sample, plan, "undo", text, evidence)

    # -- planning --------------------------------------------------------------------------------------------------

    def _plan(self, sample: Sample) -> Decision | None:
        now, config = sample.settings, self.config
        work = self._windows.estimate(sample.host.cpus, self._ceiling, self._far_ceiling)
        waiting = work.wait_s / max(1e-9, work.wait_s + work.cpu_s)
        bounds = self._guard.bounds(sample, self._windows.batch_bytes, waiting)
        if now.depth > bounds.depth:
            plan = expect(work, replace(now, depth=bounds.depth))
            text = f"depth {bounds.depth} instead of {now.depth}: more would not leave the trainer its memory"
            return self._decide(sample, plan, "limit", text, {"memory_free": float(sample.host.memory_free or 0)})
        plan, here = self._think(work, bounds, now)
        rate = self._measured_rate()
        wanted = plan.settings
        evidence = {
            "rate": rate,
            "stall": self._measured_stall(),
            "step_ms": work.step_s * 1e3,
            "worker_cpu_ms": work.cpu_s * 1e3,
            "worker_wait_ms": work.wait_s * 1e3,
            "cpus": work.cpus,
        }
        if wanted == now:
            self._agreeing.clear()
            self._in_favour = 0
            return self._explore(sample, rate, here, bounds, evidence)
        faster = plan.rate >= (1.0 + config.gain) * max(rate, here.rate, 1e-9)
        kind = _kind(now, wanted)
        if faster and not self._guard.forbids(kind, sample.at):
            self._agreeing.clear()
            self._in_favour += 1
            if self._in_favour < self._votes(plan.rate / max(rate, 1e-9)):
                return None
            if wanted.remote > now.remote and 0 < wanted.local < now.local:
                wanted = replace(wanted, local=now.local)  # until the remote ones are there
            if wanted.workers:
                wanted = replace(wanted, depth=max(wanted.depth, min(now.depth, bounds.depth)))
            if wanted == now:
                return None
            plan = replace(plan, settings=wanted)
            return self._decide(sample, plan, self._why(now, wanted), _explain(now, plan, evidence), evidence)
        self._in_favour = 0
        return self._maybe_give_back(sample, plan, here, evidence) or self._explore(
            sample, rate, here, bounds, evidence
        )

    def _think(self, work: Estimate, bounds: Bounds, now: Settings) -> tuple[Plan, Plan]:
        """The best plan and what to expect of the present setting; thought out anew only if something has changed."""
        about = (work.step_s, work.step_cpu_s + work.own_s, work.cpu_s, work.wait_s, work.far_s, work.here_s)
        numbers = (*about, work.cpus, work.ceiling, work.far_ceiling, self._windows.variation())
        depth = min(bounds.depth, DEEPEST_PER_WORKER * (bounds.local + bounds.remote))
        key = (replace(bounds, depth=depth), now)
        if self._thought is None or self._thought[0] != key or not _same(numbers, self._thought[1]):
            self._thought = (key, numbers, best(work, bounds, self.config), expect(work, now))
        return self._thought[2:]

    def _look_for_ceilings(self, sample: Sample) -> None:
        """Remote workers that idle while the consumer starves: what they make does not come through any faster."""
        if sample.at >= self._ceiling_until:
            self._ceiling = math.inf
        if sample.at >= self._far_ceiling_until:
            self._far_ceiling = math.inf
        remote = sample.remote
        idle = remote.busy_s < _IDLE * remote.running * sample.seconds
        starved = sample.wait_s > _STARVED * sample.seconds and sample.ready <= 1
        if remote.running and remote.tickets and idle and starved and sample.in_flight > sample.settings.local:
            self._far_ceiling = remote.tickets / sample.seconds
            self._far_ceiling_until = sample.at + self.config.remember_s

    def _explore(
        self, sample: Sample, rate: float, here: Plan, bounds: Bounds, evidence: Mapping[str, float]
    ) -> Decision | None:
        """Where batches are waited for and the model knows nothing better: a small step, now and then.

        Deeper, if the model finds that the setting should be faster than it is; else, on a full machine, one worker
        less (caches, memory), and on another some more (waiting that overlaps).
        """
        now = sample.settings
        due = sample.at - max(self._explored_at, self._asked_at) >= self.config.explore_s
        if not due or sample.wait_s < _STARVED * sample.seconds or not now.workers:
            return None
        full = sample.local.cpu_s + sample.host.trainer_cpu_s > _FULL * sample.host.cpus * sample.seconds
        disappointed = rate < _DISAPPOINTED * here.rate
        if not disappointed and not (full and self._windows.is_crowded):
            return None
        steps = [replace(now, depth=min(bounds.depth, 2 * now.depth))] if disappointed else []
        local = now.local - 1 if full else now.local + max(1, now.local // 4)
        if now.local and max(1, bounds.least_local) <= local <= bounds.local and local + now.remote <= bounds.depth:
            steps.append(replace(now, local=local, depth=min(bounds.depth, max(now.depth, 2 * (local + now.remote)))))
        wanted = next((s for s in steps if s != now and not self._guard.forbids(_kind(now, s), sample.at)), None)
        if wanted is None:
            return None
        plan = Plan(settings=wanted, rate=rate, stall=evidence["stall"], flow=here.flow)
        text = f"{wanted} instead of {now}: a trial, as {evidence['stall'] * 100:.0f} % of the time is lost to loading"
        return self._decide(sample, plan, "explore", text, evidence)

    def _votes(self, gain: float) -> int:
        """Windows in a row that must be for a change: one at first, or for much; more for little in steady work."""
        if self._windows.tickets < _NEW or gain > 2.0:
            return 1
        return 2 if gain > 1.2 else 3

    def _maybe_give_back(
        self, sample: Sample, plan: Plan, here: Plan, evidence: Mapping[str, float]
    ) -> Decision | None:
        """Fewer would do: once enough windows in a row have said so."""
        now, wanted = sample.settings, plan.settings
        cheaper = wanted.workers <= now.workers - max(1, now.workers // 10)
        fast = plan.rate >= (1.0 - self.config.gain) * max(here.rate, self._measured_rate())
        if not cheaper or not fast or self._guard.forbids(_kind(now, wanted), sample.at):
            self._agreeing.clear()
            return None
        self._agreeing.append(plan)
        if len(self._agreeing) < self.config.shrink_after * (3 if self._windows.variation() > _SPREAD else 1):
            return None
        plan = max(self._agreeing, key=lambda agreed: agreed.settings.workers)
        if plan.settings.workers and now.depth <= _ROOMY * plan.settings.depth:
            plan = replace(plan, settings=replace(plan.settings, depth=max(now.depth, plan.settings.depth)))
        self._agreeing.clear()
        text = f"{plan.settings} instead of {now}: as fast ({plan.rate:.3g}/s), and the rest is free for others"
        return self._decide(sample, plan, "too many", text, evidence)

    def _why(self, old: Settings, new: Settings) -> Reason:
        if not new.workers:
            return "in-process"
        if new.workers == old.workers:
            return "spread" if new.depth != old.depth and new.local == old.local else "elsewhere"
        return "too few" if new.workers > old.workers else "too many"

    def _decide(self, sample: Sample, plan: Plan, reason: Reason, text: str, evidence: Mapping[str, float]) -> Decision:
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
        self._trial = _Trial(decision, self._measured_rate(), self._measured_stall())
        self._asked_at = sample.at
        self._in_favour = 0
        self._recent.clear()
        return decision

    # -- what was measured -------------------------------------------------------------------------------------------

    def _measured_rate(self) -> float:
        seconds = sum(seconds for seconds, _, _ in self._recent)
        return sum(batches for _, batches, _ in self._recent) / seconds if seconds else 0.0

    def _measured_stall(self) -> float:
        seconds = sum(seconds for seconds, _, _ in self._recent)
        return min(1.0, sum(lost for _, _, lost in self._recent) / seconds) if seconds else 0.0


def _same(now: tuple[float, ...], before: tuple[float, ...]) -> bool:
    return all(a == b or abs(a - b) <= _SAME * abs(b) for a, b in zip(now, before, strict=True))


def _kind(old: Settings, new: Settings) -> str:
    """What sort of change it is, for remembering."""
    if not new.workers or not old.workers:
        return "to in-process" if not new.workers else "to workers"
    for lane in ("remote", "local"):
        change = getattr(new, lane) - getattr(old, lane)
        if change:
            return f"{'more' if change > 0 else 'fewer'} {lane}"
    return "deeper" if new.depth > old.depth else "shallower"


def _explain(old: Settings, plan: Plan, evidence: Mapping[str, float]) -> str:
    return (
        f"{plan.settings} instead of {old}: {evidence['stall'] * 100:.0f} % of the time is lost to loading; a batch "
        f"takes {evidence['worker_cpu_ms']:.3g} ms of CPU and {evidence['worker_wait_ms']:.3g} ms of waiting, a step "
        f"{evidence['step_ms']:.3g} ms; expected {plan.rate:.3g}/s instead of {evidence['rate']:.3g}/s"
    )
