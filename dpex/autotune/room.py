"""Room for remote workers: what a loader asks a cluster for, and what it gets. PURE."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from dpex.measure.sums import NodeStats


class NodeLink(NamedTuple):
    """The network from a node to this machine.

    Attributes:
        bytes_per_s: Bytes per second that arrive now.
        bandwidth: Bytes per second while something was under way, since the node's first batch.
        round_trip_s: Seconds for a packet there and back.
        loss: The part of the bytes that was sent again, 0 to 1.
    """

    bytes_per_s: float
    bandwidth: float
    round_trip_s: float
    loss: float


def node_links(before: Mapping[str, NodeStats], after: Mapping[str, NodeStats], seconds: float) -> dict[str, NodeLink]:
    """Return the network from each node that measures it, between two readings ``seconds`` apart."""
    return {
        place: NodeLink(
            (now.sent_bytes - before[place].sent_bytes if place in before else now.sent_bytes) / seconds,
            now.bandwidth or 0.0,
            now.round_trip_s,
            now.loss,
        )
        for place, now in after.items()
        if now.links and seconds > 0
    }


@dataclass(frozen=True, kw_only=True)
class RoomWanted:
    """A loader's demand for a cluster.

    Attributes:
        requested: Workers that it has asked for.
        running: Those of them that run.
        useful: Workers that would pay if they had places; None if unknown.
        may_grow: True if it may ask for places that no node has yet.
    """

    requested: int
    running: int
    useful: int | None = None
    may_grow: bool = False


@dataclass(frozen=True, kw_only=True)
class RoomFound:
    """The room that a cluster has for a loader.

    Attributes:
        more: Workers beyond those requested.
        unplaced: Requested workers that find no place.
        granted: Its share of the cluster in workers; None if there are no shares.
        message: What happened to a request for further nodes, for the user; "" for nothing.
    """

    more: int
    unplaced: int = 0
    granted: int | None = None
    message: str = ""


class Room(Protocol):
    """A source of room for remote workers. Both methods may take their time."""

    def look(self, wanted: RoomWanted) -> RoomFound | None:
        """Return what this loader may ask for; None if there can be no remote workers."""

    def rest(self) -> None:
        """Give back what was requested beyond its workers: the loader is not in use."""


def room_found(wanted: RoomWanted, free: int, capacity: int, granted: int | None, message: str = "") -> RoomFound:
    """Return what a loader may ask for where ``free`` workers find a place now, and ``capacity`` if none were taken."""
    most = capacity if granted is None else min(capacity, granted)
    return RoomFound(
        more=max(0, min(free, most - wanted.requested)),
        unplaced=max(0, min(wanted.requested - wanted.running, wanted.requested - capacity)),
        granted=granted,
        message=message,
    )
