"""Workers on other machines: one agent on each, and the tickets that each agent holds. This module knows nothing of
Ray.

Agents come from an implementation of `Nodes`, such as a cluster, which starts an agent on each node. It reports each
agent by a `NodeNews` with an `AgentLink`, the trainer's end of the agent's connection.

A message of tickets for any worker goes to the agent with the fewest unanswered messages per worker. An agent gets at
most `REMOTE_WINDOW` such messages per worker. A message for a logical worker goes to the agent that runs this worker.
If the connection of an agent ends, the agent and all its tickets are lost.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import pickle
import select
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal, NamedTuple, Protocol

from dpex.measure.batch_times import BatchTimes, PoolTimes, batch_times, made_on_node
from dpex.measure.pool_reading import PoolReading
from dpex.measure.settings import REMOTE
from dpex.pools.agent.connection import AgentLink, Arrived, wake_nobody
from dpex.pools.base import PoolCounts
from dpex.pools.local.forking import ProcessHandle
from dpex.pools.local.handles import Result
from dpex.pools.local.worker_process import END
from dpex.schedule.events import (
    Notice,
    PoolEvent,
    TicketMade,
    WorkerGone,
    WorkerUp,
    event_of,
)
from dpex.schedule.prefetch import REMOTE_WINDOW
from dpex.schedule.schedule import Ticket
from dpex.system.clock import monotonic
from dpex.transport.codec import codec_signature
from dpex.transport.pickling import cloud_dumps
from dpex.worker.states import RngState

WORKERS_AN_AGENT = 1_000_000
"""Size of each agent's range of worker numbers: worker k of agent n has the number `WORKERS_AN_AGENT` * n + k."""
_pools = itertools.count(1)


class NodeNews(NamedTuple):
    """An event of one agent, or of all agents.

    "ready": The agent can open a pool over ``link``, with the dataset at ``path`` on its node.
    "room": The agent's maximum number of workers has changed.
    "lost": The agent has ended; ``why`` is the reason.
    "failed": The cluster cannot run workers at present, or ever if ``for_good``. An empty ``why`` ends this state.
    "notice": A message for the user: a ``warning``, or a line of the log.
    "excluded": The node at ``place`` is excluded for a while. An empty ``why`` ends this state.

    An agent without a ``place`` is a process of this machine that also serves other trainings.
    """

    kind: Literal["ready", "room", "lost", "failed", "notice", "excluded"]
    agent: int = -1
    place: str = ""
    link: AgentLink | None = None
    path: str = ""
    why: str = ""
    warning: bool = True
    for_good: bool = False


class AgentReport(NamedTuple):
    """The contents of a frame from an agent; see `dpex.pools.agent.serving`."""

    pool: int
    results: list[tuple[Any, ...]]
    """For each batch: worker, epoch, number, kind, node, fields of `BatchTimes`, positions in ``buffers``, and the
    ticket's seconds at the agent."""
    events: list[tuple[Any, ...]]
    """Events of the pool, as plain tuples."""
    failed: str | None
    """The reason why the agent cannot serve, or None."""
    delay: float | None
    """Run-queue delay of the workers, in seconds per CPU second, or None."""
    traffic: dict[str, Any] | None
    """Fields of `PoolReading` about the link, or None."""
    buffers: list[Any]
    shared: int = 0
    """Count of results that were made for another training."""
    sharing_ranks: int = 1
    """Count of the job's ranks that share the batches."""


