"""A pass that goes on where another stood, on fake pools: the same batches with the same random states, each once."""

from __future__ import annotations

from typing import Any

import pytest
from driver import NOTHING, Driver

from dpex.schedule.progress import ResumePoint

COUNT = 20


def begun(driver: Driver, point: ResumePoint | None = None) -> Driver:
    """An epoch that goes on at ``point``, with a sampler that begins there."""
    first = 0 if point is None else point.first
    driver.sampler = iter(range(first, COUNT))
    driver.perform(driver.state.begin_epoch(point, driver.now))
    driver.fill()
    return driver


def said(work: Any) -> tuple[Any, ...]:
    """What a user sees of a batch: not who made it."""
    return work.epoch, work.number, work.index, work.logical, work.state


def taken(driver: Driver, count: int) -> list[Any]:
    batches: list[Any] = []
    while len(batches) < count:
        batch = driver.take()
        if batch is NOTHING:
            driver.fill(starving=True)
            driver.work()
        else:
            batches.append(said(batch))
    return batches


@pytest.mark.parametrize("logicals", [0, 3])
@pytest.mark.parametrize("at", [0, 1, 7, COUNT])
@pytest.mark.parametrize("snapshot_after", [None, 4])
def test_the_rest_comes_once_with_the_same_states(logicals: int, at: int, snapshot_after: int | None) -> None:
    whole = begun(Driver(logicals=logicals, local=2))
    batches = []
    for number in range(at):
        batches += taken(whole, 1)
        if logicals and number == snapshot_after:
            for logical in range(logicals):
                whole.pools["local"].snapshot(logical)
            whole.collect()
    point = whole.state.point()
    batches += [said(work) for work in whole.finish()]
    another = begun(Driver(logicals=logicals, local=3), point)
    assert another.state.point() == point
    assert [said(work) for work in another.finish()] == batches[at:]


def test_a_logical_worker_that_dies_after_going_on_makes_it_all_again() -> None:
    whole = begun(Driver(logicals=2, local=2))
    batches = taken(whole, 5)
    point = whole.state.point()
    batches += [said(work) for work in whole.finish()]
    another = begun(Driver(logicals=2, local=2), point)
    rest = taken(another, 3)
    another.pools["local"].kill(another.pools["local"].workers()[0])
    assert rest + [said(work) for work in another.finish()] == batches[5:]


def test_batches_that_were_handed_out_and_not_taken_come_again() -> None:
    driver = begun(Driver())
    taken(driver, 4)
    assert driver.state.point(undelivered=1).first == 3


def test_out_of_order_what_was_delivered_ahead_is_told() -> None:
    driver = begun(Driver(in_order=False, local=1, prefetch=6))
    pool = driver.pools["local"]
    pool.start()
    driver.collect()
    for number in (1, 3):
        driver.state.schedule.done(number, lambda: None)
        driver.state.schedule.pop()
    assert driver.state.point() == ResumePoint(first=0, ahead=frozenset((1, 3)))
