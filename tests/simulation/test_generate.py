"""Generated worlds are functions of seed and number, make sense, and are judged by one command."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.simulation import kept
from benchmarks.simulation.__main__ import main
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


def test_every_trouble_happens_in_some_world() -> None:
    told = {trouble for number in range(300) for trouble in generate(SEED, number).why.split(", ")}
    assert told >= {
        *("correlated", "rare slow batches", "slow shards", "page cache", "shared storage", "slow spells", "pauses"),
        *("others", "bursts of others", "hyper-threads", "memory contention", "clock of 10 ms", "no run queue"),
        *("cluster", "ranks", "tight memory", "limits", "changes", "no step"),
    }


def test_a_description_is_all_there_is_to_a_world() -> None:
    text = json.dumps(described(SEED, 5))
    assert scenario_of("generated", json.loads(text)) == generate(SEED, 5)


def test_the_command_reports_and_remembers_what_it_searched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept, "CACHE", tmp_path)
    lines: list[str] = []
    main(["--world", f"{SEED}:{CHEAP}"], lines.append)
    assert json.loads(lines[0])["cpus"] == described(SEED, CHEAP)["world"]["cpus"]
    assert any("regret of whole runs: mean" in line for line in lines)
    assert len(list(tmp_path.glob("*.json"))) == 1
    again: list[str] = []
    main(["--world", f"{SEED}:{CHEAP}"], again.append)
    assert again == lines


def test_the_command_plays_worlds_of_a_kind() -> None:
    lines: list[str] = []
    main(["--fuzz", "1", "--kind", "short", "--seed", "1"], lines.append)
    assert lines[0] == "short with seed 1: 1 worlds"
    assert lines[-3].endswith("--kind short --world short:1:0")
