"""The controller in every scenario, against the best static settings known; and those themselves."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache

import pytest

from benchmarks.simulation import baseline, oracle
from benchmarks.simulation.__main__ import main
from benchmarks.simulation.baseline import RECORD
from benchmarks.simulation.oracle import REFRESH, StaleOracleError, Static, search, truths
from benchmarks.simulation.scenarios import FOLDER, HOLDS, ORACLE, Scenario, load
from benchmarks.simulation.scoreboard import Result, Score, cold_start, play
from benchmarks.simulation.world import Phase, Step, Work, World
from dpex.autotune.types import Decision, Sample, Settings


@cache
def played(name: str) -> Result:
    return play(load()[name])


@pytest.mark.parametrize("name", load())
def test_the_controller_is_no_worse_and_no_better_than_is_on_record(name: str) -> None:
    """Whoever makes it better records that, so that it stays; whoever makes it worse says so by recording it."""
    scenario, kept = load()[name], baseline.read().get(name)
    assert kept is not None, f"there is no record of this scenario: {RECORD} {name}"
    found = baseline.differences(kept, baseline.achieved(played(name)))
    assert not found, f"{'; '.join(found)}. {scenario.why} If this is meant: {RECORD}, and commit the difference"


def test_nothing_is_on_record_of_scenarios_that_are_gone() -> None:
    assert baseline.read().keys() <= load().keys(), f"run {RECORD}"


# -- scenarios ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", load())
def test_the_best_static_settings_kept_are_of_this_simulator_and_scenario(name: str) -> None:
    scenario = load()[name]
    assert len(truths(scenario)) == len(scenario.judged_at), f"run {REFRESH}"


@pytest.mark.parametrize("name", load())
def test_scenarios_make_sense(name: str) -> None:
    scenario = load()[name]
    assert len(scenario.why) > 10
    assert 20 <= scenario.seconds <= 600
    assert scenario.world.phases[0].at == 0 == scenario.judged_at[0]
    assert scenario.judged_at == tuple(sorted(scenario.judged_at))
    assert min(end - start for start, end in scenario.intervals()) >= 20
    start = cold_start(scenario.world.cpus / scenario.world.ranks)
    work = scenario.world.phases[0].work
    assert work is not None
    held = scenario.world.ranks * (start.local * scenario.world.worker_bytes + start.depth * work.batch_bytes)
    assert held <= scenario.world.memory, "nobody could keep memory that the cold start has exceeded"


def test_every_family_is_there() -> None:
    families = {scenario.family for scenario in load().values()}
    steady = {"steady", "consumer", "tiny", "skew", "heavy", "noise", "long"}
    assert families == steady | {"bursty", "shift", "contended", "memory", "cluster", "ranks"}
    assert len(load()) >= 40


def test_an_unknown_target_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: object) -> None:
    entry = {"name": "x", "seconds": 30, "world": {}, "phases": [{"at": 0}], "holds": ["speed"], "why": ""}
    monkeypatch.setattr("benchmarks.simulation.scenarios.json.loads", lambda text: [entry])
    load.cache_clear()
    with pytest.raises(ValueError, match=r"scenario 'x': \['speed'\] in holds; there are regret, "):
        load()
    monkeypatch.undo()
    load.cache_clear()


def test_an_interval_is_a_world_of_its_own() -> None:
    phases = (Phase(work=Work(cpu_s=1), nodes=3), Phase(at=10, step=Step(gpu_s=2)), Phase(at=20, nodes=1))
    scenario = make(World(phases=phases), judged_at=(0, 10))
    assert list(scenario.intervals()) == [(0, 10), (10, 30)]
    alone = scenario.only(10, 30).phases
    assert alone == (Phase(work=Work(cpu_s=1), step=Step(gpu_s=2), nodes=3), Phase(at=10, nodes=1))


# -- the search --------------------------------------------------------------------------------------------------------


def make(world: World, judged_at: tuple[float, ...] = (0.0,)) -> Scenario:
    return Scenario(name="made", family="", why="", seconds=30, world=world, judged_at=judged_at)


def test_it_finds_what_formulas_say() -> None:
    """Ten workers that wait 90 of 100 ms a batch saturate one CPU."""
    phase = Phase(work=Work(wait_s=0.09, cpu_s=0.01, spread=0.1), step=Step())
    found = search(make(World(cpus=1, own_s=0.0, phases=(phase,))), 0, 30)
    assert found.best.rate == pytest.approx(100, rel=0.02)
    assert 10 <= found.cheapest.settings.local <= 15
    assert found.cheapest.rate >= 0.975 * found.best.rate


def test_it_finds_that_no_worker_is_best() -> None:
    phase = Phase(work=Work(cpu_s=0.001), step=Step(cpu_s=0.001))
    found = search(make(World(cpus=1, own_s=0.001, phases=(phase,))), 0, 30)
    assert (found.best.settings.workers, found.best.rate) == (0, pytest.approx(500, rel=0.02))


def test_it_stays_within_memory() -> None:
    phase = Phase(work=Work(wait_s=0.1, batch_bytes=2e8), step=Step(gpu_s=0.001))
    found = search(make(World(memory=1.5e9, worker_bytes=1e8, phases=(phase,))), 0, 30)
    settings = found.best.settings
    assert settings.local * 1e8 + settings.depth * 2e8 <= 1.5e9
    assert settings.local == 5  # with as many batches; a sixth leaves room for four


def test_it_spends_few_remote_workers() -> None:
    """The consumer takes 50 batches a second: five workers, wherever they are."""
    phase = Phase(work=Work(cpu_s=0.1), step=Step(gpu_s=0.02), nodes=20)
    found = search(make(World(cpus=1, own_s=0.0, phases=(phase,))), 0, 30)
    assert found.best.rate == pytest.approx(50, rel=0.02)
    assert found.cheapest.settings.workers == 5


def test_results_of_another_world_are_refused() -> None:
    scenario = load()["cpu-4-cores"]
    assert truths(scenario)
    with pytest.raises(StaleOracleError, match=f"run {REFRESH}"):
        truths(replace(scenario, world=replace(scenario.world, cpus=5.0)))


def test_results_of_another_simulator_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(oracle, "_source", lambda: "another")
    with pytest.raises(StaleOracleError, match="knows nothing of 'cpu-4-cores' as it is now"):
        truths(load()["cpu-4-cores"])


def test_nothing_is_kept_of_scenarios_that_are_gone() -> None:
    assert json.loads((FOLDER / ORACLE).read_text()).keys() == load().keys()


class Ideal:
    """The best or the cheapest static setting of each interval."""

    def __init__(self, scenario: Scenario, which: str) -> None:
        found = [getattr(truth, which).settings for truth in truths(scenario)]
        self._plan = list(zip(scenario.judged_at, found, strict=True))

    def begin(self) -> Settings:
        return self._plan.pop(0)[1]

    def step(self, sample: Sample) -> Decision | None:
        if not self._plan or sample.at < self._plan[0][0]:
            return None
        return Decision(
            at=sample.at,
            old=sample.settings,
            new=self._plan.pop(0)[1],
            reason="changed",
            text="",
            evidence={},
            predicted_rate=0.0,
            predicted_stall=0.0,
        )


@pytest.mark.parametrize("which", ["best", "cheapest"])
@pytest.mark.parametrize("name", load())
def test_the_targets_can_be_met(name: str, which: str) -> None:
    """Whoever knows the truth misses nothing; but the best has perhaps more workers, the cheapest 2.5 % less rate."""
    result = play(load()[name], lambda: Ideal(load()[name], which))
    assert result.missed().keys() <= ({"cost"} if which == "best" else {"regret"})
    assert max(score.regret for score in result.scores) <= 0.05 + (0.025 if which == "cheapest" else 0.0)


# -- the scoreboard ----------------------------------------------------------------------------------------------------


def score(**changes: object) -> Score:
    best = Static(settings=Settings(local=10, depth=20), rate=100.0)
    cheapest = Static(settings=Settings(local=8, depth=16), rate=98.0)
    good = {
        "start": 0.0,
        "end": 60.0,
        "best": best,
        "cheapest": cheapest,
        "rate": 96.0,
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


def test_the_cold_start_knows_only_the_cpus() -> None:
    assert [cold_start(cpus).local for cpus in (1.0, 3.5, 64.0)] == [1, 3, 4]
    assert cold_start(2.0) == Settings(local=2, depth=4)


def test_only_what_a_scenario_holds_to_counts() -> None:
    scenario = replace(load()["cpu-4-cores"], holds=("memory",))
    assert Result(scenario, [], [score(rate=1.0)]).missed() == {}
    later = Result(load()["cpu-4-cores"], [], [score(), score(start=30.0, rate=50.0)])
    assert later.missed() == {"regret": "regret 50.0 % from 30 s on"}


@pytest.mark.parametrize("options", [[], ["--decisions"], ["--json"]])
def test_the_command_shows_a_scenario(options: list[str]) -> None:
    lines: list[str] = []
    status = main(["--only", "consumer-two", *options], write=lines.append)
    missed = played("consumer-two").missed()
    assert status == bool(missed)
    assert any("consumer-two" in line for line in lines)


def test_the_command_knows_its_scenarios(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--only", "nothing"])
    assert "no scenario is called nothing; there are " in capsys.readouterr().err


def test_holds_are_the_targets() -> None:
    everything = score(rate=1.0, settle_s=9.0, decisions=9, workers=99.0, changes=9.0, over_bytes=9.0)
    assert set(everything.missed()) == set(HOLDS)
