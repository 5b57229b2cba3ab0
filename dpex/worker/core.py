"""What runs inside a worker of any lane: seed, fetch, collate, time each stage, catch errors.

A *host* (a process or an actor) hosts one or more *logical workers*. Under ``seeding="batch"`` there is one per host,
and each ticket has a random state of its own (`batch_seeding`). Under ``seeding="worker"``, and for streams, logical
worker *k* is what PyTorch calls worker *k*: it has its own random state, dataset copy and ``get_worker_info()``, and
may move.

`WorkerCore` owns the process's global random state and torch's global worker info; it is used by one thread.
"""

from __future__ import annotations

import copy
import ctypes
import pickle
import random
import sys
import time
import types
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch._utils import ExceptionWrapper
from torch.utils.data._utils import collate as torch_collate
from torch.utils.data._utils import worker as torch_worker

from dpex.measure.sampling import SAMPLE_S
from dpex.profile.live_timer import Row, TicketTimer
from dpex.system.cpu_clocks import CPU_CLOCK_EVERY, TINY_S
from dpex.system.user_warnings import warn
from dpex.transport.arena import Arena
from dpex.worker.batch_seeding import TicketSeeds, seed_ticket
from dpex.worker.modes import Modes

RngState = bytes
"""Pickled states of `random`, numpy's and torch's global generators."""


@dataclass(frozen=True, kw_only=True)
class WorkerSetup:
    """Everything about the loader that a worker needs; the dataset and what belongs to it travel together."""

    dataset: Any
    collate_fn: Callable[[Any], Any]
    worker_init_fn: Callable[[int], None] | None
    iterable: bool
    auto_collation: bool
    drop_last: bool
    num_workers: int
    base_seed: int
    per_batch_seed: bool
    own_workers: int | None = None
    """How many workers the user asked for, so that an error of ``worker_init_fn`` in one of them is the user's; further
    ones are dpex's, which does without them. None: all are the user's."""
    times_steps: bool = True
    """Whether transforms are timed now and then; see `dpex.profile.live_timer`."""
    modes: Modes | None = None
    """torch's modes in which batches are made; None: those that the worker has anyway, as torch's workers do."""

    def why_unfit(self, number: int, init_error: ExceptionWrapper | None) -> str:
        """See `WorkerCore.unfit`."""
        if init_error is None or self.own_workers is None or number < self.own_workers:
            return ""
        return f"worker_init_fn({number}) failed: {init_error.exc_msg.strip().splitlines()[-1]}"

    def enter_modes(self) -> None:
        """Have them from now on, in this thread."""
        if self.modes is not None:
            self.modes.stay()


class Stages(NamedTuple):
    """Seconds of wall time one ticket took, CPU seconds for it (of library threads, too: they may be more), how many
    samples it got, what its transforms took, where they were timed, and of its slowest sample, where single ones are
    timed, seconds and place.
    """

    fetch_s: float
    collate_s: float
    fetch_cpu_s: float
    collate_cpu_s: float
    samples: int
    steps: tuple[Row, ...] = ()
    slowest: tuple[()] | tuple[float, int] = ()


_stages: Callable[..., Stages] = tuple.__new__
"""`Stages` of a tuple, in a third of the time."""
NO_TIME = Stages(0.0, 0.0, 0.0, 0.0, 0)


class StreamEnd:
    """Made in place of a batch: the stream behind the ticket is exhausted."""


class Failure:
    """Made in place of a batch: the error, as torch wraps it, to be raised where the batch would have been."""

    __slots__ = ("wrapper",)

    def __init__(self, wrapper: ExceptionWrapper) -> None:
        self.wrapper = wrapper


def get_rng_state() -> RngState:
    """States of the three global generators."""
    torch_state = torch.default_generator.get_state().numpy().tobytes()
    return pickle.dumps((random.getstate(), np.random.get_state(legacy=True), torch_state), 5)


def set_rng_state(state: RngState) -> None:
    """Restore what `get_rng_state` returned."""
    python, numpy, torch_state = pickle.loads(state)
    random.setstate(python)
    np.random.set_state(numpy)
    torch.default_generator.set_state(torch.frombuffer(bytearray(torch_state), dtype=torch.uint8))


def seed_like_torch(base_seed: int, worker_id: int) -> int:
    """Seed the global generators as PyTorch seeds worker ``worker_id``; returns ``WorkerInfo.seed``."""
    seed = base_seed + worker_id
    random.seed(seed)
    torch.manual_seed(seed)
    np.random.seed(torch_worker._generate_state(base_seed, worker_id))
    return seed


