"""An agent as the trainer sees it: its workers, and which tickets it holds since when."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from dpex.pools.agent.link import AgentLink
from dpex.pools.local.worker_process import BATCH, END
from dpex.schedule.schedule import Ticket
from dpex.transport.codec import Decoder
from dpex.worker.outcome import Failure, StreamEnd


class HeldTicket(NamedTuple):
    """A ticket that is not answered yet: its message, when that was sent, and the worker that it is for, if any."""

    message: int
    sent_at: float
    worker: int | None


@dataclass(eq=False, kw_only=True)
class AgentHandle:
    """An agent.

    Attributes:
        number: The agent's number.
        place: The name of its node, for people.
        link: Its connection.
        room: How many workers it may have.
        up: Workers that serve, by their numbers there.
        held: Tickets of the present epoch, by number.
        messages: How many tickets of each message are not answered.
        answered_at: When its last answer came, in seconds.
    """

    number: int
    place: str
    link: AgentLink
    room: int = 0
    up: set[int] = field(default_factory=set)
    held: dict[int, HeldTicket] = field(default_factory=dict)
    messages: dict[int, int] = field(default_factory=dict)
    answered_at: float = 0.0

    def put(self, *header: Any) -> bool:
        """Send a request; return False while the connection takes no more, so that it is to be watched."""
        return self.link.put(*header)

    @property
    def open_messages(self) -> int:
        """Messages of which some ticket is not answered yet."""
        return len(self.messages)

    def at_work(self) -> int:
        """Return the workers that have something to do, at most."""
        return min(len(self.up), len(self.out()))

    def out(self) -> Sequence[int]:
        """Return the numbers of the tickets that it holds."""
        return tuple(self.held)

    def serving(self) -> list[int]:
        """Return the workers that take tickets."""
        return sorted(self.up)

    @property
    def must_shrink(self) -> bool:
        """True if it has more workers than it may, as its node is being drained."""
        return len(self.up) > self.room

    def sent(self, tickets: list[Ticket], message: int, worker: int | None, now: float) -> None:
        """Note that these tickets are on their way to it."""
        self.messages[message] = len(tickets)
        self.held.update({ticket.number: HeldTicket(message, now, worker) for ticket in tickets})

    def took_back(self, number: int) -> HeldTicket | None:
        """Forget a ticket, which was made or lost; return None if it did not hold that."""
        held = self.held.pop(number, None)
        if held is not None:
            self.messages[held.message] -= 1
            if not self.messages[held.message]:
                del self.messages[held.message]
        return held

    def answered(self, number: int, here_s: float, at: float) -> float:
        """Note that a ticket was made and arrived at that time; return its seconds on the network, there and back.

        The agent had the ticket for ``here_s``, by its own clock; no clock is compared with another machine's. Where
        batches follow one another on a full link, each costs the time since the one before.
        """
        held = self.took_back(number)
        if held is None:
            return 0.0
        return max(0.0, min(at - held.sent_at - here_s, at - max(held.sent_at, self.answered_at)))

    def lost_with(self, worker: int) -> list[int]:
        """Forget and return the tickets that were addressed to that worker."""
        lost = [number for number, held in self.held.items() if held.worker == worker]
        for number in lost:
            self.took_back(number)
        return lost

    def new_epoch(self) -> None:
        """Forget all tickets: they are not wanted any more."""
        self.held.clear()
        self.messages.clear()


class RemoteResult:
    """A result that is not decoded; calling it decodes."""

    __slots__ = ("_kind", "_node", "_slots")

    def __init__(self, kind: int, node: Any, slots: dict[tuple[int, int], Any]) -> None:
        self._kind, self._node, self._slots = kind, node, slots

    def __call__(self) -> Any:
        if self._kind == END:
            return StreamEnd()
        value = Decoder(self._lease).decode(self._node)
        return value if self._kind == BATCH else Failure(pickle.loads(value))

    def _lease(self, segment: int, slot: int, nbytes: int) -> Any:
        return self._slots[segment, slot][:nbytes]
