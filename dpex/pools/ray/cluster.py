"""The Ray cluster of this process, and its parked agents.

A process has at most one connection to Ray, which all pools share. dpex uses an existing connection, and raises an
error if ``head_address`` names another cluster. Without a connection, it connects to the given address, else to
``RAY_ADDRESS``, else it starts a private Ray on this machine. Unlike ``ray.init()``, it never joins a cluster that is
merely recorded on this machine.

Starting the first agent of a node takes a second or two. So a pool that closes parks its agents for the next pool,
which sends them its dataset. Once no loader uses the connection, parked agents give back their room on the cluster.
They end with the connection, or after a while.

A node gets no workers if it cannot serve the dataset. After a single failure of an agent, dpex starts it again at once.
After several failures, it excludes the node for a minute.

Importing this module does not import Ray.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
import math
import os
import socket
import threading
from collections import deque
from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from dpex.errors import ClusterError
from dpex.pools.ray.guardians import Guardians
from dpex.system.clock import monotonic
from dpex.system.ray_package import (
    TokenError,
    available_resources_per_node,
    cluster_id,
    has_started_ray,
    import_ray,
    is_client,
    is_ray_connected,
)
from dpex.transport.arena import Arena

logger: logging.Logger = logging.getLogger("dpex")

PARKED_S = 60.0
"""Seconds for which parked agents are kept. They keep their room on the cluster while a loader uses the connection."""
_END_S = 2.0
"""Maximum seconds for which the last loader to close waits until the cluster has its resources back."""
LOOPBACK = "127.0.0.1"
KNOCK_S = 3.0
"""Seconds that a cluster may take to accept a connection."""
NEEDS_TOKEN = (
    "the cluster asks for a token. Start this process with RAY_AUTH_MODE=token, and with the cluster's token in "
    "RAY_AUTH_TOKEN, or the path of its file in RAY_AUTH_TOKEN_PATH. Ray says: {error}"
)
FAILURES = 3
"""Number of failures that exclude a node. Two may be chance: a person, or a lack of memory, killed the process."""
WITHIN_S = 600.0
"""Seconds within which `FAILURES` failures exclude a node. Rarer ones are unrelated. A start may take 60 s to fail."""
NAMED = 3
"""Maximum number of nodes that a message names."""
PROVIDE = (
    ". Install or repair it on the node. Ray installs packages that are named in "
    "ClusterConfig(ray_remote_args={'runtime_env': {'pip': [...]}})"
)
PAUSE_S = 60.0
"""Seconds of an exclusion, in which a machine usually restarts or frees its memory."""


# -- answers of Ray ----------------------------------------------------------------------------------------------------


def living_nodes() -> list[dict[str, Any]]:
    """Return the nodes that Ray counts as alive, as ``ray.nodes()`` has them. Asks Ray, which may take long."""
    return [node for node in importlib.import_module("ray").nodes() if node["Alive"]]


def own_node() -> str:
    return str(importlib.import_module("ray").get_runtime_context().get_node_id())


def slots(needs: Mapping[str, float]) -> tuple[int, int]:
    """Return the number of workers with these needs for which there is room: now, and if everything were free.

    The trainer's own node does not count, because its spare CPUs serve better as local workers. Parked reservations of
    this process count as free. Asks Ray, which may take long.
    """
    own = own_node()
    nodes = {node["NodeID"]: node["Resources"] for node in living_nodes() if node["NodeID"] != own}
    free = available_resources_per_node()
    capacity = sum(fit(has, needs) for has in nodes.values())
    parked = _current.parked.workers if _current is not None else 0
    return min(capacity, sum(fit(free.get(node, {}), needs) for node in nodes) + parked), capacity


def fit(resources: Mapping[str, float], needs: Mapping[str, float]) -> int:
    """Return the number of workers with these needs for which these resources are enough."""
    return min(int(resources.get(name, 0.0) / need + 1e-6) for name, need in needs.items())


def trainer_address() -> str:
    """Return the address at which nodes reach this process. The nodes of a private Ray are on this machine."""
    if _current is not None and _current.private:
        return LOOPBACK
    return str(importlib.import_module("ray").util.get_node_ip_address())


# -- nodes kept for the next pool --------------------------------------------------------------------------------------


class Parked:
    """Nodes without a pool (`dpex.pools.ray.nodes.RayNodes`), by the options of their reservations. Thread-safe."""

    def __init__(self) -> None:
        self._parked: list[Any] = []

    @property
    def workers(self) -> int:
        return sum(nodes.workers for nodes in list(self._parked))

    def park(self, nodes: Any) -> None:
        self._parked.append(nodes)

    def take(self, key: Hashable) -> Any:
        return next((nodes for nodes in self._parked[::-1] if nodes.key == key and self.discard(nodes)), None)

    def discard(self, nodes: Any) -> bool:
        """Remove ``nodes``. Return False if another thread has removed them, and owns them now."""
        with contextlib.suppress(ValueError):
            self._parked.remove(nodes)
            return True
        return False

    def give_back_room(self) -> None:
        """Make all parked nodes give back the room of their workers, and wait for this up to `_END_S` seconds.

        Without the wait, a call of Ray after the user's ``ray.shutdown()`` would start another Ray.
        """
        deadline = monotonic() + _END_S
        for given_back in [nodes.give_back_room() for nodes in list(self._parked)]:
            given_back.wait(max(0.0, deadline - monotonic()))

    def clear(self) -> None:
        """End all parked nodes, and wait up to `_END_S` seconds for them."""
        parked = [nodes for nodes in list(self._parked) if self.discard(nodes)]
        for nodes in parked:
            nodes.end()
        deadline = monotonic() + _END_S
        for nodes in parked:
            nodes.join(max(0.0, deadline - monotonic()))


# -- nodes that get no workers -----------------------------------------------------------------------------------------


class AvoidedNode(NamedTuple):
    """A node that gets no workers before the time ``until`` in seconds. ``why``: the reason, as `without` shows it."""

    place: str
    why: str
    until: float


def without(nodes: Iterable[AvoidedNode]) -> str:
    """Return a text for people, such as "node A gets no workers: no dpex". Nodes with equal reasons share a clause."""
    places: dict[str, list[str]] = {}
    for node in sorted(nodes):
        places.setdefault(node.why, []).append(node.place)
    return "; ".join(f"{_named(found)}{why}" for why, found in places.items())


def _named(places: list[str]) -> str:
    if len(places) == 1:
        return f"node {places[0]} gets no workers"
    more = f" and {len(places) - NAMED} more" if len(places) > NAMED else ""
    return f"nodes {', '.join(places[:NAMED])}{more} get no workers"


class AvoidedNodes:
    """Counts failures by node, and excludes nodes. All times are seconds of one clock, which the caller chooses."""

    def __init__(self) -> None:
        self._failed_at: dict[str, deque[float]] = {}
        self._avoided: dict[tuple[str, str], AvoidedNode] = {}

    def failed(self, node: str, place: str, why: str, now: float) -> bool:
        """Count a failure; return True if the node is excluded for a while."""
        failed_at = self._failed_at.setdefault(node, deque(maxlen=FAILURES))
        failed_at.append(now)
        if len(failed_at) < FAILURES or now - failed_at[0] > WITHIN_S:
            return False
        failed_at.clear()
        often = f" for {PAUSE_S:.0f} s, as it failed {FAILURES} times within {WITHIN_S:.0f} s; the last time: {why}"
        self._avoided[node, ""] = AvoidedNode(place, often, now + PAUSE_S)
        return True

    def unfit(self, node: str, place: str, kind: str, why: str) -> None:
        self._avoided[node, kind] = AvoidedNode(place, f": {why}{PROVIDE}", math.inf)

    def now(self, kind: str, now: float) -> dict[str, AvoidedNode]:
        known = list(self._avoided.items())  # a copy: threads of other loaders add entries
        return {node: found for (node, of), found in known if of in ("", kind) and now < found.until}


# -- the connection ----------------------------------------------------------------------------------------------------


@dataclass(eq=False)
class Cluster:
    """A connection to Ray. ``private``: dpex started this Ray, and shuts it down. ``shares``: count of its users."""

    session: str
    private: bool
    parked: Parked = field(default_factory=Parked)
    guardians: Guardians = field(default_factory=Guardians)
    avoided: AvoidedNodes = field(default_factory=AvoidedNodes)
    shares: int = 0
    _landing: Arena = field(default_factory=lambda: Arena(shared=False))
    """Memory of the trainer into which results are received, under the lock."""
    _landing_lock: threading.Lock = field(default_factory=threading.Lock)

    def memory(self, nbytes: int) -> Any:
        """Return writable memory to receive a buffer into. It is usually faulted in. Thread-safe."""
        with self._landing_lock:
            return self._landing.array(nbytes)[0]

    def is_connected(self) -> bool:
        """Return True if this is still the Ray that this process is connected to."""
        return is_ray_connected() and _session() == self.session


_current: Cluster | None = None
_lock = threading.RLock()


def connect(head_address: str) -> Cluster:
    """Return the connection; the caller must `release` it. Starts a private Ray if no Ray is connected or named.

    Raises ClusterError if Ray is not installed, ``head_address`` or ``RAY_ADDRESS`` does not answer, this process is
    connected to another cluster than ``head_address``, or nodes of the cluster cannot connect to this process.
    """
    global _current
    with _lock:
        private = False
        was_connected = is_ray_connected()
        if not was_connected:
            _current = None
            private = _initialise(head_address)
        _check_reachable()
        if was_connected:
            _check_same(head_address)
        session = _session()
        if _current is None or _current.session != session:
            _current = Cluster(session, private)
        _current.shares += 1
        return _current


def release(cluster: Cluster, *, shut_down: bool = False) -> None:
    """Give a share back. After the last share, a private Ray is shut down if ``shut_down``. Otherwise parked agents
    give back their room, and a private Ray ends when the process exits."""
    global _current
    with _lock:
        cluster.shares -= 1
        if cluster.shares > 0:
            return
        if not (cluster.private and shut_down and cluster is _current and is_ray_connected()):
            cluster.parked.give_back_room()
        else:
            cluster.parked.clear()
            importlib.import_module("ray").shutdown()
            _current = None


def _check_reachable() -> None:
    """Raise ClusterError if nodes cannot connect to this process, or if Ray uses TLS, which dpex's connections lack."""
    if is_client():
        raise ClusterError(
            "this process is connected by ray://, so the nodes of the cluster cannot connect to it: train on a node of "
            "the cluster (`ray start --address=HEAD:6379`), or give distribute_mode=False"
        )
    if os.environ.get("RAY_USE_TLS", "0").lower() in ("1", "true"):
        raise ClusterError(
            "RAY_USE_TLS: Ray encrypts its traffic, but dpex sends batches unencrypted over its own connections, so it "
            "refuses remote workers: give distribute_mode=False for workers on this machine"
        )


