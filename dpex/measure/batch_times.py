"""The record of a batch's times, from the worker that makes it to the sums that metrics export. PURE.

A worker fills in a `BatchTimes` and sends it with the batch. `dpex.measure.pool_times.PoolTimes` adds the records of a
pool up, and `StageSums` is the sum. To count something else per batch: add a field to `BatchTimes` and a counter of the
same name to `StageSums`, and set it where the worker measures it (`dpex.worker.fetch`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

from dpex.measure.record import Record, counter

StepRow = tuple[str, int, float, float]
"""A step: its name, calls, and wall and CPU seconds in them without the steps within; "a > b" is step b within a."""
_WALL, _CPU = "dpex_worker_seconds_total", "dpex_worker_cpu_seconds_total"


class BatchTimes(NamedTuple):
    """The times of one batch. CPU seconds include those of libraries' threads, so they may exceed the wall seconds.

    Attributes:
        samples: Samples in the batch.
        load_s: Wall seconds for the samples, ``dataset[i]``, transforms included.
        load_cpu_s: CPU seconds of that.
        collate_s: Wall seconds in the collate function.
        collate_cpu_s: CPU seconds in the collate function.
        steps: Transforms and other steps, if this batch was one of those in which they were timed.
        slowest: Seconds of the slowest sample and its place in the batch; empty if samples were not timed.
        failed: Index and error, as text, of each sample that could not be loaded.
        cache_hits: Samples that came from a cache (`dpex.cached`).
        cache_misses: Samples that a cache did not have.
        cache_saved_s: Seconds that preparing the former would have taken, less those that reading them took.
        encode_s: Wall seconds in which the batch was written into shared memory.
        encode_cpu_s: CPU seconds of all but loading and collating. Clocks have errors, so it may be below 0.
        nbytes: Bytes of the batch's buffers.
        transit_s: Seconds on the network while the worker had nothing else to do.
        ended_at: When the batch was encoded, or arrived from another machine, in seconds of this machine's clock that
            does not jump.
    """

    samples: int = 0
    load_s: float = 0.0
    load_cpu_s: float = 0.0
    collate_s: float = 0.0
    collate_cpu_s: float = 0.0
    steps: tuple[StepRow, ...] = ()
    slowest: tuple[()] | tuple[float, int] = ()
    failed: tuple[tuple[str, str], ...] = ()
    cache_hits: int = 0
    cache_misses: int = 0
    cache_saved_s: float = 0.0
    encode_s: float = 0.0
    encode_cpu_s: float = 0.0
    nbytes: int = 0
    transit_s: float = 0.0
    ended_at: float = 0.0

    @property
    def busy_s(self) -> float:
        """Wall seconds for which the worker was busy with the batch."""
        return self.load_s + self.collate_s + self.encode_s

    @property
    def cpu_s(self) -> float:
        """CPU seconds of all stages."""
        return self.load_cpu_s + self.collate_cpu_s + self.encode_cpu_s

    def encoded(self, encode_s: float, cpu_s: float, nbytes: int, ended_at: float) -> tuple[Any, ...]:
        """Return the times of a batch that was encoded, as a plain tuple, which `marshal` takes.

        Args:
            encode_s: Wall seconds for encoding.
            cpu_s: CPU seconds for the whole batch.
            nbytes: Bytes of its buffers.
            ended_at: When it was encoded.
        """
        return (*self[:-_ENCODED], encode_s, cpu_s - self.load_cpu_s - self.collate_cpu_s, nbytes, 0.0, ended_at)


batch_times: Callable[[tuple[Any, ...]], BatchTimes] = partial(tuple.__new__, BatchTimes)
"""Return the `BatchTimes` of a plain tuple with all its fields, in a third of the time that the class takes."""
NO_TIMES = BatchTimes()
_ENCODED = len(BatchTimes._fields) - BatchTimes._fields.index("encode_s")
"""Number of fields that are known only when the batch is encoded: the last ones."""
NOT_ENCODED = NO_TIMES[-_ENCODED:]


class CacheUse:
    """Counts what caches did for the batch that is being made in this process. A process makes one batch at a time."""

    __slots__ = ("hits", "misses", "saved_s")

    def __init__(self) -> None:
        self.hits = self.misses = 0
        self.saved_s = 0.0

    def take(self) -> tuple[int, int, float]:
        """Return the hits, the misses and the seconds saved since the last call, as `BatchTimes` has them."""
        if not self.hits and not self.misses:
            return _NO_USE
        found = self.hits, self.misses, self.saved_s
        self.__init__()  # type: ignore[misc]
        return found


_NO_USE = (0, 0, 0.0)
CACHE_USE = CacheUse()


@dataclass(frozen=True, kw_only=True)
class StageSums(Record):
    """Times of batches by stage, added up over all workers of a pool."""

    tickets: int = counter("The number of batches that were made.")
    load_s: float = counter(
        "Wall seconds in which workers got the samples, ``dataset[i]``, transforms included.",
        "seconds",
        stage="load",
        metric=_WALL,
    )
    load_cpu_s: float = counter(
        "CPU seconds of that, those of libraries' threads included.", "seconds", stage="load", metric=_CPU
    )
    collate_s: float = counter("Wall seconds in the collate function.", "seconds", stage="collate", metric=_WALL)
    collate_cpu_s: float = counter("CPU seconds in the collate function.", "seconds", stage="collate", metric=_CPU)
    encode_s: float = counter(
        "Wall seconds in which batches were written into shared memory.",
        "seconds",
        stage="encode",
        metric=_WALL,
    )
    encode_cpu_s: float = counter("CPU seconds of that writing.", "seconds", stage="encode", metric=_CPU)
    transit_s: float = counter(
        "Seconds on the way from a remote worker, while it had nothing else to do.", "seconds", stage="transit"
    )
    cache_hits: int = counter(
        "Samples that came from a cache (`dpex.cached`).",
        metric="dpex_cache_hits_total",
        how_to_read="Over hits and dpex_cache_misses_total: the part of the samples that cost nearly nothing.",
    )
    cache_misses: int = counter(
        "Samples that a cache did not have, so that they were prepared.",
        metric="dpex_cache_misses_total",
        how_to_read="All of the first epoch. If it rises after that, the cache is full: the log says how much fits.",
    )
    cache_saved_s: float = counter(
        "Seconds that preparing the samples of all hits would have taken, less those that reading them took.",
        "seconds",
        metric="dpex_cache_saved_seconds_total",
        how_to_read="Its rate is the number of workers that the cache replaces.",
    )

    @property
    def busy_s(self) -> float:
        """Wall seconds for which workers were busy."""
        return self.load_s + self.collate_s + self.encode_s

    @property
    def cpu_s(self) -> float:
        """CPU time of all stages."""
        return self.load_cpu_s + self.collate_cpu_s + self.encode_cpu_s


SUMMED = tuple(name for name in BatchTimes._fields if name in StageSums.declared())
"""Fields of `BatchTimes` that add up to those of `StageSums`."""


@dataclass(frozen=True, kw_only=True)
class StepSums(Record):
    """A transform, or what else the dataset or the collate function does, in the batches in which steps were timed."""

    calls: int = counter("Calls.")
    wall_s: float = counter("Wall seconds in these calls, without the steps within.", "seconds")
    cpu_s: float = counter("CPU seconds in these calls, without the steps within.", "seconds")
