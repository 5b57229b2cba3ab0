"""Workers on a Ray cluster: a pool of agents on the nodes that Ray assigns, each with room for some workers.

Room is reserved (see `room`). On a node with reserved room, or where room is likely, a guardian (see `guardians`)
starts an agent, which connects to this process. One thread makes all calls of Ray, and handles the answers. The pool
queues requests for this thread, and reads its news.

A closed pool's `RayNodes` is parked with agents, connections and reservations, for a later pool with the same options.
"""

from __future__ import annotations

import contextlib
import importlib
import itertools
import json
import logging
import math
import socket
import threading
from collections import deque
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from dpex.errors import ClusterError
from dpex.pools.agent.connection import AdmissionServer, AgentLink, link_over
from dpex.pools.agent.pool import NodeNews, Nodes, RemotePool, order_of
from dpex.pools.agent.serving import ShippedContents
from dpex.pools.ray.cluster import (
    PARKED_S,
    AvoidedNode,
    Cluster,
    connect,
    living_nodes,
    release,
    trainer_address,
    without,
)
from dpex.pools.ray.guardians import Guardian, reason_of
from dpex.pools.ray.room import ReservedRoom, worker_options
from dpex.system.clock import monotonic
from dpex.transport.pickling import pack
from dpex.worker.setup import WorkerSetup

logger: logging.Logger = logging.getLogger("dpex")

LOOK_S = 0.05
"""Seconds between two requests to the cluster's head for the nodes of pending reservations."""
NODES_S = 1.0
"""Seconds between two requests for the list of nodes."""
IDLE_S = 30.0
"""Seconds after which an agent without a reservation ends. An agent that stays longer keeps an autoscaler from removing
its node, while a new agent takes a second or two of CPU."""
_agents, _shipments = itertools.count(1), itertools.count(1)
"""Numbers of agents and of shipments, by which guardians tell them apart, because pools share guardians."""


@dataclass(eq=False)
class GuardedNode:
    """A node that works for a pool: its agent, and the agent's guardian."""

    node: str
    """Ray's id of the node, in hex."""
    guardian: Guardian
    number: int
    pid: int = 0
    """The guardian's process id."""
    place: str = ""
    """The displayed name of the node; "" if unknown."""
    path: str = ""
    refs: Any = None
    """The latest shipment; ``shipment`` is its number, and ``path`` its path on the node."""
    shipment: int = -1
    link: AgentLink | None = None
    is_open: bool = False
    """True once the agent has been reported to the pool as "ready"."""
    room: int = -1
    runs: int = 0
    """The number of running workers. ``room`` is their maximum, as last reported to the pool."""
    served: bool = False
    """True once a worker has run."""
    idle_since: float | None = None
    """Time of the first check without a reservation; None with a reservation."""

    @property
    def name(self) -> str:
        return self.place or self.node[:8]


def ray_pool(
    setup: WorkerSetup,
    head_address: str,
    ray_remote_args: Mapping[str, Any] | None,
    *,
    first_workers: int,
    **options: Any,
) -> RemotePool:
    """Return a pool of workers on a Ray cluster; ``options`` are passed on to `order_of`.

    Raises ClusterError if the cluster cannot be reached, and ShippingError if the dataset cannot travel.
    """
    cluster = connect(head_address)
    try:
        needs = worker_options(ray_remote_args)
        key = json.dumps(needs, sort_keys=True, default=repr)
        nodes = cluster.parked.take(key) or RayNodes(cluster, key, needs)
    except BaseException:
        release(cluster)
        raise
    try:
        nodes.expect(first_workers)  # agents start while the dataset is packed
        packed = pack(ShippedContents(setup=setup))
        header = np.frombuffer(packed.header, np.uint8)
        kind = f"{type(setup.dataset).__module__}.{type(setup.dataset).__qualname__}"
        nodes.ship(kind, [importlib.import_module("ray").put([header, *packed.buffers])])
        return RemotePool(nodes, partial(order_of, **options), first_workers=first_workers)
    except BaseException:
        nodes.close()
        raise