class SampleClock:
    """Finds the slowest sample of each batch while samples take long enough (``is_on``). The very first is left out: it
    pays for what is opened and imported."""

    __slots__ = ("_is_warm", "_slowest", "is_on")

    def __init__(self) -> None:
        self.is_on = True
        self._is_warm = False
        self._slowest: tuple[()] | tuple[float, int] = ()

    def samples(self, dataset: Any, index: Any) -> list[Any]:
        """``[dataset[i] for i in index]``."""
        data: list[Any] = []
        longest_s, at, is_warm = SAMPLE_S, -1, self._is_warm
        now = time.perf_counter()
        for i in index:
            data.append(dataset[i])
            then, now = now, time.perf_counter()
            if now - then > longest_s and is_warm:
                longest_s, at = now - then, len(data) - 1
            is_warm = True
        self._is_warm = is_warm
        self._slowest = (longest_s, at) if at >= 0 else ()
        return data

    def told(self, fetch_s: float, samples: int) -> tuple[()] | tuple[float, int]:
        """The slowest of these samples, if known, its seconds and its place; settles whether the next are timed."""
        slowest, self._slowest = self._slowest, ()
        self.is_on = fetch_s > SAMPLE_S * samples
        return slowest


class Fetcher:
    """Gets the samples of a ticket and collates them, as torch's fetchers do, timing the two apart.

    timer: of the worker, as fetchers come and go. cpu: the CPU clock of what is made here, see
    `dpex.system.cpu_clocks`.
    """

    def __init__(
        self,
        setup: WorkerSetup,
        dataset: Any,
        collate_fn: Callable[[Any], Any],
        timer: TicketTimer | None = None,
        cpu: Callable[[], float] = time.process_time,
    ) -> None:
        self._cpu = cpu
        self._dataset = dataset
        self._collate_fn = collate_fn
        self._auto_collation = setup.auto_collation
        self._drop_last = setup.drop_last
        self._iterator = iter(dataset) if setup.iterable else None
        self._ended = False
        self._unclocked = 0
        self._ratios = (1.0, 1.0)
        self._timer = timer or TicketTimer(is_on=False)
        self._clock = SampleClock()

    def fetch(self, index: Any) -> tuple[Any, Stages]:
        """The batch and its stage times; raises StopIteration at the end of a stream.

        The CPU clock is a system call: of tiny batches it is read for each `CPU_CLOCK_EVERY`-th, which stands for all.
        """
        clocked = self._unclocked == 0
        cpu_began = self._cpu() if clocked else 0.0
        began = time.perf_counter()
        if began >= self._timer.due and self._timer.begin(began, self._dataset):
            return self._fetch_timed(index)
        data = self._from_stream(index) if self._iterator is not None else self._from_map(index)
        fetched = time.perf_counter()
        cpu_fetched = self._cpu() if clocked else 0.0
        samples = 1 if not self._auto_collation else len(data) if type(data) is list else _length(index)
        clock, fetch_s = self._clock, fetched - began
        slowest = clock.told(fetch_s, samples) if clock.is_on or fetch_s > SAMPLE_S * samples else ()
        batch = self._collate_fn(data)
        ended = time.perf_counter()
        collate_s = ended - fetched
        if clocked:
            cpu_ended = self._cpu()
            self._ratios = (
                (cpu_fetched - cpu_began) / fetch_s if fetch_s > 0 else 1.0,
                (cpu_ended - cpu_fetched) / collate_s if collate_s > 0 else 1.0,
            )
        fetch_ratio, collate_ratio = self._ratios
        self._unclocked = 0 if ended - began > TINY_S else (self._unclocked + 1) % CPU_CLOCK_EVERY
        times = fetch_s, collate_s, fetch_s * fetch_ratio, collate_s * collate_ratio
        return batch, _stages(Stages, (*times, samples, (), slowest))

    def unmeasured(self, index: Any) -> Any:
        """The batch of a map-style dataset alone, whose loader batches: for tiny ones, see `dpex.engine.unmeasured`."""
        dataset = self._dataset
        if getattr(dataset, "__getitems__", None):
            return self._collate_fn(dataset.__getitems__(index))
        return self._collate_fn([dataset[i] for i in index])

    def _fetch_timed(self, index: Any) -> tuple[Any, Stages]:
        """The same, and what the transforms took."""
        timer, collate_fn = self._timer, self._collate_fn
        try:
            self._collate_fn, self._unclocked = partial(timer.collating, collate_fn), 0
            batch, stages = self.fetch(index)
        finally:
            self._collate_fn = collate_fn
            timer.end()
        times = timer.without_cost(stages[:5])
        return batch, Stages(*times, timer.rows(self._dataset, times), stages.slowest)

    def _from_map(self, index: Any) -> Any:
        dataset = self._dataset
        if not self._auto_collation:
            return dataset[index]
        if getattr(dataset, "__getitems__", None):
            return dataset.__getitems__(index)
        return self._clock.samples(dataset, index) if self._clock.is_on else [dataset[i] for i in index]

    def _from_stream(self, index: Any) -> Any:
        assert self._iterator is not None
        if self._ended:
            raise StopIteration
        if not self._auto_collation:
            return next(self._iterator)
        data = []
        for _ in index:
            try:
                data.append(next(self._iterator))
            except StopIteration:
                self._ended = True
                break
        if not data or (self._drop_last and len(data) < len(index)):
            raise StopIteration
        return data


