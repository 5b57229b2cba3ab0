"""How many remote workers would pay if the cluster had places for them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from situations import situation

from dpex.autotune.config import AutotuneConfig
from dpex.autotune.controller import Controller
from dpex.autotune.planner import Bounds, expect
from dpex.autotune.situation import Situation
from dpex.autotune.types import Settings

LOCAL = Settings(local=1, prefetch=4)
WAITS = {"cpu_s": 0.0, "wait_s": 0.08, "far_s": 0.08, "step_s": 0.02, "travel_s": 0.0, "own_s": 0.0}
"""A worker makes a batch in 80 ms, and the training loop takes one every 20 ms."""


def starved(**work: Any) -> Situation:
    """One local worker, and no place on the cluster."""
    state = situation(LOCAL, bounds=Bounds(local=1, remote=0, prefetch=64), work={**WAITS, **work})
    here = expect(state.work, LOCAL)
    recent = replace(state.recent, rate=here.rate, lost=here.wait, wait=here.wait)
    return replace(state, recent=recent, think=lambda: replace(state.outlook, best=here, here=here))


def useful(state: Situation | None, most: int) -> int | None:
    controller = Controller(AutotuneConfig(max_local=1), LOCAL)
    controller._latest = state
    return controller.useful_remote(most)


def test_before_the_work_is_known_nobody_can_tell() -> None:
    assert useful(None, 64) is None


def test_as_many_as_the_training_loop_needs() -> None:
    assert useful(starved(), 64) in (3, 4)


def test_no_more_than_may_be() -> None:
    assert useful(starved(), 2) == 2


@pytest.mark.parametrize(
    "work",
    [
        pytest.param({"step_s": 0.09}, id="one worker is enough"),
        pytest.param({"far_ceiling": 0.1}, id="the way to the cluster carries nothing"),
    ],
)
def test_none_where_they_bring_nothing(work: dict[str, Any]) -> None:
    assert useful(starved(**work), 64) == 0
