"""The manager: whom it asks, what it vetoes, and what it says of that."""

from __future__ import annotations

from typing import Any

import pytest

from dpex.autotune import wording
from dpex.autotune.config import AutotuneConfig
from dpex.autotune.failed_changes import Change, FailedChanges
from dpex.autotune.felt import FeltSample
from dpex.autotune.manager import PolicyManager
from dpex.autotune.policies.base import Suggestion
from dpex.autotune.policies.grow import Grow
from dpex.autotune.policies.shrink import Shrink
from dpex.autotune.situation import Situation
from dpex.autotune.types import Settings
from tests.unit.autotune.policies.situations import EIGHT, FOUR, plan, sample, situation

TWO = Settings(local=2, prefetch=4)


class Says:
    """A policy that suggests the same each time, or nothing."""

    def __init__(self, name: str, wanted: Settings | None, **fields: Any) -> None:
        self.name = name
        self.wanted = wanted
        self.fields = fields
        self.saw: list[int] = []

    def suggest(self, state: Situation) -> Suggestion | None:
        self.saw.append(len(state.agreed.get(self.name, ())))
        if self.wanted is None:
            return None
        return Suggestion(plan=plan(self.wanted), reason="too few", text="Why.", evidence={}, **self.fields)


class Asked:
    """A manager with its memory of what failed."""

    def __init__(self, *policies: Says) -> None:
        self.failures = FailedChanges(60.0)
        self.manager = PolicyManager(self.failures)
        self.policies = policies

    def ask(self, **state: Any) -> Settings | None:
        found = self.manager.ask(situation(agreed=self.manager.agreed, **state), self.policies)
        return None if found is None else found.plan.settings

    @property
    def vetoes(self) -> list[tuple[str, str]]:
        return [(veto.policy, veto.why) for veto in self.manager.vetoes]


def test_the_first_that_suggests_something_is_followed() -> None:
    last = Says("c", TWO)
    asked = Asked(Says("a", None), Says("b", EIGHT), last)
    assert asked.ask() == EIGHT
    assert (asked.vetoes, last.saw) == ([], [])


def test_what_failed_lately_is_vetoed_and_the_next_is_asked() -> None:
    asked = Asked(Says("a", EIGHT), Says("b", TWO))
    asked.failures.remember(Change("more local", 8), 70.0)
    assert asked.ask() == TWO
    assert asked.vetoes == [("a", wording.failed_lately(30.0))]


@pytest.mark.parametrize(
    ("signal", "busy", "followed"),
    [("nvml", 0.95, TWO), ("nvml", 0.85, EIGHT), ("nvml", None, EIGHT), ("events", 0.95, EIGHT), ("wait", 0.95, EIGHT)],
)
def test_a_gpu_that_nvml_says_is_busy_gets_no_more_workers(signal: Any, busy: float | None, followed: Settings) -> None:
    """Where there are events they know better; what gives workers back is followed."""
    seen = sample(gpu_busy=busy)
    asked = Asked(Says("a", EIGHT), Says("b", TWO))
    assert asked.ask(window={"gpu_busy": busy}, felt=FeltSample(sample=seen, signal=signal, waited=0.4)) == followed
    vetoes = [("a", wording.gpu_is_busy({"gpu_busy": 0.95, "loop_waited": 0.4}))]
    assert asked.vetoes == (vetoes if followed == TWO else [])


def test_what_must_be_is_done_whatever_failed() -> None:
    asked = Asked(Says("a", EIGHT, is_forced=True))
    asked.failures.remember(Change("more local", 8), 70.0)
    assert asked.ask() == EIGHT


def test_windows_in_a_row_must_agree() -> None:
    policy = Says("a", EIGHT, votes=3)
    asked = Asked(policy)
    assert [asked.ask() for _ in range(2)] == [None, None]
    assert asked.vetoes == [("a", "2 of 3 windows in a row agree")]
    policy.wanted = None
    assert asked.ask() is None
    policy.wanted = EIGHT
    assert [asked.ask() for _ in range(3)] == [None, None, EIGHT]
    assert policy.saw == [0, 1, 2, 0, 1, 2]


def test_who_waits_for_votes_lets_others_act_unless_that_would_disturb() -> None:
    assert Asked(Says("a", EIGHT, votes=2), Says("b", TWO)).ask() == TWO
    assert Asked(Says("a", EIGHT, votes=2, is_exclusive=True), Says("b", TWO)).ask() is None


def test_growth_takes_the_votes_for_fewer_away() -> None:
    fewer = Says(Shrink.name, TWO, votes=2)
    grow = Says(Grow.name, None, is_exclusive=True, contradicts=Shrink.name)
    asked = Asked(grow, fewer)
    assert asked.ask() is None
    grow.wanted = EIGHT
    assert asked.ask() == EIGHT
    grow.wanted = None
    assert [asked.ask() for _ in range(2)] == [None, TWO]


def test_any_change_begins_the_count_for_growth_anew() -> None:
    other, grow = Says("a", None), Says(Grow.name, EIGHT, votes=2, is_exclusive=True)
    asked = Asked(other, grow)
    assert asked.ask() is None
    other.wanted = TWO
    assert asked.ask() == TWO
    other.wanted = None
    assert [asked.ask() for _ in range(2)] == [None, EIGHT]


def test_a_change_of_the_work_begins_the_count_for_fewer_anew() -> None:
    asked = Asked(Says(Shrink.name, TWO, votes=2))
    assert asked.ask() is None
    asked.manager.work_changed()
    assert [asked.ask() for _ in range(2)] == [None, TWO]


def test_what_is_put_off_is_not_done_and_keeps_its_votes() -> None:
    policy = Says("a", EIGHT, votes=2, put_off="it is late")
    asked = Asked(policy)
    assert [asked.ask() for _ in range(3)] == [None] * 3
    assert asked.vetoes == [("a", "it is late")]
    policy.fields["put_off"] = ""
    assert asked.ask() == EIGHT


def test_limits_cut_a_suggestion_and_leave_perhaps_nothing() -> None:
    asked = Asked(Says("a", EIGHT))
    assert asked.ask(config=AutotuneConfig(max_local=6)) == Settings(local=6, prefetch=16)
    assert asked.ask(config=AutotuneConfig(max_local=4, max_prefetch=8)) is None
    assert asked.vetoes == [("a", wording.NOTHING_IS_LEFT)]


def test_what_is_cut_says_so_and_expects_what_the_rest_brings() -> None:
    asked = Asked(Says("a", EIGHT))
    state = situation(config=AutotuneConfig(max_local=6))
    found = asked.manager.ask(state, asked.policies)
    assert found is not None
    assert found.text == "Why. The limits allow only 6 local workers (prefetch 16)."
    assert found.plan.rate != plan(EIGHT).rate


def test_what_a_suggestion_disproves_is_remembered_once_it_is_due() -> None:
    asked = Asked(Says("a", EIGHT, votes=2, disproves=Change("fewer local", 4)))
    asked.ask()
    assert not asked.failures.refused_for_s(Change("fewer local", 4), 100.0)
    asked.ask()
    assert asked.failures.refused_for_s(Change("fewer local", 4), 100.0) == 60.0
    assert Asked(Says("a", FOUR)).ask() is None, "the present settings are no change"
