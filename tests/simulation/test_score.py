"""A search that missed a setting is found out; what is recorded of scores, and what is said when that differs."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.simulation import baseline
from benchmarks.simulation.baseline import Achieved, achieved, differences
from benchmarks.simulation.kept import truths
from benchmarks.simulation.oracle import Static
from benchmarks.simulation.report import summary
from benchmarks.simulation.scenarios import load
from benchmarks.simulation.score import Result, Score, play
from dpex.schedule.prefetch import Settings

pytestmark = pytest.mark.long


def score(**changes: object) -> Score:
    best = Static(settings=Settings(local=10, prefetch=20), rate=100.0, settled_rate=100.0)
    cheapest = Static(settings=Settings(local=8, prefetch=16), rate=98.0, settled_rate=98.0)
    good = {
        "start": 0.0,
        "end": 60.0,
        "best": best,
        "cheapest": cheapest,
        "rate": 96.0,
        "settled_rate": 96.0,
        "best_settled_rate": 100.0,
        "settle_s": 2.0,
        "settle_allowed_s": 5.0,
        "decisions": 3,
        "workers": 8.0,
        "changes": 0.0,
        "over_bytes": -1e9,
    }
    return Score(**good | changes)  # type: ignore[arg-type]


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


def result(*scores: Score) -> Result:
    return Result(replace(load()["cpu-4-cores"], name="made"), [], scores)


def test_the_worst_figure_of_each_missed_target_is_kept() -> None:
    found = achieved(result(score(decisions=4), score(rate=94.0, decisions=6), score()))
    assert found == Achieved(regrets=(0.04, 0.06, 0.04), missed={"regret": 0.06, "decisions": 6})


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


def test_recording_updates_played_and_drops_removed_scenarios(tmp_path: Path) -> None:
    path = tmp_path / "baseline.json"
    path.write_text(json.dumps({name: {"regrets": [0.5], "missed": {}} for name in ("made", "kept", "gone")}))
    changes = baseline.record([result(score(rate=94.0))], ["new", "made", "kept"], path)
    assert changes == [
        "gone: removed, as there is no such scenario",
        "made: better: the regret of interval 0 is 6.00% instead of 50.00%",
        "made: worse: regret is missed (0.06) and was met",
    ]
    assert baseline.read(path) == {
        "made": Achieved(regrets=(0.06,), missed={"regret": 0.06}),
        "kept": Achieved(regrets=(0.5,)),
    }
    assert baseline.record([result(score(rate=94.0))], ["made", "kept"], path) == []
