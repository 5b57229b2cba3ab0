"""Room for workers on a Ray cluster: the reservations of one pool, and the number of workers that its loader may ask
for.

Each worker has a reservation, a placement group of one bundle. Ray places the group, an autoscaler sees pending groups,
and removing a group frees its CPUs at once. All workers of a node share one agent, which has one guardian.

A pool's thread calls `ReservedRoom.want`, `keep`, `of` and `workers`. The thread that calls Ray does the rest (see
`nodes`), and never waits for the cluster longer than one answer of its control service takes.

All loaders that tune themselves on one cluster divide it (see `dpex.pools.ray.shares`). Pending placement groups ask
the cluster to grow, because an autoscaler adds nodes for them. `dpex.pools.ray.demand` decides how many such groups to
ask for, and when to remove them.
"""

from __future__ import annotations

import contextlib
import importlib
import math
import threading
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

from dpex.autotune.types import RoomFound, RoomWanted, room_found
from dpex.pools.ray.cluster import AvoidedNode, fit, living_nodes, own_node, slots, without
from dpex.pools.ray.demand import Demand, Places
from dpex.pools.ray.shares import Claim, ClusterShare
from dpex.system.clock import monotonic
from dpex.system.ray_package import available_resources_per_node, draining_nodes, is_ray_connected, placement_group_near

ASKED_AT_ONCE = 4
"""Placement groups polled at a time. Ray places groups in order: if none of these is placed, later ones are not."""
_DEFAULTS = {"num_cpus": 1, "scheduling_strategy": "SPREAD"}


