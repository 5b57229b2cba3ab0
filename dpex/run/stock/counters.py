"""Counts what an iterator of torch's does, with workers or without, as dpex counts its own. Batches are not touched.

The consumer's thread writes; `WorkerTimes` is a row of numbers per worker in shared memory, each written by its worker
alone. Those rows travel to the workers as part of the collate function, which torch hands to them anyway. A worker's
wait cannot be told batch by batch from here: what the consumer waits is put down to the stages in proportion to what
they took in all workers since it last waited.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from dpex.engine.inprocess_meter import InlineMeter
from dpex.measure.batch_times import BatchTimes
from dpex.measure.consumer_time import Tally
from dpex.measure.sums import PoolStats, Sums
from dpex.measure.wait_causes import NONE_YET, STARTUP, STRAGGLER, split
from dpex.schedule.names import LOCAL
from dpex.system.clock import monotonic
from dpex.system.gpu.stall import GpuStall
from dpex.system.run_queue import OwnQueue

KEPT = 256
"""Times of single batches that a worker's row holds, the latest ones."""
_SIZED = 8
"""Batches whose bytes are looked up; what comes later is taken to be like them."""
_OWED_S = 0.1
"""Waits are put down to stages when so much has come together: rows of workers need not be read for each batch."""
_COLUMNS = ("load_s", "load_cpu_s", "collate_s", "collate_cpu_s", "samples", "tickets")
"""What a worker's row begins with, as in `dpex.measure.batch_times.StageSums`; the times of single batches follow."""
_SAMPLES, _TICKETS, _HEAD = _COLUMNS.index("samples"), _COLUMNS.index("tickets"), len(_COLUMNS)


class WorkerTimes:
    """Seconds of torch's workers by stage, in shared memory; picklable into a worker that is being started."""

    def __init__(self, workers: int) -> None:
        self._rows = torch.zeros((workers, _HEAD + KEPT), dtype=torch.float64, device="cpu").share_memory_()

    def add(self, worker: int, stages: tuple[float, float, float, float], samples: int) -> None:
        """One more batch of that worker: load, load CPU, collate and collate CPU seconds."""
        row = self._rows[worker].numpy()
        row[_HEAD + int(row[_TICKETS]) % KEPT] = stages[0] + stages[2]
        row[:_SAMPLES] += stages
        row[_SAMPLES] += samples
        row[_TICKETS] += 1

    def making(self) -> BatchTimes:
        """Of all batches so far."""
        found = self._totals()
        return BatchTimes(load_s=found["load_s"], load_cpu_s=found["load_cpu_s"], collate_s=found["collate_s"])

    def _totals(self) -> dict[str, float]:
        """Of all workers, by column."""
        return dict(zip(_COLUMNS, self._rows[:, :_HEAD].numpy().sum(axis=0).tolist(), strict=True))

    def sums(self, running: int) -> PoolStats:
        """All of it."""
        rows = self._rows.numpy().copy()
        found = self._totals()
        kept = [value for row in rows for value in row[_HEAD : _HEAD + min(KEPT, int(row[_TICKETS]))].tolist()]
        return PoolStats(
            tickets=int(found.pop("tickets")),
            **{name: value for name, value in found.items() if name != "samples"},  # type: ignore[arg-type]
            kept_s=tuple(kept),
            running=running,
            wanted=running,
            requested=running,
        )


class CountedIterator:
    """In a worker: the collate function and ``fetch`` of its fetcher, timed."""

    def __init__(self, times: WorkerTimes, worker: int, fetcher: Any) -> None:
        self._times, self._worker = times, worker
        self._fetch, self._collate = fetcher.fetch, fetcher.collate_fn
        self._stages: tuple[float, float, int] = (0.0, 0.0, 0)
        fetcher.fetch, fetcher.collate_fn = self.fetch, self.collate

    def fetch(self, index: Any) -> Any:
        """torch's, and the time it takes."""
        self._stages = (0.0, 0.0, 1)
        began, cpu_began = monotonic(), time.process_time()
        batch = self._fetch(index)
        took_s, cpu_s = monotonic() - began, time.process_time() - cpu_began
        collate_s, collate_cpu_s, samples = self._stages
        self._times.add(self._worker, (took_s - collate_s, cpu_s - collate_cpu_s, collate_s, collate_cpu_s), samples)
        return batch

    def collate(self, data: Any) -> Any:
        """The loader's."""
        began, cpu_began = monotonic(), time.process_time()
        batch = self._collate(data)
        samples = len(data) if isinstance(data, list) else 1
        self._stages = (monotonic() - began, time.process_time() - cpu_began, samples)
        return batch


