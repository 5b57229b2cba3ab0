"""Tickets that are made again, after the end of their worker or because another machine takes too long. PURE.

A ticket that killed too many workers gets an error as its result. So does the next ticket of a stream that cannot be
restarted.

The end of a worker with a hanging sample does not count against its tickets: another worker makes them again. If the
same sample hangs again, the ticket is given up, or made without the sample.
"""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

from dpex.errors import SampleTimeoutError, WorkerDiedError
from dpex.measure.settings import LOCAL
from dpex.schedule.events import NO_STATUS, Notice, Raise, WorkerGone
from dpex.schedule.logical_workers import LogicalWorkers
from dpex.schedule.placement import Place, Placement, why_too_many_died
from dpex.schedule.sample_policy import HANGS, leaving_out
from dpex.schedule.schedule import Schedule, Ticket

_MOST_LETTERS = 200
"""Maximum letters of dataset indices in an error message."""
PATIENCE = 1.0
"""A ticket is late after `PATIENCE` times the mean batch time. `LateTickets` states a bound that holds for 1."""
LEAST_PATIENCE_S = 0.1
"""Minimum seconds of waiting before a ticket is late, because a healthy link may pause for a moment, and many tiny
batches arrive in one message."""


class Failures:
    """Handles the end of a worker: its tickets are made again or given up, or the epoch ends with an error.

    Attributes:
        deaths: Workers that ended unexpectedly, by pool. Any thread may read it.
        remade: Tickets of these workers that had to be made again. Any thread may read it.
    """

    def __init__(
        self, placement: Placement, logicals: LogicalWorkers, *, iterable: bool, tolerates: bool = False
    ) -> None:
        self._placement = placement
        self._logicals = logicals
        self._iterable = iterable
        self._tolerates = tolerates
        self._hung_in: dict[tuple[int, int, int], set[Place]] = {}
        """Workers in which a sample hung, by the epoch, the ticket and the position of the sample."""
        self.deaths: Counter[str] = Counter()
        self.remade: int = 0

    def worker_ended(self, schedule: Schedule, epoch: int, event: WorkerGone, now: float) -> None:
        """Take in the end of a worker at ``now``, in seconds. Its tickets of earlier epochs are not made again."""
        place, is_present = Place(event.pool, event.worker), event.epoch == epoch
        broken = self._logicals.broken_by(place, schedule, event.working_on if is_present else None)
        again, given_up = self._take_back(schedule, event) if is_present else (0, [])
        if not event.expected:
            self.deaths[event.pool] += 1
            self.remade += again
            if not event.is_reported and not given_up and not broken and (again or not self._iterable):
                self._placement.instructions.append(_warning_of_death(event, again))
        for stream in broken:
            self._fail_stream(schedule, stream, event)
        self._logicals.evict(place, now)
        if not event.expected:
            self._give_up_after_too_many(event)

    def _take_back(self, schedule: Schedule, event: WorkerGone) -> tuple[int, list[Ticket]]:
        """Requeue the tickets of the worker. Return how many are made again, and the tickets that are given up."""
        held = sum(ticket is not None and ticket.issued for ticket in map(schedule.ticket, event.lost))
        if event.hung is None:
            given_up = schedule.requeue_lost(event.lost, event.working_on)
        else:
            given_up = self._without_what_hangs(schedule, event, event.hung)
            schedule.requeue_lost(
                number for number in event.lost if number not in {ticket.number for ticket in given_up}
            )
        for number in event.lost:
            self._placement.remove_ticket(number)
            ticket = schedule.ticket(number)
            if ticket is not None:
                self._placement.dirty.add(ticket.queue)
        for ticket in given_up:
            error = _gave_up(ticket, event.why) if event.hung is None else self._hangs(ticket, event.why)
            schedule.accept_result(ticket.number, lambda error=error: error)
            if self._iterable:
                schedule.end_queue(ticket.queue)  # the position of the stream after this ticket is unknown
        return held - len(given_up), given_up

    def _without_what_hangs(self, schedule: Schedule, event: WorkerGone, place: int) -> list[Ticket]:
        """Leave out a sample that hung in `HANGS` workers. If impossible, return its ticket, which is given up."""
        ticket = None if event.working_on is None else schedule.ticket(event.working_on)
        if ticket is None or not ticket.issued:
            return []
        workers = self._hung_in.setdefault((event.epoch, ticket.number, place), set())
        workers.add(Place(event.pool, event.worker))
        if len(workers) < HANGS:
            return []
        index = leaving_out(ticket.index, place, event.why.partition("\n")[0]) if self._tolerates else None
        if index is None:
            return [ticket]
        ticket.index = index
        workers.clear()  # the replacement sample may hang once, too
        return []

    def _hangs(self, ticket: Ticket, why: str) -> SampleTimeoutError:
        remedy = "SamplePolicy(on_error='skip') has batches made without such samples"
        if self._tolerates:
            remedy = "Samples in its place hung as well: look at the storage, or give a longer timeout_s"
        return SampleTimeoutError(
            f"{why}. It did so in {HANGS} workers; batch {ticket.number} (dataset indices {_shortened(ticket.index)}) "
            f"is given up. {remedy}"
        )

    def _fail_stream(self, schedule: Schedule, logical: int, event: WorkerGone) -> None:
        """End a stream that cannot restart. Its first open ticket gets an error; if none is open, the epoch ends."""
        numbers = sorted(t.number for t in schedule.open_tickets(logical))
        error = WorkerDiedError(
            f"{event.why}; no other worker can continue stream {logical} of the IterableDataset without repeating or "
            "losing samples, as it has no state to restart from"
        )
        if numbers:
            schedule.accept_result(numbers[0], lambda: error)
        else:
            self._placement.instructions.append(Raise(error))
        schedule.end_queue(logical)

    def _give_up_after_too_many(self, event: WorkerGone) -> None:
        placement, pool = self._placement, event.pool
        if why := why_too_many_died(placement.pools.get(pool, NO_STATUS), placement.wanted.get(pool, 0)):
            placement.instructions.append(Raise(WorkerDiedError(f"{event.why}; {why}")))


