"""Place for remote workers: what a loader tells of its need, and what it is told. PURE."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from dpex.autotune.types import Sample
from dpex.measure.sums import NodeSums

MOST_WAIT = 0.999
"""Of the loop's time: a window of a second cannot show a smaller rest."""


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
        """The fields of a `dpex.core.fair_shares.Claim`, but for the weight; at first it needs what it has."""
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


def node_links(before: Mapping[str, NodeSums], after: Mapping[str, NodeSums], seconds: float) -> dict[str, NodeLink]:
    """The ways that are measured, between two looks at the machines."""
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


def remote_need(sample: Sample, wait_goal: float) -> float | None:
    """The number of remote workers, any fraction; None if the window does not tell.

    The loop takes ``rate`` batches a second and would take ``rate / (1 - w)`` if it did not wait for its share ``w`` of
    the time. What is missing would be made by workers that take as long for a batch as those there are. A loop that
    hardly waits needs what it has. One that makes batches itself while the workers that were asked for have no place
    yet waits for these.
    """
    total_s = sample.wait_s + sample.own_s + sample.work_s
    if not sample.batches or total_s <= 0:
        return None
    made_here_s = min(sample.own_s, sample.made_here.busy_s) if sample.remote.requested else 0.0
    wait = min((sample.wait_s + made_here_s) / total_s, MOST_WAIT)
    if wait <= wait_goal:
        return float(sample.remote.requested)
    batch_s = _batch_s(sample)
    if batch_s is None:
        return None
    missing = sample.rate * wait / (1.0 - wait)
    return sample.remote.running + missing * batch_s


def made_without(sample: Sample) -> float:
    """What this machine makes, as the number of remote workers that it would take."""
    batch_s = _batch_s(sample)
    if batch_s is None or sample.seconds <= 0:
        return 0.0
    return (sample.local.tickets + sample.made_here.tickets) / sample.seconds * batch_s


def _batch_s(sample: Sample) -> float | None:
    """How long a remote worker takes for a batch; what others took, where there is none; None: nobody made any."""
    made = next((pool for pool in (sample.remote, sample.local, sample.made_here) if pool.tickets), None)
    return None if made is None else made.busy_s / made.tickets
