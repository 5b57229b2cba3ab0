"""Room for remote workers: what a loader asks a cluster for, and what it gets. PURE."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol


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
