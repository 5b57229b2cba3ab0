"""The simulated GPU: what it works off, what holds up the training process, and what events and NVML say of it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks.simulation.simulator import Simulator
from benchmarks.simulation.steering import Fixed
from benchmarks.simulation.world import Gpu, Phase, Step, Work, World
from dpex.measure.consumer_time import EngineLook
from dpex.schedule.prefetch import Settings

pytestmark = pytest.mark.long

SECONDS = 20.0
STEP = Step(gpu_s=0.1, cpu_s=0.01)


def world(gpu: Gpu, *, wait_s: float = 0.0, step: Step = STEP, **changes: object) -> World:
    plain = World(cpus=8, own_s=0.0, phases=(Phase(work=Work(wait_s=wait_s), step=step),), gpu=gpu)
    return replace(plain, **changes)  # type: ignore[arg-type]


def played(made: World, seconds: float = SECONDS) -> Simulator:
    """With one worker for each rank."""
    steering = [Fixed(Settings(local=1, prefetch=4))] * made.ranks
    simulator = Simulator(made, steering, is_tuned=False)
    simulator.run(seconds)
    return simulator


def looked(made: World) -> tuple[EngineLook, float | None]:
    rank = played(made).ranks[0]
    assert rank.gpu is not None
    return rank.look(), rank.gpu.busy_ratio


@pytest.mark.parametrize(
    ("wait_s", "stall", "busy"),
    [
        pytest.param(0.0, 0.0, 1.0, id="the GPU is the limit"),
        pytest.param(0.0995, 0.0, 1.0, id="the loop waits, and the GPU has work"),
        pytest.param(0.4, 0.74, 0.25, id="the GPU starves"),
    ],
)
def test_events_and_nvml_say_what_the_gpu_did(wait_s: float, stall: float, busy: float) -> None:
    look, seen = looked(world(Gpu(queue=4), wait_s=wait_s))
    assert look.gpu_stall_s is not None
    assert look.gpu_stall_s / SECONDS == pytest.approx(stall, abs=0.03)
    assert seen == pytest.approx(busy, abs=0.06)
    assert look.gpu_step_s / look.gpu_steps == pytest.approx(0.1, abs=0.005)


def test_ranks_wait_for_each_other_and_look_busy() -> None:
    """The second has a slower loader; the first one's kernel spins meanwhile."""
    made = world(Gpu(queue=2, all_reduce_s=0.01), ranks=2, wait_s=0.05)
    simulator = Simulator(made, [Fixed(Settings(local=4, prefetch=8)), Fixed(Settings(local=1, prefetch=1))])
    simulator.run(SECONDS)
    first, second = simulator.ranks
    assert abs(len(first.history.delivered) - len(second.history.delivered)) <= 3
    assert first.gpu is not None
    assert first.gpu.busy_ratio == pytest.approx(1.0, abs=0.05)
