"""Tickets that another machine owes for too long."""

from __future__ import annotations

import math
from typing import Any

import pytest
from driver import NOTHING, Driver

from dpex.core.events import CannotStandIn, ConsumerWaits, MadeHere
from dpex.core.late_tickets import LEAST_PATIENCE_HERE_S, LEAST_PATIENCE_S, PATIENCE, PATIENCE_HERE

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
    driver.tell(ConsumerWaits(1))
    return driver.state.late.due_at - driver.now


def test_who_owes_a_batch_has_as_long_as_a_worker_here_would_take() -> None:
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
        driver.state.rules.learn(service_s=3.0, nbytes=0)
    patience_s = PATIENCE * driver.state.rules.service_s
    assert look(driver) == pytest.approx(patience_s)
    assert patience_s > 2.0


def test_all_batches_come_once_and_in_order_though_another_machine_answers_nothing() -> None:
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


def test_an_answer_that_comes_first_counts() -> None:
    driver = begun()
    taken(driver)
    look(driver)
    look(driver, LEAST_PATIENCE_S)
    driver.pools["remote"].work()
    driver.collect()
    before = taken(driver)
    assert before
    work_here(driver)
    assert not set(taken(driver)) & set(before)


def busy() -> Driver:
    """One worker here, which has been given something and does not begin; the next batch is owed by another machine."""
    driver = begun(local=1)
    while driver.take() is not NOTHING:
        pass
    assert driver.state.dispatch.load["local"] >= 1
    return driver


def test_where_nobody_here_is_idle_the_training_process_makes_what_is_stuck() -> None:
    driver = busy()
    late = driver.state.late
    assert look(driver) == pytest.approx(LEAST_PATIENCE_HERE_S)
    look(driver, LEAST_PATIENCE_HERE_S / 2)
    assert late.to_be_made_here is None
    look(driver, LEAST_PATIENCE_HERE_S)
    ticket = late.to_be_made_here
    assert ticket is not None
    assert ticket.number == driver.state.schedule.next_number
    for _ in range(2):  # a turn that is broken off does it again
        driver.tell(MadeHere(ticket, lambda: "made here", 1))
    assert driver.take() == "made here"
    assert sum(driver.state.dispatch.load.values()) == len(driver.state.schedule.issued())
    look(driver)
    assert late.to_be_made_here is not None  # it was sent at the same time


def test_the_training_process_has_more_patience_than_the_slowest_batch_took() -> None:
    driver = busy()
    driver.state.rules.learn(service_s=5.0, nbytes=0)
    driver.state.rules.learn(service_s=0.1, nbytes=0)
    assert look(driver) == pytest.approx(PATIENCE_HERE * 5.0)


def test_a_batch_that_cannot_be_made_here_is_left_to_who_owes_it() -> None:
    driver = busy()
    driver.tell(CannotStandIn("no such file"))
    assert look(driver) == math.inf
    look(driver, 100.0)
    assert driver.state.late.to_be_made_here is None


def refused() -> Driver:
    """No worker here. Others took the first batches, which were delivered, and take no more, as a link is full."""
    driver = begun(local=0)
    driver.pools["remote"].work()
    driver.pools["remote"].room = 0
    driver.collect()
    assert taken(driver)
    driver.fill(starving=True)
    assert driver.state.dispatch.load["remote"] == 0
    return driver


def make_here(driver: Driver) -> int | None:
    """Make what is to be made here; returns its number."""
    ticket = driver.state.late.to_be_made_here
    if ticket is None:
        return None
    driver.tell(MadeHere(ticket, lambda: "made here", 1))
    assert driver.take() == "made here"
    driver.fill(starving=True)
    return ticket.number


def test_what_no_machine_takes_is_made_by_the_training_process() -> None:
    driver = refused()
    first = driver.state.schedule.next_number
    assert look(driver) == pytest.approx(LEAST_PATIENCE_HERE_S)
    assert make_here(driver) is None
    look(driver, LEAST_PATIENCE_HERE_S)
    assert make_here(driver) == first
    look(driver)
    assert make_here(driver) == first + 1  # still nothing came from there
    assert driver.state.late.made_again == 2
    assert not driver.state.late.due_at < math.inf


def test_once_a_machine_has_taken_and_made_a_batch_the_others_wait_for_it_again() -> None:
    driver = refused()
    look(driver)
    look(driver, LEAST_PATIENCE_HERE_S)
    driver.pools["remote"].room = 1
    made = make_here(driver)
    assert made is not None
    assert driver.state.late.is_stuck
    driver.pools["remote"].work()
    driver.pools["remote"].room = 0
    driver.collect()
    assert not driver.state.late.is_stuck
    assert taken(driver)[0] == made + 1
    driver.fill(starving=True)
    assert look(driver) == pytest.approx(LEAST_PATIENCE_HERE_S)
    assert driver.state.late.to_be_made_here is None


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


def test_the_death_of_who_owed_it_changes_nothing() -> None:
    driver = begun()
    numbers = taken(driver)
    look(driver)
    look(driver, LEAST_PATIENCE_S)
    remote = driver.pools["remote"]
    for worker in list(remote.workers()):
        remote.kill(worker)
    with pytest.warns(RuntimeWarning, match="was killed"):
        driver.collect()
    numbers += [batch.number for batch in driver.finish()]
    assert numbers == list(range(BATCHES))
    assert set(driver.state.dispatch.load.values()) <= {0}
