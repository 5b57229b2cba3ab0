"""The interface between the engine and a pool of workers, and the counts that every pool keeps.

A pool runs *workers*: processes or threads, on this machine or on others. Under ``seeding="batch"`` the engine hands
tickets to the pool, which gives each of them to any free worker. With logical workers (``seeding="worker"``, streams)
the engine assigns each logical worker to a worker and addresses tickets to it.

All calls come from the thread that drives the engine. Only `WorkerPool.close` may block.

`dpex.DpexDataLoader.local_pool` accepts a user's own kind of pool. The names in ``__all__`` are public for writing one.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

from dpex._torch import ExceptionWrapper
from dpex.errors import InternalError
from dpex.measure.batch_times import BatchTimes, PoolTimes
from dpex.schedule.events import (
    Notice,
    PoolEvent,
    TicketMade,
    WorkerGone,
    WorkerUp,
)
from dpex.schedule.schedule import Ticket
from dpex.worker.fetch import Failure, Fetcher, where
from dpex.worker.setup import WorkerSetup
from dpex.worker.states import RngState

__all__ = [
    "BatchTimes",
    "Fetcher",
    "Notice",
    "PoolCounts",
    "PoolEvent",
    "PoolTimes",
    "Ticket",
    "TicketMade",
    "WorkerGone",
    "WorkerPool",
    "WorkerSetup",
    "WorkerUp",
    "failure",
]


def failure(worker: int) -> Failure:
    """Return the value to deliver in place of a batch that failed. Call this while the exception is handled."""
    return Failure(ExceptionWrapper(where=where(worker)))


@dataclass(kw_only=True)
class PoolCounts:
    """Workers by stage: ``wanted`` by the user or tuner, ``requested`` from the system, ``running`` now.

    ``most``, ``why_most``: The maximum number of workers and its reason, once the system has refused a worker.
    `WorkerPool.resize` asks the system again.
    ``why_excluded``: The reason why a node of the cluster gets no workers for a while, by the name of the node.
    ``failed``: The latest such reason of each node, which is kept when the node gets workers again.
    ``sharing_ranks``: Count of the job's ranks that share the batches.
    """

    wanted: int = 0
    requested: int = 0
    running: int = 0
    most: int | None = None
    why_most: str = ""
    sharing_ranks: int = 1
    why_excluded: Mapping[str, str] = field(default_factory=dict)
    failed: Mapping[str, str] = field(default_factory=dict)

    def leave_alone(self, place: str, why: str) -> None:
        """Note ``why`` a node gets no workers; "" ends this. Makes new dicts, as other threads may read the old."""
        others = {name: known for name, known in self.why_excluded.items() if name != place}
        self.why_excluded = {**others, place: why} if why else others
        if why:
            self.failed = {**self.failed, place: why}


class MakesPool(Protocol):
    """A callable that makes a pool, such as a pool's class."""

    def __call__(self, setup: WorkerSetup, workers: int, /) -> WorkerPool:
        """Return a pool that has requested that number of ``workers``."""


class WorkerPool(Protocol):
    """A group of workers that turn tickets into batches.

    A derived class inherits defaults for a pool that has no logical workers (``seeding="batch"``) and reports no
    crashes. `examples/thread_pool.py` is such a pool.
    """

    name: str
    counts: PoolCounts
    times: PoolTimes
    failed: str | None = None
    """The reason why the pool can start no worker at present, or None."""

    @property
    def crashes(self) -> int:
        """Unexpected ends of workers since the last result from any worker."""
        return 0

    def resize(self, wanted: int) -> None:
        """Request ``wanted`` workers; `WorkerUp` and `WorkerGone` follow. A leaving worker finishes its tickets.

        With logical workers a pool only grows, because a logical worker never moves to another worker.
        """

    def at_work(self) -> int:
        """Return an upper bound on the number of busy workers."""
        return self.counts.running

    def workers(self) -> list[int]:
        """Return the workers that are up and not leaving, by id."""

    def send(self, tickets: list[Ticket], epoch: int, worker: int | None = None) -> bool:
        """Hand over tickets as one message; return False, and take nothing, if there is no room now.

        Args:
            tickets: Tickets of pass ``epoch``.
            epoch: The number of the pass. Within a pass, the numbers of tickets are unique.
            worker: The worker that makes the batches. None: any worker.
        """

    def adopt(self, worker: int, logical: int, state: RngState | None) -> None:
        """Let ``worker`` serve the logical worker ``logical``. Messages to a worker keep their order."""
        raise InternalError(f"{type(self).__name__} has no logical workers")

    def ask_state(self, worker: int, logical: int) -> None:
        """Ask for the dataset's state in ``logical``, once after the tickets sent so far, and then regularly.

        The pool reports each state by a `Snapshot`, and a failure by a `Notice`.
        """
        raise InternalError(f"{type(self).__name__} has no logical workers")

    def new_epoch(self, epoch: int) -> None:
        """Begin pass ``epoch``. Results of earlier passes need not be made any more, and are ignored."""

    def descriptors(self) -> list[int]:
        """Return file descriptors that turn readable when `poll` has events."""

    def poll(self) -> deque[PoolEvent]:
        """Return the events so far, without waiting, in the pool's deque. The caller removes the events that it has
        handled."""

    def close(self, grace_s: float) -> None:
        """End every worker within about ``grace_s`` seconds; idempotent."""
