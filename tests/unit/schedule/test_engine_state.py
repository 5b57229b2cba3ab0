"""What the engine's state answers to each event: lists of instructions, compared whole."""

from typing import Any

import pytest

from dpex.errors import WorkerDiedError
from dpex.measure.settings import Settings
from dpex.schedule.engine_state import EngineState
from dpex.schedule.events import (
    Adopt,
    Notice,
    PoolStatus,
    Raise,
    Scale,
    Send,
    Snapshot,
    TicketMade,
    WorkerGone,
    WorkerUp,
)
from dpex.schedule.logical_workers import CROWD_AFTER_S
from dpex.schedule.placement import CRASHES_IN_A_ROW, Place
from dpex.schedule.prefetch import PrefetchRules
from dpex.schedule.progress import START


class Table:
    """An engine's state of which each answer is taken down and taken out, as if it had been performed."""

    def __init__(
        self,
        *,
        logicals: int = 0,
        iterable: bool = False,
        prefetch: int = 4,
        sizes: tuple[int, int] = (2, 0),
        is_tuned: bool = False,
        tolerates: bool = False,
        **status: Any,
    ) -> None:
        rules = PrefetchRules(logical=logicals > 0, may_group=False, memory_budget=None, is_tuned=is_tuned)
        self.prefetch = prefetch
        self.state = EngineState(
            logicals=logicals,
            iterable=iterable,
            in_order=True,
            rules=rules,
            settings=self.settings(*sizes),
            tolerates=tolerates,
        )
        self.answer(self.state.placement.request_start())
        for name, count in zip(("local", "remote"), sizes, strict=True):
            if count:
                self.report(name, tuple(range(count)), **status)
        self.answer(self.state.begin_epoch())

    def settings(self, local: int, remote: int = 0) -> Settings:
        return Settings(local=local, remote=remote, prefetch=self.prefetch)

    def answer(self, _: None = None) -> list[Any]:
        """The instructions that the call in the brackets has left."""
        answer = list(self.state.placement.instructions)
        self.state.placement.instructions.clear()
        return answer

    def tell(self, event: Any, now: float = 0.0) -> list[Any]:
        return self.answer(self.state.apply_event(event, now))

    def report(self, pool: str = "local", workers: tuple[int, ...] = (0, 1), **status: Any) -> None:
        known = {"requested": len(workers), "running": len(workers)} | status
        assert self.answer(self.state.placement.update_status(pool, PoolStatus(workers=workers, **known))) == []

    def draw(self, count: int) -> None:
        for _ in range(count):
            self.state.placement.dirty.add(self.state.schedule.draw(f"index {self.state.schedule.drawn}").queue)

    def send(self, count: int = 0, *, starving: bool = True, now: float = 0.0) -> list[Any]:
        """Draw so many; returns what is sent: (pool, worker, numbers), and all other instructions as they are."""
        self.draw(count)
        return shortened(self.answer(self.state.issue(now, starving=starving)))

    def dies(
        self,
        worker: int,
        *lost: int,
        working_on: int | None = None,
        expected: bool = False,
        epoch: int = 0,
        now: float = 0.0,
    ) -> Any:
        gone = WorkerGone("local", worker, epoch, lost, working_on, expected, f"worker {worker} was killed")
        return self.tell(gone, now)

    def result(self) -> Any:
        delivery = self.state.schedule.pop()
        return None if delivery is None else delivery.payload()


def shortened(answer: list[Any]) -> list[Any]:
    return [
        (i.pool, i.worker, [t.number for t in i.tickets], *(["again"] if i.again else [])) if isinstance(i, Send) else i
        for i in answer
    ]


def made(number: int, *, epoch: int = 0, value: Any = None, **more: Any) -> TicketMade:
    return TicketMade(epoch, number, 0, value or (lambda: f"batch {number}"), **more)


def test_a_resize_scales_present_pools_and_creates_wanted_ones() -> None:
    table = Table()
    assert table.answer(table.state.resize(table.settings(0))) == [Scale("local", 0)]
    assert table.answer(table.state.resize(table.settings(0, 2))) == [Scale("local", 0), Scale("remote", 2)]
    assert table.state.placement.settings == table.settings(0, 2)


