"""Room on the cluster for one pool's workers: how much is wanted, what is reserved where, and what is on its way back.

Each worker has a reservation, a placement group of one bundle: Ray places it, an autoscaler sees those that wait, and
giving one back frees its CPUs at once. All workers of a node share one agent there, with one guardian.

The pool's thread calls `ReservedRoom.want`, `keep`, `of` and `workers`. The thread that calls Ray does the rest (see
`nodes`), and never waits for the cluster longer than one answer of its control service takes.
"""

from __future__ import annotations

import contextlib
import importlib
import threading
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

from dpex.system.ray_package import draining_nodes, placement_group_near

ASKED_AT_ONCE = 4
"""Placement groups without a place that are asked after: Ray places them in their order, so the others wait as well."""
_DEFAULTS = {"num_cpus": 1, "scheduling_strategy": "SPREAD"}


def worker_options(ray_remote_args: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return Ray's options for a worker: the user's, and dpex's own where the user names none."""
    given = ray_remote_args or {}  # whose mappings become dicts, as Ray takes no others
    return {**_DEFAULTS, **{name: dict(one) if isinstance(one, Mapping) else one for name, one in given.items()}}


def needs_of(options: Mapping[str, Any]) -> dict[str, float]:
    """Return the resources that a node must have in all to take a worker with these options."""
    named = {"CPU": options["num_cpus"], "memory": options.get("memory", 0)}
    return {name: value for name, value in {**named, **options.get("resources", {})}.items() if value}


@dataclass(eq=False)
class Reservation:
    """Room for one worker.

    Attributes:
        group: The placement group.
        near: The node that it was asked for, if any.
        node: The node where it is, None while it has no place.
        leaving: It is given back once its worker has left.
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
        """Ask for room for one worker, not on the nodes ``avoided``, and preferably on the one ``near``."""
        others = {"ray.io/node-id": f"!in({','.join(sorted(avoided))})"} if avoided else {}
        group = placement_group_near(self._bundle, near if self._spreads else None, {**self._labels, **others})
        return Reservation(group, near)

    def locate(self, waiting: list[Reservation]) -> None:
        """Find out which of these have a place."""
        for at in range(0, len(waiting), ASKED_AT_ONCE):
            asked = waiting[at : at + ASKED_AT_ONCE]
            for reservation in asked:
                found = importlib.import_module("ray.util").placement_group_table(reservation.group)
                if found.get("state") == "CREATED":
                    reservation.node = next(iter(found["bundles_to_node_id"].values()))
            if all(reservation.node is None for reservation in asked):
                return

    def give_back(self, reservation: Reservation) -> None:
        """Free it; harmless if it is gone, or Ray is."""
        with contextlib.suppress(Exception):
            importlib.import_module("ray.util").remove_placement_group(reservation.group)


class ReservedRoom:
    """The reservations of one pool.

    Args:
        options: Ray's options of each worker.

    Attributes:
        avoided: Nodes that get no workers, and why not.
    """

    def __init__(self, options: Mapping[str, Any]) -> None:
        self.avoided: dict[str, str] = {}
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
        """Reservations that have a place."""
        with self._lock:
            return sum(one.node is not None for one in self._reserved)

    def keep(self) -> None:
        """Reserve no more, and keep what is reserved for the next pool."""
        with self._lock:
            self._wanted = 0

    def want(self, workers: int) -> None:
        """See `dpex.pools.agent.nodes.Nodes.want`."""
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
        """Return how many workers that node may have."""
        with self._lock:
            return sum(one.node == node and not one.leaving for one in self._reserved)

    # -- for the thread that calls Ray ---------------------------------------------------------------------------

    @property
    def is_waiting(self) -> bool:
        """True if a reservation has no place yet."""
        return any(one.node is None for one in self._reserved)

    @property
    def nodes(self) -> set[str | None]:
        """Nodes that have any reservation."""
        return {one.node for one in self._reserved}

    def served(self) -> list[str]:
        """Return the nodes that need an agent."""
        return list(dict.fromkeys(one.node for one in self._reserved if one.node is not None and not one.leaving))

    def reserve(self) -> None:
        """Reserve room for workers that have none, each near the node that has the fewest."""
        missing = self._wanted - sum(not one.leaving for one in self._reserved)
        load = Counter(one.node or one.near for one in self._reserved)
        for _ in range(missing):
            near = min(self._fit, key=lambda node: load[node], default=None)
            load[near] += 1
            reservation = self._bundles.reserve(self.avoided, near)
            with self._lock:
                self._reserved.append(reservation)

    def locate(self) -> None:
        """Find out what has a place by now."""
        waiting = [one for one in self._reserved if one.node is None and not one.leaving]
        if waiting:
            self._bundles.locate(waiting)
            self.free(lambda one: one in waiting and one.node in self.avoided)

    def look(self, nodes: list[dict[str, Any]]) -> None:
        """Learn which nodes live, as Ray has them. Workers on one that is being drained leave; others take over."""
        there = {node["NodeID"] for node in nodes}
        self._living = set(there)
        with contextlib.suppress(Exception):
            self._living -= draining_nodes()
        for one in [one for one in self._reserved if one.node is not None]:
            one.leaving = one.leaving or (one.node in there and one.node not in self._living)
            if one.node not in there:
                one.node = None  # Ray finds another place for it
        fit = [node["NodeID"] for node in nodes if self._suffices(node["Resources"])]
        self._fit = [node for node in fit if node in self._living and node not in self.avoided]

    def _suffices(self, resources: Mapping[str, float]) -> bool:
        return all(resources.get(name, 0) >= need for name, need in self._needs.items())

    def avoid(self, nodes: dict[str, str]) -> None:
        """Have no workers on these nodes, for these reasons. If one may serve again, what has no place yet is asked for
        anew."""
        if not self.avoided.keys() <= nodes.keys():
            self.free(lambda one: one.node is None)
        self.avoided = nodes

    def has_others(self, node: str) -> bool:
        """Return True if another node than this could take a worker."""
        return any(other != node for other in self._fit)

    def why_none(self, nodes: list[dict[str, Any]]) -> str:
        """Return why no node could take a worker, or ""."""
        if self._fit:
            return ""
        some_would = any(self._suffices(node["Resources"]) for node in nodes)
        reasons = "; ".join(sorted(set(self.avoided.values()))) if some_would else ""
        return reasons or f"no node of the cluster has {self._needs}"

    def free_what_left(self, runs: Callable[[str], int]) -> None:
        """Free the reservations whose workers have left, or never came; ``runs``: how many a node has."""
        for one in [one for one in self._reserved if one.leaving]:
            reserved = sum(other.node == one.node for other in self._reserved)
            if one.node is None or reserved > runs(one.node):
                self._remove(one)

    def free(self, which: Callable[[Reservation], bool]) -> None:
        """Free these reservations."""
        for one in [one for one in self._reserved if which(one)]:
            self._remove(one)

    def _remove(self, reservation: Reservation) -> None:
        with self._lock:
            self._reserved.remove(reservation)
        self._bundles.give_back(reservation)
