"""The model against worlds whose answer is known, and against the simulator."""

import math
from dataclasses import replace
from statistics import NormalDist

import pytest

from benchmarks.simulation.simulator import simulate
from benchmarks.simulation.steering import Fixed
from benchmarks.simulation.world import Phase, Step, Work, World
from dpex.autotune.config import AutotuneConfig
from dpex.autotune.model import Estimate, fluid, replay
from dpex.autotune.planner import Bounds, Plan, best, expect, half_way
from dpex.autotune.types import Settings

EASY = Estimate(step_s=0.01, step_cpu_s=0.0, own_s=0.0, here_s=0.05, cpu_s=0.05, wait_s=0.0, far_s=0.05, cpus=16.0)
CONFIG = AutotuneConfig()


def at(local: int = 0, remote: int = 0, prefetch: int = 64) -> Settings:
    return Settings(local=local, remote=remote, prefetch=prefetch)


def test_in_process_is_step_and_work_one_after_the_other() -> None:
    assert fluid(EASY, at()).rate == pytest.approx(1 / 0.06)


@pytest.mark.parametrize(("local", "rate"), [(1, 20), (2, 40), (5, 100), (8, 100)])
def test_workers_add_up_until_the_consumer_is_the_limit(local: int, rate: float) -> None:
    assert fluid(EASY, at(local)).rate == pytest.approx(rate, rel=0.01)
    assert replay(EASY, at(local), fluid(EASY, at(local))) == pytest.approx(rate, rel=0.02)


def test_more_workers_than_cpus_make_no_more_and_slow_the_consumer() -> None:
    few = replace(EASY, cpus=2.0, step_cpu_s=0.005)
    assert fluid(few, at(8)).capacity < 2 / 0.05
    assert fluid(few, at(8)).demand < fluid(few, at(1)).demand
    assert fluid(few, at(8)).slowdown > 1.5


def test_waiting_needs_no_cpu() -> None:
    waits = replace(EASY, cpus=1.0, cpu_s=0.001, wait_s=0.1)
    assert fluid(waits, at(10)).rate == pytest.approx(10 / 0.101, rel=0.01)


THREADED = replace(EASY, cpus=8.0, step_s=0.001, cpu_s=0.08, here_s=0.02, at_once=4.0)
"""A batch takes 80 ms of CPU time; on an idle machine four CPUs make it in 20 ms."""


def test_a_batch_of_several_threads_takes_as_many_cpus() -> None:
    for workers, rate in ((1, 50), (2, 100), (4, 100), (8, 100)):
        assert fluid(THREADED, at(workers)).capacity == pytest.approx(rate, rel=0.02)
        assert replay(THREADED, at(workers), fluid(THREADED, at(workers))) == pytest.approx(rate, rel=0.05)
    assert fluid(THREADED, at()).rate == pytest.approx(1 / 0.021)
    assert fluid(replace(THREADED, others=8.0), at()).rate < 1 / 0.025
    assert best(THREADED, Bounds(local=9, remote=0, prefetch=99), CONFIG).settings.local <= 3


def test_threads_of_a_batch_are_no_faster_than_the_cpus_there_are() -> None:
    few = replace(THREADED, cpus=2.0)
    for workers in (1, 2, 3):
        assert fluid(few, at(workers)).capacity == pytest.approx(25, rel=0.02)
        assert replay(few, at(workers), fluid(few, at(workers))) == pytest.approx(25, rel=0.05)


WAITING = replace(EASY, step_s=0.001, cpu_s=0.01, wait_s=0.14, cpus=2.0)


def to(local: int) -> Plan:
    return expect(WAITING, at(local, prefetch=4 * local))


def test_a_large_step_goes_half_way_first_where_cpus_are_short() -> None:
    assert half_way(WAITING, at(2, prefetch=8), to(14), idle=0.1).settings == at(5, prefetch=20)
    assert half_way(WAITING, at(5, prefetch=20), to(14), idle=0.1).settings == at(8, prefetch=32)
    assert half_way(WAITING, at(8, prefetch=32), to(14), idle=0.1).settings == at(14, prefetch=56)


def test_where_cpus_are_free_or_the_step_is_small_it_goes_all_the_way() -> None:
    assert half_way(WAITING, at(2, prefetch=8), to(14), idle=1.5).settings.local == 14
    assert half_way(WAITING, at(2, prefetch=8), to(4), idle=0.1).settings.local == 4
    assert half_way(WAITING, at(2, prefetch=8), expect(WAITING, at(1)), idle=0.0).settings.local == 1
    assert half_way(WAITING, at(0), to(14), idle=0.0).settings.local == 14


def test_ceilings_hold() -> None:
    assert fluid(replace(EASY, ceiling=30.0), at(5)).rate == pytest.approx(30)
    far = replace(EASY, far_ceiling=30.0)
    assert fluid(far, at(remote=5)).rate == pytest.approx(30)
    assert fluid(far, at(local=1, remote=5)).rate == pytest.approx(50)


