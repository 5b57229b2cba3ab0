"""Room for workers on the cluster, one reservation each, in the way that Ray sees.

As a rule that is a placement group of one bundle: Ray places it, an autoscaler sees those that wait, and giving one
back frees its CPUs at once. All workers of a node share one agent there, with one guardian. Where that would not do
(see `has_an_agent_of_its_own`) the reservation is an actor, which is the guardian of an agent with a single worker.

Used by one thread. Nothing here waits for the cluster longer than one answer of its control service takes.
"""

from __future__ import annotations

import contextlib
import importlib
import itertools
import os
import secrets
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from dpex._ray import client_session, placement_group_near, placement_group_states
from dpex.pools.ray.guardian import CALLS_AT_ONCE, guardian_class
from dpex.pools.ray.options import has_an_agent_of_its_own, needs_of

ASKED_AT_ONCE = 4
"""Placement groups without a place that are asked after: Ray places them in their order, so the others wait as well."""


@dataclass(eq=False)
class Reservation:
    """Room for one worker.

    ``near``: where it was asked for. ``node``: where it is, None while it has no place. ``agent``: which agent serves
    it. ``leaving``: it is given back once its worker has left. ``error``: what Ray says of one that can have no place
    any more.
    """

    handle: Any
    near: str | None = None
    node: str | None = None
    agent: str | None = None
    leaving: bool = False
    hello: Any = None
    error: BaseException | None = None


class Reservations(Protocol):
    """A way to reserve. ``are_guardians``: each is its agent's guardian, which goes with it."""

    are_guardians: bool

    def reserve(self, avoided: Collection[str], near: str | None) -> Reservation:
        """Ask for room for one worker, not on the nodes ``avoided``, and preferably on the one ``near``."""

    def locate(self, waiting: list[Reservation]) -> None:
        """Find out which of these have a place."""

    def displaced(self, reservation: Reservation) -> bool:
        """Its node is gone; True if Ray finds another place for it by itself."""

    def guardian(self, reservation: Reservation) -> Any:
        """The guardian of its agent; asked for once for each agent."""

    def give_back(self, reservation: Reservation) -> None:
        """Free it; harmless if it is gone, or Ray is."""


def reservations_for(options: Mapping[str, Any]) -> Reservations:
    """The way that suits these options of a worker."""
    return Actors(options) if has_an_agent_of_its_own(options) else Bundles(options)


class Bundles:
    """Placement groups; see `Reservations`."""

    are_guardians = False

    def __init__(self, options: Mapping[str, Any]) -> None:
        self._options = options
        self._bundle = {name: float(value) for name, value in needs_of(options).items()}
        self._spreads = options["scheduling_strategy"] == "SPREAD"

    def reserve(self, avoided: Collection[str], near: str | None) -> Reservation:
        """See `Reservations.reserve`."""
        labels = _labels(self._options, avoided)
        return Reservation(placement_group_near(self._bundle, near if self._spreads else None, labels), near)

    def locate(self, waiting: list[Reservation]) -> None:
        """See `Reservations.locate`."""
        for at in range(0, len(waiting), ASKED_AT_ONCE):
            asked = waiting[at : at + ASKED_AT_ONCE]
            states = placement_group_states([one.handle for one in asked])
            placed = [(one, found) for one, found in zip(asked, states, strict=True) if found.get("state") == "CREATED"]
            for reservation, found in placed:
                reservation.node = reservation.agent = next(iter(found["bundles_to_node_id"].values()))
            if not placed:
                return

    def displaced(self, reservation: Reservation) -> bool:
        """See `Reservations.displaced`."""
        reservation.node = reservation.agent = None
        return True

    def guardian(self, reservation: Reservation) -> Any:
        """See `Reservations.guardian`."""
        affinity = importlib.import_module("ray.util.scheduling_strategies").NodeAffinitySchedulingStrategy
        environment = {name: value for name, value in self._options.items() if name == "runtime_env"}
        return _guardian(
            num_cpus=0, max_restarts=0, scheduling_strategy=affinity(reservation.node, soft=False), **environment
        )

    def give_back(self, reservation: Reservation) -> None:
        """See `Reservations.give_back`."""
        with contextlib.suppress(Exception):
            importlib.import_module("ray.util").remove_placement_group(reservation.handle)


class Actors:
    """An actor for each worker; see `Reservations`."""

    are_guardians = True

    def __init__(self, options: Mapping[str, Any]) -> None:
        self._options = options
        self._numbers = itertools.count(1)

    def reserve(self, avoided: Collection[str], near: str | None) -> Reservation:
        """See `Reservations.reserve`."""
        labels = _labels(self._options, avoided)
        guardian = _guardian(**{**self._options, **({"label_selector": labels} if labels else {})})
        return Reservation(guardian, near, hello=guardian.place.remote())

    def locate(self, waiting: list[Reservation]) -> None:
        """See `Reservations.locate`."""
        ray = importlib.import_module("ray")
        by_hello = {reservation.hello: reservation for reservation in waiting}
        if not by_hello:
            return
        for hello in ray.wait(list(by_hello), num_returns=len(by_hello), timeout=0)[0]:
            reservation = by_hello[hello]
            try:
                reservation.node = ray.get(hello)[0]
                reservation.agent = f"{reservation.node}/{next(self._numbers)}"
            except Exception as error:
                reservation.error = error

    def displaced(self, reservation: Reservation) -> bool:
        """See `Reservations.displaced`."""
        return False

    def guardian(self, reservation: Reservation) -> Any:
        """See `Reservations.guardian`."""
        return reservation.handle

    def give_back(self, reservation: Reservation) -> None:
        """See `Reservations.give_back`."""
        end(reservation.handle)


def end(guardian: Any) -> None:
    """End an actor at once; harmless if it is gone, or Ray is."""
    with contextlib.suppress(Exception):
        importlib.import_module("ray").kill(guardian, no_restart=True)


def _guardian(**options: Any) -> Any:
    name = f"dpex-node-{os.getpid()}-{secrets.token_hex(4)}"
    return guardian_class(client_session()).options(name=name, max_concurrency=CALLS_AT_ONCE, **options).remote()


def _labels(options: Mapping[str, Any], avoided: Collection[str]) -> dict[str, str]:
    """What the user asks of nodes, and that they be none of those."""
    others = {"ray.io/node-id": f"!in({','.join(sorted(avoided))})"} if avoided else {}
    return {**options.get("label_selector", {}), **others}
