"""Where the consumer's time goes, counted as it goes by, and what one look at an engine shows.

The consumer's thread writes, any other may read: what `Tally.times` says is right to within the moment that passes
meanwhile. The first call of a pass is left out: the time it takes is the start's, not the work's.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from dpex.autotune.types import LaneSample
from dpex.pace import Sizes

_TRIES = 4


class Times(NamedTuple):
    """Seconds of the consumer so far, and the batches that it got in them; see `dpex.autotune.types.Sample`."""

    batches: int
    wait_s: float
    own_s: float
    work_s: float
    head_s: float

    @property
    def seconds(self) -> float:
        """All of it but the time between passes."""
        return self.wait_s + self.own_s + self.work_s


class Tally:
    """Sums of the consumer's seconds. `Engine.next` writes some of them itself, as a call for each would cost more.

    ``entered_at``, ``blocked_at``, ``returned_at``: when the present stay inside ``next()``, the wait in it, or the
    step after it began; 0: there is none. ``starting``: the present call is the first of a pass.
    """

    __slots__ = (
        *("batches", "blocked_at", "blocked_s", "entered_at", "first_batch_s", "first_blocked_s", "head", "head_s"),
        *("inside_s", "returned_at", "start_s", "starting", "starts", "work_s", "_before"),
    )

    def __init__(self) -> None:
        self.batches = self.starts = 0
        self.entered_at = self.blocked_at = self.returned_at = 0.0
        self.inside_s = self.blocked_s = self.head_s = self.work_s = self.start_s = self.first_batch_s = 0.0
        self.first_blocked_s = 0.0
        self.head = self.starting = False
        self._before = (0.0, 0.0)

    def start(self) -> None:
        """The first call of a pass begins."""
        self.starting = True
        self._before = (self.blocked_s, self.head_s)

    def started(self, inside_s: float, got_one: bool) -> None:
        """It has ended."""
        self.first_blocked_s += self.blocked_s - self._before[0]
        self.blocked_s, self.head_s = self._before
        self.start_s += inside_s
        self.starts += got_one
        if self.batches == 1:
            self.first_batch_s = inside_s
        self.starting = False

    def block(self, now: float, head: bool) -> None:
        """The consumer begins to wait; ``head``: later batches are ready."""
        self.head = head
        self.blocked_at = now

    def unblock(self, now: float) -> None:
        """It waits no longer."""
        waited = now - self.blocked_at
        self.blocked_at = 0.0
        self.blocked_s += waited
        if self.head:
            self.head_s += waited

    def away_s(self, now: float) -> float:
        """How long the present step has taken so far."""
        returned_at = self.returned_at
        return 0.0 if self.entered_at or not returned_at else max(0.0, now - returned_at)

    def times(self, now: float) -> Times:
        """So far, what is under way included."""
        for _ in range(_TRIES):
            mark = (self.batches, self.entered_at, self.blocked_at, self.returned_at)
            found = self._times(now)
            if mark == (self.batches, self.entered_at, self.blocked_at, self.returned_at):
                break
        return found

    def _times(self, now: float) -> Times:
        batches, inside_s, work_s = self.batches - self.starts, self.inside_s - self.start_s, self.work_s
        if self.starting:
            return Times(batches, self._before[0], inside_s - self._before[0], work_s, self._before[1])
        blocked_s, head_s = self.blocked_s, self.head_s
        entered_at, blocked_at, returned_at = self.entered_at, self.blocked_at, self.returned_at
        if entered_at:
            inside_s += max(0.0, now - entered_at)
        elif returned_at:
            work_s += max(0.0, now - returned_at)
        if blocked_at:
            blocked_s += max(0.0, now - blocked_at)
            head_s += max(0.0, now - blocked_at) if self.head else 0.0
        return Times(batches, blocked_s, max(0.0, inside_s - blocked_s), work_s, head_s)


@dataclass(frozen=True, kw_only=True)
class Look:
    """An engine at one moment: sums since it was made, and what there is now.

    unwilling: a wish for other sizes was not granted yet. refused: why there can be no remote worker, if so.
    away_s: how long the consumer has been between two calls, 0 inside ``next()`` and between passes.
    pids: local workers. gpu_stall_s: see `dpex.telemetry.gpustall`; None: no GPU.
    """

    at: float
    epoch: int
    times: Times
    sizes: Sizes
    unwilling: bool
    refused: str | None
    away_s: float
    ready: int
    in_flight: int
    batch_bytes: float
    made_here: LaneSample
    local: LaneSample
    remote: LaneSample
    pids: tuple[int, ...]
    gpu_stall_s: float | None = None


def since(then: LaneSample, now: LaneSample, services_s: Iterable[float] = ()) -> LaneSample:
    """What a lane did between two looks."""
    tickets = max(0, now.tickets - then.tickets)
    services = tuple(now.services_s[-tickets:]) if tickets else tuple(services_s)
    return LaneSample(
        requested=now.requested,
        running=now.running,
        tickets=tickets,
        read_s=max(0.0, now.read_s - then.read_s),
        collate_s=max(0.0, now.collate_s - then.collate_s),
        encode_s=max(0.0, now.encode_s - then.encode_s),
        cpu_s=max(0.0, now.cpu_s - then.cpu_s),
        services_s=services,
        room=now.room,
    )
