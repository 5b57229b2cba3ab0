"""What windows of measurements say of the work: threads of libraries, and queueing that is not taken for waiting."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest

from dpex.autotune.estimator import WorkEstimator
from dpex.autotune.felt import FeltSample
from dpex.autotune.model import Estimate
from dpex.autotune.types import Sample, Settings
from dpex.autotune.window_record import WindowRecord
from dpex.measure.samples import MachineSample, PoolSample


def window(at: float, pool: dict[str, Any], *, here: bool = False, cpus: float = 4.0, **machine: Any) -> Sample:
    """A second in which two workers, or the training process, made batches for a consumer that has nothing to do."""
    made = PoolSample(**{"running": 0 if here else 2, "requested": 0 if here else 2, **pool})
    pools = {"made_here": made} if here else {"local": made}
    times = {"own_s": 0.99, "work_s": 0.01} if here else {"wait_s": 0.98, "own_s": 0.01, "work_s": 0.01}
    values = {"trainer_cpu_s": made.cpu_s if here else 0.02, "trainer_queued_s": 0.0, **machine}
    return Sample(
        at=at,
        seconds=1.0,
        settings=Settings(local=0 if here else 2, prefetch=8),
        batches=made.tickets,
        machine=MachineSample(cpus=cpus, **values),
        **times,
        **pools,  # type: ignore[arg-type]
    )


def estimate(*samples: Sample, cpus: float = 4.0) -> Estimate:
    windows = WorkEstimator()
    for sample in samples:
        windows.add(FeltSample(sample=sample))
    return windows.estimate(cpus, float("inf"), float("inf"))


@pytest.mark.parametrize("here", [False, True])
def test_cpu_time_beyond_wall_time_is_several_threads(here: bool) -> None:
    pool = {"tickets": 20, "load_s": 1.0, "cpu_s": 3.0, "queued_s": 0.0}
    work = estimate(*(window(at, pool, here=here) for at in range(4)))
    assert work.cpu_s == pytest.approx(0.15)
    assert work.at_once == pytest.approx(3.0)
    assert work.wait_s == 0.0
    assert work.here_s == pytest.approx(0.05, rel=0.01)


def test_threads_that_queue_are_as_many() -> None:
    """On two CPUs three threads of a batch are slower, and no fewer."""
    pool = {"tickets": 20, "load_s": 1.5, "cpu_s": 2.0, "queued_s": 2.5}
    work = estimate(*(window(at, pool, cpus=2.0) for at in range(4)), cpus=2.0)
    assert work.at_once == pytest.approx(3.0, rel=0.02)
    assert work.here_s == pytest.approx(0.05, rel=0.01)  # two CPUs at once, and no more


def test_on_a_full_machine_one_thread_is_not_seen_in_place_of_several() -> None:
    alone = {"tickets": 20, "load_s": 1.0, "cpu_s": 2.0, "queued_s": 0.0}
    crowded = {"tickets": 20, "load_s": 2.0, "cpu_s": 1.9, "queued_s": 3.0}
    work = estimate(*(window(at, alone) for at in range(4)), *(window(at, crowded, others=3.0) for at in range(4, 9)))
    assert work.at_once > 1.5


def test_noise_of_queueing_does_not_add_up_to_waiting() -> None:
    """Nobody waits, and what was queued is known to a fifth of itself."""
    noise = random.Random(0)
    samples = []
    for at in range(40):
        pool = {"tickets": 8, "load_s": 2.0, "cpu_s": 0.4, "queued_s": 1.6 * noise.uniform(0.8, 1.2)}
        samples.append(window(at, pool, cpus=2.0, others=1.8))
    assert estimate(*samples, cpus=2.0).waiting < 0.1


def test_waiting_is_still_seen_beside_queueing() -> None:
    pool = {"tickets": 8, "load_s": 2.0, "cpu_s": 0.4, "queued_s": 0.4}
    work = estimate(*(window(at, pool, cpus=2.0, others=1.8) for at in range(8)), cpus=2.0)
    assert work.wait_s == pytest.approx(0.15)


def test_where_nobody_tells_of_queueing_a_crowd_does() -> None:
    """Ten threads want two CPUs: a batch of 50 ms of CPU takes five times as long, and does not wait."""
    pool = {"tickets": 8, "load_s": 2.0, "cpu_s": 0.4, "queued_s": None}
    machine = {"cpus": 2.0, "others": 1.6, "trainer_queued_s": None}
    crowded, lonely = (window(at=0, pool=pool, runnable=runnable, **machine) for runnable in (10.0, None))
    assert estimate(crowded, cpus=2.0).waiting == 0.0
    assert estimate(lonely, cpus=2.0).waiting > 0.3


def test_queueing_is_no_part_of_taking_over_a_batch() -> None:
    """Half of what the training loop does in a window is waiting for a CPU."""
    pool = {"tickets": 20, "load_s": 1.0, "cpu_s": 1.0, "queued_s": 0.0}
    alone, crowded = (estimate(*(window(at, pool, trainer_queued_s=s) for at in range(4))) for s in (0.0, 0.01))
    assert alone.own_s == pytest.approx(0.01 / 20)
    assert crowded.own_s == pytest.approx(0.005 / 20)
    assert crowded.step_s == pytest.approx(0.005 / 20)


def test_what_starts_workers_is_no_other_program() -> None:
    """The process that forks them takes a CPU; its figure is still there when all run, and then another."""
    pool = {"tickets": 20, "load_s": 1.5, "cpu_s": 1.0, "queued_s": 0.5}
    starting = window(0, {**pool, "requested": 60}, others=1.0)
    stale, gone = (replace(window(0.4, pool, others=others), at=at) for at, others in ((0.4, 1.0), (0.8, 0.0)))
    assert estimate(starting, stale, gone).others == 0.0
    later = replace(stale, at=5.0)
    assert estimate(starting, later).others > 1.0, "one that goes on is another program"


def changes_of(*samples: Sample) -> list[str]:
    windows = WorkEstimator()
    return [what for sample in samples for what in windows.add(FeltSample(sample=sample))]


def test_waiting_below_nothing_is_no_change_of_the_work() -> None:
    """Batches wait for 88 ms; then other programs take the CPUs, and more is said to be queued than time passed."""
    quiet = {"tickets": 8, "load_s": 1.0, "cpu_s": 0.29, "queued_s": 0.0}
    busy = {"tickets": 8, "load_s": 2.0, "cpu_s": 0.29, "queued_s": 3.0}
    before = [window(at, quiet, cpus=2.0) for at in range(6)]
    assert estimate(*before, cpus=2.0).wait_s == pytest.approx(0.08875)
    assert changes_of(*before, *(window(at, busy, cpus=2.0, others=1.8) for at in range(6, 12))) == []


@pytest.mark.parametrize("queued_s", [0.0, 0.02])
def test_waiting_that_ends_is_said_with_durations(queued_s: float) -> None:
    """What is queued then may be a little more than the time that is left."""
    slow = {"tickets": 8, "load_s": 1.0, "cpu_s": 0.29, "queued_s": 0.0}
    fast = {"tickets": 8, "load_s": 0.29, "cpu_s": 0.29, "queued_s": queued_s}
    (said,) = changes_of(*(window(at, slow) for at in range(6)), *(window(at, fast) for at in range(6, 10)))
    assert said.startswith("waiting of a batch ")
    assert said.endswith(" ms → 0 s")


def test_a_batch_costs_no_negative_time() -> None:
    """Several threads of a batch queue beside each other."""
    record = WindowRecord()
    record.add(window(0, {"tickets": 8, "load_s": 1.0, "cpu_s": 2.0, "queued_s": 3.0}), lost_s=0.5)
    assert record.cost_s == 0.0
    record.add(window(1, {"tickets": 8, "load_s": 4.0, "cpu_s": 2.0, "queued_s": 0.4}), lost_s=0.5)
    assert record.cost_s == pytest.approx(0.1), "the windows before it are not forgotten"
