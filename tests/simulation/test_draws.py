"""Random numbers are those of their position, whoever asks and in whatever order."""

from __future__ import annotations

import pytest

from benchmarks.simulation.draws import Draws
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