def worker_options(ray_remote_args: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return Ray's options for a worker: the user's, and dpex's own where the user names none."""
    given = ray_remote_args or {}  # mappings in it become dicts, because Ray accepts no others
    return {**_DEFAULTS, **{name: dict(one) if isinstance(one, Mapping) else one for name, one in given.items()}}


def needs_of(options: Mapping[str, Any]) -> dict[str, float]:
    """Return the resources of a node that one worker with these options takes."""
    named = {"CPU": options["num_cpus"], "memory": options.get("memory", 0)}
    return {name: value for name, value in {**named, **options.get("resources", {})}.items() if value}


@dataclass(eq=False)
class Reservation:
    """Room for one worker: a placement ``group`` on ``node``.

    Until Ray grants the group, ``node`` is None, and ``near`` may name the preferred node.

    ``leaving``: True if the place is released when its worker ends.
    """

    group: Any
    near: str | None = None
    node: str | None = None
    leaving: bool = False


class Bundles:
    """Reserves places for workers with these options of Ray's."""

    def __init__(self, options: Mapping[str, Any]) -> None:
        self._labels = options.get("label_selector", {})
        self._bundle = {name: float(value) for name, value in needs_of(options).items()}
        self._spreads = options["scheduling_strategy"] == "SPREAD"

    def reserve(self, avoided: Collection[str], near: str | None) -> Reservation:
        """Ask for room for one worker on a node that is not among ``avoided``, preferably on the node ``near``."""
        others = {"ray.io/node-id": f"!in({','.join(sorted(avoided))})"} if avoided else {}
        group = placement_group_near(self._bundle, near if self._spreads else None, {**self._labels, **others})
        return Reservation(group, near)

    def locate(self, waiting: list[Reservation]) -> None:
        for at in range(0, len(waiting), ASKED_AT_ONCE):
            asked = waiting[at : at + ASKED_AT_ONCE]
            for reservation in asked:
                found = importlib.import_module("ray.util").placement_group_table(reservation.group)
                if found.get("state") == "CREATED":
                    reservation.node = next(iter(found["bundles_to_node_id"].values()))
            if all(reservation.node is None for reservation in asked):
                return

    def give_back(self, reservation: Reservation) -> None:
        """Free a reservation. Do nothing if the reservation or Ray has ended."""
        with contextlib.suppress(Exception):
            importlib.import_module("ray.util").remove_placement_group(reservation.group)


class ReservedRoom:
    """The reservations of one pool. ``avoided``: nodes that get no workers."""

    def __init__(self, options: Mapping[str, Any]) -> None:
        self.avoided: dict[str, AvoidedNode] = {}
        self._bundles = Bundles(options)
        self._needs = needs_of(options)
        self._wanted = 0
        self._lock = threading.Lock()
        self._reserved: list[Reservation] = []
        self._living: set[str] = set()
        self._fit: list[str] = []
        """Nodes that could take a worker, if they were free."""

    # -- for the pool --------------------------------------------------------------------------------------------

    @property
    def workers(self) -> int:
        with self._lock:
            return sum(one.node is not None for one in self._reserved)

    def keep(self) -> None:
        """Reserve no more, and keep the present reservations for the next pool."""
        with self._lock:
            self._wanted = 0

    def want(self, workers: int) -> None:
        with self._lock:
            self._wanted = workers
            staying = [one for one in self._reserved if not one.leaving]
            leaving = [one for one in self._reserved if one.leaving and one.node in self._living]
            for one in [one for one in leaving if one.node not in self.avoided][: max(0, workers - len(staying))]:
                one.leaving = False
            unplaced = [one for one in staying if one.node is None]
            placed = [one for one in staying if one.node is not None]
            for one in [*unplaced[::-1], *placed[::-1]][: max(0, len(staying) - workers)]:
                one.leaving = True

    def of(self, node: str) -> int:
        with self._lock:
            return sum(one.node == node and not one.leaving for one in self._reserved)

    # -- for the thread that calls Ray ---------------------------------------------------------------------------

    @property
    def is_waiting(self) -> bool:
        return any(one.node is None for one in self._reserved)

    @property
    def nodes(self) -> set[str | None]:
        return {one.node for one in self._reserved}

    def served(self) -> list[str]:
        """Return the nodes that need an agent."""
        return list(dict.fromkeys(one.node for one in self._reserved if one.node is not None and not one.leaving))

    def reserve(self) -> list[str]:
        """Reserve room for workers that have none, each preferably on the node with the fewest workers. Return the
        preferred nodes with free resources, where the room will most likely be."""
        missing = self._wanted - sum(not one.leaving for one in self._reserved)
        free = available_resources_per_node() if missing > 0 else {}
        likely: list[str] = []
        load = Counter(one.node or one.near for one in self._reserved)
        for _ in range(missing):
            near = min(self._fit, key=lambda node: load[node], default=None)
            load[near] += 1
            reservation = self._bundles.reserve(self.avoided, near)
            with self._lock:
                self._reserved.append(reservation)
            if near is not None and near not in likely and fit(free.get(near, {}), self._needs):
                likely.append(near)
        return likely

    def locate(self) -> None:
        waiting = [one for one in self._reserved if one.node is None and not one.leaving]
        if waiting:
            self._bundles.locate(waiting)
            self.free(lambda one: one in waiting and one.node in self.avoided)

    def look(self, nodes: list[dict[str, Any]]) -> None:
        """Take in Ray's list of living nodes. Workers on a draining node leave, and other workers replace them."""
        there = {node["NodeID"] for node in nodes}
        self._living = set(there)
        with contextlib.suppress(Exception):
            self._living -= draining_nodes()
        for one in [one for one in self._reserved if one.node is not None]:
            one.leaving = one.leaving or (one.node in there and one.node not in self._living)
            if one.node not in there:
                one.node = None  # Ray places the group on another node
        fit = [node["NodeID"] for node in nodes if self._suffices(node["Resources"])]
        self._fit = [node for node in fit if node in self._living and node not in self.avoided]

    def _suffices(self, resources: Mapping[str, float]) -> bool:
        return all(resources.get(name, 0) >= need for name, need in self._needs.items())

    def avoid(self, nodes: dict[str, AvoidedNode]) -> None:
        """Have no workers on ``nodes``. If a formerly avoided node may serve again, free the pending reservations, so
        that new ones may be placed there."""
        if not self.avoided.keys() <= nodes.keys():
            self.free(lambda one: one.node is None)
        self.avoided = nodes

    def has_others(self, node: str) -> bool:
        return any(other != node and other not in self.avoided for other in self._fit)

    def why_none(self, nodes: list[dict[str, Any]]) -> str:
        """Return why no node could take a worker, or ""."""
        if self._fit:
            return ""
        some_would = any(self._suffices(node["Resources"]) for node in nodes)
        reasons = without(self.avoided.values()) if some_would else ""
        return reasons or f"no node of the cluster has {self._needs}"

    def free_what_left(self, runs: Callable[[str], int]) -> None:
        """Free leaving reservations whose workers have left or never came. ``runs``: running workers of a node."""
        for one in [one for one in self._reserved if one.leaving]:
            reserved = sum(other.node == one.node for other in self._reserved)
            if one.node is None or reserved > runs(one.node):
                self._remove(one)

    def free(self, which: Callable[[Reservation], bool]) -> None:
        for one in [one for one in self._reserved if which(one)]:
            self._remove(one)

    def _remove(self, reservation: Reservation) -> None:
        with self._lock:
            self._reserved.remove(reservation)
        self._bundles.give_back(reservation)


# -- for the tuner -----------------------------------------------------------------------------------------------------


class RemoteRoom:
    """The number of remote workers that a loader may ask for: free ones, up to the loader's share of the cluster.

    A `dpex.autotune.types.Room`, which asks the cluster at most every ``every_s`` seconds.
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

    def find(self, wanted: RoomWanted) -> RoomFound | None:
        """See `dpex.autotune.types.Room.find`; None while no cluster is connected."""
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
    """Requests places beyond the size of the cluster. Used by one thread at a time, which may wait for Ray.

    A granted place is held, so that its node stays, until the loader takes the place. Then its placement group is
    removed, and the pool's own reservation gets the room. No place is on the trainer's node, which has local workers.
    """

    def __init__(self, options: Mapping[str, Any]) -> None:
        self._bundles = Bundles(options)
        self._demand = Demand()
        self._reserved: list[Reservation] = []

    @property
    def held(self) -> int:
        """Number of places that Ray has granted and the loader has not taken yet."""
        return sum(one.node is not None for one in self._reserved)

    def look(self, useful: int | None, requested: int, free: int, now: float) -> str:
        """Ask for places, or give some back; `Places` explains the numbers. Return a message to the user, or ""."""
        living = {node["NodeID"] for node in living_nodes()} if self.held else set()
        for one in self._reserved:
            if one.node is not None and one.node not in living:
                one.node = None  # Ray places the group on another node
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
