"""Workers on other machines: one agent for each, and who has which ticket. Knows no Ray; see `nodes`.

A message of tickets that any worker may make goes to the agent with the fewest messages for each of its workers; one
of a logical worker goes to the agent where that lives. An agent whose connection ends is lost, with all it held. The
workers of one on the trainer's own machine are served without it; see `near`.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import pickle
import select
import threading
from collections import deque
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from dpex.core.events import Notice, PoolEvent, Snapshot, SplittingKnown, TicketMade, WorkerGone, WorkerUp
from dpex.core.names import REMOTE
from dpex.core.schedule import Ticket
from dpex.core.streams import ALL
from dpex.measure.sums import NodeSums
from dpex.pools.agent.agreeing import order_for, told_by
from dpex.pools.agent.events import plain
from dpex.pools.agent.handles import AgentHandle, RemoteResult, node_sums, with_traffic
from dpex.pools.agent.link import Arrived
from dpex.pools.agent.near import AgentStarter, NearAgentHandle, NearPool
from dpex.pools.agent.nodes import NodeNews, Nodes
from dpex.pools.agent.traffic import Traffic
from dpex.pools.base import PoolCounts, PoolTimes
from dpex.pools.local.worker_process import END
from dpex.system.clock import monotonic
from dpex.transport.codec import codec_signature
from dpex.transport.pickling import cloud_dumps
from dpex.worker.logical_state import RngState

WORKERS_AN_AGENT = 1_000_000
"""Workers are numbered by agent: worker k of agent n is n times this, plus k."""
MESSAGES_AHEAD = 4
"""Messages for each worker that an agent may hold, so that the way there and back is hidden."""
_NO_SUMS = NodeSums()
_pools = itertools.count(1)


class RemotePool:
    """See the module; implements `dpex.pools.base.WorkerPool`.

    Args:
        nodes: where agents come from.
        shared_queue: any worker makes any ticket.
        first_workers: workers wanted from the start.
        probe_index: an index that a node is tried with before it serves, or None.
    """

    name = REMOTE

    def __init__(self, nodes: Nodes, *, shared_queue: bool, first_workers: int, probe_index: Any = None) -> None:
        self.counts = PoolCounts()
        self.times = PoolTimes()
        self.failed: str | None = None
        self.crashes = 0
        self._is_hopeless = False
        self._nodes = nodes
        self._shared = shared_queue
        self._probe_index = pickle.dumps(probe_index, 5)
        self._number = next(_pools)
        self._agents: dict[int, AgentHandle] = {}
        self._events: deque[PoolEvent] = deque()
        self._epoch = 0
        self._last_message = 0
        self._closed = False
        self._owner = os.getpid()
        self._read, self._write = os.pipe()
        os.set_blocking(self._read, False)
        os.set_blocking(self._write, False)
        self._wake_lock = threading.Lock()
        self._epoll = select.epoll()
        self._epoll.register(self._read, select.EPOLLIN)
        nodes.begin(self.wake)
        self.resize(first_workers)

    @property
    def is_own(self) -> bool:
        """Whether this process made it, and no parent of it."""
        return self._owner == os.getpid()

    def wake(self) -> None:
        """Make `descriptors` readable; from any thread."""
        with self._wake_lock:
            if not self._closed:
                with contextlib.suppress(BlockingIOError):
                    os.write(self._write, b"\0")

    # -- size ----------------------------------------------------------------------------------------------------

    def resize(self, wanted: int) -> None:
        """See `WorkerPool.resize`."""
        self.counts.wanted = wanted
        self._nodes.want(wanted, may_shrink=self._shared)
        for agent in self._agents.values():
            self._tell_room(agent)
        self._hear_nodes()

    def _at(self, worker: int) -> tuple[AgentHandle | None, int]:
        number, local = divmod(worker, WORKERS_AN_AGENT)
        return self._agents.get(number), local

    def _hear_nodes(self) -> None:
        for news in self._nodes.news():
            if news.kind == "ready":
                self._open(news)
            elif news.kind == "notice":
                self._events.append(Notice(news.why, news.warning))
            elif news.kind == "left alone":
                self.counts.leave_alone(news.place, news.why)
            elif news.kind == "failed":
                self._fail(news.why, news.for_good)
            elif (agent := self._agents.get(news.agent)) is not None:
                if news.kind == "room":
                    self._tell_room(agent)
                else:
                    self._lose(agent, news.why)
        self._count()

    def _open(self, news: NodeNews) -> None:
        assert news.link is not None
        news.link.wake = self.wake
        probe = self._probe_index if news.probe else None
        order = (self._shared, news.path, codec_signature(), probe)
        if news.link.is_near:
            agent = self._open_near(news, order)
        else:
            agent = AgentHandle(number=news.agent, place=news.place, link=news.link)
            self._put(agent, "open", self._number, order_for(news.link, order))
        self._agents[news.agent] = agent
        self._put(agent, "epoch", self._epoch)
        self._tell_room(agent)

    def _open_near(self, news: NodeNews, order: tuple[Any, ...]) -> AgentHandle:
        assert news.link is not None
        first = news.agent * WORKERS_AN_AGENT
        starter = AgentStarter(news.link, order)
        pool = NearPool(starter, first=first, times=self.times, shared_queue=self._shared)
        self._epoll.register(pool.descriptors()[0], select.EPOLLIN)
        return NearAgentHandle(number=news.agent, place=news.place, link=news.link, pool=pool)

    def _tell_room(self, agent: AgentHandle) -> None:
        """Let an agent know how many workers it may have, which it keeps up by itself."""
        room = self._nodes.room(agent.number)
        if room != agent.room:
            agent.room = room
            self._put(agent, "resize", room)

    def _fail(self, why: str, for_good: bool) -> None:
        if why and self.failed is None:
            self._events.append(Notice(f"no worker can run on the cluster: {why}"))
        self.failed, self._is_hopeless = why or None, for_good

    def _put(self, agent: AgentHandle, *header: Any) -> None:
        if not agent.put(*header):
            self._watch(agent)

    def _watch(self, agent: AgentHandle) -> None:
        """Be woken when the connection takes more."""
        with contextlib.suppress(OSError, ValueError):  # it has just ended, which is heard of
            fd = agent.link.descriptor
            try:
                self._epoll.modify(fd, select.EPOLLOUT | select.EPOLLONESHOT)
            except FileNotFoundError:
                self._epoll.register(fd, select.EPOLLOUT | select.EPOLLONESHOT)

    def _count(self) -> None:
        counts = self.counts
        counts.running = sum(len(agent.up) for agent in self._agents.values())
        counts.requested = counts.running if self._is_hopeless else max(counts.running, counts.wanted)

    # -- tickets -------------------------------------------------------------------------------------------------

    def at_work(self) -> int:
        """Workers that have something to do, at most."""
        return sum(agent.at_work() for agent in self._agents.values())

    def workers(self) -> list[int]:
        """See `WorkerPool.workers`; those that are to leave first are the last."""
        agents: Iterable[AgentHandle]
        agents = self._agents.values()
        if any(agent.must_shrink for agent in agents):
            agents = sorted(agents, key=lambda agent: agent.must_shrink)
        return [agent.number * WORKERS_AN_AGENT + k for agent in agents for k in agent.serving()]

    def send(
        self,
        tickets: list[Ticket],
        epoch: int,
        worker: int | None = None,
        sent: list[Any] | None = None,
        *,
        again: bool = False,
    ) -> bool:
        """See `WorkerPool.send`. A message to a named worker is always taken, one to anybody while somebody has
        room."""
        sent = [] if sent is None else sent
        agent, number = self._emptiest(len(tickets)) if worker is None else self._at(worker)
        if agent is None:
            return False
        if isinstance(agent, NearAgentHandle):
            return agent.pool.send(tickets, epoch, None if worker is None else number, sent, again=again)
        data = _packed([(ticket.number, ticket.index) for ticket in tickets])
        self._last_message += 1
        if epoch == self._epoch and not again:
            agent.sent(tickets, self._last_message, None if worker is None else number, monotonic())
        sent += (agent.number,)
        self._put(agent, "tickets", None if worker is None else number, epoch, tickets[0].queue, data, again)
        return True

    def _emptiest(self, tickets: int) -> tuple[AgentHandle | None, int]:
        """The agent with the fewest messages for each worker, out of those whose way carries so many tickets more."""
        best, best_load = None, float(MESSAGES_AHEAD)
        for agent in self._agents.values():
            serving = min(len(agent.up), agent.room)
            is_emptier = serving > 0 and (load := agent.open_messages / serving) < best_load
            if is_emptier and agent.pace.allows(len(agent.held), tickets, serving):
                best, best_load = agent, load
        return best, -1

    def adopt(self, worker: int, logical: int, state: RngState | None, streams: int = ALL) -> None:
        """See `WorkerPool.adopt`."""
        agent, number = self._at(worker)
        if agent is not None:
            self._put(agent, "adopt", number, logical, state, streams)

    def ask_state(self, worker: int, logical: int) -> None:
        """See `WorkerPool.ask_state`."""
        agent, number = self._at(worker)
        if agent is not None:
            self._put(agent, "ask_state", number, logical)

    def new_epoch(self, epoch: int) -> None:
        """See `WorkerPool.new_epoch`."""
        self._epoch = epoch
        for agent in self._agents.values():
            agent.new_epoch()
            self._put(agent, "epoch", epoch)

    # -- what happened -------------------------------------------------------------------------------------------

    def descriptors(self) -> list[int]:
        """See `WorkerPool.descriptors`: the pool's own epoll."""
        return [self._epoll.fileno()]

    def poll(self) -> deque[PoolEvent]:
        """See `WorkerPool.poll`."""
        if self._closed:
            return self._events
        with contextlib.suppress(BlockingIOError):
            os.read(self._read, 4096)
        self._hear_nodes()
        for agent in list(self._agents.values()):
            self._hear(agent)
        self._count()
        return self._events

    def _hear(self, agent: AgentHandle) -> None:
        link = agent.link
        has_ended = link.ended  # before what arrived is read: there is nothing after it then
        while link.arrived:
            self._told(agent, link.arrived.popleft())
        if agent.number not in self._agents:
            return
        if isinstance(agent, NearAgentHandle) and not has_ended:
            self._hear_near(agent)
        elif has_ended:
            self._nodes.cut_off(agent.number)
            self._lose(agent, link.why_ended)
        elif not link.flush():
            self._watch(agent)

    def _told(self, agent: AgentHandle, arrived: Arrived) -> None:
        _, pool, results, events, failed, delay, traffic = arrived.header
        if pool != self._number:
            return  # the one before this, which was closed
        if events and events[0][0] == "splitting":  # it is told before the first result of its stream
            self._hear_splitting(agent, *events.pop(0)[1:])
        if results:
            self._made(agent, results, arrived, delay)
        if arrived.saved_bytes:
            self._add(agent, NodeSums(saved_bytes=arrived.saved_bytes))
        if traffic is not None:
            known = self.times.nodes.get(agent.place, _NO_SUMS)
            self.times.nodes[agent.place] = with_traffic(known, Traffic(*traffic))
            agent.round_trip_s = Traffic(*traffic).round_trip_s
        for event in events:
            getattr(self, f"_hear_{event[0]}")(agent, *event[1:])
        if failed is not None and agent.number in self._agents:
            self._set_aside(agent, failed)

    def _made(self, agent: AgentHandle, results: list[Any], arrived: Arrived, delay: float | None) -> None:
        self.crashes = 0
        busy_s = cpu_all_s = 0.0
        times, epoch_now, first = self.times, self._epoch, agent.number * WORKERS_AN_AGENT
        for worker, epoch, number, kind, node, stages, cpu_s, encode_s, nbytes, places, here_s in results:
            service_s = times.count(stages, cpu_s, encode_s, nbytes)
            busy_s, cpu_all_s = busy_s + service_s, cpu_all_s + cpu_s
            if not agent.link.is_tunnel:
                times.streamed_bytes += nbytes
            if epoch != epoch_now:
                continue
            way_s = agent.answered(number, here_s, arrived.at)
            times.transit_s += way_s
            slots = {(segment, slot): arrived.buffers[which] for segment, slot, which in places}
            load_s, collate_s, load_cpu_s, _, samples, _, slowest, failed = stages
            making = (load_s, load_cpu_s, collate_s, encode_s, way_s)
            value = RemoteResult(kind, node, slots)
            rest = (service_s, nbytes, samples, making, slowest, failed)
            self._events.append(TicketMade(epoch, number, first + worker, value, kind == END, *rest))
        agent.answered_at = arrived.at
        self._add(agent, node_sums(busy_s, cpu_all_s, len(results), delay))

    def _add(self, agent: AgentHandle, more: NodeSums) -> None:
        known = self.times.nodes.get(agent.place, _NO_SUMS)
        self.times.nodes[agent.place] = known.plus(more)

    def _hear_near(self, agent: NearAgentHandle) -> None:
        """Take in what the workers of an agent on this machine did."""
        pool = agent.pool
        events = pool.poll()
        while events:  # one that was broken off is taken in again (see `dpex.system.interrupts`)
            event = events[0]
            if type(event) is TicketMade:
                self.crashes = 0
                self._events += (event,)
            elif not (isinstance(event, Notice) and event.text == pool.failed):
                what, *about = plain(event)
                getattr(self, f"_hear_{what}")(agent, *about)
            del events[0]
        if (more := pool.take_sums()) is not None:
            self._add(agent, more)
        if pool.failed is not None:
            self._set_aside(agent, pool.failed)

    def _hear_up(self, agent: AgentHandle, worker: int) -> None:
        agent.up.add(worker)
        self.failed = None
        self._nodes.runs(agent.number, len(agent.up))
        self._events.append(WorkerUp(self.name, agent.number * WORKERS_AN_AGENT + worker))

    def _hear_gone(
        self,
        agent: AgentHandle,
        worker: int,
        epoch: int,
        lost: tuple[int, ...],
        guilty: int | None,
        expected: bool,
        why: str,
        pid: int | None,
        hung: int | None,
    ) -> None:
        agent.up.discard(worker)
        if epoch == self._epoch:
            for number in lost:
                agent.took_back(number)
            lost = (*lost, *(agent.lost_with(worker) if worker >= 0 else ()))
        agent.leaving.discard(worker)
        self._nodes.runs(agent.number, len(agent.up))
        self.crashes += not expected
        number = agent.number * WORKERS_AN_AGENT + worker if worker >= 0 else -1
        text = why if expected else f"on node {agent.place}: {why}"
        self._events.append(WorkerGone(self.name, number, epoch, lost, guilty, expected, text, pid, hung))

    def _hear_snapshot(self, _: AgentHandle, logical: int, epoch: int, number: int, state: RngState | None) -> None:
        self._events.append(Snapshot(logical, epoch, number, state))

    def _hear_splitting(self, _: AgentHandle, is_split: bool) -> None:
        self._events.append(SplittingKnown(is_split))

    def _hear_notice(self, agent: AgentHandle, text: str, warning: bool, once: str = "") -> None:
        self._events.append(Notice(f"node {agent.place}: {text}", warning, once))

    def _hear_uncompressed(self, agent: AgentHandle, is_installed_there: bool) -> None:
        if text := told_by(agent.place, is_installed_there=is_installed_there):
            self._events.append(Notice(text, False))

    # -- losses --------------------------------------------------------------------------------------------------

    def _set_aside(self, agent: AgentHandle, why: str) -> None:
        text = f"node {agent.place} is set aside: {why}"
        self._events.append(Notice(text))
        self._nodes.set_aside(agent.number, text)
        self._lose(agent, text)

    def _lose(self, agent: AgentHandle, why: str) -> None:
        """An agent is no more, and neither are its workers; what they held is nobody's fault."""
        del self._agents[agent.number]
        agent.link.close()
        lost = tuple(agent.out())
        if isinstance(agent, NearAgentHandle):
            agent.pool.leave(0.0)
        if agent.place in self.times.nodes:
            self.times.nodes[agent.place] = replace(self.times.nodes[agent.place], links=0)
        text = f"the agent on node {agent.place}, which keeps its workers, is lost: {why}"
        workers = [agent.number * WORKERS_AN_AGENT + worker for worker in sorted(agent.up)]
        self.crashes += bool(workers)
        if lost and not workers:
            workers = [-1]
        for worker in workers:
            self._events.append(WorkerGone(self.name, worker, self._epoch, lost, None, False, text))
            lost = ()

    # -- closing -------------------------------------------------------------------------------------------------

    def close(self, grace_s: float = 5.0) -> None:
        """See `WorkerPool.close`."""
        if self._closed:
            return
        with self._wake_lock:
            self._closed = True
            os.close(self._read)
            os.close(self._write)
        self._epoll.close()
        if not self.is_own:
            return
        for agent in self._agents.values():
            agent.link.wake = _nobody
            agent.put("close", grace_s)
        self._nodes.close()
        self._agents.clear()
        self._events.clear()
        self.counts = PoolCounts()


def _nobody() -> None:
    """Nobody is to be woken."""


def _packed(tickets: list[tuple[int, Any]]) -> bytes:
    try:
        return pickle.dumps(tickets, 5)
    except Exception:
        return cloud_dumps(tickets)
