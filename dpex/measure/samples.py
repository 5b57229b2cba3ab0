"""What is measured in a window of one worker pool, and of the trainer's machine. Times are seconds, sizes bytes."""

from __future__ import annotations

from dataclasses import dataclass, replace
from operator import add

from dpex.measure.record import counter, few_of_many, level, state
from dpex.measure.sums import LinkSums


@dataclass(frozen=True, kw_only=True)
class PoolSample(LinkSums):
    """One pool in a window; sums are over the ``tickets`` whose results came in it."""

    requested: int = level("Workers asked of the system, those running included.")
    running: int = level("Workers that take tickets.")
    tickets: int = counter("Batches made.")
    load_s: float = counter("Wall seconds in which workers got the samples.", "seconds")
    collate_s: float = counter("Wall seconds in the collate function.", "seconds")
    encode_s: float = counter("Wall seconds in which batches were written into shared memory.", "seconds")
    cpu_s: float = counter("CPU seconds of all three.", "seconds")
    queued_s: float | None = counter(
        "Seconds in which a worker could have run and had no CPU; None where the kernel does not tell.",
        "seconds",
        default=None,
    )
    services_s: tuple[float, ...] = few_of_many(
        "Wall seconds of single batches: the latest, a few dozen at most.", add, "seconds"
    )
    room: int | None = state("Further workers there would be place for, None if unknown.", default=None)
    unplaced: int = state("How many of those requested the cluster has no place for.")
    granted: int | None = state(
        "Workers that this loader may have beside the others on the cluster, None if nobody divides it.", default=None
    )

    def since(self, earlier: PoolSample) -> PoolSample:
        """What the pool did between two looks."""
        found = super().since(earlier)
        return replace(found, services_s=self.services_s[-found.tickets :] if found.tickets else ())

    @property
    def busy_s(self) -> float:
        """Wall time workers were at work."""
        return self.load_s + self.collate_s + self.encode_s


@dataclass(frozen=True, kw_only=True)
class MachineSample:
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
