"""Events that worker pools report to `EngineState`, and its instructions to `dpex.engine.pools`. PURE.

There is one instruction for each message to a worker, and none for a finished batch, because the consumer takes it from
the schedule directly.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

from dpex.measure.batch_times import NO_TIMES, BatchTimes
from dpex.schedule.schedule import Ticket


class TicketMade(NamedTuple):
    """The result of a ticket. ``value()`` decodes it to a batch, an error, or the end of a stream.

    ``times``: the durations of making it.
    """

    epoch: int
    number: int
    worker: int
    value: Callable[[], Any]
    stream_end: bool = False
    times: BatchTimes = NO_TIMES


ticket_made_of: Callable[..., TicketMade] = tuple.__new__
"""Make a `TicketMade` from a tuple of all its fields, once per batch. Calling the class takes twice the time."""


@dataclass(frozen=True, slots=True)
class WorkerUp:
    """A worker that makes tickets from now on."""

    pool: str
    worker: int


@dataclass(frozen=True, slots=True)
class WorkerGone:
    """The end of a worker. ``lost``: the tickets of ``epoch`` that it held. ``working_on``: the ticket that it was
    making.

    ``expected``: True if the worker was asked to leave. ``why``: A sentence for the user. ``hung``: If the time limit
    of a sample ended the worker, the position of the sample in the ticket, else None. ``is_reported``: True if another
    event gives the reason, so that the end of a node or of a template causes one warning.
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
    is_reported: bool = False


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The state of logical worker ``logical`` after ticket ``number``. After a death, it can restart from ``state``."""

    logical: int
    epoch: int
    number: int
    state: Any


@dataclass(frozen=True, slots=True)
class Notice:
    """A message to the user, as a ``warning`` or a log line. It is an event of a pool, and an instruction as well.

    ``once``: A key, if messages with this key are to appear once in a process. "": The message appears each time.
    """

    text: str
    warning: bool = True
    once: str = ""


PoolEvent = TicketMade | WorkerUp | WorkerGone | Snapshot | Notice
_THAT_TRAVEL = {kind.__name__: kind for kind in (WorkerUp, WorkerGone, Snapshot, Notice)}


def plain(event: PoolEvent) -> tuple[Any, ...]:
    """Return an event other than `TicketMade` as plain values, which can travel between machines."""
    name = type(event).__name__
    return (name, *(getattr(event, one) for one in _THAT_TRAVEL[name].__match_args__))


def event_of(name: str, *values: Any) -> PoolEvent:
    """Return the event from the result of `plain`."""
    return _THAT_TRAVEL[name](*values)


class PoolStatus(NamedTuple):
    """The status of a pool.

    ``workers``: Numbers of the workers that take tickets.
    ``requested``, ``running``: Counts of workers requested from the system, and of workers that run now.
    ``failed``: The reason why the pool can start no worker at present, or None.
    ``crashes``: Count of workers that ended unexpectedly since the last result.
    ``most``, ``why_most``: After a refusal, the maximum workers that the system allows, and the reason.
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


# -- instructions ----------------------------------------------------------------------------------------------------


class Send(NamedTuple):
    """Send tickets of one queue in one message to a pool: to ``worker``, or to any worker (None).

    ``again``: True if a worker that died had made the tickets. They are made again to restore the state after them.
    """

    pool: str
    worker: int | None
    queue: int
    epoch: int
    tickets: list[Ticket]
    again: bool = False


class Adopt(NamedTuple):
    """Let ``worker`` continue as logical worker ``logical`` from ``state``, or from the start if ``state`` is None."""

    pool: str
    worker: int
    logical: int
    state: Any


class AskState(NamedTuple):
    """Have ``worker`` ask the dataset of ``logical`` for its state at once, and at intervals from then on."""

    pool: str
    worker: int
    logical: int


class Scale(NamedTuple):
    """Ask a pool for ``wanted`` workers. A pool that does not exist yet is made.

    ``optional``: If the workers cannot be had, the owner calls `Placement.scale_refused` instead of raising an error.
    """

    pool: str
    wanted: int
    optional: bool = False


class EnterEpoch(NamedTuple):
    """Begin an epoch in every pool. Results of earlier epochs are discarded from now on."""

    epoch: int


class Discard(NamedTuple):
    """Decode results that are not wanted any more and drop them, which gives their memory back."""

    values: tuple[Callable[[], Any], ...]


class Raise(NamedTuple):
    """End the epoch with this error at the consumer's next turn."""

    error: Exception


ToWorker = Adopt | AskState
"""Instructions to one worker, ignored if it has ended."""
Instruction = Send | ToWorker | Scale | EnterEpoch | Discard | Notice | Raise
