"""Ask the policies in their order, veto what may not be done, and say why. PURE.

A suggestion is followed unless one of these objections holds, which are looked at in this order:

1. Such a change failed lately, or asks for more although NVML says that the GPU is busy. The next policy is asked.
2. Too few windows in a row have wanted it. A policy that wants nothing loses its votes.
3. The policy itself puts it off.
4. Limits, memory and the cluster leave nothing of it. Where they leave a part, that part is done.

After objections 2 to 4 the next policy is asked, unless the suggestion is exclusive: then nothing is done in this
window. The votes for growth are counted anew after any change of the settings, those for giving back after a change of
the work: a trial that came between says nothing against giving back.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from dpex.autotune import wording
from dpex.autotune.failed_changes import FailedChanges, change
from dpex.autotune.planner import Plan, expect
from dpex.autotune.policies import POLICIES
from dpex.autotune.policies.base import Policy, Suggestion
from dpex.autotune.policies.grow import Grow
from dpex.autotune.policies.shrink import Shrink
from dpex.autotune.situation import Situation
from dpex.autotune.types import Settings, Veto

_MOST_VOTES = 1000
"""Windows that are remembered: suggestions may be put off for hours."""


class PolicyManager:
    """See the module. ``vetoes``: what was objected to when the policies were asked last."""

    def __init__(self, failures: FailedChanges) -> None:
        self.vetoes: tuple[Veto, ...] = ()
        self._failures = failures
        self._agreed: dict[str, tuple[Plan, ...]] = {}

    @property
    def agreed(self) -> Mapping[str, tuple[Plan, ...]]:
        """What each policy wanted in the windows before, as long as it wanted something in all of them."""
        return dict(self._agreed)

    def work_changed(self) -> None:
        """Fewer workers that would have been enough may not be any more."""
        self._withdraw(Shrink.name)

    def ask(self, state: Situation, policies: Sequence[Policy] = POLICIES) -> Suggestion | None:
        """The first suggestion to which there is no objection; its plan is within all limits."""
        self.vetoes = ()
        for policy in policies:
            suggestion = policy.suggest(state)
            if suggestion is None or self._is_refused(policy, suggestion, state):
                self._withdraw(policy.name)
                continue
            chosen = self._considered(policy, suggestion, state)
            if chosen is not None or suggestion.is_exclusive:
                return chosen
        return None

    # -- objections ----------------------------------------------------------------------------------------------------

    def _is_refused(self, policy: Policy, suggestion: Suggestion, state: Situation) -> bool:
        return self._failed_lately(policy, suggestion, state) or self._serves_nobody(policy, suggestion, state)

    def _serves_nobody(self, policy: Policy, suggestion: Suggestion, state: Situation) -> bool:
        wanted = suggestion.wanted.settings
        is_more = (wanted.workers, wanted.prefetch) > (state.now.workers, state.now.prefetch)
        if suggestion.is_forced or not is_more or not state.is_gpu_busy:
            return False
        self._veto(policy, wanted, wording.gpu_is_busy(state.evidence))
        return True

    def _failed_lately(self, policy: Policy, suggestion: Suggestion, state: Situation) -> bool:
        wanted = suggestion.wanted.settings
        left_s = 0.0 if suggestion.is_forced else self._failures.refused_for_s(change(state.now, wanted), state.at)
        if left_s > 0:
            self._veto(policy, wanted, wording.failed_lately(left_s))
        return left_s > 0

    def _considered(self, policy: Policy, suggestion: Suggestion, state: Situation) -> Suggestion | None:
        wanted = suggestion.wanted
        votes = (*self._agreed.get(policy.name, ()), wanted)[-_MOST_VOTES:]
        self._agreed[policy.name] = votes
        self._withdraw(suggestion.contradicts)
        too_few = wording.votes(len(votes), suggestion.votes) if len(votes) < suggestion.votes else ""
        if too_few or suggestion.put_off:
            self._veto(policy, wanted.settings, too_few or suggestion.put_off)
            return None
        if not suggestion.is_exclusive:
            self._withdraw(policy.name)
        if suggestion.disproves is not None:
            self._failures.remember(suggestion.disproves, state.at)
        return self._within_walls(policy, suggestion, state)

    def _within_walls(self, policy: Policy, suggestion: Suggestion, state: Situation) -> Suggestion | None:
        wanted = suggestion.plan.settings
        allowed = state.within_walls(wanted)
        if allowed == state.now:
            self._veto(policy, wanted, wording.NOTHING_IS_LEFT)
            return None
        self._withdraw(Grow.name)
        if allowed == wanted:
            return suggestion
        return replace(suggestion, plan=expect(state.unlimited, allowed), text=wording.cut(suggestion.text, allowed))

    def _veto(self, policy: Policy, wanted: Settings, why: str) -> None:
        self.vetoes += (Veto(policy=policy.name, wanted=wanted, why=why),)

    def _withdraw(self, name: str) -> None:
        self._agreed.pop(name, None)
