"""What a score says, and the command that shows scores."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks.simulation.__main__ import main
from benchmarks.simulation.kept import truths
from benchmarks.simulation.oracle import Static
from benchmarks.simulation.report import summary
from benchmarks.simulation.scenarios import HOLDS, load
from benchmarks.simulation.score import Result, Score, cold_start, play
from dpex.autotune.config import AutotuneConfig
from dpex.autotune.types import Settings

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


def test_a_good_score_misses_nothing() -> None:
    assert score().missed() == {}


@pytest.mark.parametrize(
    ("hold", "changes", "figure"),
    [
        ("regret", {"rate": 94.0}, "regret 6.0 %"),
        ("settle", {"settle_s": 5.5}, "settled after 5.5 s"),
        ("decisions", {"decisions": 4}, "4 decisions"),
        ("cost", {"workers": 8.9}, "8.90 workers, 8 would do"),
        ("oscillation", {"changes": 20.0}, "20.0 changes in 10 min"),
        ("memory", {"over_bytes": 5e8}, "500 MB too much"),
    ],
)
def test_each_target_can_be_missed(hold: str, changes: dict[str, object], figure: str) -> None:
    assert score(**changes).missed() == {hold: figure}


def test_the_cold_start_knows_only_the_cpus_the_memory_and_the_limits() -> None:
    def begun(cpus: float, config: AutotuneConfig | None = None, memory: float = 1e12) -> Settings:
        return cold_start(replace(load()["cpu-4-cores"].world, cpus=cpus, memory=memory), config)

    assert [begun(cpus).local for cpus in (0.5, 1.0, 3.5, 64.0)] == [1, 1, 3, 8]
    assert [begun(64.0, memory=memory).local for memory in (1e9, 7e9, 9e9, 1e11)] == [4, 5, 7, 8]
    assert begun(2.0) == Settings(local=2, prefetch=4)
    assert begun(8.0, AutotuneConfig(max_local=3, max_prefetch=4)) == Settings(local=3, prefetch=4)
    assert begun(1.0, AutotuneConfig(min_local=2, min_remote=1)) == Settings(local=2, remote=1, prefetch=6)


def test_only_what_a_scenario_holds_to_counts() -> None:
    scenario = replace(load()["cpu-4-cores"], holds=("memory",))
    assert Result(scenario, [], [score(rate=1.0)]).missed() == {}
    later = Result(load()["cpu-4-cores"], [], [score(), score(start=30.0, rate=50.0)])
    assert later.missed() == {"regret": "regret 50.0 % from 30 s on"}


def test_a_whole_run_is_judged_by_what_was_delivered() -> None:
    """95 of 100 for a minute, and 80 of 100 for half of one."""
    first, second = score(rate=95.0), score(start=60.0, end=90.0, rate=80.0)
    result = Result(load()["cpu-4-cores"], [], [first, second])
    assert result.regret == pytest.approx(1 - (60 * 95 + 30 * 80) / 9000)
    assert result.settled_regret == pytest.approx(0.04)


def test_being_better_than_any_fixed_setting_makes_up_for_nothing_elsewhere() -> None:
    result = Result(load()["cpu-4-cores"], [], [score(rate=110.0)])
    assert result.gain == pytest.approx(0.1)
    assert result.regret == 0.0


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


@pytest.mark.parametrize("options", [[], ["--decisions"], ["--json"]])
def test_the_command_shows_a_scenario(options: list[str]) -> None:
    lines: list[str] = []
    main(["--only", "consumer-two", *options], write=lines.append)
    assert any("consumer-two" in line for line in lines)
    assert options == ["--json"] or any("regret of whole runs: mean" in line for line in lines)


def test_the_command_knows_its_scenarios(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--only", "nothing"])
    assert "no scenario is called nothing; there are " in capsys.readouterr().err


def test_holds_are_the_targets() -> None:
    everything = score(rate=1.0, settle_s=9.0, decisions=9, workers=99.0, changes=9.0, over_bytes=9.0)
    assert set(everything.missed()) == set(HOLDS)
