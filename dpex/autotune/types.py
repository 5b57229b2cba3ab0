"""The values that go in and out of the law, and the room that a cluster has. Times are seconds, sizes bytes, rates per
second.

A legal sample has only possible numbers: finite, and 0 or more except for free memory. ``at`` never goes back. Any
number may jump from one window to the next, and a time is 0 where a clock stood still. An unknown value is 0 where the
type does not allow None. Memory and room may vanish. The law takes any sequence of legal samples and raises nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, Literal, Protocol

from dpex.measure.pool_reading import PoolReading
from dpex.measure.samples import MachineSample
from dpex.measure.settings import Settings

if TYPE_CHECKING:
    from dpex.autotune.limits import Limits


Signal = Literal["wait", "events", "nvml"]
"""By which clock loading is judged: the training loop's in ``next()``, CUDA events on the GPU's stream, or NVML."""


@dataclass(frozen=True, kw_only=True)
class Sample:
    """The measurements between ``at - seconds`` and ``at``, under ``settings``.

    Attributes:
        wait_s: Seconds in which the consumer was blocked in ``next()``. ``wait_s``, ``busy_s`` and ``work_s`` add up to
            ``seconds``, except for the present call.
        busy_s: Seconds in which the consumer was busy in ``next()`` (decoding, or handing out work).
        work_s: Seconds between two calls.
        steps, steps_s: Steps that ended in the window, and their whole seconds. ``work_s`` over ``batches`` is not
            their mean, because a window may cut a step. None: only ``work_s`` is known.
        straggler_s: Part of ``wait_s`` in which later batches were ready, and the next batch in turn was not.
        ready, in_flight: Batches at the end of the window.
        batch_bytes: Mean size of a batch.
        gpu_busy: Share of about the last second in which the GPU ran kernels (NVML).
        gpu_stall_s: Seconds in which the GPU's stream waited for data, by CUDA events that completed in the window.
        gpu_steps, gpu_step_s: Steps of the GPU's stream, from a return of ``next()`` to the next entry, and their
            seconds.
        feed_wait_s: Seconds in which the stream waited for copies of finished batches to the device.
        pass_batches: Batches of a whole pass; 0 if unknown.
        start_s: Seconds from the beginning of the latest pass to its first batch.
        starts_anew: True if each pass starts new workers.
        lanes: Batches that a worker makes at the same time.
        signal: The clock behind ``wait_s``, ``busy_s`` and ``work_s``: with a known GPU they are the GPU's.
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
    local: PoolReading = field(default_factory=PoolReading)
    remote: PoolReading = field(default_factory=PoolReading)
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
    signal: Signal = "wait"

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


Reason = Literal["start", "too few", "too many", "spread", "explore", "undo", "limit", "demand", "failed"]
"""The reason of a decision. "spread" is for a larger prefetch, "explore" for a trial without a prediction, "demand" for
a request to the cluster, "failed" for an error in the tuner."""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """The effect of a decision, measured once the new workers ran.

    Attributes:
        rate: Batches per second.
        wait: The share of the training loop's time that was lost to loading, from 0 to 1. It includes the training
            thread's waits for a CPU.
        kept: True if the change was kept, False if it was undone.
        at: Time of the conclusion, in seconds since the loader's first `iter()`.
    """

    rate: float
    wait: float
    kept: bool
    at: float


@dataclass(frozen=True, kw_only=True)
class Decision:
    """A change of settings, with its reason, its evidence and its expected effect.

    Attributes:
        at: Time of the decision, in seconds since the loader's first `iter()`.
        old: The previous settings.
        new: The new settings.
        reason: The reason in one word.
        text: The decision in sentences.
        evidence: The measurements, by name. "rate" is missing if they cover less than three times of a batch.
        predicted_rate: Expected batches per second.
        predicted_wait: Expected share of the training loop's time lost to loading, from 0 to 1.
        outcome: The effect; None until it is measured.
        signal: The measure of loading. "events": the time that the GPU's stream waited for data, by CUDA events.
            "nvml": the time in which the GPU ran no kernel and the training loop waited. "wait": the time that the
            training loop waited, without a known GPU. Times and shares are the GPU's if it is known.
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

    @classmethod
    def to(
        cls,
        window: Sample,
        new: Settings,
        reason: Reason,
        *,
        rate: float = 0.0,
        wait: float = 0.0,
        evidence: Mapping[str, float] = MappingProxyType({}),
        text: str = "",
    ) -> Decision:
        """Return the decision for ``new`` at the end of a window.

        Args:
            window: The latest window.
            new: The wanted settings. The tuner clips them to the limits.
            reason: The reason in one word. After "undo", the outcome of the decision before says that it was not kept.
            rate: Expected batches per second; 0 without a prediction.
            wait: Expected share of the training loop's time lost to loading.
            evidence: Measurements behind it, by name.
            text: The decision in sentences. "": dpex writes them.
        """
        return cls(
            at=window.at,
            old=window.settings,
            new=new,
            reason=reason,
            text=text,
            evidence=dict(evidence),
            predicted_rate=rate,
            predicted_wait=wait,
            signal=window.signal,
        )


class Policy(Protocol):
    """Chooses the settings of a loader from windows of measurements.

    ``AutotuneConfig(policy=...)`` takes a class or a function that returns a policy for a configuration
    (`AutotuneConfig`), the settings to begin with (`Settings`) and the limits (`dpex.autotune.limits.Limits`). dpex
    makes a new policy if limits change, for instance by `resize()`. A policy needs no base class. It knows time only
    from windows, and starts no thread.

    dpex drops windows that measured nothing, judges waiting by the GPU's clock where there is one, keeps the limits of
    memory, cluster and user, and writes the outcome of each decision.
    """

    def observe(self, window: Sample, limits: Limits) -> Decision | None:
        """Take in a window; return `Decision.to(window, settings, reason)`, or None to stay.

        Args:
            window: A `dpex.autotune.types.Sample`: ``rate`` (batches per second), ``wait`` (the share of the training
                loop's time in ``next()``), ``seconds``, ``at`` (seconds since the loader's first `iter()`),
                ``settings`` (those in force), and ``local`` and ``remote``, the measurements of the worker pools.
            limits: The limits in this window. The tuner clips each wish to them.
        """


# -- room on a cluster -------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class RoomWanted:
    """A loader's demand for a cluster.

    Attributes:
        requested: Requested workers.
        running: Running workers.
        useful: Workers that would speed up training; None if unknown.
        may_grow: True if it may ask for new nodes.
    """

    requested: int
    running: int
    useful: int | None = None
    may_grow: bool = False


@dataclass(frozen=True, kw_only=True)
class RoomFound:
    """The room that a cluster has for a loader.

    Attributes:
        more: Possible workers beyond the requested.
        unplaced: Requested workers without a place.
        granted: The loader's share in workers, or None.
        message: The result of a request for nodes, for the user, or "".
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
