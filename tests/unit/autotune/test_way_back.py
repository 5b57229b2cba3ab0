"""Whether what was gone back to brings again what it had brought."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from dpex.autotune.constants.judging import EVALUATION
from dpex.autotune.evaluation import FailedTrial
from dpex.autotune.types import Decision, Sample, Settings
from dpex.autotune.way_back import WayBack
from dpex.measure.samples import PoolSample

ONE, TWO, FOUR = (Settings(local=workers, prefetch=8) for workers in (1, 2, 4))
IN_PROCESS = Settings(local=0, prefetch=8)
COST_S = 0.02


def decision(old: Settings, new: Settings) -> Decision:
    return Decision(
        at=0.0, old=old, new=new, reason="undo", text="", evidence={}, predicted_rate=50.0, predicted_wait=0.0
    )


def way_back(old: Settings = ONE, tried: Settings = FOUR, back: Settings = ONE) -> WayBack:
    failed = FailedTrial(
        decision=decision(old, tried),
        rate_before=50.0,
        rate_since=10.0,
        lost_before=0.2,
        cost_before_s=COST_S,
        cost_since_s=0.1,
        gain=-0.8,
        error=0.1,
    )
    return WayBack(failed, decision(tried, back))


def window(batches: int, cost_s: float) -> Sample:
    pool = PoolSample(running=1, tickets=batches, load_s=batches * cost_s)
    return Sample(at=0.0, seconds=1.0, settings=ONE, batches=batches, work_s=1.0, local=pool)


def work(chance: float = 0.0) -> Any:
    return SimpleNamespace(uncertainty=lambda batches: chance)


def test_batches_that_stay_dear_are_a_change_of_the_work() -> None:
    back = way_back()
    assert not back.add(window(4, 0.1), 0.0, work())  # begun among the workers that are gone
    assert not back.add(window(EVALUATION.few_batches - 1, 0.1), 0.0, work())
    (said,) = back.add(window(1, 0.1), 0.0, work())
    assert said == "time of a batch 20 ms → 100 ms"
    assert not back.add(window(10, 0.1), 0.0, work())  # it has been said


@pytest.mark.parametrize(("cost_s", "chance"), [(COST_S, 0.0), (0.039, 0.0), (0.1, 2.0)])
def test_what_is_as_cheap_again_or_may_be_dearer_by_chance_is_none(cost_s: float, chance: float) -> None:
    back = way_back()
    assert not any(back.add(window(4, cost_s), 0.0, work(chance)) for _ in range(20))


def test_later_changes_are_not_put_down_to_the_trial() -> None:
    back = way_back()
    assert not any(back.add(window(4, COST_S), 0.0, work()) for _ in range(8))
    assert not any(back.add(window(100, 0.5), 0.0, work()) for _ in range(8))


def test_more_workers_than_before_the_trial_may_queue() -> None:
    dear_s = 3.9 * COST_S
    for back, says in ((way_back(back=TWO), False), (way_back(), True)):
        assert any(back.add(window(4, dear_s), 0.0, work()) for _ in range(8)) is says


@pytest.mark.parametrize(("old", "back"), [(IN_PROCESS, IN_PROCESS), (ONE, IN_PROCESS)])
def test_in_process_has_no_workers_to_compare(old: Settings, back: Settings) -> None:
    looked = way_back(old=old, back=back)
    assert not any(looked.add(window(10, 0.5), 0.0, work()) for _ in range(8))
