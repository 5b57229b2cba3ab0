"""What cannot stay as it is: more memory than there is, or remote workers that there is no place for, or that another
loader needs more. PURE."""

from __future__ import annotations

from dpex.autotune import wording
from dpex.autotune.constants.worker_count import WALLS
from dpex.autotune.planner import Plan, best, expect
from dpex.autotune.policies.base import Suggestion
from dpex.autotune.situation import Situation
from dpex.autotune.types import Reason


class Walls:
    """Back within what limits and memory allow."""

    name = "walls"

    def suggest(self, state: Situation) -> Suggestion | None:
        """See `Policy.suggest`."""
        now, allowed = state.now, state.within_walls(state.now)
        if allowed == now:
            return None
        granted = state.sample.remote.granted
        if granted is not None and allowed.remote < now.remote:
            return _without_what_others_need(state, granted)
        free = float(state.sample.machine.memory_free or 0)
        text = wording.too_much_memory(now, allowed, free)
        return _forced(state, expect(state.work, allowed), "limit", text, memory_free=free)


def _without_what_others_need(state: Situation, granted: int) -> Suggestion:
    plan = best(state.work, state.bounds, state.config)
    text = wording.share_is(state.now, plan.settings, granted, plan.rate)
    return _forced(state, plan, "limit", text, granted=float(granted))


class NoPlace:
    """Without the remote workers that the cluster has no place for."""

    name = "no place"

    def suggest(self, state: Situation) -> Suggestion | None:
        """See `Policy.suggest`."""
        if state.unplaced_windows < WALLS.unplaced_windows or state.now.remote <= state.bounds.remote:
            return None
        plan, unplaced = best(state.work, state.bounds, state.config), state.sample.remote.unplaced
        text = wording.no_place(state.now, plan.settings, unplaced, plan.rate)
        return _forced(state, plan, "lost", text, unplaced=float(unplaced))


def _forced(state: Situation, plan: Plan, reason: Reason, text: str, **evidence: float) -> Suggestion:
    return Suggestion(plan=plan, reason=reason, text=text, evidence={**state.evidence, **evidence}, is_forced=True)
