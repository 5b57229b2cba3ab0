"""The number of remote workers that a loader may ask for: free ones, up to the loader's share of the cluster.

All loaders that tune themselves on one cluster divide it (see `dpex.pools.ray.shares`).

A cluster is asked to grow by placement groups without a place, which are demand that an autoscaler adds nodes for.
`dpex.pools.ray.demand` says how many, and when they go back.
"""

from __future__ import annotations

import contextlib
import math
import threading
from collections.abc import Mapping
from typing import Any

from dpex.autotune.types import RoomFound, RoomWanted, room_found
from dpex.pools.ray.cluster import living_nodes, own_node, slots
from dpex.pools.ray.demand import Demand, Places
from dpex.pools.ray.reservations import Bundles, Reservation, needs_of, worker_options
from dpex.pools.ray.shares import Claim, ClusterShare
from dpex.system.clock import monotonic
from dpex.system.ray_package import is_ray_connected


class RemoteRoom:
    """See the module; a `dpex.autotune.types.Room`.

    Args:
        weight: This loader's share relative to that of others.
        every_s: Seconds between two looks at the cluster.
    """

    def __init__(self, ray_remote_args: Mapping[str, Any] | None, *, weight: float = 1.0, every_s: float) -> None:
        options = worker_options(ray_remote_args)
        self._needs = needs_of(options)
        self._every_s = every_s
        self._looked_at = -math.inf
        self._found: tuple[int, int] | None = None
        self._share = ClusterShare(weight)
        self._granted: int | None = None
        self._growth = ClusterGrowth(options)
        self._lock = threading.Lock()

    def look(self, wanted: RoomWanted) -> RoomFound | None:
        """See `dpex.autotune.types.Room.look`; None while no cluster is connected."""
        with self._lock:
            message = ""
            if (now := monotonic()) - self._looked_at >= self._every_s:
                self._looked_at, self._found = now, self._look()
                if self._found is not None:
                    free, capacity = self._found
                    message = self._grow(wanted, free, now)
                    self._found = free + self._growth.held, capacity
                self._granted = None if self._found is None else self._report(wanted, *self._found)
            if self._found is None:
                return None
            return room_found(wanted, *self._found, self._granted, message)

    def rest(self) -> None:
        """See `dpex.autotune.types.Room.rest`."""
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
            return slots(self._needs) if is_ray_connected() else None
        return None

    def _report(self, wanted: RoomWanted, free: int, capacity: int) -> int | None:
        cpus = self._needs.get("CPU", 0.0) or 1.0
        claim = Claim(
            useful=max(1, wanted.requested) if wanted.useful is None else wanted.useful,
            most=capacity,
            cpus=cpus,
            requested=wanted.requested,
            running=wanted.running,
        )
        return self._share.report(claim, free=free * cpus, total=capacity * cpus)


class ClusterGrowth:
    """Ask Ray for places beyond those of the cluster. Used by one thread at a time, which may wait for Ray.

    A place that has come is kept, and with it its node, until the loader takes it: then the placement group is removed,
    and the pool's own reservation gets its room. None lies on the trainer's node, which serves local workers.
    """

    def __init__(self, options: Mapping[str, Any]) -> None:
        self._bundles = Bundles(options)
        self._demand = Demand()
        self._reserved: list[Reservation] = []

    @property
    def held(self) -> int:
        """Number of places that have come and were not taken yet."""
        return sum(one.node is not None for one in self._reserved)

    def look(self, useful: int | None, requested: int, free: int, now: float) -> str:
        """Ask for places, or give some back; the numbers are those of `Places`. Return a message to the user, or ""."""
        living = {node["NodeID"] for node in living_nodes()} if self.held else set()
        for one in self._reserved:
            if one.node is not None and one.node not in living:
                one.node = None  # Ray finds another place for it
        self._bundles.locate([one for one in self._reserved if one.node is None])
        held = self.held
        places = Places(useful=useful, requested=requested, free=free, held=held, awaited=len(self._reserved) - held)
        change = self._demand.look(places, now)
        self._give_back([one for one in self._reserved if one.node is None][::-1][: change.awaited])
        self._give_back([one for one in self._reserved if one.node is not None][: change.held])
        if change.ask:
            self._reserved += [self._bundles.reserve([own_node()], None) for _ in range(change.ask)]
        return change.message

    def _give_back(self, reservations: list[Reservation]) -> None:
        for one in reservations:
            self._reserved.remove(one)
            self._bundles.give_back(one)

    def end(self) -> None:
        """Give everything back. Idempotent."""
        if self._reserved and is_ray_connected():
            self._give_back(list(self._reserved))
        self._reserved = []