@pytest.mark.parametrize("iterable", [False, True])
def test_a_resize_of_logical_workers_changes_only_the_prefetch(iterable: bool) -> None:
    table = Table(logicals=2, iterable=iterable)
    assert table.answer(table.state.resize(Settings(local=0, remote=2, prefetch=11))) == []
    table.state.settle_prefetch()
    assert table.state.placement.settings == Settings(local=2, remote=0, prefetch=11)
    assert table.state.schedule.prefetch == 11


@pytest.mark.parametrize("status", [{"failed": "no program"}, {"most": 1}])
def test_logical_workers_that_did_not_start_are_requested_again(status: dict[str, Any]) -> None:
    table = Table(logicals=2)
    table.report("local", (0,), **status)
    assert table.answer(table.state.resize(table.settings(2))) == [Scale("local", 2)]


def test_a_tuner_that_cannot_have_remote_workers_gets_local_ones() -> None:
    table = Table(sizes=(0, 0), prefetch=8, is_tuned=True)
    (scale,) = table.answer(table.state.resize(table.settings(0, 2)))
    assert scale == Scale("remote", 2, optional=True)
    assert table.answer(table.state.placement.scale_refused(scale, "there is no cluster")) == [
        Notice("no remote workers for this loader: there is no cluster", warning=False),
        Scale("local", 1),
    ]
    assert (table.state.placement.settings, table.state.placement.wanted) == (table.settings(1), {"local": 1})


def test_a_refused_request_for_remote_workers_keeps_the_sizes() -> None:
    table = Table()
    _, scale = table.answer(table.state.resize(table.settings(2, 2)))
    assert scale == Scale("remote", 2)
    assert table.answer(table.state.placement.scale_refused(scale, "there is no cluster")) == []
    assert (table.state.placement.settings, table.state.placement.wanted) == (table.settings(2), {"local": 2})


@pytest.mark.parametrize(("cpus", "count"), [(1, 1), (8, 3)])
def test_local_workers_take_over_from_a_lost_cluster(cpus: int, count: int) -> None:
    table = Table(sizes=(0, 3))
    assert table.answer(table.state.consumer_waits(cpus, 0.0)) == []
    table.report("remote", (), failed="its head is gone", requested=0)
    assert table.answer(table.state.consumer_waits(cpus, 0.0)) == [
        Notice(f"no remote worker is left, so local workers take over ({count}): its head is gone"),
        Scale("local", count),
    ]
    assert table.state.placement.settings == table.settings(count, 3)


def test_the_end_of_all_pools_is_an_error() -> None:
    """The cluster has none for this dataset, and the local ones that took over cannot start. This waited for ever."""
    table = Table(sizes=(0, 3))
    table.report("remote", (), failed="node a lacks a module", requested=3)
    table.answer(table.state.consumer_waits(2, 0.0))
    assert table.answer(table.state.consumer_waits(2, 0.0)) == []
    table.report("local", (), failed="no local worker can be started: it lacks a module", requested=0)
    (end,) = table.answer(table.state.consumer_waits(2, 0.0))
    assert isinstance(end, Raise)
    assert str(end.error) == (
        "no worker can run on the cluster: node a lacks a module; no local worker can be started: it lacks a module"
    )


def test_a_failed_pool_is_a_warning_only_where_others_go_on() -> None:
    """The same reason came three times before: for the pool, with the workers that take over, and as the error."""
    table = Table(sizes=(2, 1))
    failed = PoolStatus(failed="node a lacks a module", requested=1)
    told = [Notice("no worker can run on the cluster: node a lacks a module")]
    assert table.answer(table.state.placement.update_status("remote", failed)) == told
    assert table.answer(table.state.placement.update_status("remote", failed._replace(crashes=1))) == []
    assert table.answer(table.state.placement.update_status("local", PoolStatus(failed="no room"))) == []


def test_local_substitutes_leave_when_the_cluster_returns() -> None:
    running = 2
    table = Table(sizes=(0, 3))
    table.report("remote", (), failed="no node has room", requested=0)
    table.answer(table.state.consumer_waits(2, 0.0))
    table.report("local", (1, 2), requested=2, running=2)
    for up in range(1, running):
        table.report("remote", tuple(range(up)), requested=3, running=up)
        assert not any(isinstance(said, Scale) for said in table.tell(WorkerUp("remote", up - 1)))
    table.report("remote", tuple(range(running)), requested=3, running=running)
    assert table.tell(WorkerUp("remote", running - 1))[:2] == [
        Notice("remote workers run again: the local workers that took over leave", warning=False),
        Scale("local", 0),
    ]
    assert table.state.placement.settings == table.settings(0, 3)
    assert not any(isinstance(said, Scale) for said in table.tell(WorkerUp("remote", running - 1)))


