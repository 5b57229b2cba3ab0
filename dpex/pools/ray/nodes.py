"""The nodes of a Ray cluster that work for one pool: who has room for how many workers, and the agents there.

Room is reserved (see `reserved`), and where it is a guardian keeps an agent (see `guardian`), which connects to
this process or, where it cannot, is reached through Ray (see `tunnel`). All calls of Ray are made by one thread, and
their answers come to it; the pool leaves wishes and reads news.

When its pool closes this is parked, with agents, connections and reservations, for the next pool with the same options.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
from collections import deque
from collections.abc import Callable, Hashable, Mapping
from typing import Any

from dpex.pools.agent.admission import AdmissionServer
from dpex.pools.agent.link import AgentLink, link_over, wake_nobody
from dpex.pools.agent.main import UNREACHED
from dpex.pools.agent.nodes import NodeNews
from dpex.pools.ray.avoided import AvoidedNodes
from dpex.pools.ray.cluster import PARKED_S, Cluster, living_nodes, stream_address
from dpex.pools.ray.deaths import reason_of
from dpex.pools.ray.node import GuardedNode
from dpex.pools.ray.reservations import Reservation, end
from dpex.pools.ray.reserved import ReservedRoom
from dpex.pools.ray.tunnel import open_tunnel
from dpex.system.clock import monotonic

logger = logging.getLogger("dpex")

LOOK_S = 0.05
"""How often reservations that are not placed yet are asked after; the answer comes from the cluster's head."""
NODES_S = 1.0
"""How often it is asked which nodes there are."""
IDLE_S = 30.0
"""How long an agent stays without a reservation: an autoscaler keeps a node that has an actor, and a new agent takes a
second or two of CPU."""
FAILED_STARTS = 3
"""Agents in a row that may end before any worker served, while none runs anywhere."""


