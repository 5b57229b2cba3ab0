"""How many more remote workers a loader may ask for: what the cluster has free, up to the loader's share of it.

Loaders of all processes that are connected to one cluster divide it by need: one of them starts a small named actor,
which keeps `dpex.core.fair_shares.ClusterShares`, and each reports to it about once a second. The actor belongs to who
started it and ends with that; the next report of another starts a new one, which knows all within a second. Where it
cannot be had, the ranks of a job divide the cluster evenly.
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
from dpex.core.fair_shares import Claim
from dpex.core.room import KnownNeed, NodeLink, RoomFound, RoomWanted, room_found
from dpex.pools.ray.cluster import answers, slots
from dpex.pools.ray.growth import ClusterGrowth
from dpex.pools.ray.options import actor_options, needs_of
from dpex.system.clock import monotonic
from dpex.system.ray_package import is_ray_connected

logger = logging.getLogger("dpex")

ACTOR, NAMESPACE = "dpex-shares", "dpex"
PATIENCE_S = 5.0
"""How long who only looks waits for it."""
ANSWER_S = 0.2
"""How long the tuner waits for the coordinator, which answers within milliseconds once it runs."""
_numbers = count(1)


class RemoteRoom:
    """See the module; a `dpex.core.room.Room`.

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
        """See `dpex.core.room.Room.look`; None while no cluster is connected."""
        with self._lock:
            return self._room(wanted)

    def rest(self) -> None:
        """See `dpex.core.room.Room.rest`."""
        with self._lock:
            self._looked_at = -math.inf
            self._growth.end()

    def _room(self, wanted: RoomWanted) -> RoomFound | None:
        now, told = monotonic(), ""
        self._need.learn(wanted)
        if now - self._looked_at >= self._every_s:
            self._looked_at = now
            self._found = self._look()
            if self._found is not None:
                told = self._grow(wanted, self._found[0], now)
                self._found = self._found[0] + self._growth.held, self._found[1]
            self._granted = None if self._found is None else self._report(wanted, *self._found)
        if self._found is None:
            return None
        free, capacity = self._found
        if self._granted is None:
            capacity //= self._world_size
        return room_found(wanted, free, capacity, self._granted, told)

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


class ClusterShare:
    """This loader's share of a cluster, as the coordinator tells it."""

    def __init__(self, weight: float) -> None:
        self._weight = weight
        self._name = f"{socket.gethostname()}:{os.getpid()} {Path(sys.argv[0]).name or 'python'} #{next(_numbers)}"
        self._coordinator: Any = None
        self._answer: Any = None
        self._granted: int | None = None

    def report(
        self, claim: Mapping[str, Any], *, free: float, total: float, links: Mapping[str, NodeLink]
    ) -> int | None:
        """Report a `Claim` without its weight; returns the workers that were granted last, None if nobody answers."""
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
    """Return what the loaders of this cluster ask for, and what was granted, by loader; nothing where no loader tunes
    itself on it. Asks Ray."""
    return {name: (Claim(**claim), granted) for name, (claim, granted) in _asked("claims").items()}


def links() -> list[tuple[str, NodeLink]]:
    """Return the ways from nodes to loaders that tune themselves, each with the node's name. Asks Ray."""
    return [(place, NodeLink(*way)) for ways in _asked("links").values() for place, way in ways.items()]


def _asked(what: str) -> dict[str, Any]:
    """What the coordinator answers; nothing where there is none."""
    ray = importlib.import_module("ray")
    try:
        method = getattr(ray.get_actor(ACTOR, namespace=NAMESPACE), what)
        return dict(ray.get(method.remote(), timeout=PATIENCE_S))
    except (ValueError, ray.exceptions.RayError):  # it has just gone with who started it
        return {}


def coordinator() -> Any:
    """The actor of this cluster; it is started beside whoever is first to need it. Asks Ray."""
    ray = importlib.import_module("ray")
    affinity = importlib.import_module("ray.util.scheduling_strategies").NodeAffinitySchedulingStrategy
    here = affinity(ray.get_runtime_context().get_node_id(), soft=True)
    options = {"name": ACTOR, "namespace": NAMESPACE, "get_if_exists": True, "num_cpus": 0}
    return _coordinator_class(client_session()).options(**options, scheduling_strategy=here).remote()


@cache
def _coordinator_class(session: str) -> Any:

    class DpexShares:
        def __init__(self) -> None:
            from dpex.core.fair_shares import ClusterShares

            self._shares = ClusterShares()
            self._links: dict[str, dict[str, Any]] = {}

        def report(self, name: str, claim: dict[str, Any], free: float, total: float, links: dict[str, Any]) -> int:
            import time

            from dpex.core.fair_shares import Claim

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
