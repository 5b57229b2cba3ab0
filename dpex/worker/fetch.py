"""Gets the samples of a ticket and collates them, as torch's fetchers do, and times the two stages.

`StreamEnd` and `Failure` stand in place of a batch.

CPU time is measured for the whole process, which a worker has to itself. So it includes threads that libraries start
for a batch.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable
from functools import partial
from types import CoroutineType
from typing import TYPE_CHECKING, Any

import torch

from dpex._torch import ExceptionWrapper
from dpex._torch import collate as torch_collate
from dpex.measure.batch_times import CACHE_USE, BatchTimes, loaded_times
from dpex.measure.sampling import SAMPLE_S
from dpex.profile.live_timer import TicketTimer
from dpex.schedule.names import is_asynchronous
from dpex.system.clock import monotonic
from dpex.transport.arena import Arena
from dpex.worker.own_generators import OwnGenerators
from dpex.worker.sample_guard import SampleGuard
from dpex.worker.setup import WorkerSetup
from dpex.worker.states import DatasetState, load_state

if TYPE_CHECKING:
    from dpex.worker.async_samples import AsyncSamples


class StreamEnd:
    """The stream behind the ticket is exhausted."""


class Failure:
    """An error, as torch wraps it, to be raised where the batch would have been."""

    __slots__ = ("wrapper",)

    def __init__(self, wrapper: ExceptionWrapper) -> None:
        self.wrapper: ExceptionWrapper = wrapper


def where(number: int) -> str:
    """Return the place that torch names in an error that a worker caught."""
    return f"in DataLoader worker process {number}"


TINY_S = 0.0003
"""Tickets of at most this many seconds are tiny: reading a CPU clock, which takes up to 1 µs, is a noticeable cost."""
CPU_CLOCK_EVERY = 16
"""The CPU clock is read for one of this many tiny tickets."""


class SampledCpu:
    """Measure the CPU seconds of tickets by ``clock``, a system call.

    If tickets are tiny, each `CPU_CLOCK_EVERY`-th reads the clock, and the others use its ratio of CPU to wall time.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._unclocked = 0
        self._began_s = 0.0
        self._ratio = 1.0

    def begin(self) -> float:
        """Begin a ticket; return the time."""
        if not self._unclocked:
            self._began_s = self._clock()
        return monotonic()

    def end(self, wall_s: float) -> float:
        """End a ticket that took ``wall_s``; return its CPU seconds."""
        if self._unclocked:
            cpu_s = wall_s * self._ratio
        else:
            cpu_s = self._clock() - self._began_s
            self._ratio = cpu_s / wall_s if wall_s > 0 else 1.0
        self._unclocked = 0 if wall_s > TINY_S else (self._unclocked + 1) % CPU_CLOCK_EVERY
        return cpu_s


class SampleClock:
    """Finds the slowest sample of each batch, while samples take more than `SAMPLE_S` on average (``is_on``).

    The very first sample is left out, because it pays for opening files and importing modules.
    """

    __slots__ = ("_is_warm", "_slowest", "is_on")

    def __init__(self) -> None:
        self.is_on: bool = True
        self._is_warm = False
        self._slowest: tuple[()] | tuple[float, int] = ()

    def samples(self, dataset: Any, index: Any) -> list[Any]:
        """Return ``[dataset[i] for i in index]``."""
        data: list[Any] = []
        longest_s, at, is_warm = SAMPLE_S, -1, self._is_warm
        now = monotonic()
        for i in index:
            data.append(dataset[i])
            then, now = now, monotonic()
            if now - then > longest_s and is_warm:
                longest_s, at = now - then, len(data) - 1
            is_warm = True
        self._is_warm = is_warm
        self._slowest = (longest_s, at) if at >= 0 else ()
        return data

    def slowest(self, load_s: float, samples: int) -> tuple[()] | tuple[float, int]:
        """Return seconds and position of the slowest sample, if known. Decide if the next batch's samples are timed."""
        slowest, self._slowest = self._slowest, ()
        self.is_on = load_s > SAMPLE_S * samples
        return slowest


