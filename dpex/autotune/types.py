"""The values that go in and out of the law, and the room that a cluster has. Times are seconds, sizes bytes, rates per
second.

A legal sample is whatever clocks, counters and the system may report. Whole numbers and times are 0 or more, and any
of them may jump from one window to the next. A time may be 0 where a clock stood still, and infinite, negative or NaN
where one jumped or failed; ``at`` may stand still or go back. An unknown value is 0 where the type does not allow
None. Memory, room and CPUs may vanish. The law takes any sequence of legal samples: it raises nothing, stays within its
limits, and proposes settings only on what `dpex.autotune.measured` accepts as measured.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, Protocol

from dpex.measure.samples import MachineSample, PoolSample
from dpex.schedule.prefetch import Settings


@dataclass(frozen=True, kw_only=True)
class Sample:
    """The measurements between ``at - seconds`` and ``at``, under ``settings``.

    Attributes:
        wait_s: Seconds in which the consumer was blocked in ``next()``. With ``busy_s`` and ``work_s`` these add up to
            ``seconds``, but for the call that is under way.
        busy_s: Seconds in which it was busy there (decoding, or handing out work).
        work_s: Seconds between two calls.
        steps, steps_s: Steps that ended in the window, and all their seconds, those before the window too. A window
            that ends in the middle of a step holds a part of it, so ``work_s`` over ``batches`` is no mean. None: only
            ``work_s`` is known.
        straggler_s: Part of ``wait_s`` in which later batches were ready and the next one in turn was not.
        ready, in_flight: Batches at the end of the window.
        batch_bytes: Mean size of a batch.
        gpu_busy: Share of about the last second in which the GPU ran kernels (NVML).
        gpu_stall_s: Seconds in which the GPU's stream waited for data, by CUDA events that were read in the window.
        gpu_steps, gpu_step_s: Steps of that stream, from one return of ``next()`` to the next entry, and their seconds.
        feed_wait_s: Seconds in which the stream waited for batches that were made and not on the device yet.
        pass_batches: Batches of a whole pass, 0 if unknown.
        start_s: Seconds from the beginning of the latest pass to its first batch.
        starts_anew: Each pass starts workers of its own.
        lanes: Batches that a worker makes at the same time.
    """

    at: float
    seconds: float
    settings: Settings
    epoch: int = 0
    batches: int = 0
    wait_s: float = 0.0
    busy_s: float = 0.0
    work_s: float = 0.0
    steps: int | None = None
    steps_s: float = 0.0
    straggler_s: float = 0.0
    ready: int = 0
    in_flight: int = 0
    batch_bytes: float = 0.0
    local: PoolSample = field(default_factory=PoolSample)
    remote: PoolSample = field(default_factory=PoolSample)
    machine: MachineSample = field(default_factory=MachineSample)
    gpu_busy: float | None = None
    gpu_stall_s: float | None = None
    gpu_steps: int = 0
    gpu_step_s: float = 0.0
    feed_wait_s: float = 0.0
    pass_batches: int = 0
    start_s: float = 0.0
    starts_anew: bool = False
    lanes: int = 1

    @property
    def rate(self) -> float:
        """Batches per second."""
        return self.batches / self.seconds if self.seconds > 0 else 0.0

    @property
    def held(self) -> int:
        """Batches that take memory: those that are ready, and those workers are at."""
        return self.ready + min(self.in_flight, self.lanes * (self.local.running + self.remote.running))

    @property
    def wait(self) -> float:
        """Share of the consumer's time spent in ``next()``, 0 to 1."""
        total = self.wait_s + self.busy_s + self.work_s
        return (self.wait_s + self.busy_s) / total if total > 0 else 0.0


Signal = Literal["wait", "events", "nvml"]
"""By which clock loading is judged: the training loop's in ``next()``, CUDA events on the GPU's stream, or NVML."""

Reason = Literal["start", "too few", "too many", "spread", "explore", "undo", "limit", "demand", "failed"]
"""In one word: "spread" is for a larger prefetch, "explore" for a trial of what the model does not know, "demand" for a
request to the cluster, "failed" for an error in tuning itself."""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """The effect of a decision, measured once the new workers ran.

    Attributes:
        rate: Batches per second.
        wait: The share of the training loop's time that was lost to loading, from 0 to 1. Where the training thread
            itself waits for a CPU, that is in it.
        kept: Whether the change was kept; False if it was undone.
        at: When that was concluded, in seconds since the first `iter()` of the loader.
    """

    rate: float
    wait: float
    kept: bool
    at: float


@dataclass(frozen=True, kw_only=True)
class Decision:
    """A change of settings: why, on what evidence, and what it should bring.

    Attributes:
        at: When it was taken, in seconds since the first `iter()` of the loader.
        old: The settings before.
        new: The settings after.
        reason: The reason in one word.
        text: The decision in sentences: what, why, and on what evidence.
        evidence: The measurements that it rests on, by name. No "rate" if they cover less than three times of a batch.
        predicted_rate: The expected batches per second.
        predicted_wait: The expected share of the training loop's time lost to loading, from 0 to 1.
        outcome: What it brought; None while that is not known.
        signal: By what loading was judged: "events": the time that the GPU's stream waited for data, by CUDA events;
            "nvml": the time in which the GPU ran no kernel and the training loop waited; "wait": the time that the
            training loop waited, as nothing is known of a GPU. Times and shares are the GPU's where it is known.
    """

    at: float
    old: Settings
    new: Settings
    reason: Reason
    text: str
    evidence: Mapping[str, float]
    predicted_rate: float
    predicted_wait: float
    outcome: Outcome | None = None
    signal: Signal = "wait"


# -- room on a cluster -------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class RoomWanted:
    """A loader's demand for a cluster.

    Attributes:
        requested: Workers that it has asked for.
        running: Those of them that run.
        useful: Workers that would pay if they had places; None if unknown.
        may_grow: True if it may ask for places that no node has yet.
    """

    requested: int
    running: int
    useful: int | None = None
    may_grow: bool = False


@dataclass(frozen=True, kw_only=True)
class RoomFound:
    """The room that a cluster has for a loader.

    Attributes:
        more: Workers beyond those requested.
        unplaced: Requested workers that find no place.
        granted: Its share of the cluster in workers; None if there are no shares.
        message: What happened to a request for further nodes, for the user; "" for nothing.
    """

    more: int
    unplaced: int = 0
    granted: int | None = None
    message: str = ""


class Room(Protocol):
    """A source of room for remote workers. Both methods may take their time."""

    def look(self, wanted: RoomWanted) -> RoomFound | None:
        """Return what this loader may ask for; None if there can be no remote workers."""

    def rest(self) -> None:
        """Give back what was requested beyond its workers: the loader is not in use."""


def room_found(wanted: RoomWanted, free: int, capacity: int, granted: int | None, message: str = "") -> RoomFound:
    """Return what a loader may ask for where ``free`` workers find a place now, and ``capacity`` if none were taken."""
    most = capacity if granted is None else min(capacity, granted)
    return RoomFound(
        more=max(0, min(free, most - wanted.requested)),
        unplaced=max(0, min(wanted.requested - wanted.running, wanted.requested - capacity)),
        granted=granted,
        message=message,
    )
