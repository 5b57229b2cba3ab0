"""Several workers in one worker process, each a thread, for datasets that declare themselves thread-safe.

They share the dataset, and of what is global in a process each thread gets its own: ``get_worker_info()``, the ticket's
seed, the collate function's slots. The global generators cannot be had per thread: a dataset that draws from them is
found out (`dpex.worker.shared_rng`) before anything of it is sent, and its workers become processes.

`SharedProcessState` belongs to the process, a `ThreadCore` to one thread.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable
from typing import Any

import torch
from torch.utils.data import ConcatDataset, Subset

from dpex._torch import ExceptionWrapper, WorkerInfo, set_worker_info
from dpex._torch import collate as torch_collate
from dpex.profile.live_timer import TicketTimer
from dpex.schedule import seeding
from dpex.schedule.probing import attribute
from dpex.system.cpu_clocks import SharedCpu
from dpex.worker.collate import ArenaCollate
from dpex.worker.core import WorkerCore
from dpex.worker.current_batch import batch_seed, current, of_thread
from dpex.worker.fetch import Fetcher
from dpex.worker.logical import seed_like_torch
from dpex.worker.logical_state import RngState
from dpex.worker.outcome import NO_TIME, Failure, Stages, where
from dpex.worker.setup import WorkerSetup
from dpex.worker.shared_rng import SharedGenerators

_thread = threading.local()
"""``info`` for ``get_worker_info()``, ``stack`` for ``default_collate``."""
_torch_stack = torch_collate.collate_tensor_fn


def declares_thread_safe(dataset: Any) -> bool:
    """Whether ``dpex_thread_safe`` is true of a dataset, or of all that a `Subset` or `ConcatDataset` holds."""
    said = attribute(dataset, "dpex_thread_safe")
    if isinstance(said, bool):
        return said
    if type(dataset) is Subset:
        return declares_thread_safe(dataset.dataset)
    return type(dataset) is ConcatDataset and all(map(declares_thread_safe, dataset.datasets))


class _InfoOfThread(WorkerInfo):
    """What ``get_worker_info()`` returns in such a process: whoever asks it sees what belongs to the asking thread."""

    __slots__ = ()

    def __getattribute__(self, name: str) -> Any:
        return getattr(getattr(_thread, "info", _first_info), name)


_first_info: Any = None


def _stack(batch: Any, *, collate_fn_map: Any = None) -> torch.Tensor:
    """The entry for tensors in ``default_collate``'s table: into the thread's own slots."""
    stack: Callable[..., torch.Tensor] = getattr(_thread, "stack", _torch_stack)
    return stack(batch, collate_fn_map=collate_fn_map)


class SharedProcessState:
    """What the workers of one process share; made before the first of them, in the main thread.

    ``worker_init_fn`` is called here, once for the process, with the number of its first worker. If it fails, that is
    the answer to every ticket of all of them.
    """

    def __init__(self, setup: WorkerSetup, first_worker: int) -> None:
        global _first_info
        self.setup = setup
        self.init_error: ExceptionWrapper | None = None
        current.begin_worker(is_per_batch=True)
        setup.enter_modes()
        seed_like_torch(setup.base_seed, first_worker)
        _first_info = self.info(first_worker)
        set_worker_info(object.__new__(_InfoOfThread))
        try:
            if setup.worker_init_fn is not None:
                setup.worker_init_fn(first_worker)
        except Exception:
            self.init_error = ExceptionWrapper(where=where(first_worker))
        self.generators = SharedGenerators()
        self.cpu = SharedCpu()
        self._key = (-1, 0)
        torch.initial_seed = torch.random.initial_seed = batch_seed
        current.has_threads = True
        table = torch_collate.default_collate_fn_map
        if table.get(torch.Tensor) is _torch_stack:
            table[torch.Tensor] = _stack

    def info(self, worker: int) -> Any:
        """What ``get_worker_info()`` says to a worker."""
        setup = self.setup
        return WorkerInfo(
            id=worker, num_workers=setup.num_workers, seed=setup.base_seed + worker, dataset=setup.dataset
        )

    def seed_of(self, epoch: int, number: int) -> int:
        """The seed of a ticket."""
        known, key = self._key
        if known != epoch:
            key = seeding.epoch_key(self.setup.base_seed, epoch)
            self._key = (epoch, key)
        return seeding.ticket_seed(key, number)


def stack_here(collate: ArenaCollate) -> None:
    """From now on ``default_collate`` uses these slots in the calling thread."""
    _thread.stack = collate.stack


class ThreadCore(WorkerCore):
    """Makes the tickets of a worker that is a thread; used by that thread.

    ``tell`` hears, before the result is sent, that a ticket drew from a global generator. As long as its worker is the
    only one of the process the result is right nevertheless. Otherwise the process ends at once: what its workers held
    is made anew elsewhere, by the rules for workers that died.
    """

    def __init__(self, commons: SharedProcessState, tell: Callable[[str], None]) -> None:
        super().__init__(commons.setup)
        self._commons = commons
        self._tell = tell
        self._told = False
        setup = commons.setup
        self.cpu = commons.cpu.seconds
        self._timer = TicketTimer(is_on=setup.times_steps)  # by the thread's own clock
        self._fetcher = Fetcher(setup, setup.dataset, setup.collate_fn, self._timer, self.cpu)

    def adopt(self, number: int, state: RngState | None = None, setup: WorkerSetup | None = None, **_: Any) -> None:
        """The thread is worker ``number``; there are no others here, and no random state of its own."""
        torch.set_num_threads(1)
        self._setup.enter_modes()
        self._commons.cpu.join()
        _thread.info = self._commons.info(number)

    def leave(self) -> None:
        """The thread makes no further ticket."""
        self._commons.cpu.leave()

    def unfit(self, number: int) -> str:
        """See `WorkerCore.unfit`; ``worker_init_fn`` is called once for the process."""
        return self._setup.why_unfit(number, self._commons.init_error)

    def make(self, number: int, index: Any, logical_number: int, epoch: int) -> tuple[Any, Stages]:
        """See `WorkerCore.make`."""
        commons = self._commons
        if commons.init_error is not None:
            return Failure(commons.init_error), NO_TIME
        of_thread.seed = seed = commons.seed_of(epoch, number)
        commons.generators.begin(seed)
        made: tuple[Any, Stages]
        commons.cpu.begin()
        try:
            made = self._fetcher.fetch(index)
        except Exception:
            made = Failure(ExceptionWrapper(where=where(logical_number))), NO_TIME
        finally:
            commons.cpu.end()
        moved = commons.generators.moved()
        if moved is not None:
            self._drew(moved)
        return made

    def _drew(self, generator: str) -> None:
        if not self._told:
            self._tell(generator)
            self._told = True
        if self._commons.generators.shared:
            end_process(0)


def end_process(code: int) -> None:
    """End now, whatever the other threads are at; what was printed is kept."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
