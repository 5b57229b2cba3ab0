"""Constants of the controller are found by name, can be changed, and are needed: a scenario fails without each."""

from __future__ import annotations

import pytest

from benchmarks.simulation.fit import changed, constants, main, outcome
from dpex.autotune.config import AutotuneConfig
from dpex.autotune.constants.planning import LIMITS, PLANNER
from dpex.autotune.constants.trying import COMMON
from dpex.autotune.limits import walls
from dpex.autotune.types import Sample, Settings

pytestmark = pytest.mark.long


def test_all_constants_are_found() -> None:
    found = constants()
    assert found["common.starved"] == COMMON.starved
    assert found["planner.as_fast"] == PLANNER.as_fast
    assert len(found) > 120


def test_a_change_reaches_everybody_and_ends() -> None:
    sample, config = Sample(at=1.0, seconds=1.0, settings=Settings()), AutotuneConfig()
    with changed({"limits.most_prefetch": 3}):
        assert constants()["limits.most_prefetch"] == walls(config, sample, 1e6).prefetch == 3
    assert constants()["limits.most_prefetch"] == walls(config, sample, 1e6).prefetch == LIMITS.most_prefetch > 3


@pytest.mark.parametrize(
    ("scenario", "constant", "without"),
    [
        pytest.param("storage-seeks", "evaluation.clearly_more", 1e9, id="queueing at a storage"),
    ],
)
def test_a_scenario_fails_without_it(scenario: str, constant: str, without: float) -> None:
    as_it_is, changed_to = (outcome("development", [scenario], values) for values in ({}, {constant: without}))
    assert as_it_is.regret < 0.05
    assert changed_to.regret > as_it_is.regret + 0.02


def test_the_command_sweeps_a_constant() -> None:
    lines: list[str] = []
    main(
        ["--constant", "planner.as_fast", "--factor", "0.9", "--factor", "1", "--only", "consumer-two"],
        lines.append,
    )
    assert [line.split()[:2] for line in lines[2:]] == [["planner.as_fast", "0.882"], ["planner.as_fast", "0.98"]]
    assert lines[3].split()[2:] == lines[1].split()[3:]
