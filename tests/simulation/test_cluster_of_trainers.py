"""Several trainers on one cluster: each has its own controller, and nodes fail."""

from __future__ import annotations

from dataclasses import replace
from statistics import fmean

import pytest

from benchmarks.simulation.cluster import BATCH_CPU_S, Ended, Plan, main, report, simulate

pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def several() -> list[Ended]:
    """With 12 places every change of a worker shows, and one run in ten is far off by chance: so there are two."""
    wants = tuple(workers / BATCH_CPU_S for workers in (12, 24))
    plan = Plan(wants=wants, nodes=3, per_node=4, cpus=2.0, seconds=60.0, fail_every_s=15.0, repair_s=10.0)
    return [simulate(replace(plan, seed=seed)) for seed in range(2)]


def test_trainers_that_want_more_than_there_is_wait_alike_though_nodes_fail(several: list[Ended]) -> None:
    waits = [fmean(ended.wait(ended.trainers[number], 30.0, 60.0) for ended in several) for number in range(2)]
    assert all(wait > 0.2 for wait in waits)
    assert waits[0] == pytest.approx(waits[1], abs=0.15)  # a worker more is a tenth of the wait here
    for ended in several:
        assert ended.failures == 4
        assert not any(trainer.steering.errors for trainer in ended.trainers)
        workers = [ended.workers(trainer, 30.0, 60.0) for trainer in ended.trainers]
        assert 8 <= sum(workers) <= ended.plan.places
        assert len(list(report(ended))) == 7


def test_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--trainers", "2", "--nodes", "2", "--per-node", "2", "--seconds", "5"]
    assert main(options) == 0
    assert capsys.readouterr().out.startswith("2 trainers, 2 nodes of 2 workers, 5 s, 0 nodes failed\n| trainer |")
