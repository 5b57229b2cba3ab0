"""Logical workers: the workers that they are placed on, their states, and the tickets sent to them. PURE.

Under ``seeding="worker"`` and for streams a ticket belongs to a logical worker, which is PyTorch's worker *k*. A
logical worker is placed on a worker once and stays on it as long as that worker lives. After the worker's death it is
placed on another worker. It starts from the last state that was reported, and makes its later tickets again. A stream
can do so only if its dataset has a state. Datasets are asked for their states from a call of
`LogicalWorkers.ask_states` on. Until that call, the state of a dataset at its start counts as its state.

Each worker takes an equal part of the logical workers. If all workers have their part, other logical workers wait until
no worker has started or ended for `CROWD_AFTER_S`. They are then placed on the workers with the fewest logical workers.
"""

from __future__ import annotations

from collections import Counter
from itertools import groupby, islice
from typing import Any

from dpex.measure.settings import LOCAL
from dpex.schedule.events import Adopt, AskState, Send, Snapshot
from dpex.schedule.placement import Place, Placement
from dpex.schedule.prefetch import LARGEST_GROUP
from dpex.schedule.progress import LogicalLog, ResumePoint
from dpex.schedule.schedule import Schedule, Ticket

CROWD_AFTER_S = 5.0
"""Seconds without the start or the end of a worker, after which logical workers without a worker share a worker. Most
requested workers start sooner. A worker that starts later has nothing to do until the iterator ends."""


