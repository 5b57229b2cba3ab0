"""What is known of one logical worker: its states, as workers told them, and the tickets it has made since. PURE.

After a death it goes on from its latest state and makes again what came after it. A run that is resumed later needs its
state as of the last batch that was *delivered*, and workers are ahead of that: so states are kept from the latest one
that is not ahead of the delivery on (`settle`).

A stream whose dataset cannot tell its state has none; of its batches only the number is kept. One that could tell, and
has not been asked yet, has the state None: as at its start.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, replace
from typing import Any

from dpex.core.ticket_runs import MadeTicket, TicketRuns, made_ticket_of

START = (-1, -1)
"""Place of a state that was told before the first ticket."""


@dataclass(frozen=True, kw_only=True)
class LogicalPoint:
    """Where a logical worker stands as of the batches that were delivered.

    state: as a worker told it; None: as at its start. again: tickets that it made after that, to be made once more.
    batches: of this epoch, for a stream whose dataset has no state. has_ended: a stream that has no more.
    """

    state: Any = None
    again: tuple[MadeTicket, ...] = ()
    batches: int = 0
    has_ended: bool = False

    def going_on(self, epoch: int, first: int) -> LogicalPoint:
        """As it is for a pass that goes on at ticket ``first``.

        A stream that ended ahead of its turn has its end among the tickets to be made again. That number may be another
        stream's in the pass to come; this stream finds its end there anew.
        """
        if not self.has_ended or not self.again or self.again[-1][:2] < (epoch, first):
            return self
        return replace(self, again=self.again[:-1], has_ended=False)


class LogicalLog:
    """See the module.

    Args:
        is_stream: without a state, its batches are only counted.
    """

    def __init__(self, *, is_stream: bool) -> None:
        self._is_stream = is_stream
        self._states: deque[tuple[tuple[int, int], Any]] = deque()
        self._made: deque[MadeTicket] | TicketRuns = TicketRuns() if is_stream else deque()
        self._batches = 0

    @property
    def is_known(self) -> bool:
        """Whether any state was told, or could be."""
        return bool(self._states)

    def begin_epoch(self) -> None:
        """Batches are counted from zero."""
        self._batches = 0

    def made(self, epoch: int, number: int, index: Any) -> None:
        """A ticket was made; a second time nothing changes."""
        made = self._made
        if self._is_stream and not self._states:
            self._batches += 1
        elif not made or made[-1].number != number or made[-1].epoch != epoch:
            made.append(made_ticket_of(MadeTicket, (epoch, number, index)))

    def ended(self, epoch: int, number: int, index: Any) -> None:
        """Its stream had no more at this ticket, which is made again unless the state after it is told.

        A dataset may get ready for its next epoch there: without that, it would begin the next one at its end.
        """
        if self._states:
            self.made(epoch, number, index)

    def told(self, epoch: int, number: int, state: Any) -> None:
        """The state after that ticket.

        One of an earlier ticket than the latest says nothing new. One of the same ticket may hold more, as the dataset
        has been asked meanwhile.
        """
        states, place = self._states, (epoch, number)
        if not states or place > states[-1][0]:
            states.append((place, state))
        elif place == states[-1][0]:
            states[-1] = (place, state)

    def settle(self, epoch: int, first: int) -> None:
        """Forget what is not needed once all its tickets before ``first`` were delivered."""
        states, made = self._states, self._made
        while len(states) > 1 and states[1][0] < (epoch, first):
            states.popleft()
        if states and states[0][0] < (epoch, first):
            while made and made[0][:2] <= states[0][0]:
                made.popleft()

    def latest(self) -> tuple[Any, list[MadeTicket]]:
        """Its latest state, and what it has made since."""
        if not self._states:
            return None, list(self._made)
        place, state = self._states[-1]
        return state, [ticket for ticket in self._made if ticket[:2] > place]

    def point(self, epoch: int, first: int, *, undelivered: int = 0, has_ended: bool = False) -> LogicalPoint:
        """Where it stands once its tickets before ``first`` were delivered; ``undelivered``: it made so many more."""
        known = [(place, state) for place, state in self._states if place < (epoch, first)]
        place, state = known[-1] if known else (START, None)
        again = tuple(ticket for ticket in self._made if place < ticket[:2] < (epoch, first))
        batches = 0 if known else self._batches - undelivered
        return LogicalPoint(state=state, again=again, batches=batches, has_ended=has_ended)

    def go_on(self, point: LogicalPoint) -> None:
        """It begins where another run stood."""
        self._states.clear()
        self._made.clear()
        if point.state is not None:
            self._states.append((START, point.state))
        self._made.extend(point.again)
        self._batches = point.batches
