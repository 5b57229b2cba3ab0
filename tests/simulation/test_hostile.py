"""Each hostile effect does what it says, and is off unless asked for."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest

from benchmarks.simulation.history import History
from benchmarks.simulation.simulator import simulate
from benchmarks.simulation.steering import Fixed
from benchmarks.simulation.world import Bursts, Cache, Pauses, Phase, SlowSpells, Step, Storage, Work, World
from dpex.autotune.types import Decision, Sample, Settings

pytestmark = pytest.mark.long

FREE: dict[str, Any] = {"own_s": 0.0, "fork_s": 0.0, "actor_s": 0.0, "rtt_s": 0.0}


class Watching(Fixed):
    """Keeps the samples."""

    def step(self, sample: Sample) -> Decision | None:
        SAMPLES.append(sample)
        return None


SAMPLES: list[Sample] = []


def world(work: Work, step: Step | None = None, **changes: Any) -> World:
    phase = Phase(work=work, step=step or Step(), **{n: changes.pop(n) for n in ("nodes", "storage") if n in changes})
    return World(phases=(phase,), **FREE | changes)


def run(of: World, local: int = 0, remote: int = 0, seconds: float = 20.0) -> History:
    SAMPLES.clear()
    settings = Settings(local=local, remote=remote, prefetch=max(2, 4 * (local + remote)))
    return simulate(of, [Watching(settings)], seconds)[0]


@pytest.mark.parametrize(("local", "rate"), [(1, 10), (4, 40), (8, 40)])
def test_storage_is_shared_by_its_readers(local: int, rate: float) -> None:
    """A reader alone takes 100 ms; the disk gives four of them as much, and more of them nothing more."""
    of = world(Work(read=1e6), cpus=16, storage=Storage(capacity=4e7, reader=1e7))
    assert run(of, local).rate(5, 20) == pytest.approx(rate, rel=0.02)


def test_disks_that_seek_get_slower_with_each_reader() -> None:
    of = world(Work(read=1e6), cpus=16, storage=Storage(capacity=4e7, reader=1e7, loss=0.1))
    assert run(of, 11).rate(5, 20) == pytest.approx(20, rel=0.02)


def test_remote_workers_read_from_the_same_storage() -> None:
    of = world(Work(read=1e6), cpus=16, nodes=4, storage=Storage(capacity=4e7, reader=1e7))
    assert run(of, 4, 4).rate(5, 20) == pytest.approx(40, rel=0.02)


def test_a_warm_cache_makes_batches_faster() -> None:
    history = run(world(Work(wait_s=0.1, cache=Cache(batches=100, warm=0.1))), 2)
    assert history.rate(0, 4) == pytest.approx(20, rel=0.05)
    assert history.rate(10, 20) == pytest.approx(200, rel=0.02)


def test_bursts_take_cpus_for_a_while() -> None:
    quiet = world(Work(cpu_s=0.02), cpus=2)
    history = run(replace(quiet, bursts=Bursts(cpus=2.0, on_s=5.0, off_s=5.0)), 2, seconds=200.0)
    rates = [history.rate(at, at + 1) for at in range(200)]
    assert min(rates) == pytest.approx(50, rel=0.05)
    assert max(rates) == pytest.approx(100, rel=0.05)
    assert 0.25 < sum(rate < 60 for rate in rates) / 200 < 0.75


@pytest.mark.parametrize(("local", "rate"), [(1, 10), (4, 40), (8, 52), (16, 52)])
def test_hyper_threads_are_less_than_cores(local: int, rate: float) -> None:
    """Eight of them, on four cores, of which each gains 30 % by its second thread."""
    history = run(world(Work(cpu_s=0.1), cpus=8, smt_yield=0.3), local)
    assert history.rate(5, 20) == pytest.approx(rate, rel=0.04)
    cpu_s = sum(s.local.cpu_s for s in SAMPLES) / sum(s.local.tickets for s in SAMPLES)
    assert cpu_s == pytest.approx(min(local, 8) / rate, rel=0.05)  # a thread beside another gets on more slowly


@pytest.mark.parametrize("together", [1, 4])
def test_workers_are_slow_for_a_while_alone_or_together(together: int) -> None:
    slow = SlowSpells(share=0.3, factor=5.0, seconds=4.0, together=together)
    history = run(world(Work(wait_s=0.1), cpus=8, slow=slow), 4, seconds=200.0)
    whole = sum(history.rate(at, at + 1) > 36 for at in range(200))
    assert whole / 200 == pytest.approx(0.7 if together == 4 else 0.7**4, abs=0.15)


def test_slow_nodes_leave_local_workers_alone() -> None:
    slow = SlowSpells(share=0.9, factor=9.0, seconds=50.0, remote=True)
    assert run(world(Work(wait_s=0.1), slow=slow), 4).rate(5, 20) == pytest.approx(40, rel=0.02)
    assert run(world(Work(wait_s=0.1), nodes=4, slow=slow), 0, 4).rate(5, 20) < 30


def test_the_trainer_pauses_between_steps_and_workers_go_on() -> None:
    of = world(Work(wait_s=0.1), Step(gpu_s=0.01), pauses=Pauses(every_s=5.0, seconds=1.0))
    history = run(of, 2)
    ends = [b for a, b in pairwise(history.delivered) if b - a > 0.9]
    assert len(ends) == 3
    assert sum(sample.work_s for sample in SAMPLES) > 3.0
    assert [history.count(end - 1e-6, end + 0.1) >= 8 for end in ends] == [True] * 3


def test_everything_stops_and_goes_on_where_it_was() -> None:
    of = world(Work(cpu_s=0.05, wait_s=0.05), cpus=4, pauses=Pauses(every_s=5.0, seconds=2.0, stops_all=True))
    still, history = run(replace(of, pauses=None), 4, seconds=14.0), run(of, 4, seconds=20.0)
    assert max(sample.seconds for sample in SAMPLES) == pytest.approx(3.0, abs=0.3)
    assert len(history.delivered) == pytest.approx(len(still.delivered), abs=4)
    assert [history.count(5 * n + 1e-6, 5 * n + 1.9) for n in (1, 2, 3)] == [0, 0, 0]


def test_where_the_system_tells_nothing_of_run_queues_nothing_is_known() -> None:
    run(world(Work(cpu_s=0.05), cpus=2, knows_queue=False), 4, seconds=5.0)
    assert {(s.local.queued_s, s.machine.trainer_queued_s) for s in SAMPLES} == {(None, None)}
    run(world(Work(cpu_s=0.05), cpus=2), 4, seconds=5.0)
    assert SAMPLES[-1].local.queued_s


def test_clocks_that_count_ticks_are_right_on_average() -> None:
    history = run(world(Work(cpu_s=0.003, wait_s=0.001), Step(cpu_s=0.001), cpus=8, tick_s=0.01), 3)
    shown = [sample.local.cpu_s for sample in SAMPLES]
    assert all(abs(seconds / 0.01 - round(seconds / 0.01)) < 1e-6 for seconds in shown)
    assert sum(shown) == pytest.approx(0.003 * len(history.delivered), rel=0.05)
    trainer_s = sum(sample.machine.trainer_cpu_s for sample in SAMPLES)
    assert trainer_s == pytest.approx(0.001 * len(history.delivered), rel=0.05)


def test_all_is_off_unless_asked_for() -> None:
    quiet = World(phases=(Phase(work=Work(cpu_s=0.01), step=Step(gpu_s=0.01)),))
    off = (quiet.bursts, quiet.slow, quiet.pauses, quiet.smt_yield, quiet.thrash, quiet.noise, quiet.tick_s)
    assert off == (None, None, None, None, 0.0, 0.0, 0.0)
