"""A lane that makes nothing: it takes down what it is told, and says what a test has it say."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

from dpex.core.schedule import Ticket
from dpex.pools.base import Event, LaneCounts, LaneTimes, Made


class FakeLane:
    """Implements `dpex.pools.base.Lane`.

    ``sent`` holds a tuple (ticket numbers, epoch, worker) for each message. ``accepts`` says whether it takes messages
    at present. ``told`` holds every other call, with its arguments. ``said`` is what `poll` returns.
    """

    def __init__(self, name: str = "local", workers: tuple[int, ...] = (0, 1), *, accepts: bool = True) -> None:
        count = len(workers)
        self.name = name
        self.workers = list(workers)
        self.accepts = accepts
        self.counts = LaneCounts(wanted=count, requested=count, running=count)
        self.times = LaneTimes()
        self.failed: str | None = None
        self.crashes = 0
        self.sent: list[tuple[list[int], int, int | None]] = []
        self.told: list[tuple[Any, ...]] = []
        self.said: deque[Event] = deque()

    starts_slowly = False

    def hosts(self) -> list[int]:
        return self.workers

    def at_work(self) -> int:
        return len(self.workers)

    def send(self, tickets: list[Ticket], epoch: int, host: int | None = None, sent: list[Any] | None = None) -> bool:
        if self.accepts:
            if sent is not None:
                sent.append(host)
            self.sent.append(([ticket.number for ticket in tickets], epoch, host))
        return self.accepts

    def says_made(self, number: int, value: Callable[[], Any], epoch: int = 0) -> None:
        """The result of a ticket arrives with the next `poll`."""
        self.said.append(Made(epoch, number, self.workers[0], value))

    def resize(self, wanted: int) -> None:
        self.told.append(("resize", wanted))
        self.counts.wanted = wanted

    def dismiss(self, host: int) -> None:
        self.told.append(("dismiss", host))

    def adopt(self, host: int, logical: int, state: Any) -> None:
        self.told.append(("adopt", host, logical, state))

    def release(self, host: int, logical: int) -> None:
        self.told.append(("release", host, logical))

    def new_epoch(self, epoch: int) -> None:
        self.told.append(("new_epoch", epoch))

    def descriptors(self) -> list[int]:
        return []

    def poll(self) -> deque[Event]:
        return self.said

    def close(self, grace_s: float = 5.0) -> None:
        self.told.append(("close", grace_s))

    @property
    def numbers_sent(self) -> list[int]:
        """Numbers of all tickets that were sent, in order."""
        return [number for numbers, _, _ in self.sent for number in numbers]
