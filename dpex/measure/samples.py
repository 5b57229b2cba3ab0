"""Measurements of a window, in seconds and bytes: of the trainer's machine and of its GPUs. PURE."""

from __future__ import annotations

from dataclasses import dataclass

from dpex.measure.record import Record, counter


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
