"""What every lane offers, and what it tells the epoch that drives it.

A lane hosts *hosts* (worker processes, actors). Under ``seeding="batch"`` the epoch hands tickets to the lane, which
gives them to whichever host is free. With logical workers (``seeding="worker"``, streams) the epoch assigns each
logical worker to a host and addresses tickets to it.

All calls come from the thread that drives the epoch. A lane never blocks but in `close`.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from dpex.core.schedule import Ticket
from dpex.measure.consumer_time import STEP_BUCKETS, NodeSums
from dpex.measure.sampling import Reservoir
from dpex.profile.live_timer import Row
from dpex.worker.core import RngState

CRASHES_IN_A_ROW = 8
"""Unexpected ends of hosts without a result in between, beside one per host wanted, before work is given up."""
RECENT = 64
"""Service times that a lane remembers one by one."""


class Made(NamedTuple):
    """A ticket's result arrived. ``value()`` decodes it: the batch, a `Failure` or a `StreamEnd`.

    ``service_s`` is how long the worker was busy with it, ``nbytes`` the size of its buffers, ``making`` a `Making`.
    ``slowest``: seconds and place of its slowest sample, where that is known.
    """

    epoch: int
    number: int
    host: int
    value: Callable[[], Any]
    stream_end: bool = False
    service_s: float = 0.0
    nbytes: int = 0
    samples: int = 0
    making: tuple[float, ...] = ()
    slowest: tuple[()] | tuple[float, int] = ()


@dataclass(frozen=True, slots=True)
class Up:
    """A host takes tickets from now on."""

    host: int


@dataclass(frozen=True, slots=True)
class Gone:
    """A host is no more. ``lost`` are ticket numbers it held, ``guilty`` the one it was working on.

    ``expected`` is true when it left because it was asked to. ``why`` is a sentence for people.
    """

    host: int
    lost: tuple[int, ...]
    guilty: int | None
    expected: bool
    why: str
    pid: int | None = None


@dataclass(frozen=True, slots=True)
class Released:
    """Logical worker ``logical`` left its host with this random state."""

    logical: int
    host: int
    state: RngState | None


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Random state of ``logical`` after ticket ``number``; replaying from here restores what a death took away."""

    logical: int
    epoch: int
    number: int
    state: RngState


@dataclass(frozen=True, slots=True)
class Note:
    """Something a person should know; ``warning`` tells a warning from a log line."""

    text: str
    warning: bool = True


Event = Made | Up | Gone | Released | Snapshot | Note


@dataclass(kw_only=True)
class LaneCounts:
    """Hosts by stage: ``wanted`` by the user or tuner, ``requested`` from the system, ``running`` now.

    ``most``: how many the system allows, once it refused one, and ``why_most``. Asking for a number tries anew.
    """

    wanted: int = 0
    requested: int = 0
    running: int = 0
    most: int | None = None
    why_most: str = ""


@dataclass(kw_only=True, slots=True)
class LaneTimes:
    """Sums over the tickets a lane made: their number, wall seconds by stage, CPU seconds of all and by stage.

    ``services_s``: wall seconds of each of the latest; ``services``: how many took how long, by `STEP_BUCKETS`;
    ``choice``: some of all. ``transit_s``: on the network, while their host had nothing else to answer.
    ``nbytes``: of all batches; ``streamed_bytes``: of those that came on a connection of their own. ``steps``: calls,
    wall and CPU seconds by step, of the batches that were timed. ``nodes``: by machine of the cluster.
    """

    tickets: int = 0
    fetch_s: float = 0.0
    collate_s: float = 0.0
    encode_s: float = 0.0
    cpu_s: float = 0.0
    fetch_cpu_s: float = 0.0
    collate_cpu_s: float = 0.0
    nbytes: int = 0
    streamed_bytes: int = 0
    transit_s: float = 0.0
    services_s: deque[float] = field(default_factory=lambda: deque(maxlen=RECENT))
    services: list[int] = field(default_factory=lambda: [0] * (len(STEP_BUCKETS) + 1))
    choice: Reservoir = field(default_factory=Reservoir)
    steps: dict[str, tuple[int, float, float]] = field(default_factory=dict)
    nodes: dict[str, NodeSums] = field(default_factory=dict)

    def count(
        self,
        stages: tuple[float, float, float, float, int, tuple[Row, ...], Any],
        cpu_s: float,
        encode_s: float,
        nbytes: int = 0,
    ) -> float:
        """Add one ticket, with stages as in `Stages`; returns how long its worker was busy with it."""
        fetch_s, collate_s, fetch_cpu_s, collate_cpu_s, _, steps, _ = stages
        self.tickets += 1
        self.fetch_s += fetch_s
        self.collate_s += collate_s
        self.encode_s += encode_s
        self.cpu_s += cpu_s
        self.fetch_cpu_s += fetch_cpu_s
        self.collate_cpu_s += collate_cpu_s
        self.nbytes += nbytes
        service_s = fetch_s + collate_s + encode_s
        self.services_s.append(service_s)
        if self.tickets >= self.choice.due:
            self.choice.keep(service_s)
        self.services[bisect_left(STEP_BUCKETS, service_s)] += 1
        if steps:
            self._add_steps(steps)
        return service_s

    def _add_steps(self, steps: tuple[Row, ...]) -> None:
        for name, calls, wall_s, cpu_s in steps:
            known = self.steps.get(name, (0, 0.0, 0.0))
            self.steps[name] = known[0] + calls, known[1] + wall_s, known[2] + cpu_s


class Lane(Protocol):
    """A place where tickets are turned into batches."""

    name: str
    counts: LaneCounts
    times: LaneTimes
    failed: str | None
    """Why no host can be had at present, or None."""

    def resize(self, wanted: int) -> None:
        """Ask for that many hosts; `Up` and `Gone` events follow. A leaving host finishes what it holds.

        With logical workers a lane only grows by itself: the engine empties hosts and then calls `dismiss`.
        """

    def dismiss(self, host: int) -> None:
        """Let a host that hosts no logical worker any more leave."""

    @property
    def starts_slowly(self) -> bool:
        """Whether a host serves seconds after it was asked for, not milliseconds."""

    @property
    def crashes(self) -> int:
        """Unexpected ends of hosts since the last result of any."""

    def at_work(self) -> int:
        """Hosts that have something to do, at most."""

    def hosts(self) -> list[int]:
        """Hosts that are up and not leaving, by id."""

    def send(self, tickets: list[Ticket], epoch: int, host: int | None = None, sent: list[Any] | None = None) -> bool:
        """Hand over tickets as one message; False if it cannot take them now (nothing was taken then).

        Once they are handed over there is something in ``sent``, whatever exception may follow.
        """

    def adopt(self, host: int, logical: int, state: RngState | None) -> None:
        """Let ``host`` host ``logical``; messages to a host keep their order."""

    def release(self, host: int, logical: int) -> None:
        """Let ``host`` give up ``logical`` after what it was sent so far; `Released` follows."""

    def new_epoch(self, epoch: int) -> None:
        """Results of earlier epochs are discarded from now on."""

    def descriptors(self) -> list[int]:
        """File descriptors that turn readable when `poll` has something."""

    def poll(self) -> deque[Event]:
        """What happened, without waiting: the lane's own, out of which the caller takes what it has dealt with."""

    def close(self, grace_s: float) -> None:
        """End every host within about ``grace_s`` seconds; idempotent."""
