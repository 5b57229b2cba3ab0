"""The number of remote workers that a loader may ask for: free ones, up to the loader's share of the cluster.

Loaders of all processes that are connected to one cluster divide it by need: one of them starts a small named actor,
which keeps `dpex.schedule.fair_shares.ClusterShares`, and each reports to it about once a second. The actor belongs to
the process that started it and ends with that process; the next report of another loader starts a new actor, which
knows all loaders within a second. Where no actor can be had, the ranks of a job divide the cluster evenly.

A cluster is asked to grow by placement groups without a place, which are demand that an autoscaler adds nodes for.
`dpex.pools.ray.demand` says how many, and when they go back.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
import math
import os
import socket
import sys
import threading
from collections.abc import Mapping
from functools import cache
from itertools import count
from pathlib import Path
from typing import Any

from dpex._ray import client_session
from dpex.pools.ray.cluster import answers, living_nodes, own_node, slots
from dpex.pools.ray.demand import Demand, Places
from dpex.pools.ray.reservations import Bundles, Reservation, actor_options, needs_of, stands_anywhere
from dpex.schedule.fair_shares import Claim
from dpex.schedule.room import KnownNeed, NodeLink, RoomFound, RoomWanted, room_found
from dpex.system.clock import monotonic
from dpex.system.ray_package import is_ray_connected

logger = logging.getLogger("dpex")

ACTOR, NAMESPACE = "dpex-shares", "dpex"
PATIENCE_S = 5.0
"""Seconds that a command that shows the cluster waits for the coordinator."""
ANSWER_S = 0.2
"""Seconds that the tuner waits for the coordinator, which answers within milliseconds once it runs."""
_numbers = count(1)


class RemoteRoom:
    """See the module; a `dpex.schedule.room.Room`.

    Args:
        world_size: Ranks of this job, which divide the cluster evenly while there is no coordinator.
        weight: What this loader's wait counts against that of others.
        every_s: Seconds between two looks at the cluster.
    """

    def __init__(
        self, ray_remote_args: Mapping[str, Any] | None, *, world_size: int, weight: float = 1.0, every_s: float
    ) -> None:
        options = actor_options(ray_remote_args)
        self._needs = needs_of(options)
        self._world_size = max(1, world_size)
        self._every_s = every_s
        self._looked_at = -math.inf
        self._found: tuple[int, int] | None = None
        self._share = ClusterShare(weight)
        self._granted: int | None = None
        self._need = KnownNeed()
        self._growth = ClusterGrowth(options)
        self._lock = threading.Lock()

    def look(self, wanted: RoomWanted) -> RoomFound | None:
        """See `dpex.schedule.room.Room.look`; None while no cluster is connected."""
        with self._lock:
            told = ""
            self._need.learn(wanted)
            if (now := monotonic()) - self._looked_at >= self._every_s:
                self._looked_at, self._found = now, self._look()
                if self._found is not None:
                    free, capacity = self._found
                    told = self._grow(wanted, free, now)
                    self._found = free + self._growth.held, capacity
                self._granted = None if self._found is None else self._report(wanted, *self._found)
            if self._found is None:
                return None
            free, capacity = self._found
            most = capacity // self._world_size if self._granted is None else capacity
            return room_found(wanted, free, most, self._granted, told)

    def rest(self) -> None:
        """See `dpex.schedule.room.Room.rest`."""
        with self._lock:
            self._looked_at = -math.inf
            self._growth.end()

    def _grow(self, wanted: RoomWanted, free: int, now: float) -> str:
        if not wanted.may_grow:
            self._growth.end()
            return ""
        with contextlib.suppress(Exception):
            return self._growth.look(wanted.useful, wanted.requested, free, now)
        return ""

    def _look(self) -> tuple[int, int] | None:
        with contextlib.suppress(Exception):
            return slots(self._needs) if is_ray_connected() and answers() else None
        return None

    def _report(self, wanted: RoomWanted, free: int, capacity: int) -> int | None:
        cpus = self._needs.get("CPU", 0.0) or 1.0
        claim = self._need.claim(wanted, capacity, cpus)
        return self._share.report(claim, free=free * cpus, total=capacity * cpus, links=wanted.links)


class ClusterGrowth:
    """Places that a loader asks for beyond those of the cluster. Used by one thread at a time, which may wait for Ray.

    A place that has come is kept, and with it its node, until the loader takes it: then the placement group goes, and
    the pool's own reservation gets its room. None lies on the trainer's node, which serves local workers. Workers that
    only an actor can place wait as actors of their pool, and not here.
    """

    def __init__(self, options: Mapping[str, Any]) -> None:
        self._bundles = Bundles(options) if stands_anywhere(options) and needs_of(options) else None
        self._demand = Demand()
        self._reserved: list[Reservation] = []

    @property
    def held(self) -> int:
        """Places that have come and were not taken yet."""
        return sum(one.node is not None for one in self._reserved)

    def look(self, useful: int | None, requested: int, free: int, now: float) -> str:
        """Ask for places, or give some back; see `Places`. Return what users should know, or ""."""
        if self._bundles is None:
            return ""
        living = {node["NodeID"] for node in living_nodes()} if self.held else set()
        for one in self._reserved:
            if one.node is not None and one.node not in living:
                self._bundles.displaced(one)
        self._bundles.locate([one for one in self._reserved if one.node is None])
        held = self.held
        places = Places(useful=useful, requested=requested, free=free, held=held, awaited=len(self._reserved) - held)
        change = self._demand.look(places, now)
        self._give_back([one for one in self._reserved if one.node is None][::-1][: change.awaited])
        self._give_back([one for one in self._reserved if one.node is not None][: change.held])
        if change.ask:
            own = own_node()
            self._reserved += [self._bundles.reserve([own] if own else [], None) for _ in range(change.ask)]
        return change.told

    def _give_back(self, reservations: list[Reservation]) -> None:
        for one in reservations:
            self._reserved.remove(one)
            if self._bundles is not None:
                self._bundles.give_back(one)

    def end(self) -> None:
        """Give everything back. Idempotent."""
        if self._reserved and is_ray_connected():
            self._give_back(list(self._reserved))
        self._reserved = []


# -- shares ------------------------------------------------------------------------------------------------------------


class ClusterShare:
    """A loader's share of a cluster, as the coordinator says."""

    def __init__(self, weight: float) -> None:
        self._weight = weight
        self._name = f"{socket.gethostname()}:{os.getpid()} {Path(sys.argv[0]).name or 'python'} #{next(_numbers)}"
        self._coordinator: Any = None
        self._answer: Any = None
        self._granted: int | None = None

    def report(
        self, claim: Mapping[str, Any], *, free: float, total: float, links: Mapping[str, NodeLink]
    ) -> int | None:
        """Report a `Claim` without its weight; return the workers granted last, None without a coordinator."""
        try:
            ray = importlib.import_module("ray")
            if self._coordinator is None:
                self._coordinator = coordinator()
            if self._answer is None:
                weighted = {**claim, "weight": self._weight}
                ways = {place: tuple(link) for place, link in links.items()}
                self._answer = self._coordinator.report.remote(self._name, weighted, free, total, ways)
            if ray.wait([self._answer], timeout=ANSWER_S)[0]:
                answer, self._answer = self._answer, None
                self._granted = int(ray.get(answer))
        except Exception as error:
            logger.debug("the coordinator of this cluster's loaders does not answer: %s", error)
            self._coordinator = self._answer = self._granted = None
        return self._granted


