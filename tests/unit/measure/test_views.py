"""Figures of readings made by hand, where it is clear what must come out."""

from dataclasses import replace

import pytest

from dpex.measure.pool_reading import PoolReading
from dpex.measure.reading import Reading
from dpex.measure.views import free_steps_s, is_full, mean_s, median_s, net_mean_s, queued_s, step_times, unevenness

MADE = PoolReading(tickets=8, load_s=6.0, encode_s=2.0, load_cpu_s=2.0)
"""Eight batches, each of 1 s in a worker and 0.25 s on a CPU."""


@pytest.mark.parametrize(("queued_s", "net_s"), [(0.0, 1.0), (2.0, 0.75), (6.0, 0.25), (7.5, 0.25)])
def test_queueing_is_no_part_of_a_batch_and_cpu_time_is(queued_s: float, net_s: float) -> None:
    assert net_mean_s(MADE, queued_s) == pytest.approx(net_s)


def test_queueing_is_at_most_nine_tenths_of_a_time() -> None:
    assert net_mean_s(PoolReading(tickets=1, load_s=1.0), 5.0) == pytest.approx(0.1)


def test_a_few_slow_batches_move_the_mean_and_not_the_median() -> None:
    pool = PoolReading(tickets=8, load_s=7 * 0.1 + 3.0, services_s=(0.1,) * 7 + (3.0,))
    assert (mean_s(pool), median_s(pool)) == (pytest.approx(0.4625), pytest.approx(0.1))


def test_the_median_is_of_the_latest_batches() -> None:
    assert median_s(PoolReading(tickets=164, load_s=1.0, services_s=(9.0,) * 100 + (0.1,) * 64)) == pytest.approx(0.1)


def test_the_median_is_the_mean_where_single_batches_are_unknown() -> None:
    assert median_s(MADE) == pytest.approx(1.0)


def test_a_pool_without_batches_takes_no_time() -> None:
    nothing = PoolReading()
    assert (mean_s(nothing), median_s(nothing), net_mean_s(nothing, 0.0)) == (0.0, 0.0, 0.0)


def ended_steps(*, steps: int | None, queued_s: float | None = None) -> Reading:
    """A window of 0.23 s: four batches, and four steps of 50 ms and a part of the fifth."""
    given = {"later_batches": 4, "stepping_s": 0.2296, "next_busy_s": 0.0004, "stepped_s": 0.2 if steps else 0.0}
    return Reading(seconds=0.23, step_count=steps, trainer_queued_s=queued_s, **given)


@pytest.mark.parametrize(("steps", "mean"), [(4, 0.0501), (None, 0.0575)])
def test_a_step_counts_once_it_has_ended_if_that_is_known(steps: int | None, mean: float) -> None:
    found = step_times(ended_steps(steps=steps))
    assert (found.steps, found.net_s / 4, found.queued_s) == (4, pytest.approx(mean), 0.0)


def test_waiting_for_a_cpu_is_counted_beside_the_step() -> None:
    found = step_times(ended_steps(steps=4, queued_s=0.046))
    assert (found.net_s / 4, found.queued_s / 4) == pytest.approx((0.8 * 0.0501, 0.2 * 0.0501))


def test_a_step_by_causes_has_all_that_no_worker_makes_shorter() -> None:
    """4 s of steps, 0.5 s of which lack a CPU; a second in which batches are taken in, and two of waits."""
    causes = {"read": 3.0, "h2d": 0.5, "sampler": 1.5, "startup": 2.0}
    run = Reading(causes=causes, transfer_s=1.0, work_s=4.0, trainer_queued_s=1.5)
    assert run.held_s == pytest.approx(0.5)
    assert free_steps_s(run) == pytest.approx(4.0 - 0.5 + 1.0 + 0.5 + 1.5)
    assert free_steps_s(replace(run, gpu_running_stall_s=1.0)) == pytest.approx(12.0 - 2.0 - 1.0 - 0.5)


@pytest.mark.parametrize(("services_s", "found"), [((), 1.0), ((0.1, 0.1), 1.0), ((0.1, 0.3), 1.5), ((0.0,), 1.0)])
def test_unevenness_is_the_slowest_over_the_mean(services_s: tuple[float, ...], found: float) -> None:
    assert unevenness(services_s) == pytest.approx(found)


COMPUTING = PoolReading(tickets=10, load_s=20.0, load_cpu_s=12.0)


@pytest.mark.parametrize(
    ("pool", "is_full", "found"),
    [
        (replace(COMPUTING, queued_s=3.0, queue_known_s=20.0), True, 3.0),
        (replace(COMPUTING, queued_s=3.0, queue_known_s=15.0), True, 4.0),
        (COMPUTING, True, 8.0),
        (COMPUTING, False, 0.0),
        (replace(COMPUTING, load_cpu_s=9.0), True, 0.0),
    ],
    ids=["reported", "reported for most", "unreported, full", "unreported, idle", "waiting"],
)
def test_queueing_without_a_report_is_guessed_on_full_cpus(pool: PoolReading, is_full: bool, found: float) -> None:
    assert queued_s(pool, has_full_cpus=is_full) == pytest.approx(found)


def test_a_machine_is_full_by_all_that_use_its_cpus() -> None:
    """Workers use 1.2 CPUs, the training process half a CPU, and so do other programs."""
    run = Reading(work_s=10.0, pools={"local": COMPUTING}, trainer_cpu_s=5.0, others_s=5.0, others_over_s=10.0)
    assert [is_full(replace(run, cpus=cpus)) for cpus in (2.4, 2.5)] == [True, False]
    assert not is_full(Reading(cpus=1.0, trainer_cpu_s=5.0))