class RayNodes:
    """See the module; implements `dpex.pools.agent.nodes.Nodes`.

    Args:
        cluster: the connection to Ray.
        key: pools with the same key may use these nodes one after the other.
        options: Ray's options of each worker.
    """

    def __init__(self, cluster: Cluster, key: Hashable, options: Mapping[str, Any]) -> None:
        self.key = key
        self._cluster = cluster
        self._room = ReservedRoom(options)
        self._kind = ""
        self._refs: list[Any] = []
        self._wake: Callable[[], None] = wake_nobody
        self._changed = threading.Event()
        self._closed = False
        self._parked_at: float | None = None
        self._requests: deque[Callable[[], None]] = deque()
        self._news: deque[NodeNews] = deque()
        self._nodes: dict[str, GuardedNode] = {}
        self._numbers: dict[int, GuardedNode] = {}
        self._next_number = 1
        self._shipments = 0
        self._looked_at = 0.0
        self._failed = ""
        self._failed_starts = 0
        self._avoided = AvoidedNodes(cluster, self._tell)
        cluster.listen(self._tell)
        self._server = self._listen()
        self._thread = threading.Thread(target=self._run, name="dpex-cluster", daemon=True)
        self._thread.start()

    def _listen(self) -> AdmissionServer | None:
        if (address := stream_address()) is None:
            return None

        def admit(connection: socket.socket, agent: int) -> None:
            if (link := link_over(connection, self._cluster.memory)) is not None:
                self._do(lambda: self._linked(agent, link))

        try:
            return AdmissionServer(address, admit)
        except OSError as error:
            logger.info("batches travel through Ray's object store: cannot listen on %s: %s", address, error)
            return None

    # -- the pool's side -----------------------------------------------------------------------------------------

    @property
    def workers(self) -> int:
        """Reservations that have a place."""
        return self._room.workers

    @property
    def agents(self) -> list[tuple[int, str]]:
        """Agents by number, and the nodes that they are on."""
        return [(number, node.node) for number, node in list(self._numbers.items())]

    def ship(self, kind: str, refs: list[Any]) -> None:
        """What the next pool's agents are to open: a dataset of that kind, in Ray's object store."""
        self._kind, self._refs = kind, refs

    def begin(self, wake: Callable[[], None]) -> None:
        """See `Nodes.begin`."""
        self._news.clear()
        self._wake = wake
        self._do(self._begin)

    def want(self, workers: int, *, may_shrink: bool) -> None:
        """See `Nodes.want`."""
        self._room.want(workers, may_shrink)
        self._changed.set()

    def room(self, agent: int) -> int:
        """See `Nodes.room`."""
        node = self._numbers.get(agent)
        return 0 if node is None else self._room.of(node.key)

    def give_back(self, agent: int) -> None:
        """See `Nodes.give_back`."""
        if (node := self._numbers.get(agent)) is not None:
            self._room.give_back(node.key)

    def runs(self, agent: int, workers: int) -> None:
        """See `Nodes.runs`."""
        if (node := self._numbers.get(agent)) is None:
            return
        node.runs = workers
        if workers:
            node.served, self._failed_starts, self._failed = True, 0, ""
            self._cluster.probed.add((node.node, self._kind))
        self._changed.set()

    def set_aside(self, agent: int, why: str) -> None:
        """See `Nodes.set_aside`."""
        self._do(lambda: self._set_aside(agent, why))

    def cut_off(self, agent: int) -> None:
        """See `Nodes.cut_off`."""
        self._do(lambda: self._cut_off(agent))

    def news(self) -> list[NodeNews]:
        """See `Nodes.news`."""
        return [self._news.popleft() for _ in range(len(self._news))]

    def close(self) -> None:
        """See `Nodes.close`: park this. It does not wait for the cluster."""
        self._wake, self._refs = wake_nobody, []
        self._room.want(0, may_shrink=False)
        self._do(self._park)
        self._cluster.parked.park(self)

    def end(self) -> None:
        """Give everything back. Idempotent; the thread does it."""
        self._closed = True
        self._changed.set()

    def join(self, timeout_s: float) -> None:
        """Wait until everything was given back."""
        if threading.current_thread() is not self._thread:  # in which garbage may be collected, too
            self._thread.join(timeout_s)

    def _do(self, request: Callable[[], None]) -> None:
        self._requests.append(request)
        self._changed.set()

    # -- the thread ----------------------------------------------------------------------------------------------

    def _run(self) -> None:
        while not self._closed and self._cluster.is_connected():
            try:
                self._turn()
            except Exception as error:
                logger.debug("a look at the cluster failed", exc_info=True)
                self._fail(f"{type(error).__name__}: {error}")
            self._changed.wait(LOOK_S if self._room.is_waiting else NODES_S)
            self._changed.clear()
        if not self._closed:
            self._fail("this process is not connected to the cluster any more", for_good=True)
        self._give_back_everything()

    def _turn(self) -> None:
        while self._requests:
            self._requests.popleft()()
        self._drop_given_back()
        if self._parked_at is not None:
            if monotonic() - self._parked_at > PARKED_S and self._cluster.parked.discard(self):
                self._closed = True
            return
        if not self._cluster.answers:
            return
        if monotonic() - self._looked_at > NODES_S:
            self._look()
        self._room.give_back_what_left(self._runs)
        self._drop_given_back()
        if not self._gave_up:
            self._room.reserve()
        for error in self._room.locate():
            self._start_failed(f"a worker could not be placed: {reason_of(error)}")
        for one in self._room.served():
            if one.agent not in self._nodes:
                self._new_node(one)
        self._tell_rooms()

    def _runs(self, key: str) -> int:
        node = self._nodes.get(key)
        return node.runs if node is not None and node.told else 0

    def _look(self) -> None:
        """Which nodes there are, and whether any of them could take a worker at all."""
        self._looked_at = monotonic()
        self._room.avoid(self._avoided.look())
        nodes = living_nodes()
        there = {node["NodeID"] for node in nodes}
        for node in [node for node in self._nodes.values() if node.node not in there]:
            self._drop(node, "its node is gone")
        self._room.look(nodes)
        why = self._room.why_none(nodes)
        if (why and not any(node.runs for node in self._nodes.values())) or (not why and not self._gave_up):
            self._fail(why)

    def _drop_given_back(self) -> None:
        """Forget agents without a reservation: at once those that went with theirs, others after a while."""
        reserved, now = self._room.agents, monotonic()
        keep_s = 0.0 if self._room.way.are_guardians else IDLE_S
        for node in list(self._nodes.values()):
            if node.key in reserved:
                node.idle_since = None
            elif node.idle_since is None:
                node.idle_since = now
            if node.idle_since is not None and now - node.idle_since >= keep_s:
                self._drop(node, "its room was given back")

    def _tell_rooms(self) -> None:
        """Tell the pool of agents that may have another number of workers now."""
        for node in self._nodes.values():
            room = self._room.of(node.key)
            if node.told and room != node.room:
                node.room = room
                self._tell(NodeNews("room", node.number))

    def _ask(self, node: GuardedNode, call: Any, then: Callable[[Any], None]) -> None:
        """Have the answer of a guardian's call come to this thread."""

        def came(future: Any) -> None:
            self._do(lambda: self._hear(node, future, then))

        call.future().add_done_callback(came)

    def _hear(self, node: GuardedNode, future: Any, then: Callable[[Any], None]) -> None:
        if self._nodes.get(node.key) is not node:
            return
        error = future.exception()
        if error is None:
            then(future.result())
        else:
            self._guardian_died(node, reason_of(error))

    def _tell(self, news: NodeNews) -> None:
        if self._parked_at is None:
            self._news.append(news)
            self._wake()

    def _fail(self, why: str, *, for_good: bool = False) -> None:
        if why != self._failed:
            self._failed = why
            self._tell(NodeNews("failed", why=why, for_good=for_good or self._gave_up))

    @property
    def _gave_up(self) -> bool:
        return self._failed_starts >= FAILED_STARTS

    # -- a pool comes and goes -----------------------------------------------------------------------------------

    def _begin(self) -> None:
        self._parked_at, self._failed, self._failed_starts, self._looked_at = None, "", 0, 0.0
        self._avoided.begin(self._kind)
        for node in [node for node in self._nodes.values() if node.refs is not self._refs]:
            node.told, node.runs, node.served, node.path = False, 0, False, ""
            self._ship(node)

    def _park(self) -> None:
        self._parked_at = monotonic()
        self._room.give_back_unplaced()
        with contextlib.suppress(Exception):
            for node in self._nodes.values():
                node.refs = None  # its memory in the object store is free now
                node.guardian.unship.remote(node.shipment)

    def _give_back_everything(self) -> None:
        if self._server is not None:
            self._server.close()
        for node in self._nodes.values():
            if node.link is not None:
                node.link.close()
        if self._cluster.is_connected():
            for node in self._nodes.values():
                end(node.guardian)
            self._room.give_back_all()
        self._numbers.clear()
        self._nodes.clear()

    # -- agents --------------------------------------------------------------------------------------------------

    def _new_node(self, reservation: Reservation) -> None:
        assert reservation.agent is not None
        assert reservation.node is not None
        node = GuardedNode(reservation.agent, reservation.node, self._room.way.guardian(reservation))
        self._nodes[node.key] = node
        self._ask(node, node.guardian.place.remote(), lambda answer: self._placed(node, *answer[1:]))
        self._start(node)
        self._ship(node)

    def _placed(self, node: GuardedNode, place: str, pid: int) -> None:
        node.place, node.pid = place, pid
        self._tell_if_ready(node)

    def _start(self, node: GuardedNode) -> None:
        self._numbers.pop(node.number, None)
        node.number, self._next_number = self._next_number, self._next_number + 1
        self._numbers[node.number] = node
        node.told, node.runs, node.served, node.link = False, 0, False, None
        server = None if node.node in self._cluster.unreached else self._server
        address = None if server is None else tuple(server.address_of(node.number))
        number = node.number
        self._ask(
            node, node.guardian.start.remote(address), lambda why: self._started(node, number, why, address is None)
        )

    def _started(self, node: GuardedNode, number: int, why: str, is_tunnel: bool) -> None:
        if why:
            text = f"node {node.place or node.node[:8]} is set aside: {why}"
            self._tell(NodeNews("notice", why=text))
            self._set_aside(number, text)
            return
        self._ask(node, node.guardian.watch.remote(), lambda answer: self._agent_ended(node, number, *answer))
        if is_tunnel:
            self._linked(number, AgentLink(open_tunnel(node.guardian), self._cluster.memory, is_tunnel=True))

    def _linked(self, number: int, link: AgentLink) -> None:
        if (node := self._numbers.get(number)) is None:
            link.close()
            return
        node.link = link
        self._tell_if_ready(node)

    def _ship(self, node: GuardedNode) -> None:
        number, self._shipments = self._shipments, self._shipments + 1
        node.refs, node.shipment = self._refs, number

        def shipped(path: str) -> None:
            if number == node.shipment:
                node.path = path
                self._tell_if_ready(node)

        if node.refs:
            self._ask(node, node.guardian.ship.remote(number, node.refs), shipped)

    def _tell_if_ready(self, node: GuardedNode) -> None:
        if node.place and node.path and node.link is not None and not node.told and self._parked_at is None:
            node.told = True
            probe = (node.node, self._kind) not in self._cluster.probed
            self._tell(NodeNews("ready", node.number, node.place, node.link, node.path, probe))

    # -- ends ----------------------------------------------------------------------------------------------------

    def _agent_ended(self, node: GuardedNode, number: int, code: int, why: str) -> None:
        if node.number != number:
            return
        if code in (0, UNREACHED):
            broke = "the connection that carried them broke"
            self._go_through_ray(node, f"it cannot reach {why}" if code else broke)
        text = why or f"its process ended with {'exit code' if code >= 0 else 'signal'} {abs(code)}"
        self._tell(NodeNews("lost", number, node.place, why=text))
        has_failed = code not in (0, UNREACHED)
        if has_failed and not node.served:
            self._start_failed(f"the agent on node {node.place or node.node[:8]} ended before any worker ran: {text}")
        if not self._gave_up and not (has_failed and self._is_left_alone(node, f"its agent ended: {text}")):
            self._start(node)

    def _is_left_alone(self, node: GuardedNode, why: str) -> bool:
        """Something failed on a node: whether that is one too many. The only node is never left alone."""
        can_be_spared = self._room.has_others(node.node)
        if told := self._avoided.failed(node.node, node.place or node.node[:8], why) if can_be_spared else "":
            self._leave(node, told)
        return bool(told)

    def _go_through_ray(self, node: GuardedNode, why: str) -> None:
        if node.node not in self._cluster.unreached and self._parked_at is None:
            self._cluster.unreached.add(node.node)
            text = f"batches from node {node.place} travel through Ray's object store: {why}"
            self._tell(NodeNews("notice", why=text, warning=False))

    def _guardian_died(self, node: GuardedNode, why: str) -> None:
        if not node.served:
            self._start_failed(f"the agent on node {node.place or node.node[:8]} could not be started: {why}")
        if not self._is_left_alone(node, f"its guardian ended: {why}"):
            self._drop(node, why)
        self._looked_at = 0.0

    def _drop(self, node: GuardedNode, why: str) -> None:
        """A guardian is no more, or not wanted any more."""
        self._numbers.pop(node.number, None)
        if self._nodes.get(node.key) is node:
            del self._nodes[node.key]
        end(node.guardian)
        self._room.remove_guardian(node.guardian)
        self._tell(NodeNews("lost", node.number, node.place, why=why))

    def _start_failed(self, why: str) -> None:
        self._failed_starts += not any(node.runs for node in self._nodes.values())
        self._tell(NodeNews("notice", why=why))
        if self._gave_up:
            self._room.give_back_all()
            self._fail(f"{self._failed_starts} agents in a row could not start; the last: {why}")

    def _set_aside(self, agent: int, why: str) -> None:
        if (node := self._numbers.get(agent)) is None:
            return
        self._avoided.cannot_serve(node.node, why)
        self._leave(node, why)

    def _leave(self, node: GuardedNode, why: str) -> None:
        """Have no worker on a node any more."""
        self._room.avoid(self._avoided.look())
        self._drop(node, why)
        self._room.give_back_node(node.node)
        self._looked_at = 0.0

    def _cut_off(self, agent: int) -> None:
        if (node := self._numbers.get(agent)) is not None:
            node.guardian.stop.remote()
