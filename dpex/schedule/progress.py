"""The progress of a pass and of its logical workers. After a death, or in a later run, work resumes from it. PURE.

After a death, a logical worker starts from its latest state and makes the later tickets again. A run that is resumed
later needs the state after the last batch that was *delivered*, and workers are ahead of the delivery. So the latest
state that is not ahead of the delivery is kept, and all later states (`LogicalLog.forget_before`).

For a stream whose dataset has no state, only the delivered batches of this epoch are counted, over all runs. A later
run reads these batches again and drops them. While the state of a dataset was not requested yet, None stands for it, as
for its state at the start.

All tickets of a stream have the same index, and their numbers are equal steps apart. Tickets are kept as runs of equal
steps (`TicketRuns`), because a list of the tickets of many hours would grow without end.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

START = (-1, -1)
"""Epoch and ticket number of a state that was reported before the first ticket."""


class MadeTicket(NamedTuple):
    """A ticket that was made: its epoch, its number in the epoch, and its index."""

    epoch: int
    number: int
    index: Any


made_ticket_of: Callable[..., MadeTicket] = tuple.__new__
"""Make a `MadeTicket` from a tuple of all its fields, once per batch. Calling the class takes twice the time."""


class TicketRun(NamedTuple):
    """Tickets of one epoch that have the same index, and numbers that are equal steps apart."""

    epoch: int
    numbers: range
    index: Any

    def tickets(self) -> Iterator[MadeTicket]:
        return (MadeTicket(self.epoch, number, self.index) for number in self.numbers)

    def continues(self, epoch: int, number: int, index: Any) -> bool:
        """Return True if a later ticket continues this run: it has the same epoch and index, and the next number."""
        numbers = self.numbers
        is_step = number == numbers[-1] + numbers.step if len(numbers) > 1 else number > numbers[0]
        return is_step and epoch == self.epoch and _are_of_a_stream(index, self.index)


def _are_of_a_stream(one: Any, other: Any) -> bool:
    """Return True if both indices ask for the same number of next samples of a stream: both are None, or both are lists
    of None of the same length."""
    if type(one) is not list or type(other) is not list:
        return one is None and other is None
    return len(one) == len(other) and all(each is None for each in one) and all(each is None for each in other)


class TicketRuns:
    """The tickets of a stream, with the methods of a deque that `LogicalLog` uses.

    Args:
        tickets: The first tickets.
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
        return MadeTicket(run.epoch, run.numbers[place], run.index)

    def append(self, ticket: MadeTicket) -> None:
        """Add a ticket that was made after all others."""
        epoch, number, index = ticket
        if self.runs and self.runs[-1].continues(*ticket):
            numbers = self.runs[-1].numbers
            more = range(numbers[0], number + 1, number - numbers[-1])
            self.runs[-1] = self.runs[-1]._replace(numbers=more)
        else:
            self.runs.append(TicketRun(epoch, range(number, number + 1), index))

    def extend(self, tickets: Iterable[MadeTicket]) -> None:
        """Add tickets, in the order in which they were made."""
        for ticket in tickets:
            self.append(ticket)

    def popleft(self) -> None:
        """Forget the first ticket."""
        numbers = self.runs[0].numbers[1:]
        self.runs[:1] = [self.runs[0]._replace(numbers=numbers)] if numbers else []

    def clear(self) -> None:
        self.runs.clear()


@dataclass(frozen=True, kw_only=True)
class LogicalPoint:
    """The progress of a logical worker, by the batches that were delivered."""

    state: Any = None
    """The state that a worker reported; None: as at its start."""
    again: tuple[MadeTicket, ...] = ()
    """Tickets that the logical worker made after ``state``, and has to make again."""
    batches: int = 0
    """Delivered batches of this epoch, in all runs, for a stream whose dataset has no state. ``state`` is then None, or
    the state from which a worker reads these batches again and drops them."""
    has_ended: bool = False
    """The stream has no more batches."""

    def going_on(self, epoch: int, first: int) -> LogicalPoint:
        """Return the point for a pass that resumes at ticket ``first``.

        If a stream ended ahead of its turn, it found its end at the last ticket in ``again``. This ticket is dropped,
        because the resumed pass may give its number to another stream; the stream finds its end anew. The other tickets
        of the epoch were delivered, perhaps out of order with numbers after ``first``. They get numbers before it.
        """
        again, is_over = self.again, self.has_ended
        if is_over and again and again[-1][:2] >= (epoch, first):
            again, is_over = again[:-1], False
        former = sum(ticket.epoch < epoch for ticket in again)
        numbers = range(first - len(again) + former, first)
        present = (ticket._replace(number=number) for ticket, number in zip(again[former:], numbers, strict=True))
        return replace(self, again=(*again[:former], *present), has_ended=is_over)


