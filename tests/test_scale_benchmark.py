"""`python -m benchmarks.scale`, in small: real agents, whose batches are taken in both ways, and a coordinator."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from benchmarks.scale import __main__ as command
from benchmarks.scale import tables
from benchmarks.training import runs
from benchmarks.training.runs import Run


@pytest.mark.timeout(240)
def test_each_way_is_measured_and_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    results = tmp_path / "kept" / "scale.json"
    options = ["--sizes", "1000", "--rounds", "1", "--window-s", "0.1", "--jobs", "3", "--results", str(results)]
    assert command.main(options) == 0
    run = runs.read(results)
    assert list(run.rows) == ["network:1000", "memory:1000", "coordination:3"]
    for key in ("network:1000", "memory:1000"):
        (one,) = run.rows[key]
        assert one["batches"] > 0
        assert 0 < one["thread_cpu_s"] <= 1.01 * one["process_cpu_s"]
    (coordination,) = run.rows["coordination:3"]
    assert (coordination["jobs"], coordination["cpus"]) == (3, 90)
    shown = capsys.readouterr().out
    assert all(made in shown for made in (tables.intake_table(run), tables.coordination_table(run)))
    assert tables.problems(run) == ["it has rows of 1 rounds, and 3 are quoted"]


def run_as(commit: str, monkeypatch: pytest.MonkeyPatch, asked: list[str]) -> None:
    """The command without agents: each measurement is noted, and the fourth is broken off."""

    def intake(way: str, nbytes: int, window_s: float) -> tables.Intake:
        asked.append(way)
        if len(asked) == 4:
            raise KeyboardInterrupt
        return tables.Intake(way=way, nbytes=nbytes, batches=1, seconds=1.0, thread_cpu_s=0.1, process_cpu_s=0.2)

    monkeypatch.setattr(runs, "commit", lambda root: (commit, False))
    monkeypatch.setattr(command, "intake", intake)


def test_a_run_that_was_ended_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    run_as("c" * 40, monkeypatch, asked)
    results = tmp_path / "scale.json"
    options = ["--sizes", "10", "--rounds", "3", "--jobs", "1", "--results", str(results)]
    with pytest.raises(KeyboardInterrupt):
        command.main(options)
    assert command.main(options) == 0
    assert asked == ["network", "memory", "network", "memory", "memory", "network", "memory"]
    assert tables.problems(runs.read(results)) == []


def intake(nbytes: int, thread_s: float, process_s: float, seconds: float = 2.0) -> dict[str, Any]:
    one = tables.Intake(
        way="network", nbytes=nbytes, batches=100, seconds=seconds, thread_cpu_s=thread_s, process_cpu_s=process_s
    )
    return asdict(one)


def test_a_trainer_takes_in_what_its_busiest_thread_does_in_a_second() -> None:
    slowest = tables.Coordination(jobs=1000, cpus=30_000, core_ratio=0.2, slowest_s=0.05)
    run = Run(
        subject="scale",
        settings={"rounds": 3, "intake": ["network:1000", "network:38000000"], "coordination": ["coordination:1000"]},
        about={},
        rows={
            "network:1000": [intake(1000, 2e-4, 1e-4), intake(1000, 1e-4, 3e-4), intake(1000, 4e-4, 4e-4)],
            "network:38000000": [intake(38_000_000, 1e-3, 5e-3)] * 3,
            "coordination:1000": [asdict(slowest)] * 2 + [{**asdict(slowest), "core_ratio": 0.4, "slowest_s": 0.5}],
        },
    )
    small, large = tables.intake_table(run).splitlines()[2:]
    assert small == "| network | 1 kB | 200 µs | 0 µs | 5,000/s, 5 MB/s | 50/s, 50 kB/s |"
    assert large == "| network | 38 MB | 1,000 µs | 4,000 µs | 250/s, 9.5 GB/s | 50/s, 1.9 GB/s |"
    assert tables.coordination_table(run).splitlines()[2:] == ["| 1,000 | 30,000 | 20.0% | 500 ms |"]