class RayNodes(Nodes):
    """See the module. Pools with the same ``key`` may use these nodes one after the other."""

    def __init__(self, cluster: Cluster, key: Hashable, options: Mapping[str, Any]) -> None:
        self.key = key
        self._cluster = cluster
        self._options = options
        self._room = ReservedRoom(options)
        self._kind = ""
        self._refs: list[Any] = []
        self._early: list[NodeNews] = []
        """Notices for a pool that is about to begin."""
        self._told: tuple[deque[NodeNews], Callable[[], None]] | None = None
        """The news of the present pool, and the function that wakes it. Only the thread uses them, so a former pool
        gets no news."""
        self._changed = threading.Event()
        self._closed = False
        self._parked_at: float | None = None
        self._requests: deque[Callable[[], None]] = deque()
        self._news: deque[NodeNews] = deque()
        self._nodes: dict[str, GuardedNode] = {}
        self._numbers: dict[int, GuardedNode] = {}
        self._looked_at = -math.inf
        self._failed = ""
        self._avoided: dict[str, AvoidedNode] = {}
        """Excluded nodes, as last reported to the pool."""
        address = trainer_address()
        try:
            self._server = AdmissionServer(address, self._admit)
        except OSError as error:
            raise ClusterError(f"agents cannot connect to this process: cannot listen on {address}: {error}") from error
        self._thread = threading.Thread(target=self._run, name="dpex-cluster", daemon=True)
        self._thread.start()

    def _admit(self, connection: socket.socket, agent: int) -> None:
        if (link := link_over(connection, self._cluster.memory)) is not None:
            self._do(lambda: self._linked(agent, link))

    # -- the pool's side -----------------------------------------------------------------------------------------

    @property
    def workers(self) -> int:
        return self._room.workers

    def ship(self, kind: str, refs: list[Any]) -> None:
        """Set the shipment that the next pool's agents open: a dataset of type ``kind``, in Ray's object store."""
        self._kind, self._refs = kind, refs

    def expect(self, workers: int) -> None:
        """Reserve room for a pool that is about to begin, and start agents on the nodes. Failures before the pool
        begins are reported to it."""
        self._room.want(workers)
        self._do(self._expect)

    def begin(self, wake: Callable[[], None]) -> None:
        news: deque[NodeNews] = deque()
        self._news = news
        self._do(lambda: self._begin(news, wake))

    def want(self, workers: int) -> None:
        self._room.want(workers)
        self._changed.set()

    def room(self, agent: int) -> int:
        node = self._numbers.get(agent)
        return 0 if node is None else self._room.of(node.node)

    def runs(self, agent: int, workers: int) -> None:
        if (node := self._numbers.get(agent)) is None:
            return
        node.runs = workers
        if workers:
            node.served, self._failed = True, ""
        self._changed.set()

    def set_aside(self, agent: int, why: str) -> None:
        kind = self._kind  # read now: when the thread runs this, the next pool may have set its own
        self._do(lambda: self._set_aside(agent, why, kind))

    def cut_off(self, agent: int) -> None:
        self._do(lambda: self._cut_off(agent))

    def news(self) -> list[NodeNews]:
        return [self._news.popleft() for _ in range(len(self._news))]

    def close(self) -> None:
        """Park these nodes, and give back the share of the connection, without waiting for the cluster."""
        self._refs = []
        self._room.keep()
        self._do(self._park)
        self._cluster.parked.park(self)
        release(self._cluster)

    def give_back_room(self) -> threading.Event:
        """Have the thread give back all reservations of a parked pool; return an event that is set afterwards."""
        done = threading.Event()
        self._do(lambda: self._give_back_room(done))
        return done

    def end(self) -> None:
        """Have the thread give everything back. Idempotent."""
        self._closed = True
        self._changed.set()

    def join(self, timeout_s: float) -> None:
        if threading.current_thread() is not self._thread:  # garbage collection may call this in the thread itself
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
        self._drop_unreserved()
        if self._parked_at is not None:
            is_over = monotonic() - self._parked_at > PARKED_S or not (self._nodes or self._room.nodes)
            if is_over and self._cluster.parked.discard(self):
                self._closed = True
            return
        if monotonic() - self._looked_at > NODES_S:
            self._look()
        self._room.free_what_left(self._runs)
        self._drop_unreserved()
        likely = self._room.reserve()
        for name in likely:
            self._new_node(name)
        self._room.locate()
        for name in self._room.served():
            self._new_node(name)
        for node in self._nodes.values():
            room = self._room.of(node.node)
            if node.is_open and room != node.room:
                node.room = room
                self._report(NodeNews("room", node.number))

    def _runs(self, name: str) -> int:
        node = self._nodes.get(name)
        return node.runs if node is not None and node.is_open else 0

    def _look(self) -> None:
        """Learn which nodes there are, and whether any of them could take a worker at all."""
        self._looked_at = monotonic()
        self._avoid()
        nodes = living_nodes()
        there = {node["NodeID"] for node in nodes}
        for node in [node for node in self._nodes.values() if node.node not in there]:
            self._drop(node, "its node is gone")
        self._room.look(nodes)
        why = self._room.why_none(nodes)
        if not why or not any(node.runs for node in self._nodes.values()):
            self._fail(why)

    def _avoid(self) -> None:
        """Exclude nodes that failed repeatedly or cannot serve the dataset, and report them to the pool."""
        before, self._avoided = self._avoided, self._cluster.avoided.now(self._kind, monotonic())
        for place in {node.place for name, node in before.items() if name not in self._avoided}:
            self._report(NodeNews("excluded", place=place))
        for node in [node for name, node in self._avoided.items() if before.get(name) != node]:
            self._report(NodeNews("excluded", place=node.place, why=without([node])))
        self._room.avoid(self._avoided)

    def _drop_unreserved(self) -> None:
        """End agents that have been without a reservation for `IDLE_S` seconds."""
        reserved, now = self._room.nodes, monotonic()
        for node in list(self._nodes.values()):
            if node.node in reserved:
                node.idle_since = None
            elif node.idle_since is None:
                node.idle_since = now
            elif now - node.idle_since >= IDLE_S:
                self._drop(node, "its room was given back")

    def _ask(self, node: GuardedNode, call: Any, then: Callable[[Any], None]) -> None:
        """Have this thread pass the answer of a guardian's call to ``then``."""
        call.future().add_done_callback(lambda future: self._do(lambda: self._answered(node, future, then)))

    def _answered(self, node: GuardedNode, future: Any, then: Callable[[Any], None]) -> None:
        error = future.exception()
        is_first = error is not None and self._cluster.guardians.distrust(node.guardian)
        if self._nodes.get(node.node) is node:
            if error is None:
                then(future.result())
            else:
                self._failed_on(node, f"its guardian ended: {reason_of(error)}", counts=is_first)

    def _report(self, news: NodeNews) -> None:
        if self._told is not None:
            told, wake = self._told
            told.append(news)
            wake()
        elif self._parked_at is None and news.kind == "notice":
            self._early.append(news)

    def _notice(self, why: str, *, warning: bool = True) -> None:
        self._report(NodeNews("notice", why=why, warning=warning))

    def _fail(self, why: str, *, for_good: bool = False) -> None:
        if why != self._failed:
            self._failed = why
            self._report(NodeNews("failed", why=why, for_good=for_good))

    # -- a pool comes and goes -----------------------------------------------------------------------------------

    def _expect(self) -> None:
        self._parked_at, self._failed, self._looked_at = None, "", -math.inf
        self._avoided, self._early = {}, []

    def _begin(self, news: deque[NodeNews], wake: Callable[[], None]) -> None:
        news.extend(self._early)
        self._told = news, wake
        self._expect()
        for node in [node for node in self._nodes.values() if node.refs is not self._refs]:
            node.is_open, node.runs, node.served, node.path = False, 0, False, ""
            self._ship(node)

    def _park(self) -> None:
        self._parked_at, self._told = monotonic(), None
        self._room.free(lambda one: one.node is None or one.leaving)
        with contextlib.suppress(Exception):
            for node in self._nodes.values():
                self._unship(node)

    def _unship(self, node: GuardedNode) -> None:
        if node.refs is not None:
            node.refs = None  # frees the shipment's memory in the object store
            node.guardian.actor.unship.remote(node.shipment)

    def _give_back_room(self, done: threading.Event) -> None:
        if self._parked_at is not None:
            self._room.free(lambda _: True)
        done.set()

    def _give_back_everything(self) -> None:
        self._server.close()
        for node in self._nodes.values():
            if node.link is not None:
                node.link.close()
        if self._cluster.is_connected():
            for node in self._nodes.values():
                self._let_go(node)
            self._room.free(lambda _: True)
        self._numbers.clear()
        self._nodes.clear()

    # -- agents --------------------------------------------------------------------------------------------------

    def _new_node(self, name: str) -> None:
        """Start an agent on a node, unless the node has one."""
        if name in self._nodes:
            return
        node = GuardedNode(name, self._cluster.guardians.take(name, self._options), 0)
        self._register(node)
        self._start_agent(node)
        self._ship(node)

    def _register(self, node: GuardedNode) -> None:
        """Give a node's agent a number of its own. Answers for the node's former agent are ignored from now on."""
        node.number = next(_agents)
        self._nodes[node.node] = self._numbers[node.number] = node

    def _start_agent(self, node: GuardedNode) -> None:
        def started(answer: tuple[str, int, str]) -> None:
            node.place, node.pid, why = answer
            if why:
                self._set_aside(node.number, why, self._kind)
                return
            self._report_if_ready(node)

        def ended(code: int, why: str) -> None:
            self._do(lambda: self._agent_ended(node, code, why))

        self._ask(node, node.guardian.start(tuple(self._server.address_of(node.number)), ended), started)

    def _linked(self, number: int, link: AgentLink) -> None:
        if (node := self._numbers.get(number)) is None:
            link.close()
            return
        node.link = link
        self._report_if_ready(node)

    def _ship(self, node: GuardedNode) -> None:
        number = next(_shipments)
        node.refs, node.shipment = self._refs, number

        def shipped(path: str) -> None:
            if number == node.shipment:
                node.path = path
                self._report_if_ready(node)

        if node.refs:
            self._ask(node, node.guardian.actor.ship.remote(number, node.refs), shipped)

    def _report_if_ready(self, node: GuardedNode) -> None:
        if node.place and node.path and node.link is not None and not node.is_open and self._parked_at is None:
            node.is_open = True
            self._report(NodeNews("ready", node.number, node.place, node.link, node.path))

    # -- ends ----------------------------------------------------------------------------------------------------

    def _agent_ended(self, node: GuardedNode, code: int, why: str) -> None:
        if self._nodes.get(node.node) is not node:
            return
        ended = f"its process ended with {'exit code' if code >= 0 else 'signal'} {abs(code)}"
        self._failed_on(node, f"its agent ended: {why or (ended if code else 'its connection broke')}")

    def _failed_on(self, node: GuardedNode, why: str, *, counts: bool = True) -> None:
        """Drop a node whose agent or guardian has ended. Unless the node is excluded, the next turn starts new ones.

        ``counts``: False if another pool has already counted this end of a guardian.
        """
        self._looked_at = -math.inf
        if not node.served:
            self._notice(f"no worker ran on node {node.name}: {why}")
        may_exclude = not node.served or self._room.has_others(node.node)  # the last fit node stays if it has served
        if counts and may_exclude and self._cluster.avoided.failed(node.node, node.name, why, monotonic()):
            self._leave(node)
        else:
            self._drop(node, why)

    def _drop(self, node: GuardedNode, why: str) -> None:
        """End a node's agent, give its guardian back, and forget both."""
        self._numbers.pop(node.number, None)
        if self._nodes.get(node.node) is node:
            del self._nodes[node.node]
        self._let_go(node)
        self._report(NodeNews("lost", node.number, node.place, why=why))

    def _let_go(self, node: GuardedNode) -> None:
        with contextlib.suppress(Exception):  # the guardian is gone, or Ray is
            self._unship(node)
        node.guardian.leave(node.number)
        self._cluster.guardians.give_back(node.guardian)

    def _set_aside(self, agent: int, why: str, kind: str) -> None:
        if (node := self._numbers.get(agent)) is not None:
            self._cluster.avoided.unfit(node.node, node.name, kind, why)
            self._leave(node)

    def _leave(self, node: GuardedNode) -> None:
        """Give up an excluded node. Report the reason, unless it is the last node: the pool then fails with it."""
        self._avoid()
        why = without([self._avoided[node.node]])
        if self._room.has_others(node.node):
            self._notice(why)
        self._drop(node, why)
        self._room.free(lambda one: one.node == node.node)
        self._looked_at = -math.inf

    def _cut_off(self, agent: int) -> None:
        if (node := self._numbers.get(agent)) is not None:
            node.guardian.stop(agent)
