"""The controller in every scenario of both sets, against the best fixed settings; and the scenarios themselves."""

from __future__ import annotations

from functools import cache

import pytest

from benchmarks.simulation import baseline, kept
from benchmarks.simulation.baseline import RECORD
from benchmarks.simulation.scenarios import SETS, VALIDATION, Scenario, load, scenario_of
from benchmarks.simulation.score import cold_start, play
from benchmarks.simulation.world import Phase, Step, Work, World

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


# -- scenarios ---------------------------------------------------------------------------------------------------------


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


def entry(**changes: object) -> dict[str, object]:
    return {"name": "x", "why": "", "seconds": 30, "world": {}, "phases": [{"at": 0}]} | changes


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"holds": ["speed"]}, r"scenario 'x': \['speed'\] in holds; there are regret, "),
        ({"world": {"cpu": 2}}, r"World: \['cpu'\] is no field; there are actor_s, "),
        ({"phases": [{"at": 0, "work": {"cpu": 2}}]}, r"Work: \['cpu'\] is no field; there are batch_bytes, "),
    ],
)
def test_what_is_misspelt_is_named(changes: dict[str, object], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        scenario_of("made", entry(**changes))


def test_an_interval_knows_the_phases_that_hold_in_it() -> None:
    phases = (Phase(work=Work(cpu_s=1), nodes=3), Phase(at=10, step=Step(gpu_s=2)), Phase(at=20, nodes=1))
    scenario = Scenario(name="x", family="", why="", seconds=30, world=World(phases=phases), judged_at=(0, 10))
    assert list(scenario.intervals()) == [(0, 10), (10, 30)]
    both = Phase(at=10, work=Work(cpu_s=1), step=Step(gpu_s=2), nodes=3)
    assert scenario.phases_of(10, 30) == [both, Phase(at=20, nodes=1)]


def test_random_numbers_begin_anew_where_an_interval_does() -> None:
    scenario = scenario_of("made", entry(seconds=60, phases=[{"at": 0}, {"at": 20}, {"at": 40}], judged_at=[0, 40]))
    assert [phase.stream for phase in scenario.world.phases] == [0, None, 1]
