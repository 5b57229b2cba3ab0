"""Which lane and host a ticket is sent to, in messages of which size.

Tickets that any host may make go to the lane with the least on its way by host; those of a logical worker to the host
where it lives. Used by the thread that holds the engine's lock; ``load`` may be read from any.

A ticket that was sent counts to its lane's load until `arrived` says that it came back, made or lost.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dpex.core.prefetch import Pace
from dpex.core.schedule import SHARED, Schedule, Ticket
from dpex.engine.assignment import Tenancy
from dpex.pools.base import Lane


class Dispatch:
    """``lanes`` and ``dirty`` (queues with something to send) are the engine's own.

    ``load``: tickets on their way, by lane. ``logical``: tickets belong to logical workers.
    """

    def __init__(
        self, lanes: Mapping[str, Lane], tenancy: Tenancy, pace: Pace, dirty: set[int], *, logical: bool
    ) -> None:
        self._lanes = lanes
        self._tenancy = tenancy
        self._pace = pace
        self._dirty = dirty
        self._logical = logical
        self._carrier: dict[int, str] = {}
        self.incomplete: set[int] = set()
        """Queues of which something waits for the rest of its message, for all that is known."""
        self.load: dict[str, int] = {}

    def add_lane(self, name: str) -> None:
        """There is a new lane."""
        self.load[name] = 0

    def new_epoch(self) -> None:
        """Nothing is on its way any more."""
        self._carrier.clear()
        self.incomplete.clear()
        self.load = dict.fromkeys(self.load, 0)

    def hosts(self) -> int:
        """Hosts that take tickets; 1 where there is none."""
        return max(1, sum(len(lane.hosts()) for lane in self._lanes.values()))

    def issue(self, schedule: Schedule, epoch: int, *, starving: bool) -> None:
        """Send what waits, as far as there is somebody to take it; ``starving``: incomplete messages, too."""
        if not self._logical:
            self._issue_shared(schedule, epoch, starving)
            return
        self._tenancy.settle()
        self.incomplete.clear()
        for queue in sorted(self._dirty):
            if self._issue_logical(schedule, epoch, queue, starving):
                self._dirty.discard(queue)

    def _issue_shared(self, schedule: Schedule, epoch: int, starving: bool) -> None:
        pace = self._pace
        self.incomplete.clear()
        while (waiting := schedule.pending()) and self._lanes:
            lane = self._least_loaded(schedule.window)
            if lane is None:
                return
            if waiting < pace.group and not starving and schedule.ready:
                self.incomplete.add(SHARED)
                return
            size = pace.message_size(schedule.window, len(lane.hosts()), lane.name == "remote")
            if not self._send(schedule, min(waiting, size), SHARED, epoch, lane, None):
                return
        if not schedule.pending():
            self._dirty.clear()

    def _issue_logical(self, schedule: Schedule, epoch: int, queue: int, starving: bool) -> bool:
        """Send what waits for one logical worker; True if nothing waits any longer."""
        home = self._tenancy.home(queue)
        if home is None:
            return False
        group, (lane, host) = self._pace.group, home
        while waiting := schedule.pending(queue):
            if waiting < group and not starving and schedule.ready:
                self.incomplete.add(queue)
                return False
            if not self._send(schedule, min(waiting, group), queue, epoch, lane, host):
                return False
            self._tenancy.sent(queue)
        return True

    def _send(self, schedule: Schedule, count: int, queue: int, epoch: int, lane: Lane, host: int | None) -> bool:
        """Send so many waiting tickets as one message; False if the lane cannot take it now.

        An exception of a signal handler may come anywhere in here: what was sent then is on its way, the rest waits.
        """
        tickets: list[Ticket] = []
        sent: list[Any] = []
        try:
            schedule.take(count, queue, tickets)
            lane.send(tickets, epoch, host, sent)
        finally:
            if sent:
                self._on_its_way(tickets, lane)
            else:
                schedule.give_back(tickets)
        return bool(sent)

    def _least_loaded(self, window: int) -> Lane | None:
        best, best_load = None, 0.0
        only = len(self._lanes) == 1
        for name, lane in self._lanes.items():
            hosts = len(lane.hosts())
            if not hosts:
                continue
            load = self.load[name] / hosts
            if best is None or load < best_load:
                best, best_load = lane, load
        if best is not None and not only and best_load >= max(2 * self._pace.group, window / self.hosts()):
            return None
        return best

    def _on_its_way(self, tickets: list[Ticket], lane: Lane) -> None:
        for ticket in tickets:
            self._carrier[ticket.number] = lane.name
            self.load[lane.name] += 1

    def arrived(self, number: int) -> None:
        """A ticket came back, made or lost."""
        carrier = self._carrier.get(number)
        if carrier is not None:  # without a call: see `dpex.system.interrupts`
            del self._carrier[number]
            self.load[carrier] -= 1
