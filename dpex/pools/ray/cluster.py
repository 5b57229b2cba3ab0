"""The Ray cluster of this process, and the worker processes on it that wait for their next loader.

There is at most one connection at a time; every lane holds a share of it. An initialised Ray is used as it is;
else the address that was given, or ``RAY_ADDRESS``; else a private Ray is started on this machine. A cluster that is
merely recorded on this machine, as ``ray.init()`` would join, is never joined.

Starting an actor takes a second or two, so an actor whose lane has closed is parked and prepared anew for the next
lane, which sends it the dataset as it is then. Parked actors are given back when the last share is, and after a while.

Importing this module does not import Ray.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
import os
import sys
import threading
import time
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field
from typing import Any

from dpex.errors import ClusterError
from dpex.transport.arena import Arena

logger = logging.getLogger("dpex")

PARKED_S = 60.0
"""How long a parked actor keeps its place on the cluster."""
_WAIT_FOR_BUSY_S = 1.0


def is_connected() -> bool:
    """Whether this process is connected to a Ray cluster; does not import Ray."""
    ray = sys.modules.get("ray")
    return ray is not None and hasattr(ray, "is_initialized") and bool(ray.is_initialized())


def slots(needs: Mapping[str, float]) -> tuple[int, int]:
    """Actors with these needs that there is room for: now, and if everything were free. Asks Ray, which may take long.

    The trainer's own node does not count: what it has to spare serves better as local workers. This process's own
    parked actors count as free.
    """
    ray = importlib.import_module("ray")
    state = importlib.import_module("ray._private.state")
    own = ray.get_runtime_context().get_node_id()
    nodes = {node["NodeID"]: node["Resources"] for node in ray.nodes() if node["Alive"] and node["NodeID"] != own}
    free = state.available_resources_per_node()
    capacity = sum(_fit(has, needs) for has in nodes.values())
    parked = len(_current.pool) if _current is not None else 0
    return min(capacity, sum(_fit(free.get(node, {}), needs) for node in nodes) + parked), capacity


def _fit(resources: Mapping[str, float], needs: Mapping[str, float]) -> int:
    wanted = needs or {"CPU": 1.0}
    return min(int(resources.get(name, 0.0) / need + 1e-6) for name, need in wanted.items())


def stream_address() -> str | None:
    """The address at which the cluster's nodes reach this process, or None where it is no part of the cluster.

    Where Ray encrypts its traffic nothing goes beside it.
    """
    if os.environ.get("RAY_USE_TLS", "0").lower() in ("1", "true"):
        return None
    ray = importlib.import_module("ray")
    client = sys.modules.get("ray.util.client")
    if client is not None and client.ray.is_connected():
        return None
    return str(ray.util.get_node_ip_address())


@dataclass(eq=False)
class Actor:
    """An actor process: Ray's handle, and where it is (None while that is not known)."""

    handle: Any
    node: str | None = None
    place: str = ""
    pid: int = 0
    calls: list[Any] = field(default_factory=list)
    """Unanswered calls of the lane that parked it."""
    parked_at: float = 0.0


class ActorPool:
    """Parked actors, by what they were started with."""

    def __init__(self) -> None:
        self._parked: dict[Hashable, list[Actor]] = {}
        self._lock = threading.Lock()
        self._timer: threading.Timer | None = None

    def __len__(self) -> int:
        return sum(map(len, self._parked.values()))

    def park(self, key: Hashable, actor: Actor) -> None:
        """Keep an actor for the next lane."""
        actor.parked_at = time.monotonic()
        with self._lock:
            self._parked.setdefault(key, []).append(actor)
            if self._timer is None:
                self._set_timer(PARKED_S)

    def take(self, key: Hashable, count: int) -> list[Actor]:
        """Up to ``count`` actors; one that still works for its old lane after a moment is killed instead."""
        with self._lock:
            waiting = self._parked.pop(key, [])
        idle = [actor for actor in waiting if not actor.calls or actor.node is None]
        busy = [actor for actor in waiting if actor.calls and actor.node is not None]
        if busy and len(idle) < count:
            freed = _wait(busy, count - len(idle))
            idle += freed
            busy = [actor for actor in busy if actor not in freed]
        taken, left = idle[:count], idle[count:]
        for actor in busy:
            kill(actor.handle)
        for actor in left:
            self.park(key, actor)
        return taken

    def clear(self) -> None:
        """Kill everybody who is parked."""
        with self._lock:
            parked, self._parked = self._parked, {}
            if self._timer is not None:
                self._timer.cancel()
                self._timer = None
        for actors in parked.values():
            for actor in actors:
                kill(actor.handle)

    def _set_timer(self, after_s: float) -> None:
        self._timer = threading.Timer(after_s, self._expire)
        self._timer.name = "dpex-parked-actors"
        self._timer.daemon = True
        self._timer.start()

    def _expire(self) -> None:
        now, old = time.monotonic(), []
        with self._lock:
            self._timer = None
            for key, actors in list(self._parked.items()):
                old += [actor for actor in actors if now - actor.parked_at >= PARKED_S - 1]
                self._parked[key] = [actor for actor in actors if actor not in old]
            oldest = min((a.parked_at for actors in self._parked.values() for a in actors), default=None)
            if oldest is not None:
                self._set_timer(max(1.0, oldest + PARKED_S - now))
        for actor in old:
            kill(actor.handle)