def _length(items: Any) -> int:
    try:
        return len(items)
    except TypeError:
        return 1


class ArenaCollate:
    """torch's ``default_collate`` with its tensors stacked straight into an arena.

    A user's own entry for ``torch.Tensor`` in ``default_collate_fn_map`` is respected.
    """

    def __init__(self, arena: Arena, least_bytes: int, *, in_worker: bool) -> None:
        self._arena = arena
        self._least_bytes = least_bytes
        self._in_worker = in_worker

    def stack(self, batch: Any, *, collate_fn_map: Any = None) -> torch.Tensor:
        """Stack equal, plain CPU tensors into a slot; leave everything else to torch.

        In a worker torch's result is always contiguous, in the training process it follows its inputs' strides.
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
                out = self._arena.tensor(size, dtype) if large else torch.empty(size, dtype=dtype, device="cpu")
                return torch.stack(batch, 0, out=out)
        return torch.stack(batch, 0)

    def install(self) -> None:
        """Make ``default_collate`` itself use the arena, for collate functions that call it (worker processes only)."""
        table = torch_collate.default_collate_fn_map
        if table.get(torch.Tensor) is _torch_stack:
            table[torch.Tensor] = self.stack

    def __call__(self, batch: Any) -> Any:
        """``default_collate(batch)`` without touching torch's table (for use in the training process)."""
        table = torch_collate.default_collate_fn_map
        if table.get(torch.Tensor) is _torch_stack:
            if type(batch) is list and batch and type(batch[0]) is torch.Tensor:
                first = batch[0]
                is_dense = first.layout is torch.strided and not first.is_nested
                is_small = is_dense and first.nbytes * len(batch) <= self._least_bytes
                return torch.stack(batch, 0) if is_small else self.stack(batch)
            table = {**table, torch.Tensor: self.stack}
        return torch_collate.collate(batch, collate_fn_map=table)


_TENSOR_ONLY = {torch.Tensor}
_torch_stack = torch_collate.collate_tensor_fn


def _plain(tensor: Any) -> bool:
    return (
        type(tensor) is torch.Tensor
        and tensor.layout is torch.strided
        and not tensor.is_nested
        and not tensor.requires_grad
    )


def _like(first: torch.Tensor) -> Callable[[Any], bool]:
    """Whether stacking an item with ``first`` into memory of ``first``'s dtype is what stacking them freely gives."""
    dtype = first.dtype
    return lambda item: _plain(item) and item.dtype == dtype and item.is_contiguous() and not item.is_conj()


class Logical:
    """One logical worker on this host."""

    def __init__(self, setup: WorkerSetup, number: int, state: RngState | None, timer: TicketTimer) -> None:
        self.number = number
        self.state = state
        self.setup = setup
        self.info: Any = None
        self.fetcher: Fetcher | None = None
        self.init_error: ExceptionWrapper | None = None
        self.epoch = -1
        self._timer = timer

    def start(self) -> None:
        """Seed, publish the worker info, run ``worker_init_fn``; an error is the answer to every ticket."""
        setup = self.setup
        setup.enter_modes()
        seed = seed_like_torch(setup.base_seed, self.number)
        self.info = torch_worker.WorkerInfo(
            id=self.number, num_workers=setup.num_workers, seed=seed, dataset=setup.dataset
        )
        torch_worker._worker_info = self.info
        try:
            if setup.worker_init_fn is not None:
                setup.worker_init_fn(self.number)
            self.new_pass(0)
        except Exception:
            self.init_error = ExceptionWrapper(where=where(self.number))
        if self.state is not None:
            set_rng_state(self.state)
            self.state = None

    def new_pass(self, epoch: int) -> None:
        """Begin an epoch: an iterable dataset is iterated anew."""
        self.epoch = epoch
        self.fetcher = Fetcher(self.setup, self.setup.dataset, self.setup.collate_fn, self._timer)


