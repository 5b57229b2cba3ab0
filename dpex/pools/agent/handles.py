"""An agent as the trainer sees it: its workers, and which tickets it holds since when."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from dpex.core.schedule import Ticket
from dpex.measure.sums import LinkSums, NodeSums
from dpex.pools.agent.link import AgentLink
from dpex.pools.agent.pacing import Pace
from dpex.pools.agent.traffic import Traffic
from dpex.pools.local.worker_process import BATCH, END
from dpex.transport.codec import Decoder
from dpex.worker.outcome import Failure, StreamEnd


class HeldTicket(NamedTuple):
    """A ticket that was not answered yet: in which message, when that was sent, and to which worker if to a certain
    one."""

    message: int
    sent_at: float
    worker: int | None


@dataclass(eq=False, kw_only=True)
class AgentHandle:
    """One agent.

    ``place``: its node, for people. ``room``: how many workers it may have. ``up``: those that serve, by their numbers
    there. ``leaving``: those of them that were asked to leave, one by one. ``held``: tickets of the present epoch, by
    number. ``messages``: how many tickets of each message are open. ``answered_at``: when its last answer was here.
    ``pace``: how many tickets that any worker may make it gets. ``round_trip_s``: of its connection, 0 if unknown.
    """

    number: int
    place: str
    link: AgentLink
    room: int = 0
    up: set[int] = field(default_factory=set)
    leaving: set[int] = field(default_factory=set)
    held: dict[int, HeldTicket] = field(default_factory=dict)
    messages: dict[int, int] = field(default_factory=dict)
    answered_at: float = 0.0
    pace: Pace = field(default_factory=Pace)
    round_trip_s: float = 0.0

    def put(self, *header: Any) -> bool:
        """Ask for something; False while the connection takes no more, so that it is to be watched."""
        return self.link.put(*header)

    @property
    def open_messages(self) -> int:
        """Messages of which some ticket is not answered yet."""
        return len(self.messages)

    def at_work(self) -> int:
        """Workers that have something to do, at most."""
        return min(len(self.up), len(self.out()))

    def out(self) -> Sequence[int]:
        """Numbers of the tickets that it holds."""
        return tuple(self.held)

    def serving(self) -> list[int]:
        """Workers that take tickets."""
        return sorted(self.up - self.leaving) if self.leaving else sorted(self.up)

    @property
    def must_shrink(self) -> bool:
        """Whether it has more workers than it may (its node is being drained)."""
        return len(self.up) - len(self.leaving) > self.room

    def sent(self, tickets: list[Ticket], message: int, worker: int | None, now: float) -> None:
        """These are on their way to it."""
        self.messages[message] = len(tickets)
        self.held.update({ticket.number: HeldTicket(message, now, worker) for ticket in tickets})

    def took_back(self, number: int) -> HeldTicket | None:
        """A ticket is not its own any more, made or lost."""
        held = self.held.pop(number, None)
        if held is not None:
            self.messages[held.message] -= 1
            if not self.messages[held.message]:
                del self.messages[held.message]
        return held

    def answered(self, number: int, here_s: float, at: float) -> float:
        """A ticket was made, and arrived at that time; returns the seconds on the way there and back.

        The ``here_s`` that the agent had it are not the way's, and where batches follow one another on a full link each
        costs the time since the one before. No clock is compared with another machine's.
        """
        held = self.took_back(number)
        if held is None:
            return 0.0
        way_s = at - held.sent_at - here_s
        self.pace.answered(
            way_s=way_s, round_trip_s=self.round_trip_s, held=len(self.held), sent_at=held.sent_at, at=at
        )
        if not self.held:
            self.pace.rest()
        return max(0.0, min(way_s, at - max(held.sent_at, self.answered_at)))

    def lost_with(self, worker: int) -> list[int]:
        """Tickets that were sent to that worker and nobody else, taken back."""
        lost = [number for number, held in self.held.items() if held.worker == worker]
        for number in lost:
            self.took_back(number)
        return lost

    def new_epoch(self) -> None:
        """What it holds is not wanted any more."""
        self.held.clear()
        self.messages.clear()
        self.pace.rest()


class RemoteResult:
    """An undecoded result; calling it decodes."""

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


def node_sums(busy_s: float, cpu_s: float, tickets: int, delay: float | None) -> NodeSums:
    """What an answer adds to its machine; ``delay``: seconds on run queues for each second on a CPU, None if not
    known."""
    known = NodeSums(tickets=tickets, busy_s=busy_s, cpu_s=cpu_s)
    return known if delay is None else known.plus(NodeSums(queued_s=cpu_s * delay, asked_s=busy_s))


def with_traffic(known: NodeSums, traffic: Traffic) -> NodeSums:
    """A machine's sums with what its connections have carried since they were told of."""
    more = known.plus(LinkSums(**traffic._asdict()))
    return replace(more, links=1, round_trip_s=traffic.round_trip_s)
