"""Let workers go on behind a single batch that takes far longer than all others. PURE."""

from __future__ import annotations

from dpex.autotune import wording
from dpex.autotune.planner import expect
from dpex.autotune.policies.base import Suggestion
from dpex.autotune.policies.prefetch import deeper
from dpex.autotune.situation import Situation


class Straggler:
    """A greater prefetch at once: no trial can tell anything before that batch is there."""

    name = "straggler"

    def suggest(self, state: Situation) -> Suggestion | None:
        """See `Policy.suggest`."""
        if not state.held_up_s:
            return None
        now, wanted = state.now, deeper(state)
        return Suggestion(
            plan=expect(state.unlimited, wanted),
            reason="spread",
            text=wording.held_up(now, wanted, state.held_up_s),
            evidence=state.evidence,
            put_off="" if wanted.prefetch > now.prefetch else wording.NO_ROOM_FOR_PREFETCH,
            is_forced=True,
            is_exclusive=True,
        )
