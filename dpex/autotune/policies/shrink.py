"""Give back capacity that serves nothing, once enough windows in a row say so. PURE."""

from __future__ import annotations

from dataclasses import replace

from dpex.autotune import wording
from dpex.autotune.constants.judging import EVALUATION
from dpex.autotune.constants.trying import PREFETCH
from dpex.autotune.constants.worker_count import SHRINK
from dpex.autotune.planner import Plan
from dpex.autotune.policies.base import Suggestion
from dpex.autotune.situation import Situation
from dpex.autotune.types import Settings


class Shrink:
    """The largest of the settings that the windows that agree found to be enough."""

    name = "shrink"

    def suggest(self, state: Situation) -> Suggestion | None:
        """See `Policy.suggest`."""
        best = state.outlook.best
        if best.settings == state.now or not _is_cheaper(state, best.settings) or not _is_as_fast(state, best):
            return None
        plans = (*state.agreed.get(self.name, ()), best)
        plan = _with_prefetch(state.now, max(plans, key=lambda agreed: _size(agreed.settings)))
        return Suggestion(
            plan=plan,
            towards=best,
            reason="too many",
            text=wording.fewer(state.now, plan.settings, plan.rate, state.evidence),
            evidence=state.evidence,
            votes=_votes(state, best),
            put_off=_put_off(state, best),
        )


def _size(settings: Settings) -> tuple[int, int]:
    return settings.workers, settings.prefetch


def _is_cheaper(state: Situation, wanted: Settings) -> bool:
    """Whether it saves a tenth of the workers at least, or much memory."""
    now = state.now
    return wanted.workers <= now.workers - max(1, now.workers // SHRINK.steps) or _saves_memory(state, wanted)


def _saves_memory(state: Situation, wanted: Settings) -> bool:
    """Whether as many workers would do with much less memory in batches that are drawn."""
    now = state.now
    saved = (now.prefetch - wanted.prefetch) * state.batch_bytes
    is_half = wanted.workers == now.workers and 2 * wanted.prefetch <= now.prefetch
    return is_half and saved >= SHRINK.worth_bytes


def _is_as_fast(state: Situation, plan: Plan) -> bool:
    """Whether so little is lost by it. A little more may be lost where much is saved."""
    is_much = plan.settings.workers <= SHRINK.much_less * state.now.workers
    loss = state.config.gain if is_much else state.config.wait_goal
    return plan.rate >= (1.0 - loss) * max(state.outlook.here.rate, state.recent.rate)


def _with_prefetch(now: Settings, plan: Plan) -> Plan:
    """Fewer workers keep the prefetch: what is too much of that is given back later."""
    wanted = plan.settings
    if not 0 < wanted.workers < now.workers:
        return plan
    prefetch = max(wanted.prefetch, min(now.prefetch, PREFETCH.most_per_worker * wanted.workers))
    return replace(plan, settings=replace(wanted, prefetch=prefetch))


def _is_ample(plan: Plan) -> bool:
    """Whether the capacity is far beyond what the training loop asks for."""
    return plan.flow.capacity >= SHRINK.ample * plan.flow.demand


def _votes(state: Situation, plan: Plan) -> int:
    """Few where it is beyond doubt, many where times are spread, and more where the work changes again and again."""
    least, changes = state.config.shrink_after, len(state.changed_at)
    if (_is_ample(plan) or not plan.settings.workers) and changes < SHRINK.restless:
        return max(1, least // 2)
    return least * (2 if state.variation > SHRINK.spread else 1) * max(1, changes)


def _put_off(state: Situation, plan: Plan) -> str:
    if state.at - state.asked_at < SHRINK.pause_s:
        return wording.JUST_CHANGED
    return "" if _is_seen_enough(state, plan) else wording.NOT_SEEN_ENOUGH


def _is_seen_enough(state: Situation, plan: Plan) -> bool:
    """Whether the work has been seen for so long that a slow stretch of it has had its turn."""
    if state.variation < SHRINK.uneven:
        return state.tickets >= (EVALUATION.least_batches if _is_ample(plan) else SHRINK.new_batches)
    since_s = state.at - (state.changed_at[-1] if state.changed_at else 0.0)
    return since_s >= SHRINK.calm_s and state.tickets >= SHRINK.calm_batches