class Nodes(Protocol):
    """A source of agents. All calls come from the thread that drives the epoch, and none of them waits."""

    handles: Sequence[ProcessHandle] = ()
    """The workers, where they are processes of this machine."""

    def begin(self, wake: Callable[[], None]) -> None:
        """Serve a pool from now on; ``wake`` is called, from any thread, when there is news."""

    def want(self, workers: int) -> None:
        """Reserve room for ``workers`` workers in all. Surplus reservations are released at once if they have no
        worker, and otherwise once their worker has left."""

    def room(self, agent: int) -> int:
        """Return how many workers an agent may have now."""

    def runs(self, agent: int, workers: int) -> None:
        """Note how many workers of an agent run now, including workers that have been asked to leave."""

    def set_aside(self, agent: int, why: str) -> None:
        """Exclude the node of an agent, because the node cannot serve this dataset. If other nodes can, the user gets a
        notice."""

    def cut_off(self, agent: int) -> None:
        """Note that the connection of an agent has ended."""

    def news(self) -> list[NodeNews]:
        """Return what happened since the last call."""

    def report(self, link: AgentLink, arrived: Arrived) -> AgentReport:
        _, pool, results, events, failed, delay, traffic = arrived.header
        return AgentReport(pool, results, events, failed, delay, traffic, arrived.buffers)

    def close(self) -> None:
        """Note that the pool needs no agent any more. Idempotent."""


# -- the pool ----------------------------------------------------------------------------------------------------------


class HeldTicket(NamedTuple):
    """A ticket without a result yet: the number of its message, the time of sending, and its worker or None."""

    message: int
    sent_at: float
    worker: int | None


@dataclass(eq=False, kw_only=True)
class AgentHandle:
    """An agent on the node ``place``. ``room``: Its maximum number of workers. ``up``: The workers that serve.

    ``held``: tickets of the present epoch, by number. ``messages``: count of unanswered tickets per message.
    ``answered_at``: time of the latest answer, in seconds.
    """

    number: int
    place: str
    link: AgentLink
    room: int = 0
    up: set[int] = field(default_factory=set)
    held: dict[int, HeldTicket] = field(default_factory=dict)
    messages: dict[int, int] = field(default_factory=dict)
    answered_at: float = 0.0

    @property
    def serving(self) -> int:
        """The number of workers that serve and will not be asked to leave."""
        return min(len(self.up), self.room)

    @property
    def running(self) -> int:
        """The number of workers that serve this training: at most ``room`` if other trainings use the agent, too."""
        return len(self.up) if self.place else self.serving

    @property
    def name(self) -> str:
        if self.place:
            return f"the agent on node {self.place}, which keeps its workers,"
        return "the process that makes the batches of a share"

    def sent(self, tickets: list[Ticket], message: int, worker: int | None, now: float) -> None:
        self.messages[message] = len(tickets)
        self.held.update({ticket.number: HeldTicket(message, now, worker) for ticket in tickets})

    def took_back(self, number: int) -> HeldTicket | None:
        """Forget a ticket that was made or lost. Return None if the agent did not hold the ticket."""
        held = self.held.pop(number, None)
        if held is not None:
            self.messages[held.message] -= 1
            if not self.messages[held.message]:
                del self.messages[held.message]
        return held

    def answered(self, number: int, here_s: float, at: float) -> float:
        """Note that a ticket's result arrived at the time ``at``. Return the network seconds of ticket and result.

        ``here_s``: seconds for which the agent had the ticket. Clocks of two machines are never compared. On a full
        link results arrive one after the other, so a result counts at most the time since the previous arrival.
        """
        held = self.took_back(number)
        if held is None:
            return 0.0
        return max(0.0, min(at - held.sent_at - here_s, at - max(held.sent_at, self.answered_at)))

    def lost_with(self, worker: int) -> list[int]:
        lost = [number for number, held in self.held.items() if held.worker == worker]
        for number in lost:
            self.took_back(number)
        return lost

    def new_epoch(self) -> None:
        self.held.clear()
        self.messages.clear()


