"""The Ray cluster of this process, and what it has on it that waits for the next loader.

There is at most one connection at a time; every pool holds a share of it. An initialised Ray is used as it is;
else the address that was given, or ``RAY_ADDRESS``; else a private Ray is started on this machine. A cluster that is
merely recorded on this machine, as ``ray.init()`` would join, is never joined.

Starting an agent takes a second or two, so agents whose pool has closed are parked for the next pool, which sends them
the dataset as it is then. Parked ones are given back when the last share is, and after a while.

Importing this module does not import Ray.
"""

from __future__ import annotations

import importlib
import logging
import os
import socket
import threading
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from dpex._ray import available_resources_per_node, is_client
from dpex.core.failing_nodes import FailingNodes
from dpex.errors import ClusterError
from dpex.pools.agent.nodes import NodeNews
from dpex.pools.ray.control_service import ControlService
from dpex.system.clock import monotonic
from dpex.system.ray_package import import_ray, is_ray_connected
from dpex.transport.arena import Arena

logger = logging.getLogger("dpex")

PARKED_S = 60.0
"""How long parked agents keep their room on the cluster."""
_END_S = 2.0
"""How long the last to close waits, at most, until the cluster was told what is given back."""
LOOPBACK = "127.0.0.1"
KNOCK_S = 3.0
"""Seconds that a cluster may take to accept a connection."""


def living_nodes() -> list[dict[str, Any]]:
    """Return the nodes that Ray counts as alive, as ``ray.nodes()`` has them. Asks Ray, which may take long."""
    return [node for node in importlib.import_module("ray").nodes() if node["Alive"]]


def own_node() -> str | None:
    """The node that this process is on, by number in hex; None where it is a client of the cluster, and on none."""
    return None if is_client() else str(importlib.import_module("ray").get_runtime_context().get_node_id())


def join(address: str | None) -> None:
    """Connect to the cluster at ``address``; None: at ``RAY_ADDRESS``, or the one that runs on this machine.

    For whoever looks at a cluster. Loaders use `connect`, which joins no cluster that nobody named.

    Raises:
        ClusterError: Ray is not installed, or there is no such cluster.
    """
    ray = import_ray()
    named = address or os.environ.get("RAY_ADDRESS", "").strip() or "auto"
    try:
        _knock(named)
        ray.init(address=named, logging_level=logging.WARNING, log_to_driver=False)
    except (ConnectionError, RuntimeError, ValueError, TimeoutError, OSError) as error:
        raise ClusterError(
            f"no Ray cluster answers at address={named!r}: {error}; name one with --address, as `ray start --head` "
            "prints it"
        ) from error


def _knock(address: str) -> None:
    """Connect to ``address`` and close the connection. Ray itself tries for minutes where nothing listens.

    Raises:
        ConnectionError: Nothing answers there within `KNOCK_S` seconds.
    """
    machine, _, port = address.removeprefix("ray://").rpartition(":")
    if machine and port.isdigit():
        try:
            socket.create_connection((machine.strip("[]"), int(port)), timeout=KNOCK_S).close()
        except OSError as error:
            raise ConnectionError(f"nothing answers there ({error})") from error


def slots(needs: Mapping[str, float]) -> tuple[int, int]:
    """Workers with these needs that there is room for: now, and if everything were free. Asks Ray, which may take long.

    The trainer's own node does not count: what it has to spare serves better as local workers. What this process has
    parked counts as free.
    """
    own = own_node()
    nodes = {node["NodeID"]: node["Resources"] for node in living_nodes() if node["NodeID"] != own}
    free = available_resources_per_node()
    capacity = sum(_fit(has, needs) for has in nodes.values())
    parked = _current.parked.workers if _current is not None else 0
    return min(capacity, sum(_fit(free.get(node, {}), needs) for node in nodes) + parked), capacity


def _fit(resources: Mapping[str, float], needs: Mapping[str, float]) -> int:
    wanted = needs or {"CPU": 1.0}
    return min(int(resources.get(name, 0.0) / need + 1e-6) for name, need in wanted.items())


def stream_address() -> str | None:
    """The address at which the cluster's nodes reach this process, or None where it is no part of the cluster.

    Where Ray encrypts its traffic nothing goes beside it. All nodes of a private Ray are on this machine.
    """
    if os.environ.get("RAY_USE_TLS", "0").lower() in ("1", "true"):
        return None
    ray = importlib.import_module("ray")
    if is_client():
        return None
    if _current is not None and _current.private:
        return LOOPBACK
    return str(ray.util.get_node_ip_address())


class ParkedNodes(Protocol):
    """See `dpex.pools.ray.nodes.RayNodes`."""

    key: Hashable

    @property
    def workers(self) -> int:
        """Workers that they have room for."""

    def end(self) -> None:
        """Give everything back."""

    def join(self, timeout_s: float) -> None:
        """Wait until that is done."""


