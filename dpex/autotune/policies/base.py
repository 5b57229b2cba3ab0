"""What a policy is, and what it answers. PURE.

A policy has no state and changes nothing: what it answers depends on the `Situation` alone. It does not ask whether its
suggestion may be followed; the manager vetoes what failed lately, what too few windows want, and what the limits leave
nothing of.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from dpex.autotune.failed_changes import Change
from dpex.autotune.planner import Plan
from dpex.autotune.situation import Situation
from dpex.autotune.types import Reason, Settings


@dataclass(frozen=True, kw_only=True)
class Suggestion:
    """A change of settings.

    Attributes:
        plan: The settings to have next, and what is expected of them.
        reason: The reason in one word.
        text: The change in sentences: what, why, and on what evidence.
        evidence: The measurements that it rests on, by name.
        towards: The settings that ``plan`` is a step towards; None if it goes all the way.
        votes: The number of windows in a row that must suggest it, this one included.
        put_off: Why it should wait although enough windows suggest it; "" if it should not.
        is_forced: The present settings cannot stay, so that it does not matter whether such a change failed before.
        is_exclusive: While it is put off no later policy is asked, as another change would disturb.
        contradicts: The name of a policy; what that wanted in the windows before does not count any more.
        disproves: A change that this one shows not to do; it is not made soon.
    """

    plan: Plan
    reason: Reason
    text: str
    evidence: Mapping[str, float]
    towards: Plan | None = None
    votes: int = 1
    put_off: str = ""
    is_forced: bool = False
    is_exclusive: bool = False
    contradicts: str = ""
    disproves: Change | None = None

    @property
    def wanted(self) -> Plan:
        """Where it leads to in the end."""
        return self.towards or self.plan


class Policy(Protocol):
    """One reason to change the settings."""

    @property
    def name(self) -> str:
        """By which it is known in vetoes."""

    def suggest(self, state: Situation) -> Suggestion | None:
        """What this policy would do now; None if nothing."""


def trial(state: Situation, wanted: Settings, text: str) -> Suggestion:
    """To try settings of which the model does not expect more than of the present ones."""
    plan = Plan(settings=wanted, rate=state.recent.rate, wait=state.evidence["wait"], flow=state.outlook.here.flow)
    return Suggestion(plan=plan, reason="explore", text=text, evidence=state.evidence, is_exclusive=True)
