"""The values that go in and out of the controller. Times are seconds, sizes bytes, rates per second.

A legal sample is whatever clocks, counters and the system may report. Whole numbers and times are 0 or more, and any
of them may jump from one window to the next. A time may be 0 where a clock stood still, and infinite, negative or NaN
where one jumped or failed; ``at`` may stand still or go back. What nobody can tell is None where that is allowed, else
0. Memory, room and CPUs may vanish. The controller takes any sequence of legal samples: it raises nothing, stays within
its limits, and proposes settings only on what `dpex.autotune.checked` accepts as measured.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from dpex.measure.samples import HostSample, LaneSample


@dataclass(frozen=True, kw_only=True, order=True)
class Settings:
    """What can be set. No worker at all means that batches are made in the training process.

    depth: batches drawn and not yet delivered, at most.
    """

    local: int = 0
    remote: int = 0
    depth: int = 2

    @property
    def workers(self) -> int:
        """Hosts of both lanes."""
        return self.local + self.remote

    def __str__(self) -> str:
        if not self.workers:
            return "in-process"
        lanes = [f"{count} {name}" for name, count in (("local", self.local), ("remote", self.remote)) if count]
        return f"{' + '.join(lanes)}, depth {self.depth}"


@dataclass(frozen=True, kw_only=True)
class Sample:
    """What was measured between ``at - seconds`` and ``at``, under ``settings``.

    wait_s: the consumer was blocked in ``next()``. own_s: it was busy there (decoding, handing out work, or making the
    batch itself). work_s: between two calls. The three add up to ``seconds``, but for the call that is under way.
    head_s: part of ``wait_s`` in which later batches were ready and the next one in turn was not.
    step_spread: standard deviation of steps within the window over their mean, None if unknown.
    ready, in_flight: batches at the end of the window. batch_bytes: mean size.
    gpu_busy: share of the window in which the GPU ran kernels (NVML), gpu_stall_s: its stream waited for data.
    """

    at: float
    seconds: float
    settings: Settings
    epoch: int = 0
    batches: int = 0
    wait_s: float = 0.0
    own_s: float = 0.0
    work_s: float = 0.0
    head_s: float = 0.0
    step_spread: float | None = None
    ready: int = 0
    in_flight: int = 0
    batch_bytes: float = 0.0
    made_here: LaneSample = field(default_factory=LaneSample)
    local: LaneSample = field(default_factory=LaneSample)
    remote: LaneSample = field(default_factory=LaneSample)
    host: HostSample = field(default_factory=HostSample)
    gpu_busy: float | None = None
    gpu_stall_s: float | None = None

    @property
    def rate(self) -> float:
        """Batches per second."""
        return self.batches / self.seconds if self.seconds > 0 else 0.0

    @property
    def held(self) -> int:
        """Batches that take memory: those that are ready, and those workers are at."""
        return self.ready + min(self.in_flight, self.local.running + self.remote.running)

    @property
    def stall(self) -> float:
        """Share of the consumer's time spent waiting for batches or making them, 0 to 1."""
        total = self.wait_s + self.own_s + self.work_s
        return (self.wait_s + self.own_s) / total if total > 0 else 0.0


Reason = Literal[
    "start",
    "too few",
    "too many",
    "elsewhere",
    "in-process",
    "spread",
    "explore",
    "undo",
    "limit",
    "lost",
    "changed",
    "failed",
]


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What a decision brought, measured once what it asked for was running. ``kept`` is False if it was undone."""

    rate: float
    stall: float
    kept: bool
    at: float


@dataclass(frozen=True, kw_only=True)
class Decision:
    """A change of settings: why, on what evidence (numbers by name), and what it should bring."""

    at: float
    old: Settings
    new: Settings
    reason: Reason
    text: str
    evidence: Mapping[str, float]
    predicted_rate: float
    predicted_stall: float
    outcome: Outcome | None = None
