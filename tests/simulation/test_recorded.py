"""A recorded run becomes a world with the same batches, steps and machine."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from workload import wait_as_work

from benchmarks.simulation.recorded import described, main
from benchmarks.simulation.scenarios import Scenario, scenario_of
from benchmarks.simulation.simulator import simulate
from benchmarks.simulation.steering import Fixed
from dpex import AutotuneConfig, DpexDataLoader
from dpex.autotune.trace import Header, TraceOrigin
from dpex.autotune.types import Sample, Settings
from dpex.cli.replay.again import load
from dpex.cli.replay.reading import Trace, TraceSection, TraceStep
from dpex.measure.samples import MachineSample, PoolSample

pytestmark = pytest.mark.long


def sample(at: float, **changes: Any) -> Sample:
    """A second in which two workers made four batches: 0.1 s of CPU, 0.3 s of waiting, 0.05 s without a CPU each."""
    pool = PoolSample(
        requested=2,
        running=2,
        tickets=4,
        load_s=1.8,
        encode_s=0.08,
        cpu_s=0.48,
        queued_s=0.2,
        services_s=(0.47, 0.47, 0.94),
    )
    machine = MachineSample(cpus=3.0, others=0.5, memory_free=10**9, worker_bytes=1e8)
    fields = {"batches": 4, "own_s": 0.008, "work_s": 0.4, "batch_bytes": 2e6, "local": pool, "machine": machine}
    return Sample(at=at, seconds=1.0, settings=Settings(local=2, prefetch=4), **fields | changes)


def trace(*samples: Sample) -> Trace:
    origin = TraceOrigin(config=AutotuneConfig(), start=Settings(local=2, prefetch=4))
    section = TraceSection(origin=origin, steps=tuple(TraceStep(sample=each) for each in samples))
    return Trace(header=Header(version="1.0", dpex="0", started_s=0.0), sections=(section,), decisions=())


def scenario(*samples: Sample) -> Scenario:
    return scenario_of("recorded", json.loads(json.dumps(described(trace(*samples), "made", "a run that was made up"))))


def test_services_come_in_their_order_divided_as_their_window_was() -> None:
    slow = PoolSample(running=2, tickets=2, load_s=2.0, cpu_s=0.0, queued_s=0.0, services_s=(1.0,))
    work = scenario(sample(1.0), sample(2.0, local=slow)).world.phases[0].work
    assert work is not None
    cpu, waiting = 0.4 / 1.88, 1.2 / 1.88
    first = [(service * waiting, service * cpu) for service in (0.47, 0.47, 0.94, 0.47)]
    assert list(work.recorded) == [pytest.approx(pair, rel=0.01) for pair in (*first, (1.0, 0.0), (1.0, 0.0))]
    assert work.encode_s == pytest.approx(0.08 / 6, rel=0.01)
    assert work.batch_bytes == 2e6


def test_steps_machine_and_others_are_those_of_the_run() -> None:
    others = sample(7.0, work_s=0.8, machine=MachineSample(cpus=3.0, others=2.0, memory_free=10**9, worker_bytes=1e8))
    made = scenario(sample(1.0), others)
    first, later = made.world.phases
    assert first.step is not None
    assert first.step.recorded == (0.1,) * 4 + (0.2,) * 4
    assert (first.others, later.at, later.others) == (0.5, 7.0, 2.0)
    assert (made.world.cpus, made.world.own_s, made.world.worker_bytes) == (3.0, 0.002, 1e8)
    assert made.judged_at == (0.0,)


def test_a_run_without_batches_is_no_world() -> None:
    with pytest.raises(ValueError, match="made: no batch was made in this run"):
        scenario(sample(1.0, local=PoolSample()))


class Waiting:
    """Samples that take 2 ms each."""

    def __len__(self) -> int:
        return 10**7

    def __getitem__(self, index: int) -> int:
        wait_as_work(0.002)
        return index


def test_a_real_run_becomes_a_world(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "trace.jsonl"
    config = AutotuneConfig(interval_s=0.1, trace=str(path))
    with DpexDataLoader(Waiting(), batch_size=5, num_workers="auto", autotune=config) as loader:
        for number, _ in enumerate(loader):
            if number >= 60 and len(load(str(path)).samples) >= 6:
                break
    assert main([str(path), "real", "a run of this test"]) == 0
    made = scenario_of("recorded", json.loads(capsys.readouterr().out))
    work = made.world.phases[0].work
    assert work is not None
    seen = load(str(path)).samples
    tickets = sum(pool.tickets for each in seen for pool in (each.local,))
    assert 60 <= len(work.recorded) <= tickets
    longest_s = max(service for each in seen for pool in (each.local,) for service in pool.services_s)
    assert all(0 <= wait_s + cpu_s <= 1.01 * longest_s for wait_s, cpu_s in work.recorded)
    (history,) = simulate(made.world, [Fixed(Settings(local=2, prefetch=8))], 20.0)
    assert history.delivered
