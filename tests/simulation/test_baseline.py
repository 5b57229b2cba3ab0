"""What is recorded of the controller's results, and what is said when they differ from it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.simulation import baseline
from benchmarks.simulation.__main__ import main
from benchmarks.simulation.baseline import Achieved, achieved, differences
from benchmarks.simulation.kept import truths
from benchmarks.simulation.oracle import Static
from benchmarks.simulation.scenarios import load
from benchmarks.simulation.score import Result, Score, play
from dpex.autotune.types import Settings

pytestmark = pytest.mark.long

KEPT = Achieved(regrets=(0.02, 0.06), missed={"regret": 0.06, "decisions": 4.0})


def score(**changes: float) -> Score:
    static = Static(settings=Settings(local=10, prefetch=20), rate=100.0, settled_rate=100.0)
    good = {"start": 0.0, "end": 60.0, "rate": 98.0, "settle_s": 2.0, "settle_allowed_s": 5.0, "decisions": 3}
    good |= {"settled_rate": 98.0, "best_settled_rate": 100.0}
    rest = {"workers": 10.0, "changes": 0.0, "over_bytes": -1e9}
    return Score(**good | rest | changes, best=static, cheapest=static)  # type: ignore[arg-type]


def played(name: str) -> Result:
    return play(load()[name], truths("development", load()[name]))


def result(*scores: Score) -> Result:
    return Result(replace(load()["cpu-4-cores"], name="made"), [], scores)


def test_the_worst_figure_of_each_missed_target_is_kept() -> None:
    found = achieved(result(score(decisions=4), score(rate=94.0, decisions=6), score()))
    assert found == Achieved(regrets=(0.02, 0.06, 0.02), missed={"regret": 0.06, "decisions": 6})


def test_limits_that_were_surpassed_are_kept() -> None:
    surpassing = Result(result(score()).scenario, [], [score()], beyond=["9 local of 8", "10 local of 8"])
    assert achieved(surpassing).missed == {"limits": 2}


def test_what_a_scenario_does_not_hold_to_is_not_missed() -> None:
    free = replace(result(score(decisions=9)).scenario, holds=("regret",))
    assert achieved(Result(free, [], [score(decisions=9)])).missed == {}


@pytest.mark.parametrize(
    ("now", "said"),
    [
        (KEPT, []),
        (replace(KEPT, regrets=(0.024, 0.056)), []),
        (replace(KEPT, regrets=(0.03, 0.06)), ["worse: the regret of interval 0 is 3.00% instead of 2.00%"]),
        (replace(KEPT, regrets=(0.02, 0.05)), ["better: the regret of interval 1 is 5.00% instead of 6.00%"]),
        (replace(KEPT, regrets=(0.02,)), ["the record is out of date: it has 2 intervals, the scenario 1"]),
        (
            replace(KEPT, missed={**KEPT.missed, "settle": 7.5}),
            ["worse: settle is missed (7.5) and was met"],
        ),
        (replace(KEPT, missed={"regret": 0.06}), ["better: decisions is met and was missed (4)"]),
        (
            replace(KEPT, missed={**KEPT.missed, "decisions": 5.0}),
            ["worse: decisions is missed by 5 instead of 4"],
        ),
        (
            replace(KEPT, missed={**KEPT.missed, "decisions": 3.5}),
            ["better: decisions is missed by 3.5 instead of 4"],
        ),
    ],
)
def test_every_difference_is_said(now: Achieved, said: list[str]) -> None:
    assert differences(KEPT, now) == said


def test_recording_replaces_what_was_played_keeps_the_rest_and_drops_what_is_gone(tmp_path: Path) -> None:
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


def test_the_command_plays_and_records_what_it_is_given(tmp_path: Path) -> None:
    lines: list[str] = []
    path = tmp_path / "baseline.json"
    main(["--only", "consumer-two", "--record", str(path)], lines.append)
    assert lines[-1] == "consumer-two: new"
    assert baseline.read(path) == {"consumer-two": achieved(played("consumer-two"))}
