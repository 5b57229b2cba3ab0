"""The controller in every scenario of both sets, against the best fixed settings; and the scenarios themselves."""

from functools import cache

import pytest

from benchmarks.simulation import baseline, kept
from benchmarks.simulation.baseline import RECORD
from benchmarks.simulation.scenarios import SETS, VALIDATION, load
from benchmarks.simulation.score import cold_start, play

pytestmark = pytest.mark.long

ALL = [pytest.param(name, scenario, id=f"{name}-{scenario}") for name in SETS for scenario in load(name)]
PLAYED = [pytest.param(*one.values, id=one.id, marks=[pytest.mark.long] * (one.values[0] == VALIDATION)) for one in ALL]


@cache
def recorded(of: str) -> dict[str, baseline.Achieved]:
    return baseline.read(baseline.path_of(of))


@pytest.mark.parametrize(("of", "name"), PLAYED)
def test_the_controller_achieves_exactly_the_recorded_baseline(of: str, name: str) -> None:
    """Whoever makes it better records that, so that it stays; whoever makes it worse says so by recording it."""
    scenario, record = load(of)[name], recorded(of).get(name)
    assert record is not None, f"there is no record of this scenario: {RECORD} --only {name}"
    result = play(scenario, kept.truths(of, scenario))
    assert list(result.errors) == []
    found = baseline.differences(record, baseline.achieved(result))
    assert not found, f"{'; '.join(found)}. {scenario.why} If this is meant: {RECORD}, and commit the difference"


@pytest.mark.parametrize("of", SETS)
def test_nothing_is_on_record_of_scenarios_that_are_gone(of: str) -> None:
    assert recorded(of).keys() <= load(of).keys(), f"run {RECORD}"


@pytest.mark.parametrize(("of", "name"), ALL)
def test_scenarios_make_sense(of: str, name: str) -> None:
    scenario = load(of)[name]
    assert len(scenario.why) > 10
    assert 10 <= scenario.seconds <= 1800
    assert scenario.world.phases[0].at == 0 == scenario.judged_at[0]
    assert scenario.judged_at == tuple(sorted(scenario.judged_at))
    assert min(end - start for start, end in scenario.intervals()) >= 10
    start = cold_start(scenario.world, scenario.config)
    work = scenario.world.phases[0].work
    assert work is not None
    held = scenario.world.ranks * (start.local * scenario.world.worker_bytes + start.prefetch * work.batch_bytes)
    assert held <= scenario.world.memory, "nobody could keep memory that the cold start has exceeded"
