"""Move to settings that the model finds clearly faster. PURE."""

from __future__ import annotations

import math
from dataclasses import replace

from dpex.autotune import wording
from dpex.autotune.constants.worker_count import GROW
from dpex.autotune.failed_changes import TO_IN_PROCESS, Change
from dpex.autotune.planner import Plan, expect, half_way
from dpex.autotune.policies.base import Suggestion
from dpex.autotune.policies.shrink import Shrink
from dpex.autotune.situation import Situation
from dpex.autotune.types import Reason, Settings

_RATE_OF_NOTHING = 1e-9
"""Batches per second; what divides by a rate takes no less."""


class Grow:
    """The whole way in one step, or half of it where nobody can tell who queues for a CPU."""

    name = "grow"

    def suggest(self, state: Situation) -> Suggestion | None:
        """See `Policy.suggest`."""
        now, best = state.now, state.outlook.best
        rate = max(state.recent.rate, _RATE_OF_NOTHING)
        least = (1.0 + state.config.gain) * max(rate, state.outlook.here.rate)
        if best.settings == now or best.rate < least:
            return None
        plan = _step(state)
        return Suggestion(
            plan=plan,
            towards=best,
            reason=_reason(now, plan.settings),
            text=wording.faster(now, plan.settings, plan.rate, state.evidence),
            evidence=state.evidence,
            votes=_votes(state, best.rate / rate),
            put_off=_put_off(state, plan.settings),
            is_exclusive=True,
            contradicts=Shrink.name,
            disproves=_shortage(state, plan.settings),
        )


def _votes(state: Situation, gain: float) -> int:
    """One window is enough at first, or for much; more must agree for little in steady work."""
    if state.tickets < GROW.new_batches or gain > GROW.great_gain:
        return 1
    votes = GROW.votes if gain > GROW.clear_gain else GROW.votes_for_little
    return votes - (state.at < GROW.early_s)


def _step(state: Situation) -> Plan:
    plan = _not_too_far(state, _with_what_there_is(state))
    if state.sample.local.queued_s is not None:
        return plan
    return half_way(state.work, state.now, plan, _idle_cpus(state))


def _with_what_there_is(state: Situation) -> Plan:
    """The plan with all workers that there are, where that is as fast: what is too much is given back later."""
    work, now, plan, bounds = state.work, state.now, state.outlook.best, state.bounds
    wanted = plan.settings
    if not wanted.workers:
        return plan
    prefetch = max(wanted.prefetch, min(now.prefetch, bounds.most_prefetch(wanted.local)))
    kept = Settings(local=max(now.local, wanted.local), remote=max(now.remote, wanted.remote))
    most = bounds.most_prefetch(kept.local)
    if wanted.workers < kept.workers <= most:
        kept = replace(kept, prefetch=min(prefetch, most))
        if expect(work, kept).rate >= GROW.as_fast * plan.rate:
            return replace(plan, settings=kept)
    return replace(plan, settings=replace(wanted, prefetch=prefetch))


def _not_too_far(state: Situation, plan: Plan) -> Plan:
    """The plan, or as much of it as is asked for at once where batches mostly wait: local workers first, which start
    sooner. From there the rest of the way is judged anew, by what it brought."""
    wanted, now = plan.settings, state.now
    most = round(GROW.farther * max(1, now.workers))
    if wanted.workers <= most or state.work.waiting < GROW.mostly_waits:
        return plan
    local = min(wanted.local, max(now.local, most - now.remote))
    remote = min(wanted.remote, max(now.remote, most - local))
    prefetch = math.ceil(wanted.prefetch * (local + remote) / wanted.workers)
    prefetch = max(prefetch, min(now.prefetch, wanted.prefetch))
    return expect(state.work, Settings(local=local, remote=remote, prefetch=prefetch))


def _idle_cpus(state: Situation) -> float:
    """CPUs that nobody uses."""
    machine, sample = state.sample.machine, state.sample
    used = (sample.local.cpu_s + machine.trainer_cpu_s) / max(1e-9, sample.seconds)
    return max(0.0, machine.cpus - used - machine.others)


def _put_off(state: Situation, wanted: Settings) -> str:
    if wanted == state.now:
        return wording.NO_STEP
    is_short = wanted.prefetch < state.now.prefetch and state.recent.head > GROW.out_of_turn
    return wording.PREFETCH_IS_NEEDED if is_short else ""


def _reason(old: Settings, new: Settings) -> Reason:
    if not new.workers:
        return "in-process"
    if new.workers == old.workers:
        return "spread" if new.prefetch != old.prefetch and new.local == old.local else "elsewhere"
    return "too few" if new.workers > old.workers else "too many"


def _shortage(state: Situation, wanted: Settings) -> Change | None:
    """What was enough for a while and is not now will be too little again, unless the work changes for good."""
    now = state.now
    if not now.workers:
        return TO_IN_PROCESS
    lasted = state.at - state.asked_at >= GROW.lasted_s
    return Change("fewer local", now.local) if wanted.local > now.local > 0 and lasted else None
