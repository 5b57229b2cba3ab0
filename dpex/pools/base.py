"""What every pool offers, and what it tells the epoch that drives it.

A pool runs *workers* (processes or threads, here or on other machines). Under ``seeding="batch"`` the epoch hands
tickets to the pool, which gives them to whichever worker is free. With logical workers (``seeding="worker"``, streams)
the epoch assigns each logical worker to a worker and addresses tickets to it.

All calls come from the thread that drives the epoch. A pool never blocks but in `close`.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Protocol

from dpex.measure.consumer_time import STEP_BUCKETS
from dpex.measure.sampling import Reservoir
from dpex.measure.sums import LinkSums, NodeSums, PoolSums, StageSums, StepSums
from dpex.profile.live_timer import Row
from dpex.schedule.events import PoolEvent
from dpex.schedule.schedule import Ticket
from dpex.schedule.streams import ALL
from dpex.worker.logical_state import RngState

RECENT = 64
"""Service times that a pool remembers one by one."""


@dataclass(kw_only=True)
class PoolCounts:
    """Workers by stage: ``wanted`` by the user or tuner, ``requested`` from the system, ``running`` now.

    ``most``: how many the system allows, once it refused one, and ``why_most``. Asking for a number tries anew.
    ``left_alone``: nodes of the cluster that get no workers for a while, and why; ``failed``: the latest reason of each
    node that ever was.
    """

    wanted: int = 0
    requested: int = 0
    running: int = 0
    most: int | None = None
    why_most: str = ""
    left_alone: Mapping[str, str] = field(default_factory=dict)
    failed: Mapping[str, str] = field(default_factory=dict)

    def leave_alone(self, place: str, why: str) -> None:
        """A node is left alone from now on; without a reason, it is not any more. Others may read meanwhile."""
        others = {name: known for name, known in self.left_alone.items() if name != place}
        self.left_alone = {**others, place: why} if why else others
        if why:
            self.failed = {**self.failed, place: why}


@dataclass(kw_only=True, slots=True)
class PoolTimes:
    """Sums over the tickets a pool made: their number, wall seconds by stage, CPU seconds of all and by stage.

    ``services_s``: wall seconds of each of the latest; ``services``: how many took how long, by `STEP_BUCKETS`;
    ``choice``: some of all. ``transit_s``: on the network, while their worker had nothing else to answer.
    ``shared``: batches that were made for another training. ``nbytes``: of all batches; ``streamed_bytes``: of those
    that came on a connection of their own; ``shared_bytes``: of those of remote workers that lay in shared memory.
    ``steps``: by step, of the batches that were timed. ``nodes``: by machine of the cluster. What is told of them is
    `stages` and `sums`.
    """

    tickets: int = 0
    load_s: float = 0.0
    collate_s: float = 0.0
    encode_s: float = 0.0
    cpu_s: float = 0.0
    load_cpu_s: float = 0.0
    collate_cpu_s: float = 0.0
    nbytes: int = 0
    streamed_bytes: int = 0
    shared_bytes: int = 0
    shared: int = 0
    transit_s: float = 0.0
    services_s: deque[float] = field(default_factory=lambda: deque(maxlen=RECENT))
    services: list[int] = field(default_factory=lambda: [0] * (len(STEP_BUCKETS) + 1))
    choice: Reservoir = field(default_factory=Reservoir)
    steps: dict[str, StepSums] = field(default_factory=dict)
    nodes: dict[str, NodeSums] = field(default_factory=dict)

    def count(
        self,
        stages: tuple[float, float, float, float, int, tuple[Row, ...], Any, Any],
        cpu_s: float,
        encode_s: float,
        nbytes: int = 0,
    ) -> float:
        """Add one ticket, with stages as in `Stages`; returns how long its worker was busy with it."""
        load_s, collate_s, load_cpu_s, collate_cpu_s, _, steps, _, _ = stages
        self.tickets += 1
        self.load_s += load_s
        self.collate_s += collate_s
        self.encode_s += encode_s
        self.cpu_s += cpu_s
        self.load_cpu_s += load_cpu_s
        self.collate_cpu_s += collate_cpu_s
        self.nbytes += nbytes
        service_s = load_s + collate_s + encode_s
        self.services_s.append(service_s)
        if self.tickets >= self.choice.due:
            self.choice.keep(service_s)
        self.services[bisect_left(STEP_BUCKETS, service_s)] += 1
        if steps:
            self._add_steps(steps)
        return service_s

    def _add_steps(self, steps: tuple[Row, ...]) -> None:
        for name, calls, wall_s, cpu_s in steps:
            known = self.steps.get(name, _NO_CALLS)
            self.steps[name] = StepSums(
                calls=known.calls + calls, wall_s=known.wall_s + wall_s, cpu_s=known.cpu_s + cpu_s
            )

    def stages(self) -> StageSums:
        """What making these batches took; CPU time that is neither the dataset's nor the collate function's is the
        encoder's."""
        return StageSums(
            encode_cpu_s=max(0.0, self.cpu_s - self.load_cpu_s - self.collate_cpu_s),
            **{name: getattr(self, name) for name in _STAGES},
        )

    def link(self) -> LinkSums:
        """The way from all machines."""
        found = LinkSums()
        for node in list(self.nodes.values()):
            found = found.plus(node)
        return found

    def sums(self, **others: Any) -> PoolSums:
        """All that is counted here, and what others count of the pool."""
        return self.stages().narrowed(
            PoolSums,
            **vars(self.link()),
            services=tuple(self.services),
            kept_s=tuple(self.choice.kept),
            steps=dict(self.steps),
            nodes=dict(self.nodes),
            **others,
        )


