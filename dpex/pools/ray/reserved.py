"""Room on the cluster for one pool's workers: how much is wanted, what is reserved where, and what is on its way back.

The pool's thread says how much is wanted, and asks how much an agent has; the thread that calls Ray does the rest (see
`nodes`).
"""

from __future__ import annotations

import contextlib
import threading
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

from dpex._ray import draining_nodes
from dpex.pools.ray.reservations import Actors, Bundles, Reservation, has_an_agent_of_its_own, needs_of


class ReservedRoom:
    """The reservations of one pool.

    Args:
        options: Ray's options of each worker.

    Attributes:
        avoided: Nodes that get no workers, and why not.
        way: How room is reserved.
    """

    def __init__(self, options: Mapping[str, Any]) -> None:
        self.avoided: dict[str, str] = {}
        self.way = Actors(options) if has_an_agent_of_its_own(options) else Bundles(options)
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

    def want(self, workers: int, may_shrink: bool) -> None:
        """See `dpex.pools.agent.nodes.Nodes.want`."""
        with self._lock:
            self._wanted = workers
            staying = [one for one in self._reserved if not one.leaving]
            leaving = [one for one in self._reserved if one.leaving and one.node in self._living]
            for one in [one for one in leaving if one.node not in self.avoided][: max(0, workers - len(staying))]:
                one.leaving = False
            unplaced = [one for one in staying if one.node is None]
            placed = [one for one in staying if one.node is not None] if may_shrink else []
            for one in [*unplaced[::-1], *placed[::-1]][: max(0, len(staying) - workers)]:
                one.leaving = True

    def of(self, agent: str) -> int:
        """Return how many workers that agent may have."""
        with self._lock:
            return sum(one.agent == agent and not one.leaving for one in self._reserved)

    # -- for the thread that calls Ray ---------------------------------------------------------------------------

    @property
    def is_waiting(self) -> bool:
        """True if a reservation has no place yet."""
        return any(one.node is None for one in self._reserved)

    @property
    def agents(self) -> set[str | None]:
        """Agents that have any reservation."""
        return {one.agent for one in self._reserved}

    def served(self) -> list[Reservation]:
        """Return the reservations that need an agent."""
        return [one for one in self._reserved if one.agent is not None and not one.leaving]

    def reserve(self) -> None:
        """Reserve room for workers that have none, each near the node that has the fewest."""
        missing = self._wanted - sum(not one.leaving for one in self._reserved)
        load = Counter(one.node or one.near for one in self._reserved)
        for _ in range(missing):
            near = min(self._fit, key=lambda node: load[node], default=None)
            load[near] += 1
            reservation = self.way.reserve(self.avoided, near)
            with self._lock:
                self._reserved.append(reservation)

    def locate(self) -> list[BaseException]:
        """Find out what has a place by now; return what Ray says of reservations that can have none."""
        waiting = [one for one in self._reserved if one.node is None and not one.leaving]
        if waiting:
            self.way.locate(waiting)
            self.free(lambda one: one in waiting and (one.error is not None or one.node in self.avoided))
        return [one.error for one in waiting if one.error is not None]

    def look(self, nodes: list[dict[str, Any]]) -> None:
        """Learn which nodes live, as Ray has them. Workers on one that is being drained leave; others take over."""
        there = {node["NodeID"] for node in nodes}
        self._living = set(there)
        with contextlib.suppress(Exception):
            self._living -= draining_nodes()
        for one in [one for one in self._reserved if one.node is not None]:
            if one.node in there:
                one.leaving = one.leaving or one.node not in self._living
            elif not self.way.displaced(one):
                self._remove(one)
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
        """Free the reservations whose workers have left, or never came; ``runs``: how many an agent has."""
        for one in [one for one in self._reserved if one.leaving]:
            reserved = sum(other.agent == one.agent for other in self._reserved)
            if one.agent is None or reserved > runs(one.agent):
                self._remove(one)

    def free(self, which: Callable[[Reservation], bool]) -> None:
        """Free these reservations."""
        for one in [one for one in self._reserved if which(one)]:
            self._remove(one)

    def _remove(self, reservation: Reservation) -> None:
        with self._lock:
            self._reserved.remove(reservation)
        self.way.give_back(reservation)
