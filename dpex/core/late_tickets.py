"""Tickets that another machine owes for too long while workers here have nothing to do: these make them again. PURE.

A link that has become slow, or a machine that hangs, keeps what it was given, and batches in order wait for it. Nobody
can tell how much longer that takes, but how long a worker here would take is known. As with skis, which one may hire
or buy (Karlin, Manasse, Rudolph and Sleator, 1988), waiting for that long and then making the batch again costs at most
twice as much as the better of the two choices, whatever the machine does. The first result counts, and is the same, as
the batch of a number does not depend on who makes it. The other one is dropped.

Where no worker here is idle the training process, which waits anyway, makes the batch itself. It can do nothing else
meanwhile, so this takes far more patience: longer than any batch has taken so far, which a batch that is merely slow
does not take.

What was on its way at that moment, too, is late as soon as the consumer waits for it. Where no worker is here, what
no machine takes, as a link carries no more, is late after the same time, and further such tickets at once, until
something comes from another machine that is not too late.
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


PATIENCE_HERE, LEAST_PATIENCE_HERE_S = 2.0, 1.0
"""The same before the training process makes it: so many times what the slowest batch took, and so long at least."""


class LateTickets:
    """See the module.

    ``made_again``: tickets that were late, and so were made here; may be read from any thread. ``due_at``: when the
    consumer, which waits, should look again; infinite if there is nothing that could be late. ``to_be_made_here``: the
    ticket that the training process should make now, unless ``may_make_here`` is false. ``is_stuck``: it made some,
    and nothing that is wanted has come from another machine since.
    """

    def __init__(
        self,
        pools: Mapping[str, PoolStatus],
        dispatch: Dispatch,
        rules: PrefetchRules,
        *,
        may_make: bool,
        may_make_here: bool,
    ) -> None:
        self._pools = pools
        self._dispatch = dispatch
        self._rules = rules
        self._may_make = may_make
        self.may_make_here = may_make_here
        self._awaited: tuple[int, int] | None = None
        """Epoch and number of what the consumer waits for."""
        self._since = 0.0
        self._jammed_at = self._stuck_at = -math.inf
        """What was sent up to then is on its way together with something that was late; and with something that the
        training process made."""
        self.is_stuck = False
        self.made_again = 0
        self.due_at = math.inf
        self.to_be_made_here: Ticket | None = None

    def look(self, schedule: Schedule, epoch: int, now: float) -> None:
        """The consumer is about to wait for the batch that is next in turn."""
        self.due_at, self.to_be_made_here = math.inf, None
        head = schedule.ticket(schedule.next_number) if self._may_make else None
        if head is None:
            return
        sent_at = self._dispatch.sent_at(head.number)
        if sent_at is None and (head.issued or not self._is_all_far()):
            return
        if self._awaited != (epoch, head.number):
            self._awaited, self._since = (epoch, head.number), now
        idle = self._idle()
        if idle and sent_at is not None:
            self._look_with_idle_workers(schedule, epoch, now, sent_at, idle)
        elif self.may_make_here:
            self._look_alone(head, now, sent_at)

    def _look_with_idle_workers(self, schedule: Schedule, epoch: int, now: float, sent_at: float, idle: int) -> None:
        late_at = self._since + max(LEAST_PATIENCE_S, PATIENCE * self._rules.service_s)
        if now >= late_at:
            self._jammed_at = now
        elif sent_at > self._jammed_at:
            self.due_at = late_at
            return
        for ticket in self._late(schedule)[:idle]:
            self._dispatch.make_elsewhere(ticket, epoch, LOCAL)
            self.made_again += 1

    def _look_alone(self, head: Ticket, now: float, sent_at: float | None) -> None:
        late_at = self._since + max(LEAST_PATIENCE_HERE_S, PATIENCE_HERE * self._rules.slowest_s)
        if now >= late_at:
            self._stuck_at, self.is_stuck = now, True
        elif not (self.is_stuck if sent_at is None else sent_at <= self._stuck_at):
            self.due_at = late_at
            return
        self.to_be_made_here = head
        self.made_again += 1

    def came(self, number: int) -> None:
        """The result of that ticket has come, and is wanted."""
        if self._dispatch.sent_at(number) is not None:
            self.is_stuck = False

    def _is_all_far(self) -> bool:
        """Whether there are workers, and none here."""
        workers = {name: len(status.workers) for name, status in self._pools.items()}
        return not workers.get(LOCAL) and any(workers.values())

    def _idle(self) -> int:
        """Workers here that have nothing to do."""
        local = self._pools.get(LOCAL)
        return 0 if local is None else max(0, len(local.workers) - self._dispatch.load[LOCAL])

    def _late(self, schedule: Schedule) -> list[Ticket]:
        """All that is late, the most urgent first."""
        sent_at = self._dispatch.sent_at
        far = [(ticket, at) for ticket in schedule.issued() if (at := sent_at(ticket.number)) is not None]
        return sorted(ticket for ticket, at in far if at <= self._jammed_at)
