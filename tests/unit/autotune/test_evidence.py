"""Means of the measurements over windows."""

from __future__ import annotations

import pytest

from dpex.autotune.law.evidence import ServiceTimes
from dpex.measure.samples import PoolSample


def window(queued_s: float) -> PoolSample:
    """Eight batches, each of 1 s in a worker and 0.25 s on a CPU."""
    return PoolSample(running=2, requested=2, tickets=8, load_s=8.0, cpu_s=2.0, queued_s=queued_s)


def test_queueing_that_the_kernel_counted_in_another_window_than_the_batches_is_subtracted() -> None:
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