def test_local_workers_that_took_over_logical_workers_keep_them() -> None:
    table = Table(sizes=(0, 2), logicals=2)
    table.report("remote", (), failed="no node has room", requested=0)
    table.answer(table.state.consumer_waits(2, 0.0))
    table.report("local", (0, 1))
    table.send(2)
    table.report("remote", (0, 1), requested=2, running=2)
    assert table.tell(WorkerUp("remote", 0)) == table.tell(WorkerUp("remote", 1)) == []
    assert table.send(2) == [("local", 0, [2]), ("local", 1, [3])]


@pytest.mark.parametrize(
    ("status", "text"),
    [
        ({"failed": "no process can be forked"}, "no process can be forked"),
        (
            {"most": 0, "why_most": "pids limit"},
            "no local worker can be started: pids limit; num_workers=0 makes batches in the training process",
        ),
    ],
)
def test_waiting_for_workers_that_cannot_come_is_an_error(status: dict[str, Any], text: str) -> None:
    table = Table()
    table.report("local", (), requested=1, running=1, **status)
    assert table.answer(table.state.consumer_waits(1, 0.0)) == [], "one that leaves makes the tickets that it has"
    table.report("local", (), requested=0, **status)
    (instruction,) = table.answer(table.state.consumer_waits(1, 0.0))
    assert isinstance(instruction, Raise)
    assert isinstance(instruction.error, WorkerDiedError)
    assert str(instruction.error) == text


@pytest.mark.parametrize(("sizes", "said"), [((2, 0), []), ((2, 2), [Notice("no module named codec")])])
def test_a_local_failure_warns_only_if_the_cluster_goes_on(sizes: Any, said: list[Notice]) -> None:
    table = Table(sizes=sizes)
    failed = PoolStatus(failed="no module named codec")
    assert [table.answer(table.state.placement.update_status("local", failed)) for _ in range(2)] == [said, []]


def test_tickets_are_sent_singly_until_they_are_known_to_be_tiny() -> None:
    table = Table()
    assert table.send(3) == [("local", None, [0]), ("local", None, [1]), ("local", None, [2])]
    assert table.send() == []
    table.state.rules.group = 2
    table.state.schedule.set_prefetch(16)
    assert table.send(5) == [("local", None, [3, 4]), ("local", None, [5, 6]), ("local", None, [7])]


def test_a_partial_message_waits_while_batches_are_ready() -> None:
    table = Table(prefetch=16)
    table.state.rules.group = 2
    assert table.send(2) == [("local", None, [0, 1])]
    table.tell(made(0))
    assert table.send(1, starving=False) == []
    assert not table.state.has_to_send(starving=False)
    assert table.send(1, starving=False) == [("local", None, [2, 3])]
    assert table.send(1, starving=True) == [("local", None, [4])]
    assert not table.state.has_to_send(starving=True)


def test_the_pool_with_the_least_on_its_way_by_worker_is_next() -> None:
    table = Table(sizes=(1, 3), prefetch=16)
    assert [pool for pool, _, _ in table.send(8)].count("remote") == 6
    assert table.state.placement.load == {"local": 2, "remote": 6}
    for number in range(8):
        table.tell(made(number))
    assert table.state.placement.load == {"local": 0, "remote": 0}


def full_at_twenty() -> Table:
    """Of two hundred batches the pool took twenty."""
    table = Table(prefetch=200)
    table.draw(200)
    table.state.issue(0.0, starving=True)
    answer = table.state.placement.instructions
    del answer[:20]
    table.answer(table.state.refused(answer[0]))
    return table


def test_tickets_a_full_pool_refused_are_not_offered_each_time() -> None:
    """It has room for twenty: with each result one fits, and one more is tried."""
    table = full_at_twenty()
    for number in range(100):
        table.tell(made(number))
        table.state.issue(0.0, starving=True)
        answer = table.state.placement.instructions
        assert shortened(answer) == [("local", None, [number + 20]), ("local", None, [number + 21])][: len(answer)]
        assert 1 <= len(answer) <= 2
        del answer[0]
        if answer:
            table.answer(table.state.refused(answer[0]))


