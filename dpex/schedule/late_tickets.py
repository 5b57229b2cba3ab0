"""Tickets that another machine owes for too long while workers here are idle: these make them again. PURE.

A link that has become slow, or a machine that hangs, keeps the tickets that it was sent, and batches in order wait for
them. How much longer that takes is unknown, but the time that a local worker takes for a batch is known. The tickets
are awaited for that time and then made again. This costs at most twice as much as the better of the two choices,
whatever the machine does: it is the ski rental problem (Karlin, Manasse, Rudolph and Sleator, 1988). The first result
counts, and the other one is dropped, as a batch does not depend on the worker that makes it.

Tickets that were under way at that moment are late as soon as the consumer waits for them. If all workers are on other
machines nothing is made again: those workers may be the only ones that can read the data.
"""

from __future__ import annotations

import math

from dpex.schedule.names import LOCAL
from dpex.schedule.placement import Placement
from dpex.schedule.schedule import Schedule, Ticket

PATIENCE = 1.0
"""The consumer waits for this many times what a batch takes: the factor for which the bound of 2 holds."""
LEAST_PATIENCE_S = 0.1
"""The shortest wait, seconds: a healthy link may pause for a moment, and batches that take microseconds travel in
messages of many."""


class LateTickets:
    """See the module.

    Attributes:
        made_again: The number of late tickets that local workers made again. Any thread may read it.
        due_at: When the consumer, which waits, should look again, seconds; infinite if nothing could be late.
    """

    def __init__(self, placement: Placement, *, may_make: bool) -> None:
        self._placement = placement
        self._may_make = may_make
        self._awaited: tuple[int, int] | None = None
        """Epoch and number of the ticket that the consumer waits for."""
        self._since = 0.0
        self._jammed_at = -math.inf
        """Tickets that were sent up to then are under way together with one that was late."""
        self.made_again = 0
        self.due_at = math.inf

    def look(self, schedule: Schedule, epoch: int, now: float) -> None:
        """Send what is late to idle workers here, as the consumer is about to wait for the next batch in turn."""
        self.due_at = math.inf
        head = schedule.ticket(schedule.next_number) if self._may_make else None
        sent_at = None if head is None else self._placement.sent_at(head.number)
        if head is None or sent_at is None:
            return
        if self._awaited != (epoch, head.number):
            self._awaited, self._since = (epoch, head.number), now
        idle = self._idle()
        if not idle:
            return
        late_at = self._since + max(LEAST_PATIENCE_S, PATIENCE * self._placement.rules.service_s)
        if now >= late_at:
            self._jammed_at = now
        elif sent_at > self._jammed_at:
            self.due_at = late_at
            return
        for ticket in self._late(schedule)[:idle]:
            self._placement.make_elsewhere(ticket, epoch, LOCAL)
            self.made_again += 1

    def _idle(self) -> int:
        """Return the number of workers here that have nothing to do."""
        local = self._placement.pools.get(LOCAL)
        return 0 if local is None else max(0, len(local.workers) - self._placement.load[LOCAL])

    def _late(self, schedule: Schedule) -> list[Ticket]:
        """Return all tickets that are late, the most urgent first."""
        sent_at = self._placement.sent_at
        far = [(ticket, at) for ticket in schedule.issued() if (at := sent_at(ticket.number)) is not None]
        return sorted(ticket for ticket, at in far if at <= self._jammed_at)