def _wait(busy: list[Actor], count: int) -> list[Actor]:
    """The actors that finish what they were at within a moment, ``count`` at most."""
    ray = importlib.import_module("ray")
    deadline, freed = time.monotonic() + _WAIT_FOR_BUSY_S, []
    for actor in busy[:]:
        left = max(0.0, deadline - time.monotonic())
        with contextlib.suppress(Exception):
            ready, _ = ray.wait(actor.calls, num_returns=len(actor.calls), timeout=left, fetch_local=False)
            if len(ready) == len(actor.calls):
                freed.append(actor)
        if len(freed) == count:
            break
    return freed


def kill(handle: Any) -> None:
    """End an actor at once; harmless if it is gone, or Ray is."""
    if is_connected():
        with contextlib.suppress(Exception):
            importlib.import_module("ray").kill(handle, no_restart=True)


@dataclass(eq=False)
class Cluster:
    """The connection. ``private``: dpex started this Ray, and shuts it down."""

    session: str
    private: bool
    pool: ActorPool = field(default_factory=ActorPool)
    probed: set[tuple[str, str]] = field(default_factory=set)
    """(node, kind of dataset) that served."""
    unfit: dict[tuple[str, str], str] = field(default_factory=dict)
    """(node, kind of dataset) that did not, and why."""
    landing: Arena = field(default_factory=lambda: Arena(shared=False))
    """Where results land in the trainer, under the lock."""
    landing_lock: threading.Lock = field(default_factory=threading.Lock)
    shares: int = 0


_current: Cluster | None = None
_lock = threading.RLock()


def connect(head_address: str) -> Cluster:
    """A share of the connection; to be given back with `release`. Starts a private Ray if there is none to join.

    Raises `ClusterError` where ``head_address`` or ``RAY_ADDRESS`` does not answer.
    """
    global _current
    with _lock:
        private = False
        if not is_connected():
            _current = None
            private = _initialise(head_address)
        session = _session()
        if _current is None or _current.session != session:
            _current = Cluster(session, private)
        _current.shares += 1
        return _current


def release(cluster: Cluster, *, shut_down: bool = False) -> None:
    """Give a share back. With the last one parked actors go; ``shut_down`` ends a private Ray then, else exit does."""
    global _current
    with _lock:
        cluster.shares -= 1
        if cluster.shares > 0:
            return
        cluster.pool.clear()
        if cluster.private and shut_down and cluster is _current and is_connected():
            importlib.import_module("ray").shutdown()
            _current = None


def _session() -> str:
    ray = importlib.import_module("ray")
    context = ray.get_runtime_context()
    return f"{context.gcs_address}/{context.get_job_id()}"


def _initialise(head_address: str) -> bool:
    """Connect; True if that started a private Ray."""
    ray = importlib.import_module("ray")
    given = os.environ.get("RAY_ADDRESS", "").strip() if head_address == "auto" else head_address
    address = given or "local"
    options: dict[str, Any] = {"logging_level": logging.WARNING, "log_to_driver": True}
    if address == "local":
        logger.warning("no Ray cluster is connected or named: dpex starts a private Ray on this machine")
        options["include_dashboard"] = False
    try:
        ray.init(address=address, **options)
    except (ConnectionError, RuntimeError, ValueError, TimeoutError, OSError) as error:
        if address == "local":
            raise ClusterError(f"a private Ray cannot be started on this machine: {error}") from error
        source = "head_address" if head_address != "auto" else "RAY_ADDRESS"
        raise ClusterError(
            f"no Ray cluster answers at {source}={address!r}: {error}; start one with `ray start`, "
            "or give head_address='local' for a private one"
        ) from error
    return address == "local"