def test_a_pool_that_keeps_accepting_is_offered_more_each_time() -> None:
    table = full_at_twenty()
    assert [len(table.send()) for _ in range(5)] == [1, 2, 3, 5, 9]


def test_what_one_pool_refuses_another_makes() -> None:
    table = Table(sizes=(1, 3), prefetch=16)
    table.draw(8)
    table.state.issue(0.0, starving=True)
    answer = table.state.placement.instructions
    sends = [i for i in answer if isinstance(i, Send)]
    refused = [send for send in sends if send.pool == "remote"][2]
    answer[:] = [refused, *sends[sends.index(refused) + 1 :]]  # those before it were sent
    later = table.answer(table.state.refused(refused))
    assert {pool for pool, *_ in shortened(later)} == {"local"}
    assert table.state.placement.load == {"local": 4, "remote": 2}
    assert table.send(4) == [], "nothing has come back from the cluster"
    first = next(send for send in sends if send.pool == "remote")
    table.tell(made(first.tickets[0].number))
    assert "remote" in {pool for pool, _, _ in table.send(2)}


def test_a_refusal_of_one_worker_keeps_nothing_from_the_others() -> None:
    table = Table(logicals=2)
    table.draw(4)
    table.state.issue(0.0, starving=True)
    answer = table.state.placement.instructions
    sends = [i for i in answer if isinstance(i, Send)]
    assert shortened(table.answer(table.state.refused(sends[0]))) == [
        Adopt("local", 0, 0, None),
        Adopt("local", 1, 1, None),
        ("local", 1, [1]),
        ("local", 1, [3]),
    ]
    assert table.state.schedule.pending(0) == 2
    assert table.send() == [("local", 0, [0])]
    assert table.send() == [("local", 0, [2])]


def test_the_point_is_before_a_batch_that_next_has_not_returned() -> None:
    table = Table()
    table.send(2)
    table.tell(made(0))
    table.tell(made(1))
    table.result()
    schedule = table.state.schedule
    batch = schedule.peek()
    assert batch is not None
    schedule.deliver(batch, thread=7)
    assert table.state.point().first == 1
    del schedule.in_hand[7]
    assert table.state.point().first == 2


def test_a_stream_that_has_ended_takes_no_more() -> None:
    table = Table(logicals=2, iterable=True)
    table.send(4)
    table.tell(made(1, stream_end=True))
    assert [t.number for t in table.state.schedule.issued()] == [0, 2]
    assert table.tell(WorkerGone("local", 1, 0, (), None, False, "killed")) == []  # nothing of it is lost
    assert table.result() is None


def test_a_streams_end_is_repeated_unless_its_state_is_reported() -> None:
    """The state comes a message later than the end, after which the consumer may stop, or the worker die."""
    table = Table(logicals=1, iterable=True, sizes=(1, 0))
    table.tell(Snapshot(0, *START, "new"))
    table.send(2)
    table.tell(made(0))
    table.tell(Snapshot(0, 0, 0, "read"))
    table.tell(made(1, stream_end=True))
    assert table.result() == "batch 0"
    (logical,) = table.state.point().logicals
    assert (logical.state, [ticket.number for ticket in logical.again], logical.has_ended) == ("read", [1], True)
    table.tell(Snapshot(0, 0, 1, "ready again"))
    (logical,) = table.state.point().logicals
    assert (logical.state, logical.again, logical.has_ended) == ("ready again", (), True)


def test_of_a_stream_without_a_state_its_end_is_no_batch() -> None:
    table = Table(logicals=1, iterable=True, sizes=(1, 0))
    table.send(2)
    table.tell(made(0))
    table.tell(made(1, stream_end=True))
    (logical,) = table.state.point().logicals
    assert (logical.again, logical.batches) == ((), 0)


@pytest.mark.parametrize("iterable", [True, False])
def test_who_was_asked_and_can_tell_is_waited_for(iterable: bool) -> None:
    table = Table(logicals=2, iterable=iterable)
    table.tell(Snapshot(0, *START, None))
    table.send(2)
    table.answer(table.state.logicals.ask_states())
    assert table.state.logicals.untold == ({0} if iterable else {0, 1})
    table.tell(Snapshot(0, *START, "asked"))
    assert table.state.logicals.untold == (set() if iterable else {1})