class RemotePool:
    """See the module; implements `dpex.pools.base.WorkerPool`.

    ``order(path)`` returns the order for an agent whose node has the dataset at ``path``; see `order_of`.
    """

    def __init__(
        self, nodes: Nodes, order: Callable[[str], tuple[Any, ...]], *, first_workers: int, name: str = REMOTE
    ) -> None:
        self.name = name
        self.counts: PoolCounts = PoolCounts()
        self.times: PoolTimes = PoolTimes()
        self.failed: str | None = None
        self.crashes: int = 0
        self._is_hopeless = False
        self._nodes = nodes
        self._order = order
        self._number = next(_pools)
        self._agents: dict[int, AgentHandle] = {}
        self._events: deque[PoolEvent] = deque()
        self._epoch = 0
        self._last_message = 0
        self._closed = False
        self._woken = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._wake_lock = threading.Lock()
        self._epoll = select.epoll()
        self._epoll.register(self._woken, select.EPOLLIN)
        try:
            nodes.begin(self.wake)
            self.resize(first_workers)
        except BaseException:
            self._release_resources()
            raise

    @property
    def handles(self) -> Sequence[ProcessHandle]:
        return self._nodes.handles

    def wake(self) -> None:
        """Make `descriptors` readable; from any thread."""
        with self._wake_lock:
            if not self._closed:
                os.eventfd_write(self._woken, 1)

    # -- size ----------------------------------------------------------------------------------------------------

    def resize(self, wanted: int) -> None:
        self.counts.wanted = wanted
        self._nodes.want(wanted)
        for agent in self._agents.values():
            self._send_room(agent)
        self._take_news()

    def _at(self, worker: int) -> tuple[AgentHandle | None, int]:
        number, local = divmod(worker, WORKERS_AN_AGENT)
        return self._agents.get(number), local

    def _take_news(self) -> None:
        for news in self._nodes.news():
            if news.kind == "ready":
                self._open(news)
            elif news.kind == "notice":
                self._events.append(Notice(news.why, news.warning))
            elif news.kind == "excluded":
                self.counts.leave_alone(news.place, news.why)
            elif news.kind == "failed":
                self.failed, self._is_hopeless = news.why or None, news.for_good
            elif (agent := self._agents.get(news.agent)) is not None:
                if news.kind == "room":
                    self._send_room(agent)
                else:
                    self._lose(agent, news.why)
        self._count()

    def _open(self, news: NodeNews) -> None:
        link, place = news.link, news.place
        assert link is not None
        link.wake = self.wake
        agent = self._agents[news.agent] = AgentHandle(number=news.agent, place=place, link=link)
        self._put(agent, "open", self._number, self._order(news.path))
        self._put(agent, "epoch", self._epoch)
        self._send_room(agent)

    def _send_room(self, agent: AgentHandle) -> None:
        """Send an agent its number of workers. The agent maintains that number."""
        room = self._nodes.room(agent.number)
        if room != agent.room:
            agent.room = room
            self._put(agent, "resize", room)

    def _put(self, agent: AgentHandle, *header: Any) -> None:
        if not agent.link.put(*header):
            self._watch(agent)

    def _watch(self, agent: AgentHandle) -> None:
        """Make `descriptors` readable once the connection takes more bytes."""
        with contextlib.suppress(OSError, ValueError):  # the connection has just ended, which `poll` reports
            fd = agent.link.descriptor
            try:
                self._epoll.modify(fd, select.EPOLLOUT | select.EPOLLONESHOT)
            except FileNotFoundError:
                self._epoll.register(fd, select.EPOLLOUT | select.EPOLLONESHOT)

    def _count(self) -> None:
        counts = self.counts
        counts.running = sum(agent.running for agent in self._agents.values())
        counts.requested = counts.running if self._is_hopeless else max(counts.running, counts.wanted)

    # -- tickets -------------------------------------------------------------------------------------------------

    def at_work(self) -> int:
        return sum(min(len(agent.up), len(agent.held)) for agent in self._agents.values())

    def workers(self) -> list[int]:
        """See `WorkerPool.workers`. Workers of agents with too little room come last, because they leave first."""
        agents = sorted(self._agents.values(), key=lambda agent: len(agent.up) > agent.room)
        return [agent.number * WORKERS_AN_AGENT + k for agent in agents for k in sorted(agent.up)]

    def send(self, tickets: list[Ticket], epoch: int, worker: int | None = None) -> bool:
        """See `WorkerPool.send`. `REMOTE_WINDOW` limits only messages that any worker may take."""
        agent, number = (self._emptiest(), None) if worker is None else self._at(worker)
        if agent is None:
            return False
        data = _packed([(ticket.number, ticket.index) for ticket in tickets])
        self._last_message += 1
        if epoch == self._epoch:
            agent.sent(tickets, self._last_message, number, monotonic())
        self._put(agent, "tickets", number, epoch, tickets[0].queue, data)
        return True

    def _emptiest(self) -> AgentHandle | None:
        """Return the agent with the fewest unanswered messages per worker; None if all have `REMOTE_WINDOW`."""
        best, best_load = None, float(REMOTE_WINDOW)
        for agent in self._agents.values():
            if agent.serving > 0 and (load := len(agent.messages) / agent.serving) < best_load:
                best, best_load = agent, load
        return best

    def adopt(self, worker: int, logical: int, state: RngState | None) -> None:
        agent, number = self._at(worker)
        if agent is not None:
            self._put(agent, "adopt", number, logical, state)

    def ask_state(self, worker: int, logical: int) -> None:
        agent, number = self._at(worker)
        if agent is not None:
            self._put(agent, "ask_state", number, logical)

    def new_epoch(self, epoch: int) -> None:
        self._epoch = epoch
        for agent in self._agents.values():
            agent.new_epoch()
            self._put(agent, "epoch", epoch)

    # -- events --------------------------------------------------------------------------------------------------

    def descriptors(self) -> list[int]:
        return [self._epoll.fileno()]

    def poll(self) -> deque[PoolEvent]:
        if self._closed:
            return self._events
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._woken)
        self._epoll.poll(0)  # takes the events of writable connections; else `descriptors` would stay readable
        self._take_news()
        for agent in list(self._agents.values()):
            self._read(agent)
        self._count()
        return self._events

    def _read(self, agent: AgentHandle) -> None:
        link = agent.link
        has_ended = link.ended  # read before the frames: after the end no further frame arrives
        while link.arrived:
            self._take_frame(agent, link.arrived.popleft())
        if agent.number not in self._agents:
            return
        if has_ended:
            self._nodes.cut_off(agent.number)
            self._lose(agent, link.why_ended)
        elif not link.flush():
            self._watch(agent)

    def _take_frame(self, agent: AgentHandle, arrived: Arrived) -> None:
        report = self._nodes.report(agent.link, arrived)
        if report.pool != self._number:
            return  # a report of the previous pool, which was closed
        # the maximum, because some ranks may end before others
        self.counts.sharing_ranks = max(self.counts.sharing_ranks, report.sharing_ranks)
        if report.results:
            self._made(agent, report, arrived.at)
        if report.traffic is not None:
            counts = PoolReading(**report.traffic)
            self._add(agent, counts, links=1, round_trip_s=counts.round_trip_s)
        for event in report.events:
            self._take(agent, event_of(*event))
        if report.failed is not None and agent.number in self._agents:
            self._nodes.set_aside(agent.number, report.failed)
            self._lose(agent, report.failed)

    def _made(self, agent: AgentHandle, report: AgentReport, at: float) -> None:
        self.crashes = 0
        self.times.shared += report.shared
        made: list[BatchTimes] = []
        first = agent.number * WORKERS_AN_AGENT
        for worker, epoch, number, kind, node, fields, places, here_s in report.results:
            times = batch_times(fields)
            if epoch == self._epoch:
                transit_s = agent.answered(number, here_s, at)
                times = times._replace(transit_s=transit_s, ended_at=at)
                slots = {(segment, slot): report.buffers[which] for segment, slot, which in places}
                value = Result(partial(_arrived, slots), kind, node)
                self._events.append(TicketMade(epoch, number, first + worker, value, kind == END, times))
            self.times.count(times)
            made.append(times)
        agent.answered_at = at
        there = made_on_node(made, report.delay)
        self.times.queued_s += there.queued_s
        self.times.queue_known_s += there.queue_known_s
        self._add(agent, there)

    def _take(self, agent: AgentHandle, event: PoolEvent) -> None:
        """Handle an event of an agent's pool, and pass it on with this pool's worker numbers."""
        first = agent.number * WORKERS_AN_AGENT
        match event:
            case WorkerUp(_, worker):
                agent.up.add(worker)
                self.failed = None
                self._nodes.runs(agent.number, len(agent.up))
                event = WorkerUp(self.name, first + worker)
            case WorkerGone():
                event = self._gone(agent, event)
            case Notice() if agent.place:
                event = replace(event, text=f"node {agent.place}: {event.text}")
        self._events.append(event)

    def _gone(self, agent: AgentHandle, event: WorkerGone) -> WorkerGone:
        worker = event.worker
        agent.up.discard(worker)
        if event.epoch != self._epoch:  # the worker ended before this epoch's tickets reached the agent
            event = replace(event, epoch=self._epoch, lost=(), working_on=None)
        for number in event.lost:
            agent.took_back(number)
        lost = (*event.lost, *agent.lost_with(worker))
        self._nodes.runs(agent.number, len(agent.up))
        self.crashes += not event.expected
        number = agent.number * WORKERS_AN_AGENT + worker if worker >= 0 else -1
        why = f"on node {agent.place}: {event.why}" if agent.place and not event.expected else event.why
        return replace(event, pool=self.name, worker=number, lost=lost, why=why)

    def _add(self, agent: AgentHandle, more: PoolReading, **levels: Any) -> None:
        """Add to the sums of an agent's machine, unless the agent runs on this machine."""
        if agent.place:
            known = self.times.nodes.get(agent.place, PoolReading()).plus(more)
            self.times.nodes[agent.place] = replace(known, **levels)

    # -- losses --------------------------------------------------------------------------------------------------

    def _lose(self, agent: AgentHandle, why: str) -> None:
        """Remove an ended agent and its workers. No ticket is blamed for the end."""
        del self._agents[agent.number]
        agent.link.close()
        lost = tuple(agent.held)
        if agent.place in self.times.nodes:
            self._add(agent, PoolReading(), links=0)
        text = f"{agent.name} is lost: {why}"
        workers = [agent.number * WORKERS_AN_AGENT + worker for worker in sorted(agent.up)]
        self.crashes += bool(workers)
        if lost and not workers:
            workers = [-1]
        for worker in workers:
            is_reported = worker != workers[0]
            gone = WorkerGone(self.name, worker, self._epoch, lost, None, False, text, is_reported=is_reported)
            self._events.append(gone)
            lost = ()

    # -- closing -------------------------------------------------------------------------------------------------

    def close(self, grace_s: float = 5.0) -> None:
        if self._closed:
            return
        for agent in self._agents.values():
            agent.link.wake = wake_nobody
            agent.link.put("close", grace_s)
        self._release_resources()
        self._nodes.close()

    def _release_resources(self) -> None:
        with self._wake_lock:
            self._closed = True
            os.close(self._woken)
        self._epoll.close()
        self._agents.clear()
        self._events.clear()
        self.counts = PoolCounts()


def order_of(path: str, *, shared_queue: bool, probes: bool = False) -> tuple[Any, ...]:
    """Return the fields of a `dpex.pools.agent.serving.PoolOrder` for the dataset at ``path``."""
    return shared_queue, path, codec_signature(), probes


def _arrived(slots: dict[tuple[int, int], Any], segment: int, slot: int, nbytes: int) -> Any:
    return slots[segment, slot][:nbytes]


def _packed(tickets: list[tuple[int, Any]]) -> bytes:
    try:
        return pickle.dumps(tickets, 5)
    except Exception:
        return cloud_dumps(tickets, remote=True)