class Fetcher:
    """Gets the samples of the tickets of one pass, and collates them.

    ``own``: the generators in the dataset. ``former``: the fetcher of the previous pass, whose samples may still be
    loading. ``stream``: the iterator of an iterable dataset, if there is one. ``cpu``: the clock of a batch's CPU
    seconds.
    """

    def __init__(
        self,
        setup: WorkerSetup,
        timer: TicketTimer | None = None,
        *,
        own: OwnGenerators | None = None,
        former: Fetcher | None = None,
        stream: Any = None,
        cpu: Callable[[], float] = time.process_time,
    ) -> None:
        self._cpu = cpu
        self._setup = setup
        self._own = own
        self._dataset = dataset = setup.dataset
        self._collate_fn = setup.collate_fn
        self._auto_collation = setup.auto_collation
        self._drop_last = setup.drop_last
        self.stream: Any = iter(dataset) if setup.iterable and stream is None else stream
        """The iterator of an iterable dataset; None for a map-style dataset."""
        self.has_ended: bool = False
        """True if the stream has no more samples."""
        self._unclocked = 0
        self._ratios = (1.0, 1.0)
        self._load_s = math.inf
        self._timer = timer or TicketTimer(is_on=False)
        self._clock = SampleClock()
        self._guard = SampleGuard(dataset, setup.samples, setup.base_seed) if setup.samples.is_on else None
        self._failed: tuple[tuple[str, str], ...] = ()
        self.samples: AsyncSamples | None = None if former is None else former.samples
        """The loader of asynchronous samples; None until the dataset is known to be asynchronous."""
        if self.samples is None and not setup.iterable and is_asynchronous(dataset):
            self._load_at_once()
        CACHE_USE.take()  # drops counts that a fork has inherited

    def _load_at_once(self) -> AsyncSamples:
        from dpex.worker.async_samples import AsyncSamples

        self.samples = AsyncSamples(
            self._dataset,
            auto_collation=self._auto_collation,
            concurrency=self._setup.concurrency,
            own=self._own,
            guard=self._guard,
        )
        return self.samples

    def go_on(self, state: DatasetState) -> None:
        """Resume the stream. Without a state, read and drop the first ``skip`` batches."""
        load_state(self.stream, state.iterator)
        self.has_ended = state.has_ended
        for _ in range(state.skip):
            with contextlib.suppress(Exception):  # the batch raised this error in the earlier run, too
                self.fetch(state.index)

    def fetch(self, index: Any) -> tuple[Any, BatchTimes]:
        """Return the batch and its stage times; raise StopIteration at the end of a stream.

        Reading the CPU clock is a system call. If batches are tiny, only each `CPU_CLOCK_EVERY`-th of them reads it,
        and its ratios of CPU time to wall time are used for the following ones.
        """
        clocked = self._unclocked == 0
        cpu_began = self._cpu() if clocked else 0.0
        began = monotonic()
        if began >= self._timer.due and self._timer.start_batch(began, self._dataset, self._load_s):
            return self._fetch_timed(index)
        data = self._from_stream(index) if self.stream is not None else self._from_map(index)
        fetched = monotonic()
        cpu_fetched = self._cpu() if clocked else 0.0
        samples = 1 if not self._auto_collation else len(data) if type(data) is list else _length(index)
        clock, load_s = self._clock, fetched - began
        self._load_s = load_s
        slowest = clock.slowest(load_s, samples) if clock.is_on or load_s > SAMPLE_S * samples else ()
        batch = self._collate_fn(data)
        ended = monotonic()
        collate_s = ended - fetched
        if clocked:
            cpu_ended = self._cpu()
            self._ratios = (
                (cpu_fetched - cpu_began) / load_s if load_s > 0 else 1.0,
                (cpu_ended - cpu_fetched) / collate_s if collate_s > 0 else 1.0,
            )
        load_ratio, collate_ratio = self._ratios
        self._unclocked = 0 if ended - began > TINY_S else (self._unclocked + 1) % CPU_CLOCK_EVERY
        failed = () if self._guard is None else self._guard.taken() if self.samples is None else self._failed
        return batch, loaded_times(
            samples=samples,
            load_s=load_s,
            load_cpu_s=load_s * load_ratio,
            collate_s=collate_s,
            collate_cpu_s=collate_s * collate_ratio,
            calls=(),
            slowest=slowest,
            failed=failed,
        )

    def _fetch_timed(self, index: Any) -> tuple[Any, BatchTimes]:
        """Fetch as `fetch` does, and record the calls."""
        timer, collate_fn = self._timer, self._collate_fn
        try:
            self._collate_fn, self._unclocked = partial(timer.timed_collate, collate_fn), 0
            batch, times = self.fetch(index)
        finally:
            self._collate_fn = collate_fn
            timer.stop_batch()
        return batch, timer.with_calls(times)

    def _from_map(self, index: Any) -> Any:
        if self.samples is not None:
            return self._at_once(self.samples, index)
        data = self._one_by_one(index)
        first = data[0] if type(data) is list and data else data
        if type(first) is CoroutineType:  # a wrapper hands on the coroutines of an inner dataset
            for each in data if type(data) is list else (data,):
                each.close()
            return self._at_once(self._load_at_once(), index)
        return data

    def _at_once(self, samples: AsyncSamples, index: Any) -> Any:
        data, batch = samples.load_drawn(index)
        self._failed = tuple(batch.failed)
        return data

    def _one_by_one(self, index: Any) -> Any:
        dataset, guard = self._dataset, self._guard
        if guard is not None:
            return guard.samples(index) if self._auto_collation else guard.sample(index)
        if not self._auto_collation:
            return dataset[index]
        if getattr(dataset, "__getitems__", None):
            return dataset.__getitems__(index)
        return self._clock.samples(dataset, index) if self._clock.is_on else [dataset[i] for i in index]

    async def fetch_beside(self, number: int, index: Any, seed: int) -> tuple[Any, BatchTimes]:
        """Fetch ticket ``number`` with ``seed``, as `fetch` does, while the worker makes other batches.

        The loading time is the batch's share of the worker: the sum of its samples' fetching times over the
        concurrency, plus their decoding time. If the process used more CPU seconds than this since the previous batch,
        the loading time is these CPU seconds.
        """
        from dpex.worker.async_samples import BatchLoad

        samples, batch, timer = self.samples, BatchLoad(seed, number), self._timer
        assert samples is not None
        now = monotonic()
        is_timed = now >= timer.due and timer.start_batch(now, self._dataset, self._load_s)
        try:
            data = await samples.awaited(index, batch)
            began, cpu_began = monotonic(), self._cpu()
            samples.seed(seed)
            made = timer.timed_collate(self._collate_fn, data) if is_timed else self._collate_fn(data)
        finally:
            samples.end_computing(seed)
            if is_timed:
                timer.stop_batch()
        ended, cpu_ended = monotonic(), self._cpu()
        load_cpu_s, samples.cpu_since = cpu_began - samples.cpu_since, cpu_ended
        self._load_s = load_s = max(batch.seconds / samples.slots.most + batch.decode_s, load_cpu_s)
        count = 1 if not self._auto_collation else len(data) if type(data) is list else _length(index)
        slowest = batch.slowest if batch.slowest[0] > SAMPLE_S and isinstance(index, list) else ()
        times = loaded_times(
            samples=count,
            load_s=load_s,
            load_cpu_s=load_cpu_s,
            collate_s=ended - began,
            collate_cpu_s=cpu_ended - cpu_began,
            calls=(),
            slowest=slowest,
            failed=tuple(batch.failed),
        )
        return made, timer.with_calls(times) if is_timed else times

    def _from_stream(self, index: Any) -> Any:
        if self.has_ended:
            raise StopIteration
        stream = self.stream
        if not self._auto_collation:
            return next(stream)
        data = []
        for _ in index:
            try:
                data.append(next(stream))
            except StopIteration:
                self.has_ended = True
                break
        if not data or (self._drop_last and len(data) < len(index)):
            raise StopIteration
        return data


