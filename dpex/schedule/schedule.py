"""The schedule: which ticket is drawn, issued, made, lost and delivered. PURE: no I/O, no time, no threads.

A *ticket* is one batch to make. It is drawn once, may be issued again after the death of its worker, and is delivered
exactly once: the first result counts, and later results are refused.

Rules:

* ``drawn - delivered <= prefetch``.
* With ``in_order`` tickets leave in the order of their numbers. Otherwise they leave in the order of their results.
* With ``queues == 0`` any worker may make any ticket.
* With ``queues == n`` a ticket belongs to one of *n* logical workers. With ``in_order`` the draw
  chooses the next active queue in turn, as PyTorch does. Otherwise it chooses the next queue with room for the ticket.
* An ended queue (an exhausted stream) drops its other tickets and takes no more.
* A lost ticket returns to the front of its queue. The ticket that the dead worker was making has one try less. After
  ``max_tries`` it is given up, and its failure is delivered in its place.

The owner is a single thread. An illegal call raises `ScheduleError` and leaves the state unchanged.
"""

from __future__ import annotations

from bisect import insort
from collections import deque
from collections.abc import Callable, Iterable
from itertools import islice
from typing import Any, Final, NamedTuple

from dpex.errors import InternalError


class ScheduleError(InternalError):
    """A call that the rules at the top of this module do not allow."""


class Ticket:
    """A batch to be made: its number in the epoch, its index, its queue, and the number of workers that it killed."""

    __slots__ = ("deaths", "epoch", "index", "issued", "number", "queue")

    def __init__(self, number: int, index: Any, queue: int) -> None:
        self.number: int = number
        self.index: Any = index
        self.queue: int = queue
        self.issued: bool = False
        self.deaths: int = 0
        self.epoch: int = 0

    def __lt__(self, other: Ticket) -> bool:
        return self.number < other.number

    def __repr__(self) -> str:
        return f"Ticket({self.number}, {self.index!r}, queue={self.queue}, issued={self.issued}, deaths={self.deaths})"


class MadeBatch(NamedTuple):
    """A finished batch, as `Schedule.pop` returns it: the ticket's number, its queue, and the arguments of
    `Schedule.accept_result`."""

    number: int
    queue: int
    payload: Any
    samples: int = 0
    nbytes: int = 0


_made_batch_of: Callable[..., MadeBatch] = tuple.__new__
"""Make a `MadeBatch` from a tuple of all its fields, once per batch. Calling the class takes twice the time."""

SHARED: Final = 0
"""The queue that every ticket belongs to when there are no logical workers."""