def where(number: int) -> str:
    """The place torch names in an error that a worker caught."""
    return f"in DataLoader worker process {number}"


class WorkerCore:
    """Makes the tickets of the logical workers hosted here. ``cpu``: the CPU clock of what is made."""

    cpu: Callable[[], float] = staticmethod(time.process_time)

    def __init__(self, setup: WorkerSetup) -> None:
        self._setup = setup
        self._logicals: dict[int, Logical] = {}
        self._current: Logical | None = None
        self._timer = TicketTimer(is_on=setup.times_steps, cpu=time.process_time)
        self._seeds = TicketSeeds(setup.base_seed) if setup.per_batch_seed else None

    def adopt(self, number: int, state: RngState | None = None, setup: WorkerSetup | None = None) -> None:
        """Host logical worker ``number``, from a random ``state`` that another host gave up, or from its seed."""
        setup = setup or (self._setup if not self._logicals else _copied(self._setup))
        logical = self._logicals[number] = Logical(setup, number, state, self._timer)
        self._park()
        self._current = logical
        logical.start()

    def unfit(self, number: int) -> str:
        """Why worker ``number``, for which the user did not ask, cannot work: its ``worker_init_fn`` failed. Or ""."""
        return self._setup.why_unfit(number, self._logicals[number].init_error)

    def release(self, number: int) -> RngState:
        """Stop hosting ``number``; returns its random state for the next host."""
        self._switch(number)
        del self._logicals[number]
        self._current = None
        return get_rng_state()

    def make(self, number: int, index: Any, logical_number: int, epoch: int) -> tuple[Any, Stages]:
        """The batch of a ticket, or a `Failure`, or a `StreamEnd` in its place; and how long its stages took."""
        if self._current is None or self._current.number != logical_number:
            self._switch(logical_number)
        logical = self._current
        assert logical is not None
        if logical.init_error is not None:
            return Failure(logical.init_error), NO_TIME
        try:
            if logical.epoch != epoch:
                logical.new_pass(epoch)
            fetch = logical.fetcher.fetch  # type: ignore[union-attr]
            if self._seeds is not None:
                seed_ticket(self._seeds.of(number, epoch))
            return fetch(index)
        except Exception as error:
            if isinstance(error, StopIteration) and self._setup.iterable:
                return StreamEnd(), NO_TIME
            return Failure(ExceptionWrapper(where=where(logical_number))), NO_TIME

    def _park(self) -> None:
        if self._current is not None:
            self._current.state = get_rng_state()

    def _switch(self, number: int) -> None:
        if self._current is not None and self._current.number == number:
            return
        self._park()
        logical = self._current = self._logicals[number]
        torch_worker._worker_info = logical.info
        if logical.state is not None:
            set_rng_state(logical.state)
            logical.state = None


def _copied(setup: WorkerSetup) -> WorkerSetup:
    """A setup with a dataset copy of its own, shallow so that large arrays stay shared; bound methods follow it."""
    try:
        dataset = copy.copy(setup.dataset)
    except Exception as error:
        warn(f"two logical workers share one dataset object, as it cannot be copied: {error!r}")
        return setup
    return replace(
        setup,
        dataset=dataset,
        worker_init_fn=_rebound(setup.worker_init_fn, setup.dataset, dataset),
        collate_fn=_rebound(setup.collate_fn, setup.dataset, dataset),
    )


def _rebound(function: Any, old: Any, new: Any) -> Any:
    if isinstance(function, types.MethodType) and function.__self__ is old:
        return types.MethodType(function.__func__, new)
    return function


_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_THRESHOLD = -1, -2, -3


def prepare_process() -> None:
    """One thread for torch, and a heap that keeps its pages instead of faulting them in anew per sample.

    glibc gives blocks over 128 KiB back to the kernel when they are freed, so each decoded image would pay its page
    faults again; raising the thresholds (mallopt(3)) keeps them.
    """
    torch.set_num_threads(1)
    if sys.platform == "linux":
        mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
        if mallopt is not None:
            mallopt(_M_MMAP_THRESHOLD, 32 << 20)
            mallopt(_M_TRIM_THRESHOLD, 512 << 20)
            mallopt(_M_TOP_PAD, 16 << 20)
