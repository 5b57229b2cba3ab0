"""Further streams join the first once it has shown that the dataset splits itself, and never begin if it does not."""

from __future__ import annotations

from typing import Any

import pytest
from driver import NOTHING, Driver
from fake_pool import Work

from dpex.schedule.events import Snapshot, SplittingKnown
from dpex.schedule.logical_workers import CROWD_AFTER_S
from dpex.schedule.progress import START, Splitting

STREAMS = 3
LENGTH = 3
"""Batches of each stream."""


def batch_of(work: Work) -> Work:
    assert work.state is not None
    if work.state >= LENGTH:
        raise StopIteration
    return work


def driver_of(**pool: Any) -> Driver:
    driver = Driver(logicals=STREAMS, iterable=True, splitting=Splitting(most=STREAMS), local=STREAMS, **pool)
    driver.begin(1000)
    for stream in range(STREAMS):
        driver.tell(Snapshot(stream, *START, 0))  # as datasets with a state do
    return driver


def test_a_second_worker_is_asked_for_when_the_first_stream_has_shown_it() -> None:
    driver = driver_of(is_split=True)
    pool = driver.pools["local"]
    assert pool.counts.wanted == 1
    driver.collect()
    pool.start()
    assert driver.take() is NOTHING
    pool.work(tickets=1)
    driver.collect()
    assert pool.counts.wanted == 3
    driver.now += 2 * CROWD_AFTER_S  # they are on their way: the first worker is not given the other streams meanwhile
    driver.tell(SplittingKnown(is_split=True))
    driver.fill(starving=True)
    driver.work()
    assert {worker: set(at.states) for worker, at in pool._workers.items()} == {0: {0}, 1: {1}, 2: {2}}


def test_workers_that_come_late_are_waited_for_from_the_moment_they_were_asked_for() -> None:
    driver = driver_of(is_split=True, starts_slowly=True)
    pool = driver.pools["local"]
    pool.start()
    driver.collect()
    driver.now += 2 * CROWD_AFTER_S  # the first sample takes long
    pool.work(tickets=1)
    driver.collect()
    driver.fill(starving=True)
    assert driver.state.logicals.unplaced() == [1, 2]
    driver.now += 2 * CROWD_AFTER_S
    driver.fill(starving=True)
    assert driver.state.logicals.unplaced() == [], "and not for ever"


@pytest.mark.filterwarnings("ignore:worker .* was killed:RuntimeWarning")
def test_a_first_stream_that_dies_before_it_has_shown_anything_ends_the_epoch_with_an_error() -> None:
    driver = Driver(logicals=STREAMS, iterable=True, splitting=Splitting(most=STREAMS), local=STREAMS)
    driver.begin(1000)
    pool = driver.pools["local"]
    pool.start()
    driver.collect()
    pool.work(tickets=0)
    pool.kill(0)
    driver.collect()
    (error,) = driver.finish()
    assert "stream 0 of the IterableDataset cannot go on" in str(error)


def test_a_resize_does_not_start_workers_that_have_nothing_to_read() -> None:
    driver = driver_of(is_split=False, make=batch_of)
    pool = driver.pools["local"]
    driver.resize(3)
    assert pool.counts.wanted == 1
    driver.work()
    driver.resize(3)
    assert (pool.counts.wanted, driver.state.placement.sizes.local) == (1, 1)
    assert [(batch.logical, batch.state) for batch in driver.finish()] == [(0, at) for at in range(LENGTH)]
