"""Divides the workers of a cluster among the loaders that tune themselves.

Each loader gets a share of the CPUs in proportion to its weight. CPUs that it cannot use go to other loaders (max-min
fairness). `ClusterShares` decides and is pure. It lives in a small named actor of the cluster, to which each loader
reports about once a second through its `ClusterShare`. The actor belongs to the process that started it and ends with
that process. The next report of another loader starts a new actor, which knows all loaders within a second. A loader
that has not reported for `FORGOTTEN_S` seconds has no share.
"""

from __future__ import annotations

import contextlib
import heapq
import importlib
import logging
import math
import os
import socket
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from typing import Any

from dpex.system.clock import monotonic

logger: logging.Logger = logging.getLogger("dpex")

FORGOTTEN_S = 5.0
"""Seconds without a report after which a loader has no share. They span several reports, because one may be late."""
GROWTH = 2
"""A loader's claim is at most `GROWTH` times its requested workers, plus one. So a share that a loader leaves unused
goes to other loaders, and a share that it uses grows with its requests."""
SAME = 0.1
"""Relative changes of a loader's useful workers up to this are ignored, so that noise moves no workers."""
CAPACITY_S = 5.0
"""Seconds over which the maximum of the capacity is taken. A worker that was just requested may be missing from all
counts for a moment, and no loader should lose a worker for that."""
DIVIDE_EVERY_S = 0.2
"""Minimum seconds between two divisions, because a thousand loaders report a thousand times a second. A new loader does
not wait for this."""
PARTS = 1000
"""A larger capacity is divided into this many parts, instead of into single workers, so that a division takes a
millisecond or two."""
_ROUNDING = 1e-9
"""Tolerance for rounding errors in sums of CPUs."""

ACTOR, NAMESPACE = "dpex-shares", "dpex"
PATIENCE_S = 5.0
"""Maximum seconds for which `shares` waits for the actor, for a command that shows the cluster."""
ANSWER_S = 0.2
"""Maximum seconds for which the tuner waits for the actor. An actor that runs answers within milliseconds."""
_numbers = count(1)


@dataclass(frozen=True, kw_only=True)
class Claim:
    """A loader's claim to workers of a cluster.

    ``useful``: Workers that would speed up training. ``most``: Workers that fit into the cluster. ``weight``: The
    relative share. ``cpus``: CPUs of a worker, in the unit of the capacity.
    """

    useful: int
    most: int
    weight: float = 1.0
    cpus: float = 1.0
    requested: int = 0
    running: int = 0

    @property
    def lacking(self) -> int:
        """Workers that would speed up training and do not run."""
        return max(0, self.useful - self.running)


def fair_shares(capacity: float, claims: Mapping[str, Claim]) -> dict[str, int]:
    """Divide ``capacity``, in the unit of `Claim.cpus`, among loaders. Return the number of workers of each.

    The next worker always goes to the loader with the fewest CPUs for its weight, among the loaders that have fewer
    workers than are useful to them. When all have enough, the rest of the capacity is divided by the same rule, so that
    all loaders may try more workers.
    """
    shares = dict.fromkeys(claims, 0)
    part = max(1, int(capacity / PARTS))

    def turn(name: str) -> tuple[bool, float, int, str]:
        claim, share = claims[name], shares[name]
        return share >= claim.useful, share * claim.cpus / claim.weight, -claim.running, name

    queue = [turn(name) for name in claims]
    heapq.heapify(queue)
    while queue:
        *_, name = heapq.heappop(queue)
        claim, share = claims[name], shares[name]
        limit = min(claim.most, claim.useful if share < claim.useful else claim.most)
        more = min(part, limit - share, int((capacity + _ROUNDING) / claim.cpus))
        if more > 0:
            shares[name] += more
            capacity -= more * claim.cpus
            heapq.heappush(queue, turn(name))
    return shares