class WorkersMeter:
    """Of an iterator with workers: told of each call of ``next()`` and of each wait for whatever batch comes next."""

    def __init__(self, workers: int, prefetch: int, gpu: GpuStall[Any] | None = None) -> None:
        self.times = WorkerTimes(workers)
        self.pids: tuple[int, ...] = ()
        self._workers, self._prefetch, self._gpu = workers, prefetch, gpu
        self._mark: Any = None
        self._entered = 0.0
        self._tally = Tally(detailed=True, queue=OwnQueue().seconds)
        self._made = BatchTimes()
        self._owed_s = 0.0
        self._thread = threading.get_native_id()
        self._sizes = _Sizes()
        self._passes = 0

    def started(self, seconds: float) -> None:
        """Making the iterator, or having it begin again, took so long."""
        self._tally.returned_at = 0.0  # the pass before may have been broken off
        self._tally.causes[STARTUP] += seconds
        self._passes += 1

    def enter(self) -> None:
        """The consumer asks for a batch."""
        self._entered = monotonic()
        self._tally.enter(self._entered)
        if self._gpu is not None:
            self._mark = self._gpu.enter()

    def block(self, tasks: Mapping[int, tuple[Any, ...]]) -> None:
        """It begins to wait, with those batches under way by number: a worker's, and the data if it is here."""
        ready = sum(len(task) > 1 for task in tasks.values())
        busy = len({task[0] for task in tasks.values() if len(task) == 1})
        cause = STRAGGLER if ready else NONE_YET
        self._tally.block(monotonic(), cause, max(0.0, 1.0 - busy / self._workers))

    def unblock(self) -> None:
        """Some batch has come."""
        self._tally.unblock(monotonic())

    def leave(self, data: Any = None, error: BaseException | None = None) -> None:
        """It has got one, or that error."""
        over = isinstance(error, StopIteration)
        if self._tally.blocked_at:
            self._tally.unblock(monotonic())
        if self._tally.pending_s and not self._tally.starting:
            self._owed_s += self._tally.pending_s
            self._tally.pending_s = 0.0
            if self._owed_s > _OWED_S:
                self._settle()
        now = monotonic()
        if self._gpu is not None:
            self._gpu.leave(self._mark, now - self._entered, starting=self._tally.starting, over=over)
        if error is None:
            self._tally.batches += 1
            self._sizes.add(data)
        self._tally.leave(0.0 if error is not None else now, now, over=over)

    def _settle(self) -> None:
        """Put down what was waited to the stages that the workers were at meanwhile."""
        owed_s, self._owed_s = self._owed_s, 0.0
        for cause, seconds in split(owed_s, self._lately()):
            self._tally.causes[cause] += seconds

    def _lately(self) -> BatchTimes:
        """Stages since this was last asked; while no worker has finished any since then, those before."""
        made = self.times.making()
        past = self._made
        lately = BatchTimes(
            load_s=made.load_s - past.load_s,
            load_cpu_s=made.load_cpu_s - past.load_cpu_s,
            collate_s=made.collate_s - past.collate_s,
        )
        if lately.busy_s + lately.cpu_s <= 0.0:
            return made
        self._made = made
        return lately

    def sums(self) -> Sums:
        """The counts so far."""
        self._settle()
        gpu = self._gpu
        return self._tally.sums(
            monotonic(),
            passes=max(1, self._passes),
            pools={LOCAL: self.times.sums(self._workers)},
            prefetch=self._prefetch,
            batch_bytes=self._sizes.mean_bytes,
            gpu_stall_s=gpu.total_s if gpu is not None else None,
            gpu_running_stall_s=gpu.stall_s if gpu is not None else None,
            pids=self.pids,
            thread=self._thread,
        )


class HereMeter(InlineMeter):
    """Of an iterator without workers."""

    def __init__(self, *, auto_collation: bool, gpu: GpuStall[Any] | None = None) -> None:
        super().__init__(auto_collation=auto_collation, gpu=gpu)
        self._thread = threading.get_native_id()
        self._sizes = _Sizes()

    def started(self, seconds: float) -> None:
        """Making the iterator took so long."""
        self._tally.causes[STARTUP] += seconds

    def got(self, data: Any) -> None:
        """The consumer has this batch."""
        self._sizes.add(data)

    def sums(self) -> Sums:
        """The counts so far, with the size of batches."""
        return replace(super().sums(), batch_bytes=self._sizes.mean_bytes, thread=self._thread)


class _Sizes:
    """Bytes of the first batches."""

    def __init__(self) -> None:
        self._seen = 0
        self.mean_bytes = 0.0

    def add(self, batch: Any) -> None:
        """A further one."""
        if self._seen < _SIZED:
            self._seen += 1
            self.mean_bytes += (nbytes(batch) - self.mean_bytes) / self._seen


def nbytes(batch: Any) -> int:
    """Of the tensors and arrays in plain containers; nothing else is asked for its size."""
    if isinstance(batch, torch.Tensor):
        return int(batch.element_size() * batch.nelement())
    if isinstance(batch, dict):
        return sum(map(nbytes, batch.values()))
    if isinstance(batch, (list, tuple)):
        return sum(map(nbytes, batch))
    size = getattr(batch, "nbytes", 0) if type(batch).__module__ == "numpy" else 0
    return size if isinstance(size, int) else 0
