"""What each policy gets: legal windows inside the limits, clipped wishes, and an outcome for every decision."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from dpex.autotune.config import AutotuneConfig
from dpex.autotune.limits import Limits
from dpex.autotune.runtime.trace import Recorder
from dpex.autotune.supervisor import Supervisor
from dpex.autotune.types import Decision, Reason
from dpex.errors import OptionError
from dpex.measure.pool_reading import PoolReading
from dpex.measure.reading import Reading
from dpex.measure.settings import Settings

FEW, MANY = Settings(local=2, prefetch=16), Settings(local=6, prefetch=48)
Wish = tuple[Settings, Reason] | None


class Scripted:
    """A policy that wishes what it is told, window by window."""

    wishes: Sequence[Wish]

    def __init__(self, config: AutotuneConfig, start: Settings, limits: Limits) -> None:
        self.seen: list[Reading] = []

    def observe(self, window: Reading, limits: Limits) -> Decision | None:
        self.seen.append(window)
        wish = self.wishes[len(self.seen) - 1] if len(self.seen) <= len(self.wishes) else None
        return None if wish is None else Decision.to(window, *wish)


def scripted(*wishes: Wish) -> type[Scripted]:
    return type("Scripted", (Scripted,), {"wishes": wishes})


def run(supervisor: Supervisor, windows: int, *, rate: int = 10, **changes: Any) -> Settings:
    """Windows of a second in which all wanted workers run; the settings after them."""
    now = supervisor.decisions[-1].new if supervisor.decisions else supervisor.begin()
    for number in range(windows):
        pool = PoolReading(requested=now.local, running=now.local, tickets=rate, load_s=0.1 * rate)
        spent = {"seconds": 1.0, "blocked_s": 0.5, "stepping_s": 0.5}
        window = Reading(at=number + 1.0, settings=now, later_batches=rate, pools={"local": pool}, **spent)
        decision = supervisor.step(replace(window, **changes))
        now = now if decision is None else decision.new
    return now


def test_each_decision_has_an_outcome_and_an_undo_marks_it() -> None:
    wishes = [(MANY, "spread"), None, None, None, None, None, (FEW, "undo"), (MANY, "explore"), (FEW, "too many")]
    supervisor = Supervisor(AutotuneConfig(policy=scripted(*wishes)), FEW)
    run(supervisor, 4)
    assert [decision.outcome for decision in supervisor.decisions] == [None]
    run(supervisor, 9, rate=20)
    kept = [decision.outcome.kept if decision.outcome else None for decision in supervisor.decisions]
    assert kept == [False, True, True, True]
    assert supervisor.decisions[0].outcome is not None
    assert supervisor.decisions[0].outcome.rate > 10
    assert [decision.text.partition(" ")[0] for decision in supervisor.decisions] == ["From", "Back", "From", "From"]


def test_an_outcome_leaves_out_the_window_in_which_workers_start() -> None:
    supervisor = Supervisor(AutotuneConfig(policy=scripted((MANY, "too few"))), FEW)
    run(supervisor, 1)
    run(supervisor, 1, rate=1, pools={"local": PoolReading(requested=6, running=4, tickets=1, load_s=0.1)})
    run(supervisor, 5, rate=30)
    assert supervisor.decisions[0].outcome is not None
    assert supervisor.decisions[0].outcome.rate == pytest.approx(30.0)


def test_a_wish_is_clipped_and_a_limit_is_met_without_the_policy() -> None:
    config = AutotuneConfig(policy=scripted((MANY, "too few")), max_local=4)
    supervisor = Supervisor(config, FEW)
    assert run(supervisor, 1).local == 4
    assert run(supervisor, 1, memory_free=-(10**9), worker_bytes=1e9).local < 4
    assert [decision.reason for decision in supervisor.decisions] == ["too few", "limit"]
    assert supervisor.decisions[0].outcome is not None
    assert len(supervisor.policy.seen) == 1  # type: ignore[attr-defined]


def test_decisions_outlive_new_limits_and_get_their_outcome() -> None:
    former = Supervisor(AutotuneConfig(policy=scripted((MANY, "too few"))), FEW)
    run(former, 2)
    pinned = Limits().fixed(local=3)
    after = Supervisor(AutotuneConfig(policy=scripted()), Settings(local=3, prefetch=16), pinned, former=former)
    assert after.decisions == former.decisions
    run(after, 8)
    assert all(decision.outcome is not None for decision in after.decisions[:-1])


def test_ten_changes_of_limits_leave_no_decision_unjudged() -> None:
    supervisor = Supervisor(AutotuneConfig(policy=scripted((MANY, "too few"))), FEW)
    for number in range(10):
        run(supervisor, 1 + number % 3)
        policy = scripted((Settings(local=3 + number, prefetch=60), "too few"))
        now = supervisor.decisions[-1].new
        supervisor = Supervisor(AutotuneConfig(policy=policy), now, former=supervisor, why="resize()")
    run(supervisor, 1)
    assert len(supervisor.decisions) == 11
    assert all(decision.outcome is not None for decision in supervisor.decisions[:-1])


def test_a_policy_may_leave_out_what_it_does_not_know() -> None:
    assert Supervisor(AutotuneConfig(policy=scripted()), FEW).useful_remote(8) is None
    with pytest.raises(OptionError, match=r"AutotuneConfig\(policy=3\): give a class or function"):
        AutotuneConfig(policy=3)  # type: ignore[arg-type]


# -- on record ---------------------------------------------------------------------------------------------------------


def recorded(policy: Any) -> tuple[Supervisor, list[dict[str, Any]]]:
    lines: list[dict[str, Any]] = []
    recorder = Recorder(lines.append, lambda at: {"started_s": 0.0})
    return Supervisor(AutotuneConfig(policy=policy), FEW, recorder=recorder), lines


def test_a_policy_that_sees_nothing_is_announced_once() -> None:
    supervisor, lines = recorded(scripted())
    supervisor.announce()
    supervisor.announce()
    assert [line["kind"] for line in lines] == ["header"]
    assert lines[0]["origin"]["config"]["policy"] == "Scripted"


def test_all_decisions_and_their_outcomes_are_recorded() -> None:
    supervisor, lines = recorded(scripted((MANY, "too few"), None, (FEW, "undo")))
    run(supervisor, 8)
    kinds = [line["kind"] for line in lines if line["kind"] != "window"]
    assert kinds == ["header", "decision", "outcome", "decision", "outcome"]
    assert [line["number"] for line in lines if line["kind"] == "outcome"] == [0, 1]


def test_a_window_that_breaks_the_policy_is_the_last_line() -> None:
    class Broken(Scripted):
        def observe(self, window: Reading, limits: Limits) -> Decision | None:
            raise ZeroDivisionError

    supervisor, lines = recorded(Broken)
    with pytest.raises(ZeroDivisionError):
        run(supervisor, 1)
    assert lines[-1]["kind"] == "window"
