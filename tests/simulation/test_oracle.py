"""The search for the best fixed setting: it finds what formulas and trying everything say; and what is kept of it."""

import json
from dataclasses import replace

import pytest

from benchmarks.simulation import kept
from benchmarks.simulation.generate import generate
from benchmarks.simulation.kept import REFRESH, StaleOracleError
from benchmarks.simulation.oracle import MOST_LOCAL, Search, Truth, truths
from benchmarks.simulation.scenarios import FOLDER, ORACLE, SETS, Scenario, load
from benchmarks.simulation.world import Phase, Step, Work, World
from dpex.autotune.config import AutotuneConfig
from dpex.measure.settings import Settings

pytestmark = pytest.mark.long


def make(world: World, config: AutotuneConfig | None = None) -> Scenario:
    config = config or AutotuneConfig()
    return Scenario(name="made", family="", why="", seconds=30, world=world, judged_at=(0.0,), config=config)


def search(world: World, config: AutotuneConfig | None = None) -> Truth:
    return truths(make(world, config))[0]


def test_it_finds_what_formulas_say() -> None:
    """Ten workers that wait 90 of 100 ms a batch saturate one CPU."""
    phase = Phase(work=Work(wait_s=0.09, cpu_s=0.01, spread=0.1), step=Step())
    found = search(World(cpus=1, own_s=0.0, phases=(phase,)))
    assert found.best.rate == pytest.approx(100, rel=0.02)
    assert 10 <= found.cheapest.settings.local <= 15
    assert found.cheapest.rate >= 0.975 * found.best.rate


def test_it_stays_within_memory() -> None:
    phase = Phase(work=Work(wait_s=0.1, batch_bytes=2e8), step=Step(gpu_s=0.001))
    settings = search(World(memory=1.5e9, worker_bytes=1e8, phases=(phase,))).best.settings
    assert settings.local * 1e8 + settings.prefetch * 2e8 <= 1.5e9
    assert settings.local == 5  # with as many batches; a sixth leaves room for four


def test_it_stays_within_limits() -> None:
    phase = Phase(work=Work(wait_s=0.1), step=Step(gpu_s=0.001), nodes=8)
    config = AutotuneConfig(min_local=2, max_local=5, max_remote=0, max_prefetch=9)
    assert search(World(phases=(phase,)), config).best.settings == Settings(local=5, prefetch=9)


@pytest.mark.parametrize(
    "world",
    [
        World(cpus=3, phases=(Phase(work=Work(wait_s=0.3, cpu_s=0.02, spread=0.7, correlation=30.0)),)),
        World(cpus=8, thrash=0.03, phases=(Phase(work=Work(cpu_s=0.05, wait_s=0.02)),)),
        World(cpus=4, smt_yield=0.2, phases=(Phase(work=Work(cpu_s=0.08), step=Step(gpu_s=0.01)),)),
    ],
)
def test_from_coarse_to_fine_finds_what_trying_everything_finds(world: World) -> None:
    scenario = make(world)
    best = Search(scenario, 0.0, 30.0).best()
    everything = Search(scenario, 0.0, 30.0).everything()
    assert everything.settings.local <= MOST_LOCAL
    assert 0.99 * everything.rate <= best.rate <= everything.rate


def test_later_intervals_start_from_the_best_of_earlier_ones() -> None:
    """Work that gets four times slower half-way, on so many CPUs that four times the workers keep up."""
    phases = (Phase(work=Work(cpu_s=0.1), step=Step(gpu_s=0.02)), Phase(at=30, work=Work(cpu_s=0.4), stream=1))
    scenario = replace(make(World(cpus=64, own_s=0.0, phases=phases)), seconds=60, judged_at=(0.0, 30.0))
    first, second = truths(scenario)
    assert (first.cheapest.settings.local, second.cheapest.settings.local) == (5, pytest.approx(19, abs=2))
    assert second.best.rate == pytest.approx(50, rel=0.03)


def test_nobody_does_better_than_the_best_with_the_same_draws() -> None:
    """The fixed setting of the truth, played as a controller is, has its rate to the last digit."""
    scenario = replace(generate(1, 18), judged_at=(0.0,))
    best = truths(scenario, with_cheapest=False)[0].best
    assert Search(scenario, 0.0, scenario.seconds).simulate(best.settings, scenario.seconds) == best


@pytest.mark.parametrize("of", SETS)
def test_what_is_kept_is_of_these_scenarios_and_this_simulator(of: str) -> None:
    for scenario in load(of).values():
        assert len(kept.truths(of, scenario)) == len(scenario.judged_at), f"run {REFRESH}"


@pytest.mark.parametrize(("of", "family"), sorted({(of, s.family) for of in SETS for s in load(of).values()}))
def test_rates_that_are_kept_are_had_again(of: str, family: str) -> None:
    """Of one scenario a family; the key of the others says that they were found by the same code."""
    scenario = next(each for each in load(of).values() if each.family == family)
    start, end = next(iter(scenario.intervals()))
    truth = kept.truths(of, scenario)[0]
    for static in (truth.best, truth.cheapest):
        again = Search(scenario, start, end).simulate(static.settings, end)
        assert again.rate == pytest.approx(static.rate, rel=0.002)  # another C library may round otherwise


def test_results_of_another_world_are_refused() -> None:
    scenario = load()["cpu-4-cores"]
    assert kept.truths("development", scenario)
    with pytest.raises(StaleOracleError, match=f"run {REFRESH}"):
        kept.truths("development", replace(scenario, world=replace(scenario.world, cpus=5.0)))


@pytest.mark.parametrize("of", SETS)
def test_nothing_is_kept_of_scenarios_that_are_gone(of: str) -> None:
    assert json.loads((FOLDER / of / ORACLE).read_text()).keys() == load(of).keys()
