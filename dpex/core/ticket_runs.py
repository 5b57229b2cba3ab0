"""Tickets that were made, kept in few words where they follow each other in equal steps. PURE.

A stream is asked for the same with each ticket, and its tickets are every so-manyth of an epoch. So what it made over
hours takes a few numbers, where a list of it would grow without end.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple


class MadeTicket(NamedTuple):
    """A ticket that was made: its epoch, its number in it, and what was asked for."""

    epoch: int
    number: int
    index: Any


made_ticket_of: Callable[..., MadeTicket] = tuple.__new__
"""Makes a `MadeTicket` of a tuple of all its fields: one is made for each batch, and this takes half as long."""


class TicketRun(NamedTuple):
    """``length`` tickets of an epoch from ``first`` on, each ``step`` after the one before, all asked for ``index``."""

    epoch: int
    first: int
    index: Any
    step: int = 1
    length: int = 1

    def tickets(self) -> Iterator[MadeTicket]:
        """Return its tickets, in order."""
        for place in range(self.length):
            yield MadeTicket(self.epoch, self.first + place * self.step, self.index)

    def then(self, epoch: int, number: int, index: Any) -> TicketRun | None:
        """Return the run with one more ticket, or None if that ticket does not continue it."""
        if epoch != self.epoch or number <= self.first or not _are_of_a_stream(index, self.index):
            return None
        step = number - self.first if self.length == 1 else self.step
        if number != self.first + self.length * step:
            return None
        return TicketRun(epoch, self.first, self.index, step, self.length + 1)

    def rest(self) -> TicketRun | None:
        """Return the run without its first ticket, None if that was all."""
        if self.length == 1:
            return None
        return TicketRun(self.epoch, self.first + self.step, self.index, self.step, self.length - 1)


def _are_of_a_stream(one: Any, other: Any) -> bool:
    """Return True if both ask for the next samples of a stream, and for as many: for None, or a list of it."""
    if type(one) is not list or type(other) is not list:
        return one is None and other is None
    return len(one) == len(other) and all(each is None for each in one) and all(each is None for each in other)


class TicketRuns:
    """The tickets of a stream, with the methods of a deque of them that `dpex.core.logical_log` uses.

    Args:
        tickets: The first of them.
    """

    def __init__(self, tickets: Iterable[MadeTicket] = ()) -> None:
        self.runs: list[TicketRun] = []
        self.extend(tickets)

    def __bool__(self) -> bool:
        return bool(self.runs)

    def __iter__(self) -> Iterator[MadeTicket]:
        for run in list(self.runs):
            yield from run.tickets()

    def __getitem__(self, place: int) -> MadeTicket:
        """Return the first ticket (0) or the last one (-1)."""
        run = self.runs[place]
        return MadeTicket(run.epoch, run.first + (run.length - 1) * run.step if place else run.first, run.index)

    def append(self, ticket: MadeTicket) -> None:
        """Add a ticket that was made after all others."""
        more = self.runs[-1].then(*ticket) if self.runs else None
        if more is None:
            self.runs.append(TicketRun(*ticket))
        else:
            self.runs[-1] = more

    def extend(self, tickets: Iterable[MadeTicket]) -> None:
        """Add tickets, in the order in which they were made."""
        for ticket in tickets:
            self.append(ticket)

    def popleft(self) -> None:
        """Forget the first ticket."""
        rest = self.runs[0].rest()
        self.runs[:1] = [] if rest is None else [rest]

    def clear(self) -> None:
        """Forget all of them."""
        self.runs.clear()
