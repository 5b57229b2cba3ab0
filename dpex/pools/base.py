"""What every pool offers, and what it tells the epoch that drives it.

A pool runs *workers* (processes or threads, here or on other machines). Under ``seeding="batch"`` the epoch hands
tickets to the pool, which gives them to whichever worker is free. With logical workers (``seeding="worker"``, streams)
the epoch assigns each logical worker to a worker and addresses tickets to it.

All calls come from the thread that drives the epoch. A pool never blocks but in `close`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from dpex.measure.pool_times import PoolTimes
from dpex.schedule.events import PoolEvent
from dpex.schedule.schedule import Ticket
from dpex.schedule.streams import ALL
from dpex.worker.states import RngState


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