def _check_same(head_address: str) -> None:
    """Raise ClusterError if ``head_address`` is not the connected cluster, whose head may have several names."""
    connected = str(importlib.import_module("ray").get_runtime_context().gcs_address)
    if head_address in ("auto", connected):
        return
    if head_address == "local":
        if has_started_ray():
            return
        why = "which is not a private Ray of this process"
    else:
        why = "which is another cluster"
        try:
            if _identity(head_address) == cluster_id():
                return
        except TokenError as error:
            why = NEEDS_TOKEN.format(error=error)
        except (RuntimeError, OSError) as error:
            why = f"and at {head_address} no Ray head answers: {error}"
    raise ClusterError(
        f"head_address={head_address!r}, but this process is connected to the Ray cluster at {connected}, {why}. Give "
        "head_address='auto' to use the connected cluster, or call ray.shutdown() first to connect to the other one"
    )


def _session() -> str:
    context = importlib.import_module("ray").get_runtime_context()
    return f"{context.gcs_address}/{context.get_job_id()}"


def _initialise(head_address: str) -> bool:
    """Connect; return True if that started a private Ray."""
    given = os.environ.get("RAY_ADDRESS", "").strip() if head_address == "auto" else head_address
    if not given:
        logger.warning("no Ray cluster is connected or named: dpex starts a private Ray on this machine")
    if given in ("", "local"):
        _begin("local", "a private Ray cannot be started on this machine", include_dashboard=False)
        return True
    source = "head_address" if head_address != "auto" else "RAY_ADDRESS"
    remedy = "; start a Ray cluster there with `ray start`, or give head_address='local' for a private one"
    _begin(given, f"{source}={given!r}", remedy)
    return False


