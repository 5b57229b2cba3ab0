"""Which host makes the tickets of which logical worker, and with what random state.

Used under ``seeding="worker"`` and for streams, where a ticket belongs to a logical worker. Those live on hosts and
may move: asked to leave, a logical worker finishes what it was sent and hands over its random state; after a death it
starts from its last snapshot and makes again what came after it. Running streams do not move.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from itertools import islice
from typing import Any

from dpex.core.placement import Homes, Place
from dpex.core.prefetch import LARGEST_GROUP
from dpex.core.schedule import Ticket
from dpex.pools.base import Lane, Released, Snapshot
from dpex.system.clock import monotonic

CROWD_AFTER_S = 5.0
"""How long a logical worker without a host waits for one of its own before it shares another's."""


class Tenancy:
    """``lanes`` are the engine's own, by name. Queues with new work to send are put into ``dirty``."""

    def __init__(self, logicals: int, iterable: bool, lanes: Mapping[str, Lane], dirty: set[int]) -> None:
        self._logicals = logicals
        self._iterable = iterable
        self._lanes = lanes
        self._dirty = dirty
        self._homes = Homes(logicals)
        self._snapshots: dict[int, Any] = {}
        self._since: list[deque[tuple[int, int, Any]]] = [deque() for _ in range(logicals)]
        self._started: set[int] = set()
        self._vacating: set[Place] = set()
        self._replaying: dict[int, deque[Ticket]] = {}
        self._first_up_at: float | None = None

    def places(self) -> list[Place]:
        """Hosts that are up and are to stay."""
        return [
            place
            for name, lane in self._lanes.items()
            for host in lane.hosts()
            if (place := Place(name, host)) not in self._vacating
        ]

    def tenants(self, place: Place) -> set[int]:
        """Logical workers that live there."""
        return self._homes.tenants(place)

    # -- an epoch ------------------------------------------------------------------------------------------------

    def new_epoch(self, epoch: int, unfinished: Iterable[Ticket]) -> None:
        """As in torch, logical workers still make what they hold of epoch ``epoch``, broken off, and draw for it."""
        self._started.clear()
        if not self._iterable:
            for ticket in unfinished:
                self._since[ticket.queue].append((epoch, ticket.number, ticket.index))

    def made(self, epoch: int, ticket: Ticket) -> None:
        """A ticket was made: after a death it is made again, unless a snapshot comes later."""
        since = self._since[ticket.queue]
        if self._iterable or (since and since[-1][1] == ticket.number and since[-1][0] == epoch):
            return
        since.append((epoch, ticket.number, ticket.index))

    def stream_ended(self, logical: int) -> None:
        """A stream has no more; its host may die."""
        self._started.discard(logical)

    # -- settling and sending --------------------------------------------------------------------------------------

    def settle(self) -> None:
        """Give homeless logical workers a host."""
        homes = self._homes
        if None not in homes.home:
            return
        wanted = max(1, sum(lane.counts.wanted for lane in self._lanes.values()))
        late = self._first_up_at is not None and monotonic() - self._first_up_at > CROWD_AFTER_S
        for logical, place in homes.choose(self.places(), wanted, crowd=late):
            state = homes.settle(logical, place)
            self._lanes[place.lane].adopt(place.host, logical, state)
            self._dirty.add(logical)

    def home(self, logical: int) -> tuple[Lane, int] | None:
        """Lane and host that take tickets of ``logical`` now, once what must be made again is on its way there."""
        place = self._homes.home[logical]
        if place is None or logical in self._homes.leaving:
            return None
        lane = self._lanes[place.lane]
        if logical in self._replaying and not self._replay(logical, lane, place.host):
            return None
        return lane, place.host

    def sent(self, logical: int) -> None:
        """A stream with tickets under way has begun."""
        self._started.add(logical)

    def _replay(self, logical: int, lane: Lane, host: int) -> bool:
        """Send again what a dead host had made since its last known state; True once all of it is sent."""
        waiting = self._replaying[logical]
        while waiting:
            group = [t for t in islice(waiting, LARGEST_GROUP) if t.epoch == waiting[0].epoch]
            if not lane.send(group, group[0].epoch, host):
                return False
            for _ in group:
                waiting.popleft()
        del self._replaying[logical]
        return True

    # -- moving --------------------------------------------------------------------------------------------------

    def host_up(self) -> None:
        """A host came up."""
        if self._first_up_at is None:
            self._first_up_at = monotonic()
        self.rebalance()

    def rebalance(self) -> None:
        """Move logical workers (never running streams) to where they are wanted."""
        if not self._logicals:
            return
        if not self._iterable:
            self._vacate_surplus()
            for place in list(self._vacating):
                for logical in self._homes.tenants(place) - self._homes.leaving:
                    self._ask_to_move(logical)
                self._dismiss_if_empty(place)
            spare = self._homes.spare(self.places())
            if spare is not None:
                self._ask_to_move(spare)
        self._dirty.update(range(self._logicals))

    def _vacate_surplus(self) -> None:
        """Empty hosts that are not wanted any more, but no faster than others are there to take over."""
        places = self.places()
        spare = len(places) - sum(lane.counts.wanted for lane in self._lanes.values())
        for name, lane in self._lanes.items():
            here = [place for place in places if place.lane == name]
            surplus = min(spare, len(here) - lane.counts.wanted)
            for place in here[::-1][: max(0, surplus)]:
                self._vacating.add(place)
                spare -= 1

    def _ask_to_move(self, logical: int) -> None:
        place = self._homes.leave(logical)
        self._lanes[place.lane].release(place.host, logical)

    def _dismiss_if_empty(self, place: Place) -> None:
        if place in self._vacating and not self._homes.tenants(place):
            self._lanes[place.lane].dismiss(place.host)

    def released(self, event: Released) -> None:
        """A logical worker has left its host; a second time nothing happens."""
        place = self._homes.home[event.logical]
        if event.logical not in self._homes.leaving or (place is not None and place.host != event.host):
            return
        self._snapshots[event.logical] = event.state
        self._since[event.logical].clear()
        self._homes.left(event.logical, event.state)
        if place is not None:
            self._dismiss_if_empty(place)
        self.rebalance()

    # -- deaths --------------------------------------------------------------------------------------------------

    def snapshot(self, event: Snapshot) -> None:
        """What came before this need not be made again."""
        self._snapshots[event.logical] = event.state
        since = self._since[event.logical]
        while since and since[0][:2] <= (event.epoch, event.number):
            since.popleft()

    def host_gone(self, place: Place) -> list[int]:
        """A host is no more: its logical workers start again elsewhere. Returns running streams, which cannot."""
        self._vacating.discard(place)
        broken = []
        for logical in self._homes.evicted(place):
            if self._iterable and logical in self._started:
                broken.append(logical)
                continue
            self._homes.state[logical] = self._snapshots.get(logical)
            self._replaying[logical] = deque(_replay(logical, *made) for made in self._since[logical])
            self._dirty.add(logical)
        return broken


def _replay(logical: int, epoch: int, number: int, index: Any) -> Ticket:
    ticket = Ticket(number, index, logical)
    ticket.epoch = epoch
    return ticket
