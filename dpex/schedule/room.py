"""Place for remote workers: what a loader tells of its need, and what it is told. PURE."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol


class NodeLink(NamedTuple):
    """The way from a machine. bytes_per_s: what comes now. bandwidth: bytes per second while something was on its way,
    round_trip_s and loss, 0 to 1: since its first batch."""

    bytes_per_s: float
    bandwidth: float
    round_trip_s: float
    loss: float


@dataclass(frozen=True, kw_only=True)
class RoomWanted:
    """What a loader has asked for, and what of it runs.

    need: remote workers with which its training loop would never wait; None: not known. own: what is made without any
    of them, as a number of remote workers. useful: remote workers that would pay, wherever they had place; None: not
    known. may_grow: whether places may be asked for that no node has yet. links: the ways from the machines of the
    cluster, to be shown.
    """

    requested: int
    running: int
    need: float | None = None
    own: float = 0.0
    useful: int | None = None
    may_grow: bool = False
    links: Mapping[str, NodeLink] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class RoomFound:
    """What a loader may ask for.

    more: beside those requested. unplaced: of those requested that find no place. granted: how many it may have beside
    the other loaders on the cluster; None: nobody divides it. told: what became of a request for further nodes, for the
    user.
    """

    more: int
    unplaced: int = 0
    granted: int | None = None
    told: str = ""


class Room(Protocol):
    """Place for remote workers. Both methods may take their time."""

    def look(self, wanted: RoomWanted) -> RoomFound | None:
        """What this loader may ask for; None: there can be no remote workers."""

    def rest(self) -> None:
        """Nobody uses the loader for now: give back what was asked for beyond its workers."""


class KnownNeed:
    """A loader's latest need that was known: not every window tells it."""

    def __init__(self) -> None:
        self._need: float | None = None
        self._own = 0.0

    def learn(self, wanted: RoomWanted) -> None:
        """Take in what a window told, if it did."""
        if wanted.need is not None:
            self._need, self._own = wanted.need, wanted.own

    def claim(self, wanted: RoomWanted, most: int, cpus: float) -> dict[str, float]:
        """The fields of a `dpex.schedule.fair_shares.Claim`, but for the weight; at first it needs what it has."""
        return {
            "need": max(1.0, wanted.requested) if self._need is None else self._need,
            "own": self._own,
            "most": most,
            "cpus": cpus,
            "requested": wanted.requested,
            "running": wanted.running,
        }


def room_found(wanted: RoomWanted, free: int, capacity: int, granted: int | None, told: str = "") -> RoomFound:
    """What a loader may ask for where so many workers find a place now, and so many would if nobody had any."""
    most = capacity if granted is None else min(capacity, granted)
    return RoomFound(
        more=max(0, min(free, most - wanted.requested)),
        unplaced=max(0, min(wanted.requested - wanted.running, wanted.requested - capacity)),
        granted=granted,
        told=told,
    )
