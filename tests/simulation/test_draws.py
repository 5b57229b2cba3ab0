"""Random numbers are those of their position, whoever asks and in whatever order."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest

from benchmarks.simulation.draws import Draws, Spells
from benchmarks.simulation.simulator import Simulator
from benchmarks.simulation.steering import Fixed
from benchmarks.simulation.world import Phase, Shards, Step, Work, World
from dpex.schedule.prefetch import Settings

pytestmark = pytest.mark.long

EVERYTHING = Work(
    wait_s=0.1,
    cpu_s=0.02,
    spread=0.5,
    correlation=20.0,
    rare=0.05,
    rare_factor=5.0,
    shards=Shards(share=0.3, factor=2.0, batches=10.0),
)


def factors(work: Work, count: int = 40000) -> list[float]:
    draws = Draws("seed")
    return [draws.work(work, position)[0] / work.wait_s for position in range(count)]


def test_the_order_of_asking_changes_nothing() -> None:
    forward, backward = Draws("seed"), Draws("seed")
    there = [(forward.work(EVERYTHING, n), forward.step(Step(gpu_s=1.0, spread=0.3), n)) for n in range(50)]
    back = [(backward.work(EVERYTHING, n), backward.step(Step(gpu_s=1.0, spread=0.3), n)) for n in reversed(range(50))]
    assert there == back[::-1]
    assert Draws("another").work(EVERYTHING, 7) != forward.work(EVERYTHING, 7)


def made(settings: Settings) -> dict[int, tuple[float, float, float]]:
    """What each ticket costs under these settings."""
    world = World(cpus=4, phases=(Phase(work=EVERYTHING, stream=0), Phase(at=10, stream=1, others=2.0)))
    simulator, costs = Simulator(world, [Fixed(settings)]), {}
    rank = simulator.ranks[0]
    inner = rank._work_of
    rank._work_of = lambda ticket, worker: costs.setdefault(ticket, inner(ticket, worker))  # type: ignore[method-assign]
    simulator.run(9.0)
    return costs


def test_settings_change_nothing_about_the_work() -> None:
    few, many = made(Settings(local=1, prefetch=2)), made(Settings(local=8, prefetch=64))
    assert len(many) > 3 * len(few) > 30
    assert {ticket: many[ticket] for ticket in few} == few


def test_slow_shards_have_their_share_and_length() -> None:
    found = factors(Work(wait_s=1.0, shards=Shards(share=0.25, factor=3.0, batches=50.0)), 200000)
    assert set(found) == {1.0, 3.0}
    assert found.count(3.0) / len(found) == pytest.approx(0.25, abs=0.04)
    runs = sum(a != b for a, b in pairwise(found)) / 2
    assert found.count(3.0) / runs == pytest.approx(50.0, rel=0.15)


def test_spells_are_a_function_of_time() -> None:
    times = [n * 0.1 for n in range(20000)]
    first, second = (Spells(random.Random(3), off_s=6.0, on_s=2.0) for _ in range(2))
    forward = [first.is_on(at) for at in times]
    assert forward == [second.is_on(at) for at in reversed(times)][::-1]
    assert sum(forward) / len(forward) == pytest.approx(0.25, abs=0.05)
    assert all(first.is_on(at) == first.is_on((at + first.next_change(at)) / 2) for at in times[:500])
