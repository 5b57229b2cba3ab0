"""What is measured in a window of one worker pool, and of the trainer's machine. Times are seconds, sizes bytes."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class LaneSample:
    """One lane in a window; sums are over the ``tickets`` whose results came in it.

    requested: workers asked of the system, those running included. running: those that take tickets.
    read_s, collate_s, encode_s: wall time in workers, by stage. cpu_s: CPU time of all stages. queued_s: wall time in
    which a worker could have run and had no CPU, None where the kernel does not tell.
    services_s: wall times of single batches, a fair choice of at most a few dozen.
    room: further workers there would be place for, None if unknown; unplaced: of those requested, how many the cluster
    has no place for.
    """

    requested: int = 0
    running: int = 0
    tickets: int = 0
    read_s: float = 0.0
    collate_s: float = 0.0
    encode_s: float = 0.0
    cpu_s: float = 0.0
    queued_s: float | None = None
    services_s: tuple[float, ...] = ()
    room: int | None = None
    unplaced: int = 0

    @property
    def busy_s(self) -> float:
        """Wall time workers were at work."""
        return self.read_s + self.collate_s + self.encode_s


@dataclass(frozen=True, kw_only=True)
class HostSample:
    """The trainer's machine. cpus: what this process may use (affinity, cgroup quota, its share among local ranks).

    others: CPUs out of these that programs of others kept busy. runnable: threads of anybody that have or want a CPU at
    the end of the window, None if unknown or not comparable with ``cpus``. trainer_cpu_s: CPU time of the training
    process in the window. trainer_queued_s: for how long its training thread could have run and had no CPU, None if
    unknown.
    memory_free: bytes that batches and workers may take beyond those they have (below 0: they have too many), None if
    unknown. batch_budget: bytes of batches in flight at most. worker_bytes: memory of a local worker, 0 if unknown.
    """

    cpus: float = 1.0
    others: float = 0.0
    trainer_cpu_s: float = 0.0
    trainer_queued_s: float | None = None
    memory_free: int | None = None
    batch_budget: int | None = None
    worker_bytes: float = 0.0
    runnable: float | None = None
