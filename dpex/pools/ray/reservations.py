"""Room on the cluster for one pool's workers: how much is wanted, what is reserved where, and what is on its way back.

Each worker has a reservation, as a rule a placement group of one bundle: Ray places it, an autoscaler sees those that
wait, and giving one back frees its CPUs at once. All workers of a node share one agent there, with one guardian. Where
that would not do (see `has_an_agent_of_its_own`) the reservation is an actor, which is the guardian of an agent with a
single worker.

The pool's thread calls `ReservedRoom.want`, `keep`, `of` and `workers`. The thread that calls Ray does the rest (see
`nodes`), and never waits for the cluster longer than one answer of its control service takes.
"""

from __future__ import annotations

import contextlib
import importlib
import itertools
import os
import secrets
import threading
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

from dpex._ray import client_session, draining_nodes, placement_group_near, placement_group_states
from dpex.pools.ray.guardian import CALLS_AT_ONCE, guardian_class

ASKED_AT_ONCE = 4
"""Placement groups without a place that are asked after: Ray places them in their order, so the others wait as well."""
_DEFAULTS = {"num_cpus": 1, "num_gpus": 0, "max_restarts": 0, "scheduling_strategy": "SPREAD"}


def actor_options(ray_remote_args: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return Ray's options for a worker: the user's, and dpex's own where the user names none."""
    given = ray_remote_args or {}  # whose mappings become dicts, as Ray takes no others
    return {**_DEFAULTS, **{name: dict(one) if isinstance(one, Mapping) else one for name, one in given.items()}}


def needs_of(options: Mapping[str, Any]) -> dict[str, float]:
    """Return the resources that a node must have in all to take a worker with these options."""
    named = {"CPU": options["num_cpus"], "GPU": options["num_gpus"], "memory": options.get("memory", 0)}
    return {name: value for name, value in {**named, **options.get("resources", {})}.items() if value}


def stands_anywhere(options: Mapping[str, Any]) -> bool:
    """Return True if a worker may run wherever there is what it needs."""
    return options["scheduling_strategy"] in ("DEFAULT", "SPREAD") and "accelerator_type" not in options


def has_an_agent_of_its_own(options: Mapping[str, Any]) -> bool:
    """Return True if each worker needs an actor of its own.

    Only in an actor Ray sets up what it reserves (which GPU is its), and some options only an actor has. Other workers
    share an agent on each node, in bundles.
    """
    return bool(options["num_gpus"]) or not stands_anywhere(options) or not needs_of(options)


@dataclass(eq=False)
class Reservation:
    """Room for one worker.

    Attributes:
        handle: The placement group, or the actor.
        near: The node that it was asked for, if any.
        node: The node where it is, None while it has no place.
        agent: Which agent serves it: its node, or a name of its own on the node.
        leaving: It is given back once its worker has left.
        hello: The answer that an actor gives once it has a place.
        error: What Ray says of a reservation that can have no place any more.
    """

    handle: Any
    near: str | None = None
    node: str | None = None
    agent: str | None = None
    leaving: bool = False
    hello: Any = None
    error: BaseException | None = None


class Bundles:
    """Reserve by placement groups.

    Attributes:
        are_guardians: True if each reservation is its agent's guardian, which goes with it.
    """

    are_guardians = False

    def __init__(self, options: Mapping[str, Any]) -> None:
        self._options = options
        self._bundle = {name: float(value) for name, value in needs_of(options).items()}
        self._spreads = options["scheduling_strategy"] == "SPREAD"

    def reserve(self, avoided: Collection[str], near: str | None) -> Reservation:
        """Ask for room for one worker, not on the nodes ``avoided``, and preferably on the one ``near``."""
        labels = _labels(self._options, avoided)
        return Reservation(placement_group_near(self._bundle, near if self._spreads else None, labels), near)

    def locate(self, waiting: list[Reservation]) -> None:
        """Find out which of these have a place."""
        for at in range(0, len(waiting), ASKED_AT_ONCE):
            asked = waiting[at : at + ASKED_AT_ONCE]
            states = placement_group_states([one.handle for one in asked])
            placed = [(one, found) for one, found in zip(asked, states, strict=True) if found.get("state") == "CREATED"]
            for reservation, found in placed:
                reservation.node = reservation.agent = next(iter(found["bundles_to_node_id"].values()))
            if not placed:
                return

    def displaced(self, reservation: Reservation) -> bool:
        """Note that its node is gone; return True if Ray finds another place for it by itself."""
        reservation.node = reservation.agent = None
        return True

    def guardian(self, reservation: Reservation) -> Any:
        """Return the guardian of its agent; called once for each agent."""
        affinity = importlib.import_module("ray.util.scheduling_strategies").NodeAffinitySchedulingStrategy
        environment = {name: value for name, value in self._options.items() if name == "runtime_env"}
        return _guardian(
            num_cpus=0, max_restarts=0, scheduling_strategy=affinity(reservation.node, soft=False), **environment
        )

    def give_back(self, reservation: Reservation) -> None:
        """Free it; harmless if it is gone, or Ray is."""
        with contextlib.suppress(Exception):
            importlib.import_module("ray.util").remove_placement_group(reservation.handle)


class Actors(Bundles):
    """Reserve by an actor for each worker."""

    are_guardians = True

    def __init__(self, options: Mapping[str, Any]) -> None:
        super().__init__(options)
        self._numbers = itertools.count(1)

    def reserve(self, avoided: Collection[str], near: str | None) -> Reservation:
        labels = _labels(self._options, avoided)
        guardian = _guardian(**{**self._options, **({"label_selector": labels} if labels else {})})
        return Reservation(guardian, near, hello=guardian.node.remote())

    def locate(self, waiting: list[Reservation]) -> None:
        ray = importlib.import_module("ray")
        by_hello = {reservation.hello: reservation for reservation in waiting}
        if not by_hello:
            return
        for hello in ray.wait(list(by_hello), num_returns=len(by_hello), timeout=0)[0]:
            reservation = by_hello[hello]
            try:
                reservation.node = ray.get(hello)
                reservation.agent = f"{reservation.node}/{next(self._numbers)}"
            except Exception as error:
                reservation.error = error

    def displaced(self, reservation: Reservation) -> bool:
        return False

    def guardian(self, reservation: Reservation) -> Any:
        return reservation.handle

    def give_back(self, reservation: Reservation) -> None:
        end(reservation.handle)


def end(guardian: Any) -> None:
    """End an actor at once; harmless if it is gone, or Ray is."""
    with contextlib.suppress(Exception):
        importlib.import_module("ray").kill(guardian, no_restart=True)


def _guardian(**options: Any) -> Any:
    name = f"dpex-node-{os.getpid()}-{secrets.token_hex(4)}"
    return guardian_class(client_session()).options(name=name, max_concurrency=CALLS_AT_ONCE, **options).remote()


def _labels(options: Mapping[str, Any], avoided: Collection[str]) -> dict[str, str]:
    """Return the labels that the user wants of nodes, and that they be none of the nodes ``avoided``."""
    others = {"ray.io/node-id": f"!in({','.join(sorted(avoided))})"} if avoided else {}
    return {**options.get("label_selector", {}), **others}


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
