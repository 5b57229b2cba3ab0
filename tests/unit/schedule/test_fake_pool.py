"""The fake pool keeps the promises of `dpex.pools.base`: each is one that a real pool has a test for, too."""

from __future__ import annotations

import doctest
from collections.abc import Iterator
from typing import Any

import pytest

from dpex.engine.engine import Engine
from dpex.engine.plan import EnginePlan
from dpex.schedule.events import Snapshot, TicketMade, WorkerGone, WorkerUp
from dpex.schedule.prefetch import Sizes
from dpex.schedule.schedule import Ticket
from dpex.testing import FakePool, Work, fake_pool


def pool_of(workers: int, *, shared: bool = True, **options: Any) -> FakePool:
    pool = FakePool("local", shared=shared, **options)
    pool.resize(workers)
    pool.start()
    pool.new_epoch(0)
    pool.poll().clear()
    for worker in pool.workers() if not shared else ():
        pool.adopt(worker, worker, None)
    return pool


def tickets(*numbers: int, queue: int = 0) -> list[Ticket]:
    return [Ticket(number, f"index {number}", queue) for number in numbers]


def told(pool: FakePool, kind: type[Any]) -> list[Any]:
    """What there is of that kind; the rest is taken out, too."""
    events = list(pool.poll())
    pool.poll().clear()
    return [event for event in events if isinstance(event, kind)]


def test_the_example_of_the_module_is_true() -> None:
    names = {name: globals()[name] for name in ("FakePool", "Ticket", "TicketMade")}
    found = doctest.testmod(fake_pool, extraglobs=names)
    assert (found.failed, found.attempted > 3) == (0, True)


def test_workers_that_were_asked_for_come_up_when_the_test_says_so() -> None:
    slow, quick = FakePool(starts_slowly=True), FakePool()
    for pool in (slow, quick):
        pool.resize(2)
        assert (pool.counts.requested, pool.counts.running) == (2, 0)
    assert (slow.workers(), quick.workers()) == ([], [0, 1]), "messages to those that are forked wait for them"
    slow.start(1)
    assert (slow.workers(), told(slow, WorkerUp)) == ([0], [WorkerUp("local", 0)])


def test_any_worker_takes_the_next_message_of_a_shared_pool() -> None:
    pool = pool_of(2)
    pool.send(tickets(0, 1), 0)
    pool.send(tickets(2), 0)
    pool.work(tickets=1)
    assert [(event.number, event.worker) for event in told(pool, TicketMade)] == [(0, 0), (2, 1)]
    pool.work()
    assert [(event.number, event.worker) for event in told(pool, TicketMade)] == [(1, 0)]
    assert pool.is_idle


def test_a_logical_worker_makes_its_tickets_in_order_and_its_state_runs_on() -> None:
    pool = pool_of(2, shared=False)
    pool.send(tickets(0), 0, 0)
    pool.send(tickets(2, 4), 0, 0)
    pool.work()
    works = [event.value() for event in told(pool, TicketMade)]
    assert works == [Work(0, number, f"index {number}", 0, 0, state) for state, number in enumerate((0, 2, 4))]


def test_a_snapshot_tells_the_state_after_the_latest_ticket() -> None:
    pool = pool_of(1, shared=False)
    assert not pool.snapshot(0)
    pool.send(tickets(0, 1, 2), 0, 0)
    pool.work(tickets=2)
    assert pool.snapshot(0)
    assert told(pool, Snapshot) == [Snapshot(0, 0, 1, 2)]


def test_a_full_pool_takes_nothing_of_a_message() -> None:
    pool = pool_of(1, room=1)
    sent: list[Any] = []
    assert pool.send(tickets(0), 0, None, sent)
    assert not pool.send(tickets(1, 2), 0, None, sent)
    assert len(sent) == 1
    pool.work()
    assert pool.send(tickets(1, 2), 0)


def test_who_is_asked_to_leave_finishes_what_it_holds() -> None:
    pool = pool_of(2)
    pool.send(tickets(0, 1), 0)
    pool.work(0, tickets=1)
    pool.resize(0)
    assert pool.workers() == []
    pool.work()
    events = list(pool.poll())
    assert [event.number for event in events if isinstance(event, TicketMade)] == [0, 1]
    assert [(event.worker, event.lost, event.expected) for event in events if isinstance(event, WorkerGone)] == [
        (1, (), True),
        (0, (), True),
    ]


@pytest.mark.parametrize("shared", [True, False])
def test_who_is_killed_loses_what_it_held_of_this_epoch_and_another_takes_its_place(shared: bool) -> None:
    pool = pool_of(1, shared=shared)
    to = None if shared else 0
    pool.send(tickets(5), 0, to)
    pool.new_epoch(1)
    pool.send(tickets(0, 1, 2), 1, to)
    pool.work(tickets=1 if shared else 2)
    pool.kill(0)
    (gone,) = told(pool, WorkerGone)
    assert (gone.epoch, gone.lost, gone.working_on, gone.expected) == (1, (1, 2), 1, False)
    assert (pool.crashes, pool.workers(), pool.counts.running) == (1, [1], 0)


@pytest.mark.parametrize("shared", [True, False])
def test_results_of_earlier_epochs_are_not_told(shared: bool) -> None:
    """Logical workers make them nevertheless: it moves their random state, as with torch's."""
    pool = pool_of(1, shared=shared)
    to = None if shared else 0
    pool.send(tickets(0), 0, to)
    pool.new_epoch(1)
    pool.send(tickets(0), 1, to)
    pool.work()
    assert [event.value()[::5] for event in told(pool, TicketMade)] == [(1, None if shared else 1)]


def test_a_stream_ends_where_nothing_more_can_be_made() -> None:
    def make(work: Work) -> int:
        if work.state == 2:
            raise StopIteration
        return work.number

    pool = pool_of(1, shared=False, make=make)
    pool.send(tickets(0, 1, 2), 0, 0)
    pool.work()
    assert [(event.number, event.stream_end) for event in told(pool, TicketMade)] == [(0, False), (1, False), (2, True)]


def test_messages_that_no_pool_may_be_sent_are_errors() -> None:
    with pytest.raises(AssertionError, match="name a worker"):
        pool_of(1).send(tickets(0), 0, 0)
    with pytest.raises(AssertionError, match="one queue"):
        pool_of(1).send([*tickets(0), *tickets(1, queue=1)], 0)


def delivered(engine: Engine) -> Iterator[Any]:
    while True:
        hand: list[Any] = []
        try:
            engine.next(hand)
        except StopIteration:
            return
        yield hand[0]


@pytest.mark.parametrize("logicals", [0, 2])
def test_an_engine_on_an_automatic_pool_delivers_everything(logicals: int) -> None:
    pool = FakePool("local", shared=not logicals, make=lambda work: work.index * 10, is_automatic=True)

    def make_pool(_: str, count: int) -> FakePool:
        pool.resize(count)
        return pool

    plan = EnginePlan(
        logicals=logicals,
        iterable=False,
        in_order=True,
        timeout_s=30.0,
        base_prefetch=4,
        may_read_ahead=False,
        memory_budget=None,
        make_pool=make_pool,
    )
    engine = Engine(plan, Sizes(local=2, remote=0, prefetch=None))
    for _ in range(2):
        engine.begin_epoch(iter(range(9)))
        assert list(delivered(engine)) == [index * 10 for index in range(9)]
    engine.close()
    assert pool.is_closed
