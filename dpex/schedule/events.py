"""Events of the worker pools, which the engine's state takes in, and the status of a pool. PURE.

Every event may be handed in twice, as a signal handler may interrupt its handling by an exception; the second time
changes nothing more (see `dpex.system.interrupts`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

from dpex.measure.batch_times import NO_TIMES, BatchTimes


class TicketMade(NamedTuple):
    """The result of a ticket. ``value()`` decodes it: the batch, or what stands for it (an error, an end).

    ``times``: what making it took.
    """

    epoch: int
    number: int
    worker: int
    value: Callable[[], Any]
    stream_end: bool = False
    times: BatchTimes = NO_TIMES


ticket_made_of: Callable[..., TicketMade] = tuple.__new__
"""Makes a `TicketMade` of a tuple of all its fields: one is made for each batch, and this takes half as long."""


@dataclass(frozen=True, slots=True)
class WorkerUp:
    """A worker that makes tickets from now on."""

    pool: str
    worker: int


@dataclass(frozen=True, slots=True)
class WorkerGone:
    """The end of a worker. ``lost``: the tickets of ``epoch`` that it held. ``working_on``: the one that it was making.

    ``expected``: it left because it was asked to. ``why``: a sentence for the user. ``hung``: it was ended because the
    sample at that place of the ticket took too long.
    """

    pool: str
    worker: int
    epoch: int
    lost: tuple[int, ...]
    working_on: int | None
    expected: bool
    why: str
    pid: int | None = None
    hung: int | None = None


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The state of ``logical`` after ticket ``number``, from which it can be restarted after a death."""

    logical: int
    epoch: int
    number: int
    state: Any


@dataclass(frozen=True, slots=True)
class Notice:
    """A message to the user, as a ``warning`` or a log line.

    ``once``: a key; a message with a key appears once in a process. "": each time.
    """

    text: str
    warning: bool = True
    once: str = ""


class SplittingKnown(NamedTuple):
    """The finding of the first stream: the dataset splits itself, or not (see `dpex.schedule.streams`).

    It is reported before the first result of that stream.
    """

    is_split: bool


PoolEvent = TicketMade | WorkerUp | WorkerGone | Snapshot | SplittingKnown | Notice
_THAT_TRAVEL = {kind.__name__: kind for kind in (WorkerUp, WorkerGone, Snapshot, SplittingKnown, Notice)}


def plain(event: PoolEvent) -> tuple[Any, ...]:
    """Return an event other than `TicketMade` as plain values, which can travel between machines."""
    name = type(event).__name__
    return (name, *(getattr(event, one) for one in _THAT_TRAVEL[name].__match_args__))


def event_of(name: str, *values: Any) -> PoolEvent:
    """Return the event that `plain` was given."""
    return _THAT_TRAVEL[name](*values)


class PoolStatus(NamedTuple):
    """The status of a pool.

    ``workers``: numbers of the workers that take tickets. ``requested``: the number requested from the system.
    ``running``: the number that serve already. ``failed``: why no worker can be had at present, or None. ``crashes``:
    unexpected ends since the last result. ``most``: the number that the system allows, once it refused one, and
    ``why_most``.
    """

    workers: tuple[int, ...] = ()
    requested: int = 0
    running: int = 0
    failed: str | None = None
    crashes: int = 0
    most: int | None = None
    why_most: str = ""


NO_STATUS = PoolStatus()
"""The status of a pool that has not reported yet."""
