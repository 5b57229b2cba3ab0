"""Sums of measurements over windows, and changes of the work."""

import pytest

from dpex.autotune.constants import CONSTANTS
from dpex.autotune.law.evidence import Cusum, RecentSum, SettingStats, WorkEstimate
from dpex.measure.pool_reading import PoolReading
from dpex.measure.reading import Reading
from dpex.measure.settings import Settings
from dpex.measure.views import step_times


@pytest.mark.parametrize(("windows", "summed"), [(1, 1), (33, 33), (64, 64), (65, 33), (96, 64), (300, 44)])
def test_a_recent_sum_drops_old_windows(windows: int, summed: int) -> None:
    assert CONSTANTS.recent == 64
    recent = RecentSum(PoolReading())
    for number in range(windows):
        recent.add(PoolReading(tickets=1, load_s=0.1 if number else 1e15, running=number))
    first = 1e15 if windows == summed else 0.1
    assert recent.sum.tickets == summed
    assert recent.sum.load_s == pytest.approx(first + 0.1 * (summed - 1))
    assert recent.sum.running == windows - 1


def made(queued_s: float) -> Reading:
    """Eight batches, each of 1 s in a worker and 0.25 s on a CPU."""
    pool = PoolReading(tickets=8, load_s=8.0, load_cpu_s=2.0, queued_s=queued_s, queue_known_s=8.0)
    return Reading(seconds=1.0, pools={"local": pool})


def test_queueing_counted_in_another_window_is_subtracted() -> None:
    """Twelve seconds in two windows, none of them or all of them in one."""
    for parts in ((6.0, 6.0), (12.0, 0.0), (0.0, 12.0)):
        seen = WorkEstimate()
        for queued_s in parts:
            seen.add(made(queued_s))
        assert seen.service_s == pytest.approx(0.25)


def test_a_pool_without_new_batches_keeps_its_times() -> None:
    seen = WorkEstimate()
    seen.add(made(0.0))
    for _ in range(3 * CONSTANTS.recent):
        seen.add(Reading(seconds=1.0))
    assert (seen.sum.tickets, seen.service_s) == (8, pytest.approx(1.0))


def test_a_window_without_a_step_says_nothing_of_steps() -> None:
    seen = WorkEstimate()
    seen.add(Reading(seconds=1.0, later_batches=10, stepping_s=0.5, blocked_s=0.5))
    seen.add(Reading(seconds=1.0, stepping_s=1.0))
    assert step_times(seen.sum).net_s == pytest.approx(0.5)


def test_a_setting_is_described_by_both_pools() -> None:
    record = SettingStats()
    for queued_s in (1.0, 3.0):
        here = made(queued_s)
        record.add(here.with_pools(remote=here.local), goal=0.01)
    assert (record.made.tickets, record.made.busy_s, record.made.queued_s) == (32, 32.0, 8.0)


def alarms(cusum: Cusum, *seconds: float) -> bool:
    return True in [cusum.add(each) for each in seconds]


def test_a_time_that_was_noisy_before_a_change_is_so_after_it() -> None:
    """Windows that are equal by chance after a change do not make it a steady time."""
    known = Cusum()
    alarms(known, *[1.0, 1.5, 0.7] * 20)
    known.reset()
    later = 1.0, 1.0, 1.0, 1.05, 1.5, 1.05
    assert not alarms(known, *later)
    assert alarms(Cusum(), *later)
    assert alarms(known, *[8.0] * 3)


def test_batches_begun_under_other_settings_show_no_change() -> None:
    """Batches that take four times as long were begun beside more workers, of which some have left."""

    def changes(*, is_steady: bool) -> tuple[str, ...]:
        seen = WorkEstimate()
        for _ in range(20):
            assert not seen.changes(with_times(0.1), is_steady=True)
        return tuple(name for _ in range(3) for name in seen.changes(with_times(0.4), is_steady=is_steady))

    def with_times(service_s: float) -> Reading:
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

    def single(*services_s: float) -> Reading:
        here = PoolReading(running=2, tickets=len(services_s), load_s=sum(services_s), services_s=services_s)
        count, pools = len(services_s), {"local": here}
        return Reading(at=1.0, seconds=1.0, settings=Settings(local=2), later_batches=count, pools=pools)

    seen = WorkEstimate()
    seen.add(single(0.02, 0.02))
    assert not seen.is_other_work(single(0.5, 0.5), 1.0)  # too few are known
    seen.add(single(*[0.02] * 16, 0.3))
    assert seen.is_other_work(single(*services_s), growth) is is_other
