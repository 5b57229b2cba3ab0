"""The measurements of a loader as one value, from which alone a diagnosis concludes. Pure.

Seconds are sums over all passes since the loader was made or `diagnose(reset=True)` was last called; the time between
passes is in none of them. ``Facts.slow_samples`` are about all passes. None: not measured, and
`Facts.unmeasured` says why.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from dpex.autotune.types import Decision
from dpex.measure.batch_times import StageSums, StepSums
from dpex.measure.gpu_use import GpuUse
from dpex.measure.record import counter, few_of_many, level
from dpex.measure.sampling import FailedSample
from dpex.measure.sums import RunSums, chosen
from dpex.schedule.names import LOCAL, REMOTE

WITHIN = " > "
COLLATE = "collate"
_MOST_HELD = 0.95
"""Part of a step that can have been waiting for a CPU, at most: both are measured with errors."""


@dataclass(frozen=True, kw_only=True)
class PoolFacts(StageSums):
    """The work of one pool. workers: running at the end. services_s: wall times of single batches, a fair choice."""

    queued_s: float | None = counter("Seconds in which workers could have run and had no CPU.", "seconds", default=None)
    workers: int = level("Workers that ran at the end.")
    shared: int = counter("Batches that were made for another training with the same ``share``.")
    services_s: tuple[float, ...] = few_of_many("Wall seconds of single batches.", chosen, "seconds")


@dataclass(frozen=True, kw_only=True)
class SampleFacts:
    """A dataset index, as text, of which a sample took long.

    Attributes:
        seconds: The longest time.
        mean_ratio: That time over the mean sample's.
        times: How often it was among the slowest.
        times_mean_ratio: The mean of these times over the mean sample's.
    """

    index: str
    seconds: float
    mean_ratio: float
    times: int = 1
    times_mean_ratio: float = 0.0


@dataclass(frozen=True, kw_only=True)
class TransformFacts(StepSums):
    """A transform, or another step of the dataset or of the collate function; "a > b" is step b within a.

    Calls, wall and CPU seconds are those of the timed batches, without the steps within.
    """

    name: str
    all_wall_s: float = counter("Wall seconds of all batches.", "seconds")
    all_cpu_s: float = counter("CPU seconds of all batches.", "seconds")

    @property
    def short(self) -> str:
        """The name without those of the steps around it."""
        return self.name.rpartition(WITHIN)[2]

    @property
    def is_within(self) -> bool:
        """True for a step of the dataset or of the collate function, and False for these two."""
        return WITHIN in self.name

    @property
    def is_collating(self) -> bool:
        """True for the collate function and its steps."""
        return self.name.partition(WITHIN)[0] == COLLATE


def of_all(timed: Iterable[TransformFacts], pools: Iterable[PoolFacts]) -> tuple[TransformFacts, ...]:
    """Extend the times of some batches to all: divide wall time by wall time, and CPU time by CPU time."""
    timed, pools = tuple(timed), tuple(pools)
    found = []
    for one in timed:
        stage = [other for other in timed if other.is_collating == one.is_collating]
        name = "collate" if one.is_collating else "load"
        wall_s = sum(getattr(pool, f"{name}_s") for pool in pools)
        cpu_s = sum(getattr(pool, f"{name}_cpu_s") for pool in pools)
        all_wall_s = wall_s * one.wall_s / max(1e-12, sum(other.wall_s for other in stage))
        all_cpu_s = cpu_s * one.cpu_s / max(1e-12, sum(other.cpu_s for other in stage))
        found.append(replace(one, all_wall_s=all_wall_s, all_cpu_s=min(all_wall_s, all_cpu_s)))
    return tuple(found)


@dataclass(frozen=True, kw_only=True)
class NodeFacts:
    """A machine: batches made there, wall and CPU seconds for them, and seconds that workers could have run and had
    no CPU."""

    name: str
    tickets: int
    busy_s: float
    cpu_s: float
    queued_s: float | None = None


@dataclass(frozen=True, kw_only=True)
class Subject:
    """A loader, as it is known without measuring.

    Attributes:
        name: The loader's name.
        rank: The rank of this process.
        dataset: The name of the dataset's class.
        batch_size: The batch size, as text.
        is_tuned: The tuner sets workers and prefetch.
        keeps_workers: The number of workers decides what is read, so that it stays as it is.
        has_cluster: There is a Ray cluster to have workers on.
        starts_anew: Each pass starts workers of its own (``persistent_workers=False``).
        transforms: Steps of the dataset and of the collate function.
        decisions: The tuner's decisions, with what they were to bring and what they brought.
        gpu_use: What NVML said of the GPU while the loader was tuned; None where nothing was asked.
    """

    name: str = ""
    rank: int = 0
    dataset: str = ""
    batch_size: str = ""
    is_tuned: bool = False
    keeps_workers: bool = False
    has_cluster: bool = False
    starts_anew: bool = False
    transforms: tuple[TransformFacts, ...] | None = None
    decisions: tuple[Decision, ...] = ()
    gpu_use: GpuUse | None = None


@dataclass(frozen=True, kw_only=True)
class Facts(RunSums, Subject):
    """The measurements of a loader: those of `dpex.measure.sums.RunSums` and of `Subject`, and these.

    Attributes:
        step_spread: The standard deviation of the training steps over their mean.
        gpu_stall_s: Seconds in which the GPU's stream waited for data, the first batch of each pass left out.
        pools: What each pool did, by its name.
        cpus: CPUs that may be used here.
        others: How many of these were busy with other programs.
        deaths: Workers that ended unexpectedly.
        failed_nodes: Why nodes of the cluster were left alone for a while.
        slow_samples: The samples that took longest.
        latest_failed: The latest samples that could not be loaded, each with its index and its error.
        nodes: The machines that made batches, where there are several.
        unmeasured: What is missing, and why.
    """

    step_spread: float | None = None
    gpu_stall_s: float | None = None
    pools: Mapping[str, PoolFacts] = field(default_factory=dict)
    cpus: float = 1.0
    others: float | None = None
    deaths: int = 0
    failed_nodes: tuple[str, ...] = ()
    slow_samples: tuple[SampleFacts, ...] = ()
    latest_failed: tuple[FailedSample, ...] = ()
    nodes: tuple[NodeFacts, ...] | None = None
    unmeasured: tuple[str, ...] = ()

    @property
    def wait_ratio(self) -> float:
        """The wait: the share of wall time that the training loop spent in ``next()``, 0 to 1."""
        return (self.wait_s + self.transfer_s) / self.wall_s if self.wall_s > 0 else 0.0

    @property
    def running_s(self) -> float:
        """Wall time without the start of each pass."""
        return self.wall_s - self.causes.get("startup", 0.0)

    @property
    def running_wait_ratio(self) -> float:
        """The wait without the start of each pass, whose weight falls as a run goes on."""
        return (self.running_s - self.work_s) / self.running_s if self.running_s > 0 else 0.0

    @property
    def held_s(self) -> float:
        """Seconds of the training step in which the training thread could have run and had no CPU.

        Its waits in ``next()`` end on a run queue, too, so that it has its share of what was not seen there.
        """
        if self.trainer_queued_s is None or self.wall_s <= 0:
            return 0.0
        queued_s = max(0.0, self.trainer_queued_s - self.loop_queued_s) * self.work_s / self.wall_s
        return min(_MOST_HELD * self.work_s, queued_s)

    @property
    def held_ratio(self) -> float:
        """Share of wall time that the training step waited for a CPU, 0 to 1. It is no part of the wait."""
        return self.held_s / self.wall_s if self.wall_s > 0 else 0.0

    @property
    def gpu_stall_ratio(self) -> float | None:
        """Share of wall time in which the GPU's stream waited for data, None if unknown."""
        return None if self.gpu_stall_s is None or self.wall_s <= 0 else self.gpu_stall_s / self.wall_s

    @property
    def copies_ratio(self) -> float:
        """Share of wall time in which the training stream waited for batches that were made and not on the device.

        At most 1: a loop that does not synchronise may be over before the device is.
        """
        return min(1.0, (self.feed_wait_s or 0.0) / self.wall_s) if self.wall_s > 0 else 0.0

    @property
    def local(self) -> int:
        """Workers on this machine."""
        return self.pools[LOCAL].workers if LOCAL in self.pools else 0

    @property
    def remote(self) -> int:
        """Workers on the cluster."""
        return self.pools[REMOTE].workers if REMOTE in self.pools else 0

    @property
    def workers(self) -> int:
        """Workers of both pools."""
        return self.local + self.remote

    @property
    def tickets(self) -> int:
        """Batches made, wherever."""
        return sum(pool.tickets for pool in self.pools.values())

    @property
    def busy_s(self) -> float:
        """Wall time that making them took."""
        return sum(pool.busy_s for pool in self.pools.values())