class Parked:
    """Nodes without a pool, with their agents, by what they were reserved with. From any thread."""

    def __init__(self) -> None:
        self._parked: list[Any] = []
        self._lock = threading.Lock()

    @property
    def workers(self) -> int:
        """Workers that they have room for."""
        return sum(nodes.workers for nodes in list(self._parked))

    def park(self, nodes: ParkedNodes) -> None:
        """Keep them for the next pool."""
        with self._lock:
            self._parked.append(nodes)

    def take(self, key: Hashable) -> Any:
        """The latest that suit, or None."""
        with self._lock:
            found = next((nodes for nodes in self._parked[::-1] if nodes.key == key), None)
            if found is not None:
                self._parked.remove(found)
            return found

    def discard(self, nodes: ParkedNodes) -> bool:
        """Whether they were still there, and now are not: the caller ends them."""
        with self._lock:
            was_there = nodes in self._parked
            if was_there:
                self._parked.remove(nodes)
            return was_there

    def clear(self) -> None:
        """End all, within `_END_S` seconds. It is waited for: a call of Ray that came after the user's
        ``ray.shutdown()`` would start another Ray."""
        with self._lock:
            parked, self._parked = self._parked, []
        for nodes in parked:
            nodes.end()
        deadline = monotonic() + _END_S
        for nodes in parked:
            nodes.join(max(0.0, deadline - monotonic()))


@dataclass(eq=False)
class Cluster:
    """The connection. ``private``: dpex started this Ray, and shuts it down."""

    session: str
    private: bool
    parked: Parked = field(default_factory=Parked)
    probed: set[tuple[str, str]] = field(default_factory=set)
    """(node, kind of dataset) that served."""
    unfit: dict[tuple[str, str], str] = field(default_factory=dict)
    """(node, kind of dataset) that did not, and why."""
    failing: FailingNodes = field(default_factory=FailingNodes)
    """Nodes on which agents failed."""
    unreached: set[str] = field(default_factory=set)
    """Nodes that cannot reach the trainer."""
    shares: int = 0
    control: ControlService | None = None
    """Watched while there are shares; not by a client, whose calls go to a process of the cluster."""
    _landing: Arena = field(default_factory=lambda: Arena(shared=False))
    """Where results land in the trainer, under the lock."""
    _landing_lock: threading.Lock = field(default_factory=threading.Lock)

    def memory(self, nbytes: int) -> Any:
        """Writable memory for a buffer that is received, faulted in as a rule. From any thread."""
        with self._landing_lock:
            return self._landing.array(nbytes)[0]

    def watch(self) -> None:
        """Begin to watch the control service."""
        if not is_client():
            context = importlib.import_module("ray").get_runtime_context()
            self.control = ControlService(context.gcs_address)

    def listen(self, tell: Callable[[NodeNews], None]) -> None:
        """Tell this method when the control service has gone, and when it is back."""
        if self.control is not None:
            self.control.listen(tell)

    def leave(self) -> None:
        """Give back all that is only there for shares."""
        self.parked.clear()
        if self.control is not None:
            self.control.stop()

    @property
    def answers(self) -> bool:
        """Whether its control service does; calls to it take long where not."""
        return self.control is None or self.control.answers

    def is_connected(self) -> bool:
        """Whether this is still the Ray that this process is connected to."""
        return is_ray_connected() and _session() == self.session


_current: Cluster | None = None
_lock = threading.RLock()


def connect(head_address: str) -> Cluster:
    """A share of the connection; to be given back with `release`. Starts a private Ray if there is none to join.

    Raises `ClusterError` where Ray is not installed, or ``head_address`` or ``RAY_ADDRESS`` does not answer.
    """
    global _current
    with _lock:
        private = False
        if not is_ray_connected():
            _current = None
            private = _initialise(head_address)
        session = _session()
        if _current is None or _current.session != session:
            _current = Cluster(session, private)
        if not _current.shares:
            _current.watch()
        _current.shares += 1
        return _current


def answers() -> bool:
    """Whether the control service of the cluster in use answers, for all that is known."""
    return _current is None or _current.answers


def release(cluster: Cluster, *, shut_down: bool = False) -> None:
    """Give a share back. With the last one what is parked goes; ``shut_down`` ends a private Ray then, else exit
    does."""
    global _current
    with _lock:
        cluster.shares -= 1
        if cluster.shares > 0:
            return
        cluster.leave()
        if cluster.private and shut_down and cluster is _current and is_ray_connected():
            importlib.import_module("ray").shutdown()
            _current = None


def _session() -> str:
    ray = importlib.import_module("ray")
    context = ray.get_runtime_context()
    return f"{context.gcs_address}/{context.get_job_id()}"


def _initialise(head_address: str) -> bool:
    """Connect; True if that started a private Ray."""
    ray = import_ray()
    given = os.environ.get("RAY_ADDRESS", "").strip() if head_address == "auto" else head_address
    address = given or "local"
    options: dict[str, Any] = {"logging_level": logging.WARNING, "log_to_driver": True}
    if not given:
        logger.warning("no Ray cluster is connected or named: dpex starts a private Ray on this machine")
    if address == "local":
        options["include_dashboard"] = False
    try:
        _knock(address)
        ray.init(address=address, **options)
    except (ConnectionError, RuntimeError, ValueError, TimeoutError, OSError) as error:
        if address == "local":
            raise ClusterError(f"a private Ray cannot be started on this machine: {error}") from error
        source = "head_address" if head_address != "auto" else "RAY_ADDRESS"
        raise ClusterError(
            f"{source}={address!r}: {error}; start a Ray cluster there with `ray start`, or give head_address='local' "
            "for a private one"
        ) from error
    return address == "local"