def test_a_logical_worker_waits_a_bounded_time_for_its_worker() -> None:
    table = Table(logicals=2)
    table.report("local", (0,))
    assert table.tell(WorkerUp("local", 0), now=100.0) == []
    assert table.send(2, now=100.0) == [Adopt("local", 0, 0, None), ("local", 0, [0])]
    assert table.send(now=100.0 + CROWD_AFTER_S) == []
    assert table.send(now=100.1 + CROWD_AFTER_S) == [Adopt("local", 0, 1, None), ("local", 0, [1])]


def test_one_that_comes_late_takes_nothing_from_the_others() -> None:
    table = Table(logicals=2)
    table.report("local", (0,))
    table.tell(WorkerUp("local", 0), now=100.0)
    table.send(2, now=200.0)
    table.report("local", (0, 1))
    assert table.tell(WorkerUp("local", 1), now=201.0) == []
    assert table.send(2, now=202.0) == [("local", 0, [2]), ("local", 0, [3])]


def test_after_a_death_the_wait_for_a_new_worker_is_bounded() -> None:
    table = Table(logicals=2)
    table.tell(WorkerUp("local", 0), now=0.0)
    table.send(2)
    table.report("local", (1,), requested=2)
    table.dies(0, 0, now=100.0)
    assert table.send(now=100.0 + CROWD_AFTER_S) == []
    table.report("local", (1, 2))
    assert table.send(now=100.0 + CROWD_AFTER_S) == [Adopt("local", 2, 0, None), ("local", 2, [0])]
    table.report("local", (1,), requested=2)
    table.dies(2, 0, now=200.0)
    assert table.send(now=200.1 + CROWD_AFTER_S) == [Adopt("local", 1, 0, None), ("local", 1, [0])]
    assert table.state.logicals.placed_on(Place("local", 1)) == [0, 1]


def test_this_machine_comes_before_the_cluster() -> None:
    table = Table(logicals=2, sizes=(1, 1))
    assert table.send() == [Adopt("local", 0, 0, None), Adopt("remote", 0, 1, None)]


