"""Means of the measurements over windows."""

import pytest

from dpex.autotune.law.evidence import Cusum, ServiceTimes, WorkEstimate
from dpex.measure.pool_reading import PoolReading
from dpex.measure.reading import Reading
from dpex.measure.settings import Settings


def window(queued_s: float) -> PoolReading:
    """Eight batches, each of 1 s in a worker and 0.25 s on a CPU."""
    return PoolReading(running=2, requested=2, tickets=8, load_s=8.0, load_cpu_s=2.0, queued_s=queued_s)


def test_queueing_counted_in_another_window_is_subtracted() -> None:
    """Twelve seconds in two windows, none of them or all of them in one."""
    for parts in ((6.0, 6.0), (12.0, 0.0), (0.0, 12.0)):
        times = ServiceTimes()
        for queued_s in parts:
            times.add(window(queued_s))
        assert times.net_s == pytest.approx(0.25)


def test_time_that_is_no_queueing_stays() -> None:
    times = ServiceTimes()
    times.add(window(1.0), window(3.0))
    assert (times.count, times.wall.value, times.net_s) == (16, pytest.approx(1.0), pytest.approx(0.75))


def test_a_few_slow_batches_move_the_mean_and_not_the_median() -> None:
    times = ServiceTimes()
    times.add(PoolReading(tickets=8, load_s=7 * 0.1 + 3.0, services_s=(0.1,) * 7 + (3.0,)))
    assert (times.wall.value, times.median_s) == (pytest.approx(0.4625), pytest.approx(0.1))


def test_the_median_is_the_mean_where_single_batches_are_unknown() -> None:
    times = ServiceTimes()
    times.add(window(0.0))
    assert times.median_s == pytest.approx(1.0)


def ended_steps(at: float, *, steps: int | None, queued_s: float = 0.0) -> Reading:
    """A window of 0.23 s: four batches, and four steps of 50 ms and a part of the fifth."""
    given = {"later_batches": 4, "stepping_s": 0.2296, "next_busy_s": 0.0004, "stepped_s": 0.2 if steps else 0.0}
    given |= {"step_count": steps, "trainer_queued_s": queued_s}
    return Reading(at=at, seconds=0.23, settings=Settings(local=2), cpus=2.0, **given)


def test_a_step_counts_once_it_has_ended() -> None:
    seen = WorkEstimate()
    seen.add(ended_steps(0.23, steps=4))
    assert (seen.step.count, seen.step.value) == (4, pytest.approx(0.0501))


def test_traces_without_ended_steps_give_their_mean() -> None:
    seen = WorkEstimate()
    seen.add(ended_steps(0.23, steps=None))
    assert (seen.step.count, seen.step.value) == (4, pytest.approx(0.0575))


def test_waiting_for_a_cpu_is_counted_beside_the_step() -> None:
    seen = WorkEstimate()
    seen.add(ended_steps(0.23, steps=4, queued_s=0.046))
    assert (seen.step.value, seen.step_queued.value) == pytest.approx((0.8 * 0.0501, 0.2 * 0.0501))


def alarms(cusum: Cusum, *seconds: float) -> bool:
    return True in [cusum.add(each) for each in seconds]


def test_a_time_that_was_noisy_before_a_change_is_so_after_it() -> None:
    """Windows that are equal by chance after a change do not make it a steady time."""
    known = Cusum()
    alarms(known, *[1.0, 1.5, 0.7] * 20)
    known.forget()
    later = 1.0, 1.0, 1.0, 1.05, 1.5, 1.05
    assert not alarms(known, *later)
    assert alarms(Cusum(), *later)
    assert alarms(known, *[8.0] * 3)


def test_batches_begun_under_other_settings_show_no_change() -> None:
    """Batches that take four times as long were begun beside more workers, of which some have left."""

    def changes(*, is_steady: bool) -> tuple[str, ...]:
        seen = WorkEstimate()
        for _ in range(20):
            assert not seen.changes(made(0.1), is_steady=True)
        return tuple(name for _ in range(3) for name in seen.changes(made(0.4), is_steady=is_steady))

    def made(service_s: float) -> Reading:
        here = PoolReading(running=4, requested=4, tickets=8, load_s=8 * service_s)
        settings = Settings(local=4, prefetch=32)
        pools = {"local": here}
        return Reading(at=1.0, seconds=1.0, settings=settings, later_batches=8, stepping_s=1.0, pools=pools)

    assert "local" in changes(is_steady=True)
    assert changes(is_steady=False) == ()


@pytest.mark.parametrize(
    ("services_s", "growth", "is_other"),
    [
        ((0.061, 0.062), 1.5, True),
        ((0.061, 0.059), 1.5, False),  # three times is what full CPUs and an uneven batch may do
        ((0.061, 0.062), 2.0, False),
        ((0.041, 0.042), 1.0, True),
        ((0.5,), 1.0, False),  # a single batch
        ((0.02, 0.5, 0.5), 1.0, False),
    ],
)
def test_batches_far_slower_than_the_growth_are_other_work(
    services_s: tuple[float, ...], growth: float, is_other: bool
) -> None:
    """Nine in ten of the batches before took at most 20 ms."""

    def made(*services_s: float) -> Reading:
        here = PoolReading(running=2, tickets=len(services_s), load_s=sum(services_s), services_s=services_s)
        count, pools = len(services_s), {"local": here}
        return Reading(at=1.0, seconds=1.0, settings=Settings(local=2), later_batches=count, pools=pools)

    seen = WorkEstimate()
    seen.add(made(0.02, 0.02))
    assert not seen.is_other_work(made(0.5, 0.5), 1.0)  # too few are known
    seen.add(made(*[0.02] * 16, 0.3))
    assert seen.is_other_work(made(*services_s), growth) is is_other
