"""Measurements of a window: of one worker pool, and of the trainer's machine. Times are seconds, sizes bytes."""

from __future__ import annotations

from dataclasses import dataclass, replace
from operator import add

from dpex.measure.record import counter, few_of_many, level, state
from dpex.measure.sums import LinkSums


@dataclass(frozen=True, kw_only=True)
class PoolSample(LinkSums):
    """A pool in a window. Sums are over the ``tickets`` whose results came in it."""

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
        "Workers that this loader may have beside the others on the cluster, None if the cluster is not divided.",
        default=None,
    )

    def since(self, earlier: PoolSample) -> PoolSample:
        """Return the difference to an earlier sample."""
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
        cpus: CPUs that this process may use, by affinity, cgroup quota and its share among local ranks.
        others: CPUs of these that other programs kept busy.
        trainer_cpu_s: CPU seconds of the training process.
        trainer_queued_s: Seconds in which its training thread could have run and had no CPU, None if unknown.
        memory_free: Bytes that batches and workers may still take, below 0 if they have too many; None if unknown.
        batch_budget: The largest number of bytes of batches in flight.
        worker_bytes: Memory of a local worker, 0 if unknown.
        runnable: Threads of all programs that have or want a CPU at the end of the window; None if unknown, or not
            comparable with ``cpus``.
    """

    cpus: float = 1.0
    others: float = 0.0
    trainer_cpu_s: float = 0.0
    trainer_queued_s: float | None = None
    memory_free: int | None = None
    batch_budget: int | None = None
    worker_bytes: float = 0.0
    runnable: float | None = None
