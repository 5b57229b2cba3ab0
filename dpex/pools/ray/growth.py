"""Asks a Ray cluster to grow: placement groups without a place are demand that an autoscaler adds nodes for.

`dpex.core.demand` says how many, and when they go back. One that has a place keeps it, and with it the node, until the
loader takes it: then the group goes, and the pool's own reservation gets its room. A group never lies on the trainer's
node, which serves local workers. Workers that only an actor can place wait as actors of their pool, and not here.

Used by one thread at a time, which may wait for the cluster's head.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dpex.core.demand import Demand, Places
from dpex.pools.ray.cluster import living_nodes, own_node
from dpex.pools.ray.options import needs_of, stands_anywhere
from dpex.pools.ray.reservations import Bundles, Reservation
from dpex.system.ray_package import is_ray_connected


class ClusterGrowth:
    """See the module. options: Ray's options of each worker."""

    def __init__(self, options: Mapping[str, Any]) -> None:
        self._bundles = Bundles(options) if stands_anywhere(options) and needs_of(options) else None
        self._demand = Demand()
        self._reserved: list[Reservation] = []

    @property
    def held(self) -> int:
        """Places that have come and were not taken yet."""
        return sum(one.node is not None for one in self._reserved)

    def look(self, useful: int | None, requested: int, free: int, now: float) -> str:
        """Ask for places, or give some back; see `Places`. Returns what users should know, or "". Asks Ray."""
        if self._bundles is None:
            return ""
        self._locate(self._bundles)
        held = self.held
        places = Places(useful=useful, requested=requested, free=free, held=held, awaited=len(self._reserved) - held)
        change = self._demand.look(places, now)
        self._give_back([one for one in self._reserved if one.node is None][::-1][: change.awaited])
        self._give_back([one for one in self._reserved if one.node is not None][: change.held])
        if change.ask:
            own = own_node()
            self._reserved += [self._bundles.reserve([own] if own else [], None) for _ in range(change.ask)]
        return change.told

    def _locate(self, bundles: Bundles) -> None:
        if any(one.node is not None for one in self._reserved):
            living = {node["NodeID"] for node in living_nodes()}
            for one in self._reserved:
                if one.node is not None and one.node not in living:
                    bundles.displaced(one)
        bundles.locate([one for one in self._reserved if one.node is None])

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
