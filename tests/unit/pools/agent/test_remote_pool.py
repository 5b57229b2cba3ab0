"""A pool of agents, with an agent that a test plays, over a socket of this process."""

import select
import socket
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
from waiting import until

from dpex.pools.agent.connection import AgentLink
from dpex.pools.agent.pool import NodeNews, Nodes, RemotePool, order_of
from dpex.schedule.events import WorkerGone, WorkerUp, plain
from dpex.schedule.schedule import Ticket
from dpex.transport.frames import FrameReader, FrameWriter

AGENT = 1


class OneNode(Nodes):
    """A node with room for all."""

    def __init__(self, link: AgentLink) -> None:
        self._news = [NodeNews("ready", AGENT, "here", link, "a path")]
        self._wanted = 0

    def begin(self, wake: Callable[[], None]) -> None:
        pass

    def want(self, workers: int) -> None:
        self._wanted = workers

    def room(self, agent: int) -> int:
        return self._wanted

    def runs(self, agent: int, workers: int) -> None:
        pass

    def news(self) -> list[NodeNews]:
        news, self._news = self._news, []
        return news

    def close(self) -> None:
        pass


class Played:
    """A pool with one worker on an agent, whose end of the connection is a test's."""

    def __init__(self, *, shared_queue: bool) -> None:
        self.end, ours = socket.socketpair()
        self.link = AgentLink(ours, bytearray)
        self.pool = RemotePool(OneNode(self.link), partial(order_of, shared_queue=shared_queue), first_workers=1)
        self.reader = FrameReader(self.end)
        self._writer = FrameWriter(self.end)
        self.tell(WorkerUp("", 0))
        until(self.pool.poll).clear()

    def tell(self, *events: Any) -> None:
        """Report these events."""
        self._writer.add_frame(("report", self.pool._number, [], [plain(event) for event in events], None, None, None))
        assert self._writer.flush()

    def close(self) -> None:
        self.pool.close(0.0)
        self.link.close()
        until(lambda: self.link.ended)
        self.end.close()


@pytest.fixture
def play() -> Iterator[Callable[[bool], Played]]:
    played: list[Played] = []

    def begin(shared_queue: bool) -> Played:
        played.append(Played(shared_queue=shared_queue))
        return played[-1]

    yield begin
    for one in played:
        one.close()


def test_a_connection_that_was_full_wakes_nobody_for_ever(play: Callable[[bool], Played]) -> None:
    one = play(True)
    poller = select.poll()
    poller.register(one.pool.descriptors()[0], select.POLLIN)
    while one.link.flush():
        one.pool.send([Ticket(0, b"x" * 100_000, 0)], 0, one.pool.workers()[0])
    until(
        lambda: not (one.pool.poll() or poller.poll(0))
    )  # the link's thread may wake the pool after its frame was read
    until(lambda: one.reader.read() or poller.poll(0))
    until(lambda: not one.pool.poll() and one.link.flush() and not one.reader.read())
    one.pool.poll()
    assert not poller.poll(0)


def test_a_death_before_the_agent_got_the_epoch_returns_tickets(play: Callable[[bool], Played]) -> None:
    one = play(False)
    (worker,) = one.pool.workers()
    one.pool.new_epoch(1)
    assert one.pool.send([Ticket(7, [1, 2], 0)], 1, worker)
    one.tell(WorkerGone("", 0, 0, (3,), 3, False, "it was killed"))
    (event,) = until(one.pool.poll)
    assert (event.epoch, event.lost, event.working_on) == (1, (7,), None)


def test_lost_node_reports_its_loss_once(play: Callable[[bool], Played]) -> None:
    one = play(True)
    one.tell(WorkerUp("", 1))
    until(one.pool.poll).clear()
    one.end.shutdown(socket.SHUT_RDWR)
    gone = until(one.pool.poll)
    assert [(event.is_reported, event.why) for event in gone] == [(False, gone[0].why), (True, gone[0].why)]