def test_spread_costs_what_the_simulator_says_it_costs() -> None:
    spread = tuple(math.exp(-0.5 + z) for z in _normal_quantiles(191))
    work = replace(EASY, step_s=0.005, cpu_s=0.0, wait_s=0.05, spread=spread)
    world = World(cpus=16, own_s=0.0, phases=(Phase(work=Work(wait_s=0.05, spread=1.0), step=Step(gpu_s=0.005)),))
    for prefetch in (16, 32, 64, 128):
        real = simulate(world, [Fixed(at(16, prefetch=prefetch))], 60)[0].rate(5, 60)
        assert expect(work, at(16, prefetch=prefetch)).rate == pytest.approx(real, rel=0.2)


def test_batches_that_take_longer_keep_no_others_off_a_link_that_carries_all() -> None:
    spread = tuple(math.exp(0.3 * z - 0.045) for z in _normal_quantiles(191))
    work = replace(EASY, step_s=0.0001, far_s=0.4, spread=spread)
    settings = at(remote=150, prefetch=900)
    carried = replace(work, far_ceiling=1300.0)
    alone, over_link = (replay(each, settings, fluid(each, settings)) for each in (work, carried))
    assert over_link == pytest.approx(alone, rel=0.03)
    narrow = replace(work, far_ceiling=200.0)
    assert replay(narrow, settings, fluid(narrow, settings)) == pytest.approx(200.0, rel=0.03)


def _normal_quantiles(count: int) -> list[float]:
    return [NormalDist().inv_cdf((i + 0.5) / count) for i in range(count)]


def test_the_cheapest_of_the_fast_is_best() -> None:
    plan = best(EASY, Bounds(local=16, remote=0, prefetch=999), CONFIG)
    assert plan.settings.local == 5
    assert plan.rate == pytest.approx(100, rel=0.02)


def test_in_process_where_workers_cost_more_than_they_save() -> None:
    tiny = replace(EASY, step_s=0.0001, here_s=0.0001, cpu_s=0.0002, own_s=0.0004)
    assert best(tiny, Bounds(local=16, remote=0, prefetch=999), CONFIG).settings.workers == 0


def test_what_the_machine_cannot_do_the_cluster_does() -> None:
    plan = best(replace(EASY, cpus=2.0, step_cpu_s=0.002), Bounds(local=3, remote=20, prefetch=999), CONFIG)
    assert plan.settings.remote >= 3
    assert plan.rate >= 95


@pytest.mark.parametrize("prefetch", [1, 2, 3, 7])
def test_bounds_hold_even_where_they_hurt(prefetch: int) -> None:
    plan = best(EASY, Bounds(local=3, remote=0, prefetch=prefetch), CONFIG)
    assert plan.settings.local <= min(3, prefetch)
    assert plan.settings.prefetch <= prefetch
    least = best(EASY, Bounds(local=9, remote=9, prefetch=99, least_local=8, least_remote=4), CONFIG).settings
    assert (least.local, least.remote) >= (8, 4)


@pytest.mark.parametrize(("memory", "local"), [(5e9, 5), (1e9, 3), (0.7e9, 2), (0.1e9, 1)])
def test_workers_and_batches_have_room_in_memory(memory: float, local: int) -> None:
    """Five workers would be best; each takes 200 MB, and each has a batch of 100 MB in flight."""
    bounds = Bounds(local=16, remote=0, prefetch=999, memory=memory, worker_bytes=2e8, batch_bytes=1e8, least_local=1)
    settings = best(EASY, bounds, CONFIG).settings
    assert settings.local == local
    assert settings.local * 2e8 + settings.prefetch * 1e8 <= max(memory, 3e8)  # one worker and its batch may always be


def test_costs_that_stay_alike_need_more_in_flight() -> None:
    """Against the rate of independent costs: a slow stretch outlasts a short queue, and a long one bridges it."""
    spread = tuple(math.exp(0.5 * NormalDist().inv_cdf((i + 0.5) / 97) - 0.125) for i in range(97))
    independent = replace(EASY, step_s=0.01, cpu_s=0.001, wait_s=0.065, spread=spread)
    alike = replace(independent, correlation=50.0)
    short, long = at(8, prefetch=32), at(8, prefetch=256)
    assert expect(alike, short).rate < 0.98 * expect(independent, short).rate
    assert expect(alike, long).rate > 0.98 * expect(independent, long).rate
    assert best(alike, Bounds(local=64, remote=0, prefetch=4096), CONFIG).settings.prefetch >= 48


def test_where_memory_is_short_fewer_workers_leave_room_for_batches_ahead() -> None:
    """17 workers would leave room for 22 batches, and idle behind each slow one."""
    spread = tuple(math.exp(0.8 * NormalDist().inv_cdf((i + 0.5) / 97) - 0.32) for i in range(97))
    uneven = replace(EASY, step_s=0.0, cpu_s=0.6, wait_s=8.4, here_s=9.0, spread=spread)
    bounds = Bounds(local=17, remote=0, prefetch=4096, memory=2.2e9, worker_bytes=1.25e8, batch_bytes=3.2e6)
    plan = best(uneven, bounds, CONFIG)
    assert plan.settings.local < 17
    assert plan.rate > 1.2 * expect(uneven, at(17, prefetch=bounds.most_prefetch(17))).rate
    assert plan.settings.prefetch <= bounds.most_prefetch(plan.settings.local)
    assert best(uneven, replace(bounds, memory=math.inf), CONFIG).settings.local == 17