class Schedule:
    """The state of the tickets of one epoch; see the rules at the top of the module."""

    def __init__(self, *, prefetch: int, queues: int = 0, in_order: bool = True, max_tries: int = 3) -> None:
        if prefetch < 1 or queues < 0 or max_tries < 1:
            raise ScheduleError(f"prefetch={prefetch}, max_tries={max_tries}, queues={queues}: minimums are 1, 1, 0")
        self.prefetch: int = prefetch
        self.in_order = in_order
        self.max_tries = max_tries
        self.drawn: int = 0
        self.delivered: int = 0
        self._bound = queues > 0
        self._active = [True] * max(1, queues)
        self._live = len(self._active)
        self._load = [0] * max(1, queues)
        self.delivered_of: list[int] = [0] * max(1, queues)
        """Batches that were delivered, by queue."""
        self._turn = 0
        self._open: dict[int, Ticket] = {}
        self._pending: list[deque[Ticket]] = [deque() for _ in self._active]
        self._ready: dict[int, MadeBatch] = {}
        self.next_number: int = 0
        """The number of the next batch to deliver, with ``in_order``."""
        self.in_hand: dict[int, MadeBatch] = {}
        """The batch that ``next()`` has taken and not yet returned, by thread. A later run makes it again."""
        self.held: list[tuple[Any, MadeBatch]] = []
        """Batches that another engine decodes and has not delivered, each with its value. A later run reads them again.
        """
        self._dropped = 0
        self._sampler_ended = False

    # -- drawing -------------------------------------------------------------------------------------------------

    @property
    def room(self) -> int:
        """The number of tickets that may be drawn now."""
        if self._sampler_ended or not self._live:
            return 0
        room = self.prefetch - len(self._open) - len(self._ready)
        return room if room > 0 else 0

    def draw(self, index: Any) -> Ticket:
        """Make the next ticket, for ``index`` as the sampler gave it."""
        if self._sampler_ended or not self._live or len(self._open) + len(self._ready) >= self.prefetch:
            raise ScheduleError("no room for another ticket")
        queue, turn = SHARED, 0
        if self._bound:
            queue = self._turn
            if self.in_order and self._active[queue]:
                turn = (queue + 1) % len(self._active)
            else:
                queue, turn = self._choose_queue()
        ticket = Ticket(self.drawn, index, queue)
        self._open[ticket.number] = ticket
        self._turn = turn
        self._load[queue] += 1
        self._pending[queue].append(ticket)
        self.drawn += 1
        return ticket

    def _choose_queue(self) -> tuple[int, int]:
        """Return the queue of the next ticket, and the queue whose turn it is after that."""
        turn, share, fallback = self._turn, max(1, self.prefetch // self._live), -1
        for _ in self._active:
            queue, turn = turn, (turn + 1) % len(self._active)
            if self._active[queue]:
                if self.in_order or self._load[queue] < share:
                    return queue, turn
                if fallback < 0 or self._load[queue] < self._load[fallback]:
                    fallback = queue
        return fallback, turn

    def end_sampler(self) -> None:
        """Draw no more, as the sampler has ended."""
        self._sampler_ended = True

    def set_prefetch(self, prefetch: int) -> None:
        """Change the prefetch. Tickets that were already drawn stay drawn."""
        if prefetch < 1:
            raise ScheduleError(f"prefetch={prefetch} must be at least 1")
        self.prefetch = prefetch

    # -- resuming ------------------------------------------------------------------------------------------------

    def resume_at(self, first: int, turn: int, ended: Iterable[int]) -> None:
        """Begin a new schedule with ticket ``first`` instead of 0, and with the queues in ``ended`` at their end."""
        self.drawn = self.next_number = self.delivered = first
        self._turn = turn
        for queue in ended:
            self.end_queue(queue)

    def pass_over(self, index: Any) -> None:
        """Draw a ticket and drop it, because an earlier run has delivered its batch."""
        ticket = self.draw(index)
        self._close(ticket)

    @property
    def _not_returned(self) -> list[MadeBatch]:
        """The batches that were delivered, and that ``next()`` has not returned to the training loop."""
        return [batch for _, batch in self.held] + list(self.in_hand.values())

    def position(self) -> tuple[int, frozenset[int]]:
        """Return the number of the next batch, and the numbers of later batches that were delivered before it, out of
        order."""
        kept = [batch.number for batch in self._not_returned]
        if self.in_order:
            self.peek()
            return min(kept, default=self.next_number), frozenset()
        waiting = self._open.keys() | self._ready.keys() | set(kept)
        first = min(waiting, default=self.drawn)
        return first, frozenset(range(first, self.drawn)) - waiting

    def queue_of(self, number: int) -> int:
        """Return the queue of an undelivered ticket; for any other number, the queue whose turn is next."""
        kept = [batch for batch in self._not_returned if batch.number == number]
        found = self._open.get(number) or self._ready.get(number) or next(iter(kept), None)
        return self._turn if found is None else found.queue

    def standing(self, queue: int) -> tuple[int, int, bool]:
        """Return the number of a queue's first undelivered ticket, its count of delivered ones, and if it has ended."""
        kept = [batch.number for batch in self._not_returned if batch.queue == queue]
        ready = [number for number, delivery in self._ready.items() if delivery.queue == queue] + kept
        waiting = [number for number, ticket in self._open.items() if ticket.queue == queue]
        delivered = self.delivered_of[queue] - len(kept)
        return min(ready + waiting, default=self.drawn), delivered, not (self._active[queue] or ready)

    def queue_counts(self) -> list[tuple[int, bool]]:
        """Return each queue's count of delivered batches, and True if it has ended. Any thread may call it."""
        return [(count, not active) for count, active in zip(self.delivered_of, self._active, strict=True)]

    def is_in_midst(self, queue: int, working_on: int | None) -> bool:
        """Return True if ``queue`` has not ended, and one of its tickets was made or is the ticket ``working_on``."""
        worked_on = None if working_on is None else self._open.get(working_on)
        has_begun = self.delivered_of[queue] or (worked_on is not None and worked_on.queue == queue)
        return self._active[queue] and bool(has_begun or any(made.queue == queue for made in self._ready.values()))

    # -- issuing -------------------------------------------------------------------------------------------------

    def pending(self, queue: int = SHARED) -> int:
        """Return the number of tickets of ``queue`` that wait to be issued."""
        return len(self._pending[queue])

    def issue_tickets(self, limit: int, queue: int = SHARED) -> list[Ticket]:
        """Issue up to ``limit`` tickets of ``queue``, lowest first."""
        waiting = self._pending[queue]
        tickets = [waiting.popleft() for _ in range(min(limit, len(waiting)))]
        for ticket in tickets:
            ticket.issued = True
        return tickets

    def give_back(self, tickets: Iterable[Ticket]) -> None:
        """Take back tickets that were issued but never reached a worker. No try is lost."""
        for ticket in sorted(tickets, reverse=True):
            if self._open.get(ticket.number) is ticket and ticket.issued:
                self._requeue(ticket)
                ticket.issued = False

    def _requeue(self, ticket: Ticket) -> None:
        """Put a ticket back into its queue, in the order of numbers."""
        waiting = self._pending[ticket.queue]
        if not waiting or ticket < waiting[0]:  # the usual case, as tickets are taken from the front
            waiting.appendleft(ticket)
        else:
            ordered = list(waiting)
            insort(ordered, ticket)
            self._pending[ticket.queue] = deque(ordered)

    # -- results -------------------------------------------------------------------------------------------------

    def accept_result(self, number: int, payload: Any, samples: int = 0, nbytes: int = 0) -> bool:
        """Take in the batch of ticket ``number``. Return False, and change nothing, if it is not wanted any more."""
        ticket = self._open.get(number)
        if ticket is None:
            return False
        delivery = _made_batch_of(MadeBatch, (number, ticket.queue, payload, samples, nbytes))
        if not ticket.issued:
            self._no_longer_waits(ticket)
        self._ready[number] = delivery
        del self._open[number]
        self._load[ticket.queue] -= 1
        return True

    def end_queue(self, queue: int) -> None:
        """Drop the open tickets of ``queue``, as its stream is exhausted, and draw no more for it."""
        if self._active[queue]:
            self._active[queue] = False
            self._live -= 1
        for ticket in [t for t in self._open.values() if t.queue == queue]:
            self._close(ticket)
            self._dropped += 1

    def requeue_lost(self, numbers: Iterable[int], working_on: int | None = None) -> list[Ticket]:
        """Take back tickets of a worker that died. Return the tickets that are out of tries.

        Args:
            numbers: The tickets that it held.
            working_on: The ticket that it was making.
        """
        given_up: list[Ticket] = []
        tickets = [t for n in numbers if (t := self._open.get(n)) is not None and t.issued]
        for ticket in sorted(tickets, reverse=True):
            ticket.deaths += ticket.number == working_on
            if ticket.deaths >= self.max_tries:
                given_up.append(ticket)
            else:
                self._requeue(ticket)
                ticket.issued = False
        return given_up

    def _close(self, ticket: Ticket) -> None:
        if not ticket.issued:
            self._no_longer_waits(ticket)
        del self._open[ticket.number]
        self._load[ticket.queue] -= 1

    def _no_longer_waits(self, ticket: Ticket) -> None:
        if ticket in self._pending[ticket.queue]:
            self._pending[ticket.queue].remove(ticket)

    # -- delivering ----------------------------------------------------------------------------------------------

    def pop(self) -> MadeBatch | None:
        """Deliver the next batch and return it; None if it is not made yet."""
        delivery = self.peek()
        if delivery is not None:
            self.deliver(delivery)
        return delivery

    def peek(self) -> MadeBatch | None:
        ready = self._ready
        if not self.in_order:
            return ready[next(iter(ready))] if ready else None
        while self.next_number < self.drawn:
            found = ready.get(self.next_number)
            if found is not None:
                return found
            if self.next_number in self._open:
                return None
            self.next_number += 1  # this ticket was dropped when its stream ended
        return None

    def deliver(self, batch: MadeBatch, thread: int = 0) -> None:
        """Deliver the batch that `peek` returned. With ``thread``, it is in `in_hand` until the caller removes it."""
        number = batch.number
        if thread:
            self.in_hand[thread] = batch
        del self._ready[number]
        self.delivered += 1
        self.delivered_of[batch.queue] += 1
        if self.in_order:
            self.next_number = number + 1

    def upcoming(self, most: int) -> list[MadeBatch]:
        """Return the batches that the next ``most`` calls of `pop` would return now."""
        if not self.in_order:
            return list(islice(self._ready.values(), most))
        found: list[MadeBatch] = []
        for number in range(self.next_number, self.drawn):
            if number in self._open or len(found) == most:
                break
            if number in self._ready:
                found.append(self._ready[number])
        return found

    def made(self) -> list[MadeBatch]:
        """Return all finished batches that are not delivered, even those after an unfinished batch."""
        return list(self._ready.values())

    def replace(self, number: int, payload: Any) -> None:
        """Exchange the payload of a batch that waits for its delivery."""
        if number not in self._ready:
            raise ScheduleError(f"batch {number} does not wait for its delivery")
        self._ready[number] = self._ready[number]._replace(payload=payload)

    @property
    def finished(self) -> bool:
        """True once everything was delivered, and nothing more will be drawn."""
        return not self._open and not self._ready and (self._sampler_ended or not self._live)

    @property
    def ready(self) -> int:
        """The number of batches that are made and not yet delivered."""
        return len(self._ready)

    @property
    def ready_bytes(self) -> int:
        """Bytes of the batches that are made and not yet delivered."""
        return sum(delivery.nbytes for delivery in self._ready.values())

    @property
    def at_work(self) -> int:
        """The number of queues that have tickets to be made."""
        return sum(map(bool, self._load))

    @property
    def in_flight(self) -> int:
        """The number of tickets that are drawn and not yet made."""
        return len(self._open)

    def issued(self) -> list[Ticket]:
        return [ticket for ticket in self._open.values() if ticket.issued]

    def unfinished(self) -> list[Ticket]:
        """Return the tickets that are drawn and not yet made, in order."""
        return list(self._open.values())

    def open_tickets(self, queue: int) -> list[Ticket]:
        """Return the tickets of ``queue`` that are drawn and not yet made."""
        return [ticket for ticket in self._open.values() if ticket.queue == queue]

    def ticket(self, number: int) -> Ticket | None:
        return self._open.get(number)
