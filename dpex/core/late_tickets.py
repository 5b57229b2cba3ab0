"""Tickets that another machine owes for too long while workers here have nothing to do: these make them again. PURE.

A link that has become slow, or a machine that hangs, keeps what it was given, and batches in order wait for it. Nobody
can tell how much longer that takes, but how long a worker here would take is known. As with skis, which one may hire
or buy (Karlin, Manasse, Rudolph and Sleator, 1988), waiting for that long and then making the batch again costs at most
twice as much as the better of the two choices, whatever the machine does. The first result counts, and is the same, as
the batch of a number does not depend on who makes it. The other one is dropped.

What was on its way at that moment, too, is late as soon as the consumer waits for it. Where all workers are on other
machines nothing is made again: those workers may be the only ones that can read the data.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from dpex.core.dispatch import Dispatch
from dpex.core.events import PoolStatus
from dpex.core.names import LOCAL
from dpex.core.prefetch import PrefetchRules
from dpex.core.schedule import Schedule, Ticket

PATIENCE = 1.0
"""The consumer waits for so many times what a batch takes: the factor for which the bound of 2 holds."""
LEAST_PATIENCE_S = 0.1
"""And for so long at least: a healthy link may pause for a moment, and batches that take microseconds come in messages
of many."""


class LateTickets:
    """See the module.

    Attributes:
        made_again: The number of tickets that were late, and so were made here. Any thread may read it.
        due_at: When the consumer, which waits, should look again, seconds; infinite if nothing could be late.
    """

    def __init__(
        self, pools: Mapping[str, PoolStatus], dispatch: Dispatch, rules: PrefetchRules, *, may_make: bool
    ) -> None:
        self._pools = pools
        self._dispatch = dispatch
        self._rules = rules
        self._may_make = may_make
        self._awaited: tuple[int, int] | None = None
        """Epoch and number of what the consumer waits for."""
        self._since = 0.0
        self._jammed_at = -math.inf
        """What was sent up to then is on its way together with something that was late."""
        self.made_again = 0
        self.due_at = math.inf

    def look(self, schedule: Schedule, epoch: int, now: float) -> None:
        """Send what is late to idle workers here. The consumer is about to wait for the batch that is next in turn."""
        self.due_at = math.inf
        head = schedule.ticket(schedule.next_number) if self._may_make else None
        sent_at = None if head is None else self._dispatch.sent_at(head.number)
        if head is None or sent_at is None:
            return
        if self._awaited != (epoch, head.number):
            self._awaited, self._since = (epoch, head.number), now
        idle = self._idle()
        if not idle:
            return
        late_at = self._since + max(LEAST_PATIENCE_S, PATIENCE * self._rules.service_s)
        if now >= late_at:
            self._jammed_at = now
        elif sent_at > self._jammed_at:
            self.due_at = late_at
            return
        for ticket in self._late(schedule)[:idle]:
            self._dispatch.make_elsewhere(ticket, epoch, LOCAL)
            self.made_again += 1

    def _idle(self) -> int:
        """Workers here that have nothing to do."""
        local = self._pools.get(LOCAL)
        return 0 if local is None else max(0, len(local.workers) - self._dispatch.load[LOCAL])

    def _late(self, schedule: Schedule) -> list[Ticket]:
        """All that is late, the most urgent first."""
        sent_at = self._dispatch.sent_at
        far = [(ticket, at) for ticket in schedule.issued() if (at := sent_at(ticket.number)) is not None]
        return sorted(ticket for ticket, at in far if at <= self._jammed_at)
