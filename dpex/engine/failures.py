"""What follows from the end of a host: its tickets are made again, given up, or end the epoch.

Used by the thread that holds the engine's lock; the counts may be read from any. A ticket that was with too many hosts
when they died is answered by an error in its place, and so is the next one of a stream that cannot go on elsewhere.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

from dpex.core.placement import Place
from dpex.core.schedule import Schedule, Ticket
from dpex.engine.assignment import Tenancy
from dpex.engine.dispatch import Dispatch
from dpex.errors import WorkerDiedError
from dpex.pools.base import CRASHES_IN_A_ROW, Gone, Lane
from dpex.system.user_warnings import warn


class Casualties:
    """``deaths``: hosts that ended unexpectedly, by lane; ``remade``: tickets made again for them."""

    def __init__(self, tenancy: Tenancy, dispatch: Dispatch, dirty: set[int], *, iterable: bool) -> None:
        self._tenancy = tenancy
        self._dispatch = dispatch
        self._dirty = dirty
        self._iterable = iterable
        self.deaths: Counter[str] = Counter()
        self.remade = 0

    def gone(self, schedule: Schedule, lane: Lane, event: Gone) -> WorkerDiedError | None:
        """A host has ended; returns the error that ends the epoch, if it must end."""
        again, given_up = self._take_back(schedule, event)
        if not event.expected:
            self.deaths[lane.name] += 1
            self.remade += again
            if not given_up and not self._iterable:
                _warn_of_death(event, again)
        fatal = None
        for stream in self._tenancy.host_gone(Place(lane.name, event.host)):
            fatal = _fail_stream(schedule, stream, event) or fatal
        if lane.crashes > CRASHES_IN_A_ROW + lane.counts.wanted and not event.expected:
            text = f"{event.why}; {lane.crashes} workers in a row died before they made a single batch"
            fatal = WorkerDiedError(text)
        return fatal

    def _take_back(self, schedule: Schedule, event: Gone) -> tuple[int, list[Ticket]]:
        """Let what it held be made again; returns how many tickets that are, and those that are given up."""
        held = sum(ticket is not None and ticket.issued for ticket in map(schedule.ticket, event.lost))
        given_up = schedule.lost(event.lost, event.guilty)
        for number in event.lost:
            self._dispatch.arrived(number)
            ticket = schedule.ticket(number)
            if ticket is not None:
                self._dirty.add(ticket.queue)
        for ticket in given_up:
            error = _gave_up(ticket, event.why)
            schedule.done(ticket.number, lambda error=error: error)
        return held - len(given_up), given_up


def _warn_of_death(event: Gone, again: int) -> None:
    held = f"; what it held ({again} tickets) is made again" if again else ""
    warn(f"{event.why}{held}. The epoch goes on.")


def _fail_stream(schedule: Schedule, logical: int, event: Gone) -> WorkerDiedError | None:
    """A stream cannot be taken up where it was: say so at its place, and go on without it.

    Returns the error where it has no place.
    """
    numbers = sorted(t.number for t in schedule.open_tickets(logical))
    error = WorkerDiedError(
        f"{event.why}; stream {logical} of the IterableDataset cannot go on elsewhere without repeating or losing "
        "samples, as it has no state that could be moved"
    )
    if numbers:
        schedule.done(numbers[0], lambda: error)
    schedule.end_queue(logical)
    return None if numbers else error


def _gave_up(ticket: Ticket, why: str) -> WorkerDiedError:
    return WorkerDiedError(
        f"{why}. Batch {ticket.number} (dataset indices {_shortened(ticket.index)}) killed {ticket.deaths} workers, "
        "one after the other, and is given up"
    )


def _shortened(index: Any, most: int = 200) -> str:
    text = repr(index)
    return text if len(text) <= most else f"{text[:most]}… ({len(text)} characters)"
