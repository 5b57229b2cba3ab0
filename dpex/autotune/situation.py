"""What policies read: one window, and all that is known when it has ended. Values only, which nobody changes. PURE.

The controller makes a `Situation` for each window in which something may be decided. A policy needs nothing else, so a
test of a policy is a table of situations and suggestions.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property

from dpex.autotune import limits
from dpex.autotune.config import AutotuneConfig
from dpex.autotune.constants.measuring import GPU
from dpex.autotune.constants.trying import COMMON, IN_PROCESS
from dpex.autotune.evaluation import FailedTrial
from dpex.autotune.felt import FeltSample
from dpex.autotune.model import Estimate
from dpex.autotune.planner import Bounds, Plan
from dpex.autotune.types import Sample, Settings
from dpex.autotune.window_record import WindowRecord


@dataclass(frozen=True, kw_only=True)
class Recent:
    """The latest windows under the present settings, added up. Shares are of the time, 0 to 1.

    rate: batches per second. lost: share lost to loading. wait: share in which the training loop waited in ``next()``;
    head: of that, while later batches were ready. busy: share of the workers' time in which they were at work. fullest:
    the most batches that were ready at the ends of two windows; in_flight: those drawn and not ready, on average.
    """

    windows: int = 0
    seconds: float = 0.0
    batches: int = 0
    rate: float = 0.0
    lost: float = 0.0
    wait: float = 0.0
    head: float = 0.0
    busy: float = 1.0
    fullest: int = 0
    in_flight: float = 0.0

    @classmethod
    def of(cls, record: WindowRecord) -> Recent:
        """What these windows add up to."""
        return cls(
            windows=len(record),
            seconds=record.seconds,
            batches=record.batches,
            rate=record.rate,
            lost=record.lost,
            wait=record.wait,
            head=record.head,
            busy=record.busy,
            fullest=record.fullest,
            in_flight=record.in_flight,
        )


@dataclass(frozen=True, kw_only=True)
class Outlook:
    """What the model expects. best: of the best settings that there are; here: of the present ones."""

    best: Plan
    here: Plan


@dataclass(frozen=True, kw_only=True)
class Situation:
    """See the module. Times are seconds, rates batches per second.

    Attributes:
        config: The settings of the controller.
        sample: The window that has just ended; its settings are the present ones, its times those of ``felt``.
        felt: By which clock the consumer was timed in it.
        recent: The latest windows under these settings.
        long_rate: The rate over more of these windows.
        rate_error: The relative standard error of that rate, 0 to 1.
        work: What a batch and a step cost, and the rates that were seen not to be surpassed.
        unlimited: The same without such rates.
        bounds: The settings worth a look.
        batch_bytes: The mean size of a batch.
        variation: The standard deviation of service times over their mean.
        tickets: Batches that all this rests on.
        is_crowded: A batch takes clearly more CPU than it once did: workers are in each other's way.
        is_queueing: More workers were seen to bring nothing: they queue for something of which there is no more.
        asked_at: When the latest change was asked for.
        explored_at, explore_pause_s: When the latest trial of something unknown ended, and the pause after it.
        changed_at: When the work changed lately.
        unplaced_windows: Windows in a row in which the cluster had no place for some remote workers.
        agreed: For each policy, what it wanted in the windows before this one, as long as they agree.
        think: Asks the model, which takes milliseconds: only for `outlook`.
        failed: A decision that turned out in this window not to have helped.
        held_up_s: For how long a single batch has held up all others; 0 if none does.
    """

    config: AutotuneConfig
    sample: Sample
    felt: FeltSample
    recent: Recent
    work: Estimate
    unlimited: Estimate
    bounds: Bounds
    think: Callable[[], Outlook]
    long_rate: float = 0.0
    rate_error: float = 1.0
    batch_bytes: float = 0.0
    variation: float = 0.0
    tickets: int = 0
    is_crowded: bool = False
    is_queueing: bool = False
    asked_at: float = 0.0
    explored_at: float = 0.0
    explore_pause_s: float = 0.0
    changed_at: tuple[float, ...] = ()
    unplaced_windows: int = 0
    agreed: Mapping[str, tuple[Plan, ...]] = field(default_factory=dict)
    failed: FailedTrial | None = None
    held_up_s: float = 0.0

    @property
    def at(self) -> float:
        """When the window ended."""
        return self.sample.at

    @property
    def now(self) -> Settings:
        """The present settings."""
        return self.sample.settings

    @cached_property
    def outlook(self) -> Outlook:
        """What the model expects; thought out when it is first asked for."""
        return self.think()

    @property
    def is_starved(self) -> bool:
        """Whether so much time is lost to loading that a trial may pay."""
        return self.recent.lost >= COMMON.starved

    @property
    def is_full(self) -> bool:
        """Whether workers and training loop keep the CPUs busy."""
        sample = self.sample
        used_s = sample.local.cpu_s + sample.machine.trainer_cpu_s
        return used_s > COMMON.full * sample.machine.cpus * sample.seconds

    @property
    def is_copying(self) -> bool:
        """Whether batches are only copied, by the time that making one takes for its bytes."""
        return self.batch_bytes > IN_PROCESS.copied_per_s * self.work.here_s

    @cached_property
    def evidence(self) -> Mapping[str, float]:
        """The measurements that a decision rests on, by name."""
        return {
            "rate": self.recent.rate,
            "wait": self.recent.lost,
            "blocked": self.recent.wait,
            "step_ms": self.work.step_s * 1e3,
            "worker_cpu_ms": self.work.cpu_s * 1e3,
            "worker_wait_ms": self.work.wait_s * 1e3,
            "cpus": self.work.cpus,
            "others": self.work.others,
            **self._gpu_evidence(),
        }

    def _gpu_evidence(self) -> Mapping[str, float]:
        """What is known of the GPU, as shares of the time; nothing where loading is judged by the wait."""
        busy, felt = self.sample.gpu_busy, self.felt
        stall = {"gpu_stall": self.recent.lost} if felt.signal == "events" else {}
        ran = {} if busy is None else {"gpu_busy": busy}
        copies = {"gpu_waits_for_copies": felt.copies} if felt.copies >= GPU.hardly_lost else {}
        return {**stall, **ran, **copies, "loop_waited": felt.waited} if felt.is_gpu else {}

    @property
    def is_gpu_busy(self) -> bool:
        """Whether NVML says so, which has to do where there are no events."""
        busy = self.sample.gpu_busy
        return self.felt.signal == "nvml" and busy is not None and busy >= GPU.busy

    def within_walls(self, wanted: Settings) -> Settings:
        """The nearest settings that limits, memory and the cluster allow."""
        return limits.allowed(self.config, self.sample, self.batch_bytes, wanted)
