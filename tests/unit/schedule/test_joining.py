"""Further streams join the first once it has shown that the dataset splits itself, and never begin if it does not."""

from __future__ import annotations

from typing import Any

import pytest
from driver import NOTHING, Driver
from fake_pool import Work

from dpex.schedule.events import Snapshot, SplittingKnown
from dpex.schedule.logical_workers import CROWD_AFTER_S
from dpex.schedule.progress import ONE, START, UNKNOWN, ResumePoint, Splitting

LENGTH = 3
"""Batches of each stream."""


def batch_of(work: Work) -> Work:
    assert work.state is not None
    if work.state >= LENGTH:
        raise StopIteration
    return work


def driver_of(
    is_split: bool, splitting: Splitting | None = None, point: ResumePoint | None = None, streams: int = 3, **more: Any
) -> Driver:
    splitting = splitting or Splitting(most=streams)
    options = {"local": streams, "is_split": is_split, "make": batch_of} | more
    driver = Driver(logicals=streams, iterable=True, splitting=splitting, **options)
    driver.begin(1000, point)
    for stream in range(streams if point is None else 0):
        driver.tell(Snapshot(stream, *START, 0))  # as datasets with a state do
    return driver


def by_stream(batches: list[Any]) -> list[tuple[int, int]]:
    """Stream and number in it of each batch."""
    return [(batch.logical, batch.state) for batch in batches]


IN_TURN = [(stream, at) for at in range(LENGTH) for stream in range(3)]
ALONE = [(0, at) for at in range(LENGTH)]


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


@pytest.mark.parametrize(("is_split", "wanted"), [(None, 1), (True, 3), (False, 1)])
def test_a_later_pass_begins_with_the_workers_that_the_one_before_came_to(is_split: bool | None, wanted: int) -> None:
    driver = driver_of(bool(is_split), Splitting(most=3, is_split=is_split))
    assert driver.pools["local"].counts.wanted == wanted
    assert by_stream(driver.finish()) == (IN_TURN if is_split else ALONE)


@pytest.mark.filterwarnings("ignore:worker .* was killed:RuntimeWarning")
def test_a_first_stream_that_dies_before_it_has_shown_anything_ends_the_epoch_with_an_error() -> None:
    driver = Driver(logicals=3, iterable=True, splitting=Splitting(most=3), local=3)
    driver.begin(1000)
    pool = driver.pools["local"]
    pool.start()
    driver.collect()
    pool.work(tickets=0)
    pool.kill(0)
    driver.collect()
    (error,) = driver.finish()
    assert "stream 0 of the IterableDataset cannot go on" in str(error)


@pytest.mark.parametrize("streams", [3, 1, 5])
def test_a_dataset_read_in_one_stream_goes_on_in_one_whatever_the_number_of_workers(streams: int) -> None:
    driver = driver_of(is_split=False)
    driver.work()
    driver.work()
    first = [driver.take()]
    point = driver.state.point()
    assert (point.streams, len(point.logicals), point.turn) == (ONE, 1, 0)
    assert by_stream(first + resumed(point, is_split=True, streams=streams)) == ALONE


def resumed(point: ResumePoint, *, is_split: bool, streams: int = 3) -> list[Any]:
    """What comes after that point."""
    return driver_of(is_split, point=point, streams=streams).finish()


@pytest.mark.parametrize(("is_split", "expected"), [(True, IN_TURN), (False, ALONE)])
def test_what_was_not_known_is_found_out_by_the_later_run(is_split: bool, expected: list[tuple[int, int]]) -> None:
    point = driver_of(is_split).state.point()
    assert point.streams == UNKNOWN
    assert by_stream(resumed(point, is_split=is_split)) == expected


def test_a_resize_does_not_start_workers_that_have_nothing_to_read() -> None:
    driver = driver_of(is_split=False)
    pool = driver.pools["local"]
    driver.resize(3)
    assert pool.counts.wanted == 1
    driver.work()
    driver.resize(3)
    assert (pool.counts.wanted, driver.state.placement.sizes.local) == (1, 1)
    assert by_stream(driver.finish()) == ALONE
