"""A node of the cluster that works for a pool: its agent, and the agent's guardian, as the thread that calls Ray sees
them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from dpex.pools.agent.link import AgentLink


@dataclass(eq=False)
class GuardedNode:
    """An agent and its guardian.

    ``key``: as in `Reservation.agent`. ``number``: of the agent, anew each time that one is started. ``pid``: of the
    guardian. ``refs``: what was shipped there last, ``shipment`` its number, and ``path`` where it lies. ``told``: the
    pool knows that it is ready. ``room``: what the pool was told of that last. ``runs``: workers that the pool knows
    of. ``served``: some did, since the agent was started. ``idle_since``: when it was first seen without a reservation,
    None if it has one.
    """

    key: str
    node: str
    guardian: Any
    number: int = -1
    pid: int = 0
    place: str = ""
    path: str = ""
    refs: Any = None
    shipment: int = -1
    link: AgentLink | None = None
    told: bool = False
    room: int = -1
    runs: int = 0
    served: bool = False
    idle_since: float | None = None
