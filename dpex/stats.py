"""The values that ``loader.stats()`` returns: snapshots, safe to keep."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from dpex.measure.pool_reading import PoolReading
from dpex.measure.readable import duration, fine_percent, size
from dpex.measure.reading import Reading, wait_ratio


class StreamStats(NamedTuple):
    """A stream of an iterable dataset, in the present epoch and this run.

    Attributes:
        shards: The number of shards of this stream if the dataset deals them to its workers in turn; 0 if it names no
            shards.
        batches: Count of batches of this stream that were delivered, or handed to the workers that decode them.
        has_ended: True if the dataset has no more samples for this stream.
    """

    shards: int
    batches: int
    has_ended: bool


@dataclass(frozen=True, kw_only=True)
class LoaderStats:
    """A loader at one moment.

    Without workers, only ``batches`` is known, unless metrics, `DpexDataLoader.diagnose` or ``dpex diagnose`` ask for a
    measurement, which adds the times. PyTorch's own iterators are not counted.

    Attributes:
        epoch: The number of the epoch of this loader, from 0. A resumed run counts from 0, too.
        batches: Count of delivered batches.
        prefetch: The maximum number of batches that are drawn and not yet delivered.
        in_flight: Count of batches that are being made or wait for a worker.
        ready: Count of finished batches that wait for the training loop.
        batch_bytes: The mean size of a batch.
        ready_bytes: The size of the ready batches, estimated from the mean.
        wait_s: Wall seconds that the training loop spent inside ``next()``, and in the starts of passes.
        busy_s: The part of ``wait_s`` spent busy, not blocked: decoding, handing out work, making batches.
        straggler_s: The part of ``wait_s`` in which later batches were ready and the next one was not.
        work_s: Wall seconds between calls of ``next()``, summed: time of the training loop, not of the GPU.
        first_batch_s: Seconds from ``iter()`` to the first batch.
        gpu_stall_s: Seconds in which the GPU's stream was idle without data. The first batch of an epoch is left
            out, and the last few are not yet known. None without a GPU.
        deaths: Count of workers that ended unexpectedly.
        remade: Count of batches that were made again after deaths.
        late: Count of batches that local workers made again because a remote worker was too slow.
        failed_samples: Count of samples that failed to load; see `SamplePolicy`.
        pools: Counts and times of each worker pool: "local", "remote", and "inline" for the training process.
        streams: The streams in which workers read an iterable dataset, in the order of their numbers.

    Examples:
        >>> import torch
        >>> from torch.utils.data import TensorDataset
        >>> from dpex import DpexDataLoader
        >>> with DpexDataLoader(TensorDataset(torch.arange(8)), num_workers=2) as loader:
        ...     for batch in loader:
        ...         pass
        ...     stats = loader.stats()
        >>> stats.batches, stats.pools["local"].tickets
        (8, 8)
    """

    epoch: int = 0
    batches: int = 0
    prefetch: int = 0
    in_flight: int = 0
    ready: int = 0
    batch_bytes: float = 0.0
    ready_bytes: float = 0.0
    wait_s: float = 0.0
    busy_s: float = 0.0
    straggler_s: float = 0.0
    work_s: float = 0.0
    first_batch_s: float = 0.0
    gpu_stall_s: float | None = None
    deaths: int = 0
    remade: int = 0
    late: int = 0
    failed_samples: int = 0
    pools: Mapping[str, PoolReading] = field(default_factory=dict)
    streams: tuple[StreamStats, ...] = ()

    @classmethod
    def of(cls, found: Reading, *, busy_s: float, first_batch_s: float) -> LoaderStats:
        """Return the stats of an iterator, with two figures that a reading does not have."""
        return found.narrowed(
            cls,
            ready_bytes=found.ready * found.batch_bytes,
            wait_s=found.next_s,
            busy_s=busy_s,
            first_batch_s=first_batch_s,
            gpu_stall_s=found.gpu_running_stall_s,
            deaths=sum(pool.deaths for pool in found.pools.values()),
        )

    @property
    def wait_ratio(self) -> float:
        """The share of the training loop's wall time that it spent waiting for batches, from 0 to 1."""
        return wait_ratio(self.wait_s, self.work_s)

    def __repr__(self) -> str:
        return f"LoaderStats({'; '.join(f'{name} {value}' for name, value in self._shown())})"

    def _shown(self) -> Iterator[tuple[str, str]]:
        """Return the main figures in words."""
        yield "epoch", str(self.epoch + 1)
        yield "batches", f"{self.batches:,}"
        if self.wait_s + self.work_s:
            yield "wait", fine_percent(self.wait_ratio)
        if self.gpu_stall_s is not None:
            yield "GPU stall", duration(self.gpu_stall_s)
        yield (
            "workers",
            " + ".join(f"{pool.running} {name}" for name, pool in self.pools.items() if pool.running) or "0",
        )
        yield "queue", f"{self.ready} ready, {self.in_flight} in flight, prefetch {self.prefetch}"
        if self.batch_bytes:
            yield "a batch", size(self.batch_bytes)
        if self.streams:
            yield "streams", f"{len(self.streams)}, {sum(one.has_ended for one in self.streams)} of them ended"
        for name in ("deaths", "remade", "late", "failed_samples"):
            if count := getattr(self, name):
                yield name.replace("_", " "), f"{count:,}"
