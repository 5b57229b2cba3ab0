"""What the engine's state is told: events of the worker pools, of the consumer and of whoever performs. PURE.

Every event may be handed in twice, because an exception of a signal handler can break off its handling; the second time
changes nothing more (see `dpex.system.interrupts`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from dpex.core.prefetch import Sizes
from dpex.core.resume_point import ResumePoint

if TYPE_CHECKING:
    from dpex.core.instructions import Scale, Send

# -- from worker pools -------------------------------------------------------------------------------------------------


class TicketMade(NamedTuple):
    """The result of a ticket arrived. ``value()`` decodes it: the batch, or what stands for it (an error, an end).

    ``service_s`` is how long the worker was busy with it, ``nbytes`` the size of its buffers, ``making`` a `Making`.
    ``slowest``: seconds and place of its slowest sample, where that is known. ``failed``: index and error of each
    sample that could not be had.
    """

    epoch: int
    number: int
    worker: int
    value: Callable[[], Any]
    stream_end: bool = False
    service_s: float = 0.0
    nbytes: int = 0
    samples: int = 0
    making: tuple[float, ...] = ()
    slowest: tuple[()] | tuple[float, int] = ()
    failed: tuple[tuple[str, str], ...] = ()


ticket_made_of: Callable[..., TicketMade] = tuple.__new__
"""Makes a `TicketMade` of a tuple of all its fields: one is made for each batch, and this takes half as long."""


@dataclass(frozen=True, slots=True)
class WorkerUp:
    """A worker of that pool makes tickets from now on."""

    pool: str
    worker: int


@dataclass(frozen=True, slots=True)
class WorkerGone:
    """A worker has ended. ``lost`` are the tickets of ``epoch`` it held, ``guilty`` the one it was working on.

    ``expected`` is true when it left because it was asked to. ``why`` is a sentence for people. ``hung``: it was ended
    because the sample at that place of the guilty ticket took too long.
    """

    pool: str
    worker: int
    epoch: int
    lost: tuple[int, ...]
    guilty: int | None
    expected: bool
    why: str
    pid: int | None = None
    hung: int | None = None


@dataclass(frozen=True, slots=True)
class Snapshot:
    """State of ``logical`` after ticket ``number``; replaying from here restores what a death took away."""

    logical: int
    epoch: int
    number: int
    state: Any


@dataclass(frozen=True, slots=True)
class Notice:
    """Something a person should know; ``warning`` tells a warning from a log line.

    ``once``: what it is about, if that is to be told once in a process; "": each time.
    """

    text: str
    warning: bool = True
    once: str = ""


class SplittingKnown(NamedTuple):
    """The first stream has shown whether the dataset splits itself (see `dpex.core.first_stream`).

    It is told before the first result of that stream.
    """

    is_split: bool


PoolEvent = TicketMade | WorkerUp | WorkerGone | Snapshot | SplittingKnown | Notice


class PoolStatus(NamedTuple):
    """What a pool says of itself.

    ``workers`` take tickets now, by number; ``requested`` from the system; ``running``: serving already. ``failed``:
    why no worker can be had at present. ``crashes``: unexpected ends since the last result. ``most``: how many the
    system allows, once it refused one, and ``why_most``.
    """

    workers: tuple[int, ...] = ()
    requested: int = 0
    running: int = 0
    failed: str | None = None
    crashes: int = 0
    most: int | None = None
    why_most: str = ""


NO_STATUS = PoolStatus()
"""Of a pool that was asked for and has not yet said anything."""


class Reported(NamedTuple):
    """The status of a pool has changed."""

    pool: str
    status: PoolStatus


# -- from the performer ------------------------------------------------------------------------------------------------


class Refused(NamedTuple):
    """The pool could not take this message now, or whoever should hand it over was interrupted."""

    send: Send


class ScaleRefused(NamedTuple):
    """The workers that were asked for cannot be had."""

    scale: Scale
    why: str


# -- from the consumer -------------------------------------------------------------------------------------------------


class EpochBegins(NamedTuple):
    """A new pass over the data begins; what is undelivered of the former one is dropped.

    ``resume``: where it goes on, if an earlier run began it.
    """

    resume: ResumePoint | None = None


class Opened(NamedTuple):
    """The engine was just made: the workers that it begins with are wanted."""


class Resize(NamedTuple):
    """Other numbers of workers, or another prefetch, are wanted."""

    sizes: Sizes


class Resized(NamedTuple):
    """The pools have been asked for what the latest `Resize` wanted."""


class StatesWanted(NamedTuple):
    """Somebody asks where the pass stands, and may do so again: datasets are to tell their states from now on."""


class TicketsWait(NamedTuple):
    """Tickets were drawn, or workers have room again; ``starving``: the consumer has nothing else to take."""

    starving: bool


class ConsumerWaits(NamedTuple):
    """The consumer is about to wait for a batch. ``cpus``: how many workers this machine has CPUs for."""

    cpus: int


SEND_FULL_MESSAGES = TicketsWait(starving=False)
SEND_EVERYTHING = TicketsWait(starving=True)

Event = (
    PoolEvent
    | Reported
    | Refused
    | ScaleRefused
    | EpochBegins
    | Opened
    | Resize
    | Resized
    | StatesWanted
    | TicketsWait
    | ConsumerWaits
)