def _warning_of_death(event: WorkerGone, again: int) -> Notice:
    batches = "batch" if again == 1 else f"{again} batches"
    held = f" Its {batches} will be made again." if again else ""
    return Notice(f"{event.why}.{held} Training continues.")


def _gave_up(ticket: Ticket, why: str) -> WorkerDiedError:
    return WorkerDiedError(
        f"{why}. Batch {ticket.number} (dataset indices {_shortened(ticket.index)}) killed {ticket.deaths} workers, "
        "one after the other, and is given up"
    )


def _shortened(index: Any) -> str:
    text = repr(index)
    return text if len(text) <= _MOST_LETTERS else f"{text[:_MOST_LETTERS]}… ({len(text)} characters)"


# -- late tickets ------------------------------------------------------------------------------------------------------


class LateTickets:
    """Late tickets of other machines, which idle local workers make again.

    A slow link or a hanging machine delays its tickets, and batches in order wait for them. The remaining delay is
    unknown, but the time that a local worker takes for a batch is known. dpex waits for that time, and then has the
    tickets made again. This takes at most twice as long as the better choice (to wait, or to remake them at once), by
    the ski rental problem (Karlin, Manasse, Rudolph and Sleator, 1988). The first result counts, and the second is
    dropped, because a batch does not depend on the worker that makes it.

    Once a ticket is late, all other tickets that were sent before that moment are late without a wait. If all workers
    are remote, no ticket is made again, because only these workers may have access to the data.

    Attributes:
        made_again: The number of late tickets that local workers made again. Any thread may read it.
        due_at: Time at which the awaited ticket will be late, in seconds; infinite if no check is needed.
    """

    def __init__(self, placement: Placement, *, may_make: bool) -> None:
        self._placement = placement
        self._may_make = may_make
        self._awaited: tuple[int, int] | None = None
        """Epoch and number of the ticket that the consumer waits for."""
        self._since = 0.0
        self._jammed_at = -math.inf
        """Time at which a ticket was last found late. Tickets that were sent before this time are late, too."""
        self.made_again: int = 0
        self.due_at: float = math.inf

    def remake_late(self, schedule: Schedule, epoch: int, now: float) -> None:
        """Send late tickets to idle local workers. Called when the consumer is about to wait for its next batch."""
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
        """Return the number of idle local workers."""
        local = self._placement.pools.get(LOCAL)
        return 0 if local is None else max(0, len(local.workers) - self._placement.load[LOCAL])

    def _late(self, schedule: Schedule) -> list[Ticket]:
        """Return all tickets that are late, the most urgent first."""
        sent_at = self._placement.sent_at
        remote = [(ticket, at) for ticket in schedule.issued() if (at := sent_at(ticket.number)) is not None]
        return sorted(ticket for ticket, at in remote if at <= self._jammed_at)
