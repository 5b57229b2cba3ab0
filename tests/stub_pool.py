"""A pool that makes nothing: it takes down what it is told, and says what a test has it say."""

from collections import deque
from collections.abc import Callable
from typing import Any

from dpex.measure.batch_times import PoolTimes
from dpex.pools.base import PoolCounts
from dpex.schedule.events import PoolEvent, TicketMade
from dpex.schedule.schedule import Ticket


class StubPool:
    """Implements `dpex.pools.base.WorkerPool`.

    ``sent`` holds a tuple (ticket numbers, epoch, worker) for each message. ``told`` holds every other call,
    with its arguments. ``said`` is what `poll` returns.
    """

    def __init__(self, name: str = "local", workers: tuple[int, ...] = (0, 1)) -> None:
        count = len(workers)
        self.name = name
        self.up = list(workers)
        self.counts = PoolCounts(wanted=count, requested=count, running=count)
        self.times = PoolTimes()
        self.failed: str | None = None
        self.crashes = 0
        self.sent: list[tuple[list[int], int, int | None]] = []
        self.told: list[tuple[Any, ...]] = []
        self.said: deque[PoolEvent] = deque()

    def workers(self) -> list[int]:
        return self.up

    def at_work(self) -> int:
        return len(self.up)

    def send(self, tickets: list[Ticket], epoch: int, worker: int | None = None) -> bool:
        self.sent.append(([ticket.number for ticket in tickets], epoch, worker))
        return True

    def says_made(self, number: int, value: Callable[[], Any], epoch: int = 0) -> None:
        """The result of a ticket arrives with the next `poll`."""
        self.said.append(TicketMade(epoch, number, self.up[0], value))

    def resize(self, wanted: int) -> None:
        self.told.append(("resize", wanted))
        self.counts.wanted = wanted

    def adopt(self, worker: int, logical: int, state: Any) -> None:
        self.told.append(("adopt", worker, logical, state))

    def new_epoch(self, epoch: int) -> None:
        self.told.append(("new_epoch", epoch))

    def descriptors(self) -> list[int]:
        return []

    def poll(self) -> deque[PoolEvent]:
        return self.said

    def close(self, grace_s: float = 5.0) -> None:
        self.told.append(("close", grace_s))

    @property
    def numbers_sent(self) -> list[int]:
        """Numbers of all tickets that were sent, in order."""
        return [number for numbers, _, _ in self.sent for number in numbers]