def _length(items: Any) -> int:
    try:
        return len(items)
    except TypeError:
        return 1


# -- collating ---------------------------------------------------------------------------------------------------------

_Tensor, _strided = torch.Tensor, torch.strided
_TENSOR_ONLY, _TUPLE_ONLY = {torch.Tensor}, {tuple}
_AS_IMPORTED = dict(torch_collate.default_collate_fn_map)
_torch_stack = torch_collate.collate_tensor_fn


class ArenaCollate:
    """torch's ``default_collate`` with its tensors stacked straight into an arena.

    A user's own entry for ``torch.Tensor`` in ``default_collate_fn_map`` is respected. Batches of more than
    ``least_bytes`` lie in the arena. ``threads()`` threads stack them, with the same result for any number of threads.
    """

    def __init__(
        self, arena: Arena, least_bytes: int, *, in_worker: bool, threads: Callable[[], int] = lambda: 1
    ) -> None:
        self._arena = arena
        self._least_bytes = least_bytes
        self._in_worker = in_worker
        self._threads = threads

    def stack(self, batch: Any, *, collate_fn_map: Any = None) -> torch.Tensor:
        """Stack plain CPU tensors, large results into a slot of the arena; leave everything else to torch.

        In a worker torch's result is always contiguous; in the training process it follows the strides of its inputs.
        """
        first = batch[0]
        if not _plain(first):
            stacked: torch.Tensor = _torch_stack(batch, collate_fn_map=collate_fn_map)
            return stacked
        large = first.numel() * first.itemsize * len(batch) > self._least_bytes
        strided = not first.is_contiguous()
        if (large and (self._in_worker or not strided)) or (strided and self._in_worker):
            shape, dtype = first.shape, first.dtype
            alike = set(map(type, batch)) == _TENSOR_ONLY if self._in_worker else all(map(_like(first), batch))
            if alike and first.device.type == "cpu":
                size = (len(batch), *shape)
                if large:
                    return self._stack_large(batch, self._arena.tensor(size, dtype))
                return torch.stack(batch, 0, out=torch.empty(size, dtype=dtype, device="cpu"))
        result = torch.stack(batch, 0)
        if self._in_worker and result.dtype != first.dtype:  # torch's workers use the first tensor's dtype
            return torch.stack(batch, 0, out=torch.empty_like(result, dtype=first.dtype))
        return result

    def _stack_large(self, batch: Any, out: torch.Tensor) -> torch.Tensor:
        threads = self._threads()
        if threads == 1 or torch.get_num_threads() != 1:
            return torch.stack(batch, 0, out=out)
        torch.set_num_threads(threads)
        try:
            return torch.stack(batch, 0, out=out)
        finally:
            torch.set_num_threads(1)

    def install(self) -> None:
        """Make ``default_collate`` itself use the arena, for collate functions that call it (worker processes only)."""
        table = torch_collate.default_collate_fn_map
        if table.get(torch.Tensor) is _torch_stack:
            table[torch.Tensor] = self.stack

    def __call__(self, batch: Any) -> Any:
        """Return ``default_collate(batch)`` without changing torch's table, for use in the training process."""
        table = torch_collate.default_collate_fn_map
        if type(batch) is list and batch and table.get(_Tensor) is _torch_stack:
            first = batch[0]
            if type(first) is _Tensor:
                return self._stack_here(batch, first)
            if type(first) is tuple and table == _AS_IMPORTED and _are_alike(batch, len(first)):
                return [self._column(samples, table) for samples in zip(*batch, strict=True)]
        return torch_collate.collate(batch, collate_fn_map=self._with_arena(table))

    def _stack_here(self, batch: Any, first: torch.Tensor) -> torch.Tensor:
        """Stack tensors in the training process. Small tensors are not examined one by one."""
        is_dense = first.layout is _strided and not first.is_nested
        if is_dense and first.nbytes * len(batch) <= self._least_bytes:
            return torch.stack(batch, 0)
        return self.stack(batch)

    def _column(self, samples: Any, table: Any) -> Any:
        first = samples[0]
        if type(first) is _Tensor:
            return self._stack_here(samples, first)
        return torch_collate.collate(samples, collate_fn_map=self._with_arena(table))

    def _with_arena(self, table: Any) -> Any:
        return {**table, _Tensor: self.stack} if table.get(_Tensor) is _torch_stack else table


def _are_alike(rows: Any, size: int) -> bool:
    """Return True if all ``rows`` are plain tuples of ``size`` items, which torch's function collates by columns."""
    return set(map(type, rows)) == _TUPLE_ONLY and set(map(len, rows)) == {size}


def _plain(tensor: Any) -> bool:
    return (
        type(tensor) is torch.Tensor
        and tensor.layout is torch.strided
        and not tensor.is_nested
        and not tensor.requires_grad
    )


def _like(first: torch.Tensor) -> Callable[[Any], bool]:
    """Return a function that returns True if stacking an item with ``first`` in place gives torch's result."""
    dtype = first.dtype
    return lambda item: _plain(item) and item.dtype == dtype and item.is_contiguous() and not item.is_conj()