@pytest.mark.parametrize(("logicals", "workers", "wanted"), [(5, 2, 2), (5, 2, 3), (4, 3, 1), (3, 3, 0), (2, 0, 2)])
def test_no_worker_takes_more_than_its_part(logicals: int, workers: int, wanted: int) -> None:
    table = Table(logicals=logicals, sizes=(wanted, 0))
    table.report("local", tuple(range(workers)))
    table.send()
    part = -(-logicals // max(1, wanted))
    taken = [len(table.state.logicals.placed_on(Place("local", worker))) for worker in range(workers)]
    assert sum(taken) == min(logicals, part * workers)
    assert max(taken, default=0) - min(taken, default=0) <= 1


def test_what_is_made_again_is_sent_epoch_by_epoch() -> None:
    table = Table(logicals=1, sizes=(1, 0))
    table.send(2)
    table.answer(table.state.begin_epoch())
    table.send(1)
    table.tell(made(0, epoch=1))
    table.report("local", (5,))
    table.dies(0, epoch=1)
    answer = table.answer(table.state.issue(0.0, starving=True))
    assert [(i.epoch, [t.number for t in i.tickets], i.again) for i in answer[1:]] == [
        (0, [0, 1], True),
        (1, [0], True),
    ]


def test_a_refused_remake_comes_before_all_other_tickets() -> None:
    table = Table(logicals=1, sizes=(1, 0))
    table.send(2)
    table.tell(made(0))
    table.report("local", (5,))
    table.dies(0, 1)
    table.state.issue(0.0, starving=True)
    answer = table.state.placement.instructions
    again = next(i for i in answer if isinstance(i, Send))
    assert shortened(table.answer(table.state.refused(again))) == [Adopt("local", 5, 0, None)]
    assert table.send() == [("local", 5, [0], "again"), ("local", 5, [1])]


def test_a_running_stream_cannot_go_on_elsewhere() -> None:
    table = Table(logicals=2, iterable=True)
    table.send(4)
    assert table.dies(0, 0, 2, working_on=0) == []
    error = table.result()
    assert isinstance(error, WorkerDiedError)
    assert "no other worker can continue stream 0 of the IterableDataset" in str(error)
    assert [t.number for t in table.state.schedule.issued()] == [1, 3]


def test_a_stream_that_was_not_sent_anything_begins_elsewhere() -> None:
    table = Table(logicals=1, iterable=True, sizes=(1, 0))
    table.draw(1)
    table.state.issue(0.0, starving=True)
    answer = table.state.placement.instructions
    table.answer(table.state.refused(answer[1]))
    table.report("local", (5,))
    assert table.dies(0) == []
    assert table.send() == [Adopt("local", 5, 0, None), ("local", 5, [0])]


def test_a_stream_that_has_begun_no_batch_begins_elsewhere() -> None:
    table = Table(logicals=1, iterable=True, sizes=(1, 0))
    table.send(1)
    table.tell(made(0))
    assert table.result() == "batch 0"
    table.answer(table.state.begin_epoch())
    table.send(2)
    table.report("local", (5,))
    (said,) = table.dies(0, 0, 1, epoch=1)
    assert said == Notice("worker 0 was killed. Its 2 batches will be made again. Training continues.")
    assert table.send() == [Adopt("local", 5, 0, None), ("local", 5, [0]), ("local", 5, [1])]


def test_the_death_of_a_stream_without_tickets_ends_the_epoch() -> None:
    table = Table(logicals=1, iterable=True, sizes=(1, 0))
    table.send(1)
    table.tell(made(0))
    (instruction,) = table.dies(0)
    assert isinstance(instruction, Raise)


def test_tickets_of_a_dead_worker_are_remade_and_counted() -> None:
    table = Table(prefetch=6)
    table.send(6)
    (said,) = table.dies(0, 1, 3, 4)
    assert said == Notice("worker 0 was killed. Its 3 batches will be made again. Training continues.")
    assert (table.state.failures.deaths["local"], table.state.failures.remade) == (1, 3)
    assert table.state.placement.load == {"local": 3}
    assert table.send() == [("local", None, [1]), ("local", None, [3]), ("local", None, [4])]
    table.dies(1, 4)
    assert (table.state.failures.deaths["local"], table.state.failures.remade) == (2, 4)


def test_second_worker_of_a_lost_node_warns_no_more() -> None:
    table = Table(sizes=(0, 2))
    table.report("remote", (0, 1))
    lost = [
        WorkerGone("remote", worker, 0, (), None, False, "node a is lost", is_reported=worker > 0) for worker in (0, 1)
    ]
    assert [table.tell(gone) for gone in lost] == [[Notice("node a is lost. Training continues.")], []]
    assert table.state.failures.deaths["remote"] == 2


def test_what_a_worker_held_of_an_earlier_epoch_is_nobodys_loss() -> None:
    table = Table()
    table.send(2)
    table.answer(table.state.begin_epoch())
    table.send(2)
    assert table.dies(0, 0, 1, working_on=0, epoch=0) == [Notice("worker 0 was killed. Training continues.")]
    assert (table.send(), table.state.failures.remade, table.state.placement.load) == ([], 0, {"local": 2})


def test_a_worker_that_was_asked_to_leave_did_not_die() -> None:
    table = Table()
    table.send(2)
    assert table.dies(0, 0, 1, expected=True) == []
    assert (table.state.failures.deaths.total(), table.state.failures.remade) == (0, 0)
    assert table.send() == [("local", None, [0]), ("local", None, [1])]


def test_a_ticket_that_killed_three_workers_is_given_up() -> None:
    table = Table()
    table.send(2)
    for _ in range(table.state.schedule.max_tries - 1):
        table.dies(0, 0, 1, working_on=0)
        table.send()
    assert table.dies(0, 0, 1, working_on=0) == []
    assert table.state.failures.remade == 2 + 2 + 1
    assert table.send() == [("local", None, [1])]
    error = table.result()
    assert isinstance(error, WorkerDiedError)
    assert "Batch 0 (dataset indices 'index 0') killed 3 workers" in str(error)


def test_too_many_deaths_in_a_row_end_the_epoch() -> None:
    table = Table()
    table.report(crashes=CRASHES_IN_A_ROW + 2)
    assert len(table.dies(0)) == 1
    table.report(crashes=CRASHES_IN_A_ROW + 3)
    end = table.dies(0)[-1]
    assert isinstance(end, Raise)
    assert f"{CRASHES_IN_A_ROW + 3} workers in a row died" in str(end.error)
    assert table.dies(0, expected=True) == []
