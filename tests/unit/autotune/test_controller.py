"""What the controller decides in simulated worlds, and what it does not."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import pytest

from benchmarks.simulation.history import History
from benchmarks.simulation.simulator import Simulator, simulate
from benchmarks.simulation.steering import Fixed
from benchmarks.simulation.world import Phase, Step, Work, World
from dpex.autotune.config import AutotuneConfig
from dpex.autotune.controller import Controller
from dpex.autotune.types import Sample, Settings
from dpex.autotune.wording import named
from dpex.measure.samples import MachineSample, PoolSample

CPU = Phase(work=Work(cpu_s=0.05), step=Step(gpu_s=0.01, cpu_s=0.001))
WAIT = Phase(work=Work(wait_s=0.08, cpu_s=0.001), step=Step(gpu_s=0.005))


def run(
    world: World, seconds: float = 60, start: Settings | None = None, **config: float
) -> tuple[History, Controller]:
    controller = Controller(AutotuneConfig(**config), start or Settings(local=2, prefetch=4))  # type: ignore[arg-type]
    return simulate(world, [controller], seconds)[0], controller


def world(*phases: Phase, cpus: float = 4, **changes: float) -> World:
    return World(cpus=cpus, phases=phases, **changes)  # type: ignore[arg-type]


def test_work_that_waits_gets_workers_far_beyond_the_cores_in_one_step() -> None:
    history, controller = run(world(WAIT, cpus=2))
    first = controller.decisions[0]
    assert first.reason == "too few"
    assert 12 <= first.new.local <= 24  # the first window holds two batches
    assert history.rate(5, 60) > 0.97 / 0.0053
    assert first.outcome is not None
    assert first.outcome.kept


def test_cpu_bound_work_stays_within_the_machine() -> None:
    history, controller = run(world(CPU))
    assert 4 <= controller.decisions[-1].new.local <= 5
    assert history.rate(5, 60) > 0.95 * 4 / 0.0515


def test_nothing_grows_while_the_consumer_is_the_limit_and_workers_go() -> None:
    history, controller = run(world(Phase(work=Work(cpu_s=0.02), step=Step(gpu_s=0.1)), cpus=8), start=_many())
    assert all(decision.new.workers < decision.old.workers for decision in controller.decisions)
    assert controller.decisions[-1].new.workers <= 1
    assert history.rate(10, 60) > 0.97 / 0.1003


def _many() -> Settings:
    return Settings(local=8, prefetch=16)


def test_work_that_is_cheaper_to_do_than_to_hand_over_goes_in_process() -> None:
    tiny = Phase(work=Work(cpu_s=0.0001, encode_s=0.0001), step=Step(gpu_s=0.0001))
    _, controller = run(world(tiny, own_s=0.0005), seconds=10)
    assert controller.decisions[-1].new.workers == 0


def _uneven(seed: int, sigma: float = 0.7) -> list[float]:
    rng, state, found = random.Random(seed), 0.0, []
    for _ in range(20_000):
        state = CARRIED * state + math.sqrt(1.0 - CARRIED**2) * rng.gauss(0.0, 1.0)
        found.append(math.exp(sigma * state - sigma * sigma / 2))
    return found


CARRIED = math.exp(-1 / 50)


class Slow(Simulator):
    """Batches stay slow, or fast, for some fifty of them."""

    def __init__(self, world: World, controller: Controller | Fixed) -> None:
        self._factors = iter(_uneven(1))
        super().__init__(world, [controller])

    def draw_work(self, _rng: random.Random) -> tuple[float, float]:
        """See `Simulator.draw_work`."""
        factor = next(self._factors)
        return self.work.wait_s * factor, self.work.cpu_s * factor


SHARDS = Phase(work=Work(cpu_s=0.002, wait_s=0.05), step=Step(gpu_s=0.008, cpu_s=0.001))


def _delivered(world: World, controller: Controller | Fixed) -> int:
    simulator = Slow(world, controller)
    simulator.run(60.0)
    return len(simulator.ranks[0].history.delivered)


def test_slow_stretches_keep_their_workers() -> None:
    """Where slow batches come in a row, fewer workers that are enough on average are too few half of the time."""
    controller = Controller(AutotuneConfig(), Settings(local=4, prefetch=8))
    best = max(_delivered(world(SHARDS, cpus=8), Fixed(Settings(local=n, prefetch=8 * n))) for n in (6, 12, 24))
    assert _delivered(world(SHARDS, cpus=8), controller) > 0.95 * best
    assert sum(decision.reason == "undo" for decision in controller.decisions) <= 1


def test_prefetch_that_serves_nothing_is_given_back() -> None:
    large = Phase(work=Work(cpu_s=0.02, batch_bytes=14e6), step=Step(gpu_s=0.02))
    history, controller = run(world(large, cpus=4), start=Settings(local=2, prefetch=64), seconds=30)
    assert controller.decisions[-1].new.prefetch <= 8
    assert history.rate(5, 30) > 0.95 / 0.0203
    assert max(mark.memory for mark in history.marks[-10:]) < 0.5 * 64 * 14e6


def test_it_comes_back_from_in_process_when_work_gets_heavy() -> None:
    tiny = Phase(work=Work(cpu_s=0.0001, encode_s=0.0001), step=Step(gpu_s=0.0001))
    heavy = Phase(at=5, work=Work(cpu_s=0.02), step=Step(gpu_s=0.005))
    history, controller = run(world(tiny, heavy, own_s=0.0005), seconds=30)
    assert controller.decisions[-1].new.workers >= 3
    assert history.rate(15, 30) > 0.9 * 4 / 0.021


def test_what_one_machine_cannot_do_goes_to_the_cluster_and_comes_back_when_it_is_not_needed() -> None:
    heavy = Phase(work=Work(cpu_s=0.1), step=Step(gpu_s=0.02, cpu_s=0.001), nodes=12, link=1e9)
    slow = Phase(at=40, step=Step(gpu_s=0.3, cpu_s=0.001))
    history, controller = run(world(heavy, slow, cpus=2), seconds=80)
    assert max(decision.new.remote for decision in controller.decisions) >= 3
    assert history.rate(10, 40) > 0.93 / 0.0213
    assert controller.decisions[-1].new.remote == 0


def test_a_lost_node_is_made_up_for() -> None:
    heavy = Phase(work=Work(cpu_s=0.1), step=Step(gpu_s=0.02, cpu_s=0.001), nodes=4, link=1e9)
    history, _ = run(world(heavy, Phase(at=20, nodes=3), cpus=4), seconds=60)
    assert history.rate(30, 60) > 0.93 * history.rate(5, 20)


def test_it_reopens_when_the_work_changes() -> None:
    shift = [
        Phase(work=Work(wait_s=0.016), step=Step(gpu_s=0.02)),
        Phase(at=20, work=Work(wait_s=0.128)),
        Phase(at=40, work=Work(wait_s=0.032)),
    ]
    history, controller = run(world(*shift))
    for start in (3, 24, 44):
        assert history.rate(start, start + 15) > 0.95 / 0.0203
    assert controller.decisions[-1].new.workers <= 3


@pytest.mark.parametrize("part_of_window", [0.0, 0.3, 0.6, 0.9])
def test_a_trial_is_not_blamed_for_a_change_of_the_work(part_of_window: float) -> None:
    """With the first batches of the new kind it asks for a worker more, which by then seems to make all dearer."""
    config = AutotuneConfig()
    changes_at = 10.0 + part_of_window * config.interval_s
    quick, slow = (Work(wait_s=wait_s, cpu_s=0.001, spread=0.02) for wait_s in (0.016, 0.4))
    phases = Phase(work=quick, step=Step(gpu_s=0.02)), Phase(at=changes_at, work=slow)
    controller = Controller(config, Settings(local=4, prefetch=8))
    history = simulate(world(*phases), [controller], changes_at + 20.0, config.interval_s)[0]
    assert history.rate(changes_at + 12.0, changes_at + 20.0) > 0.9 / 0.02


@pytest.mark.parametrize("changes_at", [4.6, 4.8, 5.0, 5.2, 5.4, 5.6, 5.8])
def test_another_level_is_noticed_by_its_first_windows(changes_at: float) -> None:
    """Windows of two batches each follow: what they are off by is no spread that would hide them."""
    config = AutotuneConfig()
    quick, slow = (Work(wait_s=wait_s, cpu_s=0.001, spread=0.02) for wait_s in (0.016, 0.128))
    phases = Phase(work=quick, step=Step(gpu_s=0.02)), Phase(at=changes_at, work=slow)
    controller = Controller(config, Settings(local=2, prefetch=4))
    history = simulate(world(*phases, cpus=2), [controller], changes_at + 8.0, config.interval_s)[0]
    assert history.rate(changes_at + 1.5, changes_at + 8.0) > 0.95 / 0.0203
    assert not any(decision.reason == "undo" for decision in controller.decisions)


def test_memory_is_a_wall() -> None:
    big = Phase(work=Work(wait_s=0.2, cpu_s=0.02, batch_bytes=2e8), step=Step(gpu_s=0.01))
    history, _ = run(world(big, memory=3e9))
    assert max(mark.memory for mark in history.marks) <= 3e9


@pytest.mark.parametrize(("budget", "deepest"), [(None, 24), (60 << 20, 6)])
def test_a_memory_budget_is_a_wall(budget: int | None, deepest: int) -> None:
    """Work that waits for 80 ms beside a step of 5 ms would have some 17 workers, with two batches of 10 MB each."""
    controller = Controller(AutotuneConfig(), Settings(local=2, prefetch=4))
    settings = controller.begin()
    for second in range(1, 20):
        sample = Sample(at=float(second), seconds=1.0, settings=settings, batches=20, wait_s=0.9, work_s=0.1, own_s=0.0)
        seen = _with_pool(replace(sample, batch_bytes=10 << 20), settings.local, 0.08)
        decision = controller.step(replace(seen, machine=replace(seen.machine, batch_budget=budget)))
        settings = settings if decision is None else decision.new
    prefetches = [decision.new.prefetch for decision in controller.decisions]
    assert max(prefetches) >= deepest if budget is None else max(prefetches) == deepest
    assert all(decision.new.workers <= decision.new.prefetch for decision in controller.decisions)


@pytest.mark.long
def test_steady_work_is_left_alone() -> None:
    for phase in (CPU, WAIT):
        history, controller = run(world(phase), seconds=600)
        late = [decision for decision in controller.decisions if decision.at > 30]
        kept = [d for d in late if d.outcome is not None and d.outcome.kept and d.reason != "undo"]
        assert not kept
        assert history.rate(30, 600) > 0.98 * history.rate(5, 30)


def test_limits_are_kept() -> None:
    _, controller = run(world(WAIT), max_local=6)
    assert max(decision.new.local for decision in controller.decisions) == 6
    _, controller = run(world(Phase(work=Work(cpu_s=0.001), step=Step(gpu_s=0.1))), start=_many(), min_local=3)
    assert min(decision.new.local for decision in controller.decisions) == 3


def test_a_change_that_does_not_help_is_undone_and_not_tried_at_once_again() -> None:
    """A storage that gives no more than some rate, however many ask."""
    controller = Controller(AutotuneConfig(explore_s=1e6), Settings(local=2, prefetch=4))
    settings, at = controller.begin(), 0.0
    for _ in range(60):
        at += 1.0
        rate = 20.0
        wait = settings.local / rate if settings.local else 0.05
        sample = Sample(at=at, seconds=1.0, settings=settings, batches=20, wait_s=0.8, work_s=0.2, own_s=0.0)
        sample = _with_pool(sample, settings.local, wait)
        decision = controller.step(sample)
        if decision is not None:
            settings = decision.new
    grown, undone = controller.decisions[:2]
    assert grown.new.local > grown.old.local
    assert undone.reason == "undo"
    assert settings.local <= 2
    assert sum(d.new.local > d.old.local for d in controller.decisions) == 1


def _with_pool(sample: Sample, workers: int, service_s: float) -> Sample:
    pool = PoolSample(
        requested=workers,
        running=workers,
        tickets=20,
        load_s=20 * service_s,
        cpu_s=0.02,
        services_s=(service_s,) * 20,
    )
    return replace(sample, local=pool, machine=MachineSample(cpus=4, trainer_cpu_s=0.05))


def test_every_decision_says_why() -> None:
    _, controller = run(world(WAIT))
    assert controller.decisions
    for decision in controller.decisions:
        assert named(decision.new) in decision.text
        assert decision.evidence
        assert decision.predicted_rate > 0


@pytest.mark.parametrize("idle_s", [5.0, 100.0])
def test_a_validation_in_between_is_not_misread(idle_s: float) -> None:
    history, controller = run(world(WAIT, cpus=2), seconds=20)
    settings = controller.decisions[-1].new
    before = len(controller.decisions)
    nothing = Sample(at=20 + idle_s, seconds=idle_s, settings=settings)
    assert controller.step(nothing) is None
    assert len(controller.decisions) == before
    assert history.delivered