class LogicalLog:
    """The states of one logical worker, as workers reported them, and the tickets that it has made since.

    Args:
        is_stream: True for a stream. Until a worker has reported a state, only its delivered batches are counted.
    """

    def __init__(self, *, is_stream: bool) -> None:
        self._is_stream = is_stream
        self._states: deque[tuple[tuple[int, int], Any]] = deque()
        self._made: deque[MadeTicket] | TicketRuns = TicketRuns() if is_stream else deque()
        self._batches = 0
        self._start: Any = None
        """The state from which a stream starts if an earlier run began the epoch, and this run has no later state."""

    @property
    def is_known(self) -> bool:
        """Return True if a state was reported. The state None counts; it stands for one that was not requested yet."""
        return bool(self._states)

    def begin_epoch(self) -> None:
        """Count batches from zero."""
        self._batches, self._start = 0, None

    def add_made(self, epoch: int, number: int, index: Any) -> None:
        """Note a ticket that was made."""
        made = self._made
        if self._is_stream and not self._states:
            return
        if not made or made[-1].number != number or made[-1].epoch != epoch:
            made.append(made_ticket_of(MadeTicket, (epoch, number, index)))

    def add_end(self, epoch: int, number: int, index: Any) -> None:
        """Note that the stream ended at this ticket. A restart makes the ticket again unless a later state is known.

        A dataset may prepare its next epoch when it ends. Without this ticket, that epoch would start at the old end.
        """
        if self._states:
            self.add_made(epoch, number, index)

    def add_state(self, epoch: int, number: int, state: Any) -> None:
        """Add the state after ticket ``number`` of ``epoch``.

        A state is ignored if the state after a later ticket is known. A second state after the same ticket replaces the
        first, because it may also hold the state of the dataset, which was asked for meanwhile.
        """
        states, place = self._states, (epoch, number)
        if not states or place > states[-1][0]:
            states.append((place, state))
        elif place == states[-1][0]:
            states[-1] = (place, state)

    def forget_before(self, epoch: int, first: int) -> None:
        """Forget states and tickets that are not needed once all tickets before ``first`` were delivered."""
        states, made = self._states, self._made
        while len(states) > 1 and states[1][0] < (epoch, first):
            states.popleft()
        if states and states[0][0] < (epoch, first):
            while made and made[0][:2] <= states[0][0]:
                made.popleft()

    def latest(self) -> tuple[Any, list[MadeTicket]]:
        """Return the latest state, and the tickets that were made since."""
        if not self._states:
            return self._start, list(self._made)
        place, state = self._states[-1]
        return state, [ticket for ticket in self._made if ticket[:2] > place]

    def point(self, epoch: int, first: int, *, delivered: int = 0, has_ended: bool = False) -> LogicalPoint:
        """Return the progress of the logical worker once its tickets before ``first`` were delivered.

        Args:
            epoch: The present epoch.
            first: The number of the next ticket to be delivered.
            delivered: Batches of the logical worker that were delivered in this run.
            has_ended: The stream has no more batches.
        """
        known = [(place, state) for place, state in self._states if place < (epoch, first)]
        place, state = known[-1] if known else (START, None)
        again = tuple(ticket for ticket in self._made if place < ticket[:2] < (epoch, first))
        batches = self._batches + delivered if self._is_stream and not known else 0
        return LogicalPoint(state=state, again=again, batches=batches, has_ended=has_ended)

    def resume_at(self, point: LogicalPoint) -> None:
        """Begin at the point of another run."""
        self._states.clear()
        self._made.clear()
        self._made.extend(point.again)
        self._batches = point.batches
        if point.batches:
            self._start = point.state
        elif point.state is not None:
            self._states.append((START, point.state))


@dataclass(frozen=True, kw_only=True)
class ResumePoint:
    """The progress of a pass, by the batches that were delivered."""

    epoch: int = 0
    """The epoch of the iterator, which has several epochs if its workers persist."""
    first: int = 0
    """The number of the next batch."""
    ahead: frozenset[int] = field(default_factory=frozenset)
    """Numbers of later batches that were already delivered, out of order."""
    turn: int = 0
    """The logical worker whose turn it is."""
    logicals: tuple[LogicalPoint, ...] = ()
    """The point of each logical worker; empty if any worker may make any ticket."""
    read: ResumePoint | None = None
    """The point of the pass that reads the stream, if other workers decode it; else None."""

    def next_epoch(self) -> ResumePoint:
        """Return where the next epoch of the same iterator begins."""
        logicals = tuple(
            LogicalPoint(state=None if each.batches else each.state, again=each.again) for each in self.logicals
        )
        return ResumePoint(epoch=self.epoch + 1, logicals=logicals)
