"""The simulated loader against what is known of such systems: bottlenecks, and lost nodes."""

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import pytest

from benchmarks.simulation.history import History
from benchmarks.simulation.simulator import simulate
from benchmarks.simulation.steering import Fixed
from benchmarks.simulation.world import Phase, Step, Storage, Work, World
from dpex.schedule.prefetch import Settings

pytestmark = pytest.mark.long


def world(work: Work, step: Step | None = None, *, phases: Iterable[Phase] = (), **constants: Any) -> World:
    """A world without costs but those named."""
    free = {"own_s": 0.0, "fork_s": 0.0, "actor_s": 0.0, "rtt_s": 0.0} | constants
    has = {"link": 1e12} | {name: free.pop(name) for name in ("nodes", "link", "storage") if name in free}
    return World(phases=(Phase(work=work, step=step or Step(), **has), *phases), **free)


def run(of: World, settings: Settings, seconds: float = 20.0) -> History:
    return simulate(of, [Fixed(settings)] * of.ranks, seconds)[0]


def workers(local: int = 0, remote: int = 0, prefetch: int | None = None) -> Settings:
    return Settings(local=local, remote=remote, prefetch=4 * (local + remote) if prefetch is None else prefetch)


DISK = Storage(capacity=4e7, reader=1e7)
IN_PROCESS = world(Work(cpu_s=0.01, wait_s=0.02, encode_s=0.5), Step(gpu_s=0.03, cpu_s=0.01), own_s=0.5, cpus=1)
"""There is nothing to encode and to hand over."""


@pytest.mark.parametrize(
    ("of", "settings", "rate"),
    [
        *(
            (world(Work(cpu_s=0.05), cpus=4), workers(local), rate)
            for local, rate in ((1, 20), (3, 60), (4, 80), (8, 80))
        ),
        (world(Work(cpu_s=0.03, encode_s=0.01), cpus=2), workers(4), 50),
        (
            world(Work(cpu_s=0.03), Step(cpu_s=0.005), cpus=2, own_s=0.005),
            workers(8),
            2 / 0.04,
        ),  # the loop has its part
        (world(Work(wait_s=0.1), cpus=1), workers(1), 10),
        (world(Work(wait_s=0.1), cpus=1), workers(16), 160),
        (world(Work(wait_s=0.1), cpus=1), workers(16, prefetch=5), 50),
        (world(Work(cpu_s=0.01), Step(gpu_s=0.02, cpu_s=0.004), cpus=8, own_s=0.001), workers(4), 1 / 0.025),
        (world(Work(cpu_s=0.05, wait_s=0.05), cpus=1, nodes=8), workers(remote=8), 80),  # each has a CPU of its own
        (world(Work(cpu_s=0.1), nodes=3), workers(remote=8), 30),
        (world(Work(cpu_s=0.02, batch_bytes=4e6), nodes=8, link=1e8), workers(remote=8), 25),
        (world(Work(cpu_s=0.1), cpus=2, nodes=3), workers(2, 3), 50),
        (IN_PROCESS, Settings(), 1 / 0.07),
        (replace(IN_PROCESS, phases=(*IN_PROCESS.phases, Phase(others=3.0))), Settings(), 1 / 0.13),
        (world(Work(cpu_s=0.04), cpus=2, thrash=0.1), workers(6), 2 / (0.04 * 1.4)),
        (world(Work(cpu_s=0.1), cpus=8, smt_yield=0.3), workers(16), 52),
        (world(Work(read=1e6), cpus=16, storage=DISK), workers(1), 10),
        (world(Work(read=1e6), cpus=16, storage=DISK), workers(8), 40),  # it gives four of them all that they can take
        (world(Work(read=1e6), cpus=16, nodes=4, storage=DISK), workers(4, 4), 40),
        (world(Work(read=1e6), cpus=16, storage=replace(DISK, loss=0.1)), workers(11), 20),
    ],
)
def test_the_rate_is_that_of_the_bottleneck(of: World, settings: Settings, rate: float) -> None:
    assert run(of, settings, 60).rate(10, 60) == pytest.approx(rate, rel=0.03)


def test_lost_nodes_lose_no_batch() -> None:
    """A batch lost would stop delivery for good, as it is in order."""
    of = world(
        Work(cpu_s=0.1, spread=0.5), cpus=2, nodes=6, phases=[Phase(at=10.05, nodes=1), Phase(at=20.05, nodes=6)]
    )
    history = run(of, workers(2, 6, prefetch=64), 30)
    assert [history.rate(start, start + 7) for start in (3, 13, 23)] == pytest.approx([80, 30, 80], rel=0.12)
