"""The table of a worker's life: what each step leads to, and that no other step is taken."""

from __future__ import annotations

from itertools import product
from typing import get_args

import pytest

from dpex.pools.local.worker_life import (
    ENDS,
    GONE,
    IS_ASKED_TO_LEAVE,
    LIFE,
    RUNNING,
    SERVES,
    STAYING,
    LifeError,
    Stage,
    Step,
)


def lived(*steps: Step) -> list[Stage]:
    stages: list[Stage] = ["asked"]
    for step in steps:
        stages.append(LIFE[stages[-1], step])
    return stages


def test_a_worker_is_up_once_it_serves() -> None:
    assert lived(SERVES, IS_ASKED_TO_LEAVE, ENDS) == ["asked", "up", "leaving", "gone"]


@pytest.mark.parametrize("stage", get_args(Stage))
def test_only_who_was_up_runs_and_only_who_was_not_asked_to_leave_stays(stage: Stage) -> None:
    assert (stage in RUNNING) == (stage in ("up", "leaving"))
    assert (stage in STAYING) == (stage not in ("leaving", "gone"))


@pytest.mark.parametrize("stage", [stage for stage in get_args(Stage) if stage != GONE])
def test_a_worker_may_end_at_any_stage_and_be_asked_to_leave_once_it_is_up(stage: Stage) -> None:
    assert LIFE[stage, ENDS] == GONE
    if stage == "asked":
        return
    after = LIFE[stage, IS_ASKED_TO_LEAVE]
    assert after not in STAYING
    assert (after in RUNNING) == (stage in RUNNING), "being asked makes nobody more or less up"
    assert LIFE[after, IS_ASKED_TO_LEAVE] == after


@pytest.mark.parametrize(("stage", "step"), list(product(get_args(Stage), get_args(Step))))
def test_a_step_is_in_the_table_or_an_error_that_names_it(stage: Stage, step: Step) -> None:
    known = dict(LIFE)
    if (stage, step) in known:
        assert LIFE[stage, step] == known[stage, step]
        return
    with pytest.raises(LifeError, match=f"{stage}.*{step}"):
        LIFE[stage, step]
    assert dict(LIFE) == known