class LogicalWorkers:
    """See the module.

    Attributes:
        count: The number of logical workers.
        logs: The states and made tickets of each logical worker.
        untold: Logical workers that were asked for their states and have not reported them yet.
    """

    def __init__(self, placement: Placement, count: int, *, iterable: bool) -> None:
        self._placement = placement
        self.count = count
        self._iterable = iterable
        self.logs: list[LogicalLog] = [LogicalLog(is_stream=iterable) for _ in range(count)]
        self.untold: set[int] = set()
        self._place_of: list[Place | None] = [None] * count
        self._replaying: dict[int, list[Ticket]] = {}
        """Tickets to make again before new tickets, by logical worker."""
        self._never_placed = set(range(count))
        self._changed_at: float | None = None
        """Time of the latest start or end of a worker, in seconds; None before the first start."""
        self.asks_states: bool = False

    def placed_on(self, place: Place) -> list[int]:
        """Return the logical workers of a worker, in order."""
        return [logical for logical, of in enumerate(self._place_of) if of == place]

    def unplaced(self) -> list[int]:
        """Return the logical workers that have no worker now, in order."""
        return [logical for logical, place in enumerate(self._place_of) if place is None]

    # -- an epoch ------------------------------------------------------------------------------------------------

    def new_epoch(self, epoch: int, former: Schedule) -> None:
        """Begin the epoch after ``epoch``.

        If ``epoch`` was broken off, logical workers still make the tickets that they hold, as in PyTorch, and draw
        random numbers for them. So tickets that were sent count as made. The tickets of a logical worker that has had
        no worker yet count, too.
        """
        for ticket in former.unfinished() if self.count else ():
            if ticket.issued or ticket.queue in self._never_placed:
                self.logs[ticket.queue].add_made(epoch, ticket.number, ticket.index)
        for log in self.logs:
            log.begin_epoch()

    def resume_at(self, point: ResumePoint, schedule: Schedule) -> None:
        """Have an epoch begin at the point of another run. No logical worker has a worker yet."""
        points = [each.going_on(point.epoch, point.first) if self._iterable else each for each in point.logicals]
        ended = [queue for queue, logical in enumerate(points) if logical.has_ended]
        schedule.resume_at(point.first, point.turn, ended)
        for log, logical in zip(self.logs, points, strict=False):
            log.resume_at(logical)

    def stream_ended(self, epoch: int, ticket: Ticket) -> None:
        """Note that a stream ended at this ticket."""
        self.logs[ticket.queue].add_end(epoch, ticket.number, ticket.index)

    # -- placing and sending -------------------------------------------------------------------------------------

    def place_all(self, now: float) -> None:
        """Place logical workers that have no worker."""
        if not (unplaced := self.unplaced()):
            return
        load = Counter(self._place_of)
        places = self._placement.places()
        limit = -(-self.count // max(1, sum(self._placement.wanted.values())))
        may_share = self._changed_at is not None and now - self._changed_at > CROWD_AFTER_S
        for logical in unplaced:
            place = min(places, key=lambda it: (load[it], it.pool != LOCAL, it.worker), default=None)
            if place is None or (load[place] >= limit and not may_share):
                break
            load[place] += 1
            self._place_on(logical, place)

    def _place_on(self, logical: int, place: Place) -> None:
        pool, worker = place
        state, made_since = self.logs[logical].latest()
        self._replaying[logical] = [_again(logical, *made) for made in made_since]
        self._placement.instructions.append(Adopt(pool, worker, logical, state))
        if self.asks_states:
            self._placement.instructions.append(AskState(pool, worker, logical))
        self._place_of[logical] = place
        self._never_placed.discard(logical)
        self._placement.dirty.add(logical)

    def ask_states(self) -> None:
        """Have workers ask datasets for their states from now on. A second call does nothing."""
        if self.asks_states:
            return
        self.asks_states = True  # `_place_on` asks logical workers that are placed later
        for logical, place in enumerate(self._place_of):
            if place is not None and self._placement.serves(place):
                self._placement.instructions.append(AskState(*place, logical))
                if not self._iterable or self.logs[logical].is_known:
                    self.untold.add(logical)

    def issue(self, schedule: Schedule, epoch: int, now: float, *, starving: bool) -> None:
        """Send each logical worker the tickets that wait for it; if ``starving``, incomplete messages as well."""
        if None in self._place_of:
            self.place_all(now)
        dirty = self._placement.dirty
        for logical in sorted(dirty):
            if self._issue_to(logical, schedule, epoch, starving):
                dirty.discard(logical)

    def _issue_to(self, logical: int, schedule: Schedule, epoch: int, starving: bool) -> bool:
        """Send the tickets that wait for one logical worker. Return True if none is left."""
        placement, place = self._placement, self._place_of[logical]
        if place is None or not placement.serves(place):
            return False
        if logical in self._replaying:
            self._replay(logical, place)
        group, (pool, worker) = placement.rules.group, place
        while waiting := schedule.pending(logical):
            if waiting < group and not starving and schedule.ready:
                placement.incomplete.add(logical)
                return False
            if not placement.send(schedule, Send(pool, worker, logical, epoch, []), min(waiting, group)):
                return not schedule.pending(logical)
        return True

    def refused(self, messages: list[Send]) -> None:
        """Take back messages that were refused, the latest first."""
        again: dict[int, list[Ticket]] = {}
        for message in messages:
            if message.again:
                again[message.queue] = message.tickets + again.get(message.queue, [])
        self._replaying.update(again)

    def _replay(self, logical: int, place: Place) -> None:
        """Send the tickets that a dead worker had made since its last known state, in messages of one epoch each."""
        pool, worker = place
        for epoch, tickets in groupby(self._replaying.pop(logical), key=lambda ticket: ticket.epoch):
            while group := list(islice(tickets, LARGEST_GROUP)):
                self._placement.instructions.append(Send(pool, worker, logical, epoch, group, again=True))

    # -- workers that come and end -------------------------------------------------------------------------------

    def worker_up(self, now: float) -> None:
        """Note that a worker started at ``now``. Any queue may have tickets to send to it."""
        self._changed_at = now
        if self.count:
            self._placement.dirty.update(range(self.count))

    def snapshot(self, event: Snapshot, epoch: int, first: int) -> None:
        """Take in a state. Tickets before it need not be made again.

        Args:
            event: The report of a worker.
            epoch: The present epoch.
            first: The number of the next batch in that epoch.
        """
        log = self.logs[event.logical]
        self.untold.discard(event.logical)
        log.add_state(event.epoch, event.number, event.state)
        log.forget_before(epoch, first)

    def unreported(self) -> int:
        """Count the logical workers that have reported no state."""
        return sum(not log.is_known for log in self.logs)

    def broken_by(self, place: Place, schedule: Schedule, working_on: int | None) -> list[int]:
        """Return the streams of an ended worker that had begun and, without a state, cannot be restarted.

        Streams without a begun batch in this epoch start anew. ``working_on``: The ticket that the worker was making.
        """
        if not self._iterable:
            return []
        return [k for k in self.placed_on(place) if not self.logs[k].is_known and schedule.is_in_midst(k, working_on)]

    def evict(self, place: Place, now: float) -> None:
        """Take the logical workers off a worker that ended at ``now``. They wait to be placed again."""
        if self._changed_at is not None:
            self._changed_at = now  # a replacement has `CROWD_AFTER_S` to start
        for logical in self.placed_on(place):
            self._placement.dirty.add(logical)
            self._place_of[logical] = None


def _again(logical: int, epoch: int, number: int, index: Any) -> Ticket:
    ticket = Ticket(number, index, logical)
    ticket.epoch = epoch
    return ticket
