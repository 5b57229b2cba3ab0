"""Generated worlds are functions of seed and number, make sense, and are judged by one command."""

from __future__ import annotations

import json

import pytest

from benchmarks.simulation.generate import described, generate
from benchmarks.simulation.scenarios import scenario_of
from benchmarks.simulation.score import cold_start

pytestmark = pytest.mark.long

SEED, CHEAP = 77, 35
"""That world is quickly searched."""


def test_a_world_is_the_same_each_time_and_none_is_like_another() -> None:
    assert generate(SEED, 3) == generate(SEED, 3)
    assert len({repr(generate(SEED, number).world) for number in range(50)}) == 50


@pytest.mark.parametrize("number", range(60))
def test_worlds_make_sense(number: int) -> None:
    scenario = generate(SEED, number)
    world, phase = scenario.world, scenario.world.phases[0]
    assert phase.work is not None
    assert 2 <= world.cpus <= 64
    assert 1e-5 < phase.work.wait_s + phase.work.cpu_s + phase.work.read < 11
    assert phase.step is None or phase.step.gpu_s + phase.step.cpu_s <= 1
    reading_s = phase.work.read / phase.storage.reader if phase.storage is not None else 0.0
    alone_s = phase.work.wait_s + phase.work.cpu_s + reading_s
    assert 10 <= scenario.seconds <= 1800
    assert scenario.seconds >= min(1800, 150 * alone_s) - 0.1, "something can be learnt, and used"
    start = cold_start(world, scenario.config)
    assert world.ranks * (start.local * world.worker_bytes + start.prefetch * phase.work.batch_bytes) <= world.memory


def test_a_description_is_all_there_is_to_a_world() -> None:
    text = json.dumps(described(SEED, 5))
    assert scenario_of("generated", json.loads(text)) == generate(SEED, 5)