def shares() -> dict[str, tuple[Claim, int]]:
    """Return what the loaders that tune themselves on this cluster ask for, and what was granted, by loader."""
    return {name: (Claim(**claim), granted) for name, (claim, granted) in _asked("claims").items()}


def links() -> list[tuple[str, NodeLink]]:
    """Return the connections from nodes to loaders that tune themselves, each with the node's name."""
    return [(place, NodeLink(*way)) for ways in _asked("links").values() for place, way in ways.items()]


def _asked(what: str) -> dict[str, Any]:
    """Return what the coordinator answers; nothing where there is none. Asks Ray."""
    ray = importlib.import_module("ray")
    try:
        method = getattr(ray.get_actor(ACTOR, namespace=NAMESPACE), what)
        return dict(ray.get(method.remote(), timeout=PATIENCE_S))
    except (ValueError, ray.exceptions.RayError):  # it has just gone with who started it
        return {}


def coordinator() -> Any:
    """Return the actor of this cluster, started beside the first that needs it. Asks Ray."""
    ray = importlib.import_module("ray")
    affinity = importlib.import_module("ray.util.scheduling_strategies").NodeAffinitySchedulingStrategy
    here = affinity(ray.get_runtime_context().get_node_id(), soft=True)
    options = {"name": ACTOR, "namespace": NAMESPACE, "get_if_exists": True, "num_cpus": 0}
    return _coordinator_class(client_session()).options(**options, scheduling_strategy=here).remote()


@cache
def _coordinator_class(session: str) -> Any:

    class DpexShares:
        def __init__(self) -> None:
            from dpex.schedule.fair_shares import ClusterShares

            self._shares = ClusterShares()
            self._links: dict[str, dict[str, Any]] = {}

        def report(self, name: str, claim: dict[str, Any], free: float, total: float, links: dict[str, Any]) -> int:
            import time

            from dpex.schedule.fair_shares import Claim

            self._links[name] = links
            return self._shares.report(name, Claim(**claim), free=free, total=total, now=time.monotonic())

        def claims(self) -> dict[str, Any]:
            from dataclasses import asdict

            return {name: (asdict(claim), granted) for name, (claim, granted) in self._shares.claims().items()}

        def links(self) -> dict[str, Any]:
            known = self._shares.claims()
            self._links = {name: links for name, links in self._links.items() if name in known}
            return self._links

        def __repr__(self) -> str:
            return "dpex shares"

    return importlib.import_module("ray").remote(DpexShares)