class ClusterShares:
    """Divides the cluster among the loaders that report: the class of the actor. Times are seconds of one clock."""

    def __init__(self) -> None:
        self._claims: dict[str, Claim] = {}
        self._seen_at: dict[str, float] = {}
        self._shares: dict[str, int] = {}
        self._capacities: list[tuple[float, float]] = []
        self._divided_at = -math.inf

    def report(self, name: str, claim: Claim, free: float, total: float, now: float | None = None) -> int:
        """Return the number of workers that the loader ``name`` may have.

        ``free`` and ``total`` are the free capacity of the cluster, now and if no loader had workers, in the unit of
        `Claim.cpus`. ``now``: seconds.
        """
        now = monotonic() if now is None else now
        before = self._claims.get(name, claim)
        if abs(claim.useful - before.useful) <= SAME * before.useful:
            claim = replace(claim, useful=before.useful)
        self._claims[name], self._seen_at[name] = claim, now
        if name not in self._shares or now - self._divided_at >= DIVIDE_EVERY_S:
            self._divide(free, total, now)
        return self._shares[name]

    def _divide(self, free: float, total: float, now: float) -> None:
        self._divided_at = now
        self._claims = {known: one for known, one in self._claims.items() if now - self._seen_at[known] <= FORGOTTEN_S}
        held = sum(one.requested * one.cpus for one in self._claims.values())
        self._capacities = [(at, known) for at, known in self._capacities if now - at <= CAPACITY_S]
        self._capacities.append((now, min(total, held + free)))
        reachable = {
            name: replace(one, useful=min(one.useful, GROWTH * one.requested + 1)) for name, one in self._claims.items()
        }
        self._shares = fair_shares(max(known for _, known in self._capacities), reachable)

    def claims(self) -> dict[str, tuple[Claim, int]]:
        return {name: (claim, self._shares[name]) for name, claim in self._claims.items()}


# -- the actor ---------------------------------------------------------------------------------------------------------


class ClusterShare:
    """A loader's share of a cluster, computed by the actor. Without an actor, loaders have no shares."""

    def __init__(self, weight: float) -> None:
        self._weight = weight
        self._name = f"{socket.gethostname()}:{os.getpid()} {Path(sys.argv[0]).name or 'python'} #{next(_numbers)}"
        self._actor: Any = None
        self._answer: Any = None
        self._granted: int | None = None

    def report(self, claim: Claim, *, free: float, total: float) -> int | None:
        """Report ``claim`` with this loader's weight. Return the workers last granted, or None without an actor."""
        try:
            ray = importlib.import_module("ray")
            if self._actor is None:
                self._actor = _actor()
            if self._answer is None:
                weighted = replace(claim, weight=self._weight)
                self._answer = self._actor.report.remote(self._name, weighted, free, total)
            if ray.wait([self._answer], timeout=ANSWER_S)[0]:
                answer, self._answer = self._answer, None
                self._granted = int(ray.get(answer))
        except Exception as error:
            logger.debug("the actor with the shares of this cluster does not answer: %s", error)
            self._actor = self._answer = self._granted = None
        return self._granted


def shares() -> dict[str, tuple[Claim, int]]:
    """Return the claims and grants of the tuned loaders on this cluster, by loader. The call asks Ray."""
    ray = importlib.import_module("ray")
    with contextlib.suppress(ValueError, ray.exceptions.RayError):  # no loader has started the actor, or it has ended
        actor = ray.get_actor(ACTOR, namespace=NAMESPACE)
        return dict(ray.get(actor.claims.remote(), timeout=PATIENCE_S))
    return {}


def _actor() -> Any:
    """Return the actor of this cluster. Start it, preferably on this node, if none runs. Asks Ray."""
    ray = importlib.import_module("ray")
    affinity = importlib.import_module("ray.util.scheduling_strategies").NodeAffinitySchedulingStrategy
    here = affinity(ray.get_runtime_context().get_node_id(), soft=True)
    options = {"name": ACTOR, "namespace": NAMESPACE, "get_if_exists": True, "num_cpus": 0}
    return ray.remote(ClusterShares).options(**options, scheduling_strategy=here).remote()
