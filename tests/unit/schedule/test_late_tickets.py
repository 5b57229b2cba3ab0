"""Tickets that another machine owes for too long."""

import math
from typing import Any

import pytest
from driver import NOTHING, Driver

from dpex.schedule.failures import LEAST_PATIENCE_S, PATIENCE

BATCHES = 24


def begun(**options: Any) -> Driver:
    """Two workers here, which have made all that they were given, and two far away that make nothing."""
    driver = Driver(**{"local": 2, "remote": 2, "prefetch": 8} | options)
    for pool in driver.pools.values():
        pool.start()
    driver.collect()
    driver.begin(BATCHES)
    work_here(driver)
    return driver


def work_here(driver: Driver) -> None:
    if "local" in driver.pools:
        driver.pools["local"].work()
    driver.collect()


def taken(driver: Driver) -> list[int]:
    """Numbers of all batches that can be had; workers here make what comes to them meanwhile."""
    numbers = []
    while (batch := driver.take()) is not NOTHING:
        numbers.append(batch.number)
        work_here(driver)
    return numbers


def look(driver: Driver, seconds: float = 0.0) -> float:
    """The consumer is about to wait, so many seconds later; returns when it should look again."""
    driver.now += seconds
    driver.perform(driver.state.consumer_waits(1, driver.now))
    return driver.state.late.due_at - driver.now


def test_a_late_batch_has_the_time_a_local_worker_would_take() -> None:
    driver = begun()
    taken(driver)
    assert look(driver) == pytest.approx(LEAST_PATIENCE_S)
    assert look(driver, LEAST_PATIENCE_S / 2) == pytest.approx(LEAST_PATIENCE_S / 2)
    assert driver.state.late.made_again == 0
    look(driver, LEAST_PATIENCE_S)
    assert driver.state.late.made_again == 2
    work_here(driver)
    assert taken(driver)


def test_slow_batches_have_more_time() -> None:
    driver = begun()
    taken(driver)
    for _ in range(100):
        driver.state.rules.add_batch(service_s=3.0, nbytes=0)
    patience_s = PATIENCE * driver.state.rules.service_s
    assert look(driver) == pytest.approx(patience_s)
    assert patience_s > 2.0


def test_batches_come_once_in_order_without_the_remote_answers() -> None:
    driver = begun()
    numbers = taken(driver)
    for _ in range(4 * BATCHES):
        look(driver, 1.0)
        work_here(driver)
        numbers += taken(driver)
    assert numbers == list(range(BATCHES))
    assert driver.state.schedule.finished
    assert driver.state.late.made_again > 0
    driver.pools["remote"].work()  # what is too late is dropped
    driver.collect()
    assert taken(driver) == []


def test_what_was_sent_with_a_late_ticket_is_late_at_once() -> None:
    driver = begun(local=1)
    taken(driver)
    look(driver)
    look(driver, LEAST_PATIENCE_S)
    assert driver.state.late.made_again == 1
    work_here(driver)
    taken(driver)
    look(driver)
    assert driver.state.late.made_again == 2


def test_where_nobody_here_is_idle_the_others_are_waited_for() -> None:
    driver = begun(local=1)
    while driver.take() is not NOTHING:
        pass
    assert driver.state.placement.load["local"] >= 1
    assert look(driver) == look(driver, 100.0) == math.inf
    work_here(driver)
    assert look(driver) <= 0.0 or driver.state.late.made_again  # the one here has nothing to do any more


def test_workers_elsewhere_are_waited_for_where_none_is_here() -> None:
    """They may be the only ones that can read the data."""
    driver = begun(local=0)
    driver.pools["remote"].work()
    driver.pools["remote"].room = 0
    driver.collect()
    assert taken(driver)
    driver.fill(starving=True)
    assert look(driver) == look(driver, 100.0) == math.inf
    assert driver.state.late.made_again == 0


def test_while_no_machine_has_come_up_nothing_is_late() -> None:
    driver = Driver(local=0, remote=2, prefetch=8, starts_slowly=True)
    driver.begin(BATCHES)
    driver.fill(starving=True)
    assert look(driver) == look(driver, 100.0) == math.inf
    assert driver.state.late.made_again == 0


@pytest.mark.parametrize("options", [{"logicals": 2}, {"in_order": False}])
def test_nothing_is_late(options: dict[str, Any]) -> None:
    """Logical workers make their own batches, and where these come in any order nothing waits for a late one."""
    driver = begun(**options)
    for _ in range(3):
        work_here(driver)
        while driver.take() is not NOTHING:
            pass
        assert look(driver, 100.0) == math.inf
    assert driver.state.late.made_again == 0
