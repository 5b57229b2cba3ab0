"""Measurements of a window, in seconds and bytes: of a worker pool, of the trainer's machine and of its GPUs. PURE."""

from __future__ import annotations

from dataclasses import dataclass, replace
from operator import add

from dpex.measure.record import Record, counter, few_of_many, level, state
from dpex.measure.sums import LinkSums


@dataclass(frozen=True, kw_only=True)
class PoolSample(LinkSums):
    """A pool in a window. Sums are over the ``tickets`` whose results came in it."""

    requested: int = level("Workers asked of the system, those running included.")
    running: int = level("Workers that take tickets.")
    sharing_ranks: int = state("Ranks of this job that share the batches.", default=1)
    tickets: int = counter("Batches made.")
    load_s: float = counter("Wall seconds in which workers got the samples.", "seconds")
    collate_s: float = counter("Wall seconds in the collate function.", "seconds")
    encode_s: float = counter("Wall seconds in which batches were written into shared memory.", "seconds")
    cpu_s: float = counter("CPU seconds of all three.", "seconds")
    queued_s: float | None = counter(
        "Seconds on run queues: a worker could have run and had no CPU. None without a report by the kernel.",
        "seconds",
        default=None,
    )
    services_s: tuple[float, ...] = few_of_many(
        "Wall seconds of single batches: the latest, a few dozen at most.", add, "seconds"
    )
    room: int | None = state("Further workers there would be place for, None if unknown.", default=None)
    unplaced: int = state("How many of those requested the cluster has no place for.")
    granted: int | None = state(
        "Workers that this loader may have beside the others on the cluster, None if the cluster is not divided.",
        default=None,
    )

    def since(self, earlier: PoolSample) -> PoolSample:
        found = super().since(earlier)
        return replace(found, services_s=self.services_s[-found.tickets :] if found.tickets else ())

    @property
    def busy_s(self) -> float:
        """Wall seconds for which workers were busy."""
        return self.load_s + self.collate_s + self.encode_s


@dataclass(frozen=True, kw_only=True)
class MachineSample:
    """The trainer's machine in a window.

    Attributes:
        cpus: CPUs that this process may use, by affinity, cgroup quota and its share of the machine.
        others: CPUs among ``cpus`` that other programs kept busy.
        trainer_cpu_s: CPU seconds of the training process.
        trainer_queued_s: Seconds of the training thread on run queues; None if unknown.
        memory_free: Bytes available to batches and workers, negative beyond the limit; None if unknown.
        worker_bytes: Median private memory of a local worker; 0 if unknown.
    """

    cpus: float = 1.0
    others: float = 0.0
    trainer_cpu_s: float = 0.0
    trainer_queued_s: float | None = None
    memory_free: int | None = None
    worker_bytes: float = 0.0


@dataclass(frozen=True, kw_only=True)
class GpuUse(Record):
    """NVML's readings while a loader was tuned: sums over the windows for which there were any.

    A training that has ended leaves an idle GPU, so windows are added up only while passes run.
    """

    seconds: float = counter("Seconds of these windows.", "seconds")
    busy_s: float = counter("Seconds in which a kernel ran.", "seconds")
    supplied_s: float = counter("Seconds of the windows at whose end batches were ready.", "seconds")
    supplied_busy_s: float = counter("Seconds of those in which a kernel ran.", "seconds")

    @classmethod
    def of_window(cls, seconds: float, busy: float, *, is_supplied: bool) -> GpuUse:
        """Return the sums of one window, in which the GPU ran kernels for the share ``busy`` of the time."""
        supplied_s = seconds if is_supplied else 0.0
        return cls(seconds=seconds, busy_s=busy * seconds, supplied_s=supplied_s, supplied_busy_s=busy * supplied_s)

    @property
    def busy_ratio(self) -> float | None:
        """Share of the time in which some kernel ran, 0 to 1; None if there is no window."""
        return self.busy_s / self.seconds if self.seconds > 0 else None

    @property
    def supplied_busy_ratio(self) -> float | None:
        """Share of the time with batches ready in which a kernel ran; None without such a time."""
        return self.supplied_busy_s / self.supplied_s if self.supplied_s > 0 else None

    @property
    def supplied_idle_ratio(self) -> float:
        """Share of all the time in which batches were ready and no kernel ran, 0 to 1."""
        return (self.supplied_s - self.supplied_busy_s) / self.seconds if self.seconds > 0 else 0.0