def join(address: str | None) -> None:
    """Connect to the cluster at ``address``. None: the cluster at ``RAY_ADDRESS``, or the cluster of this machine.

    For commands that look at a cluster. Loaders use `connect`, which joins a cluster only by its address. Raises
    ClusterError if Ray is not installed, or there is no such cluster.
    """
    named = address or os.environ.get("RAY_ADDRESS", "").strip() or "auto"
    remedy = "; name one with --address, as `ray start --head` prints it"
    _begin(named, f"no Ray cluster answers at address={named!r}", remedy, log_to_driver=False)


def _begin(address: str, what: str, remedy: str = "", **options: Any) -> None:
    """Connect. An error begins with ``what``, and ends with the remedy."""
    ray = import_ray()
    try:
        if ":" in address:
            _identity(address)
        ray.init(address=address, logging_level=logging.WARNING, **options)
    except TokenError as error:
        raise ClusterError(f"{what}: {NEEDS_TOKEN.format(error=error)}") from error
    except (RuntimeError, ValueError, OSError) as error:
        raise ClusterError(f"{what}: {error}{remedy}") from error


def _identity(address: str) -> str:
    """Return the identity of the cluster at ``address``, as `cluster_id` does.

    Raises ConnectionError if nothing answers there within `KNOCK_S`, and TokenError if this process lacks the
    cluster's token. ``ray.init`` tries for minutes, and names neither cause.
    """
    machine, _, port = address.rpartition(":")
    if machine and port.isdigit():
        try:
            socket.create_connection((machine.strip("[]"), int(port)), timeout=KNOCK_S).close()
        except OSError as error:
            raise ConnectionError(f"nothing answers there ({error})") from error
    return cluster_id(address)
