"""Actors as the trainer sees them: where each stands, the calls it was sent, and what those cost on the way.

Knows no Ray: an actor's handle is only kept, and a call is submitted by what made it. Used by the trainer's thread.
"""

from __future__ import annotations

import pickle
from collections import deque
from collections.abc import Callable
from typing import Any

from dpex.core.schedule import Ticket
from dpex.measure.consumer_time import NodeSums
from dpex.pools.ray.cluster import Actor
from dpex.pools.ray.results import Landed
from dpex.pools.ray.worker_actor import Source
from dpex.transport.pickling import cloud_dumps


class Call:
    """A message to a host that was not answered yet; one that goes ``alone`` waits until the host has no other."""

    __slots__ = ("alone", "kind", "logical", "ref", "sent_at", "submit", "tickets")

    def __init__(
        self, kind: str, submit: Callable[[], Any], tickets: list[Ticket], logical: int = -1, alone: bool = False
    ) -> None:
        self.kind = kind
        self.submit = submit
        self.tickets = tickets
        self.logical = logical
        self.alone = alone
        self.ref: Any = None
        self.sent_at = 0.0


class Host:
    """One actor; ``stage`` is "asked", "placed", "preparing" or "up". Messages to it keep their order."""

    def __init__(self, number: int, index: int, actor: Actor) -> None:
        self.number = number
        self.index = index
        self.actor = actor
        self.stage = "asked"
        self.probing = False
        self.leaving = False
        self.source: Source | None = None
        self.answered_at = 0.0
        self.calls: dict[int, Call] = {}
        self.waiting: deque[Call] = deque()

    @property
    def idle(self) -> bool:
        """Whether it has nothing to answer."""
        return not self.calls and not self.waiting

    def tickets(self) -> list[Ticket]:
        """What it holds or is to be sent."""
        return [ticket for call in (*self.calls.values(), *self.waiting) for ticket in call.tickets]

    def next_call(self) -> Call | None:
        """The call that may be submitted now, taken from those that wait."""
        if not self.waiting:
            return None
        alone = self.waiting[0].alone or any(call.alone for call in self.calls.values())
        return None if alone and self.calls else self.waiting.popleft()


def transit_s(host: Host, call: Call, landed: Landed) -> float:
    """Seconds on the way, for each batch of an answer.

    The host had nothing else to do from when it was sent this call, or else gave its last answer, until this answer was
    here; what of that it was not busy with the batches is the way's. No clock but the trainer's is needed.
    """
    began, host.answered_at = max(call.sent_at, host.answered_at), landed.at
    return max(0.0, landed.at - began - _busy_s(landed)) / len(landed.results)


def _busy_s(landed: Landed) -> float:
    return sum((stages[0] + stages[1] + encode_s for *_, stages, _, encode_s, _ in landed.results), 0.0)


def node_sums(landed: Landed) -> NodeSums:
    """What an answer adds to those of its machine."""
    busy_s, queued_s = _busy_s(landed), landed.queued_s
    return NodeSums(
        tickets=len(landed.results),
        busy_s=busy_s,
        cpu_s=sum(cpu_s for *_, cpu_s, _, _ in landed.results),
        queued_s=queued_s or 0.0,
        asked_s=0.0 if queued_s is None else busy_s,
    )


def message(tickets: list[Ticket], epoch: int) -> bytes:
    """Tickets of one queue, as an actor takes them."""
    content = (epoch, tickets[0].queue, [(t.number, t.index) for t in tickets])
    try:
        return pickle.dumps(content, 5)
    except Exception:
        return cloud_dumps(content)
