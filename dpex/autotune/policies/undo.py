"""Go back from a decision that did not help. PURE."""

from __future__ import annotations

from dpex.autotune import wording
from dpex.autotune.evaluation import FailedTrial
from dpex.autotune.model import Flow
from dpex.autotune.planner import Plan
from dpex.autotune.policies.base import Suggestion
from dpex.autotune.situation import Situation
from dpex.autotune.types import Settings


class Undo:
    """Back to the settings before, or, where workers queue, to as many of them as get as much."""

    name = "undo"

    def suggest(self, state: Situation) -> Suggestion | None:
        """See `Policy.suggest`."""
        failed = state.failed
        if failed is None:
            return None
        back = failed.knee or failed.decision.old
        since = failed.rate_since
        plan = Plan(
            settings=back,
            rate=failed.rate_before,
            wait=failed.lost_before,
            flow=Flow(demand=since, capacity=since, slowdown=1.0),
        )
        evidence = {"rate_before": failed.rate_before, "rate_after": since}
        return Suggestion(plan=plan, reason="undo", text=_text(failed, back), evidence=evidence, is_forced=True)


def _text(failed: FailedTrial, back: Settings) -> str:
    tried, rates = failed.decision.new, (failed.rate_before, failed.rate_since)
    if failed.knee is not None:
        return wording.queueing(tried, back, (failed.cost_before_s, failed.cost_since_s), rates)
    return wording.undone(tried, back, failed.gain, failed.error, (*rates, failed.decision.predicted_rate))
