"""A search that missed a setting is found out, and so is each difference from the recorded baseline."""

from dataclasses import replace

import pytest

from benchmarks.simulation.baseline import Achieved, differences
from benchmarks.simulation.kept import truths
from benchmarks.simulation.report import summary
from benchmarks.simulation.scenarios import load
from benchmarks.simulation.score import play
from dpex.measure.settings import Settings

pytestmark = pytest.mark.long


def test_a_search_that_missed_a_better_setting_is_found_out() -> None:
    scenario = load()["consumer-two"]
    truth = truths("development", scenario)[0]
    poor = replace(truth, best=replace(truth.best, settings=Settings(local=1, prefetch=2), rate=truth.best.rate / 2))
    result = play(scenario, [poor])
    assert len(result.doubts) == 1
    assert result.scores[0].best.rate == pytest.approx(truth.best.rate, rel=0.02)
    assert any(
        "ERROR, the search missed a setting in consumer-two" in line for line in summary("development", [result])
    )
    assert play(scenario, [truth]).doubts == []


KEPT = Achieved(regrets=(0.02, 0.06), missed={"regret": 0.06, "decisions": 4.0})


@pytest.mark.parametrize(
    ("now", "said"),
    [
        (KEPT, []),
        (replace(KEPT, regrets=(0.024, 0.056)), []),
        (replace(KEPT, regrets=(0.03, 0.06)), ["worse: the regret of interval 0 is 3.00% instead of 2.00%"]),
        (replace(KEPT, regrets=(0.02, 0.05)), ["better: the regret of interval 1 is 5.00% instead of 6.00%"]),
        (replace(KEPT, regrets=(0.02,)), ["the record is out of date: it has 2 intervals, the scenario 1"]),
        (replace(KEPT, missed={**KEPT.missed, "settle": 7.5}), ["worse: settle is missed (7.5) and was met"]),
        (replace(KEPT, missed={"regret": 0.06}), ["better: decisions is met and was missed (4)"]),
        (replace(KEPT, missed={**KEPT.missed, "decisions": 5.0}), ["worse: decisions is missed by 5 instead of 4"]),
        (replace(KEPT, missed={**KEPT.missed, "decisions": 3.5}), ["better: decisions is missed by 3.5 instead of 4"]),
    ],
)
def test_every_difference_is_said(now: Achieved, said: list[str]) -> None:
    assert differences(KEPT, now) == said