_NO_CALLS = StepSums()
_STAGES = [one.name for one in fields(PoolTimes) if one.name in StageSums.declared()]


class WorkerPool(Protocol):
    """A place where tickets are turned into batches."""

    name: str
    counts: PoolCounts
    times: PoolTimes
    failed: str | None
    """Why no worker can be had at present, or None."""

    def resize(self, wanted: int) -> None:
        """Ask for that many workers; `WorkerUp` and `WorkerGone` events follow. A leaving worker finishes what it
        holds.

        With logical workers a pool only grows, as each of them stays on its worker.
        """

    @property
    def crashes(self) -> int:
        """Unexpected ends of workers since the last result of any."""

    def at_work(self) -> int:
        """Workers that have something to do, at most."""

    def workers(self) -> list[int]:
        """Workers that are up and not leaving, by id."""

    def send(
        self,
        tickets: list[Ticket],
        epoch: int,
        worker: int | None = None,
        sent: list[Any] | None = None,
        *,
        again: bool = False,
    ) -> bool:
        """Hand over tickets as one message; False if it cannot take them now (nothing was taken then).

        Once they are handed over there is something in ``sent``, whatever exception may follow. ``again``: their
        batches are there already, and only the random states that they leave behind are wanted.
        """

    def adopt(self, worker: int, logical: int, state: RngState | None, streams: int = ALL) -> None:
        """Let ``worker`` serve ``logical``; messages to a worker keep their order.

        ``streams``: as in `dpex.schedule.streams`; where it is `UNKNOWN`, `SplittingKnown` follows.
        """

    def ask_state(self, worker: int, logical: int) -> None:
        """Have ``worker`` ask the dataset of ``logical`` for its state, after what it was sent so far and from then on;
        `Snapshot` follows, and `Notice` if that fails."""

    def new_epoch(self, epoch: int) -> None:
        """Results of earlier epochs are discarded from now on."""

    def descriptors(self) -> list[int]:
        """File descriptors that turn readable when `poll` has something."""

    def poll(self) -> deque[PoolEvent]:
        """What happened, without waiting: the pool's own, out of which the caller takes what it has dealt with."""

    def close(self, grace_s: float) -> None:
        """End every worker within about ``grace_s`` seconds; idempotent."""
