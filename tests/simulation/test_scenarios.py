"""The controller in every scenario of both sets, against the best fixed settings."""

from functools import cache

import pytest

from benchmarks.simulation import baseline, kept
from benchmarks.simulation.baseline import RECORD
from benchmarks.simulation.scenarios import SETS, load
from benchmarks.simulation.score import play

pytestmark = pytest.mark.long

PLAYED = [pytest.param(name, scenario, id=f"{name}-{scenario}") for name in SETS for scenario in load(name)]


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
