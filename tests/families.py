"""What the tests of the local pool share: data with augmentations, and the processes of an iterator.

The datasets' naps are what makes work take a while.
"""

import array
import contextlib
import fcntl
import os
import random
import resource
import signal
import termios
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch
from inspection import template_pid
from torch.utils.data import Dataset, IterableDataset, default_collate
from waiting import until
from workload import wait_as_work

from dpex.worker.setup import WorkerSetup


class Of(Dataset[Any]):
    """Map-style: item i is `make(i)`."""

    def __init__(self, make: Callable[[Any], Any], length: int) -> None:
        self.make = make
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: Any) -> Any:
        return self.make(index)


class Augmented(Dataset[torch.Tensor]):
    """Sample ``index``: float64 (4 + ``extra``,): the index and a number each of `random`, numpy and torch."""

    def __init__(self, length: int, nap_s: float = 0.0, extra: int = 0) -> None:
        self.length = length
        self.nap_s = nap_s
        self.extra = extra

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> torch.Tensor:
        if self.nap_s:
            wait_as_work(self.nap_s)
        numbers = [index, random.random(), np.random.rand(), torch.rand(()).item()]
        return torch.cat([torch.tensor(numbers, dtype=torch.float64), torch.rand(self.extra, dtype=torch.float64)])


class WhoMadeIt(Dataset[torch.Tensor]):
    """Sample: int64 (3,): the index, the process that made it, and that process's parent."""

    def __init__(self, length: int, nap_s: float = 0.0) -> None:
        self.length = length
        self.nap_s = nap_s

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> torch.Tensor:
        if self.nap_s:
            wait_as_work(self.nap_s)
        return torch.tensor([index, os.getpid(), os.getppid()])


def has_made_all(pool: Any) -> bool:
    """Return True if the workers of a `LocalPool` have taken and made every ticket that they were sent."""
    waiting = array.array("i", [0])  # bytes of messages that no worker has taken
    if pool._queue is not None:
        fcntl.ioctl(pool._queue.socket.fileno(), termios.TIOCOUTQ, waiting)
    return not waiting[0] and all(pool._board.read(one.row) == ([], None) for one in pool._workers.values())


def setup_of(dataset: Any, **changes: Any) -> WorkerSetup:
    """Return what the workers of a plain loader with ``dataset`` get."""
    plain: dict[str, Any] = {
        "collate_fn": default_collate,
        "worker_init_fn": None,
        "iterable": isinstance(dataset, IterableDataset),
        "auto_collation": True,
        "drop_last": False,
        "num_workers": 2,
        "base_seed": 11,
        "per_batch_seed": False,
    }
    return WorkerSetup(dataset=dataset, **plain | changes)


def seeded(seed: int = 7) -> torch.Generator:
    """A generator of its own, so that two loaders draw the same base seeds and orders."""
    return torch.Generator().manual_seed(seed)


def descriptors() -> set[tuple[str, str]]:
    """The numbers of this process's descriptors and what each refers to."""
    return {(entry.name, str(entry.readlink())) for entry in Path("/proc/self/fd").iterdir() if entry.is_symlink()}


@contextlib.contextmanager
def no_descriptor_left() -> Iterator[None]:
    """This process can open nothing within, truly."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    taken: list[int] = []
    try:
        resource.setrlimit(
            resource.RLIMIT_NOFILE, (max(int(one.name) for one in Path("/proc/self/fd").iterdir()) + 1, hard)
        )
        with contextlib.suppress(OSError):
            while True:
                taken.append(os.open(os.devnull, os.O_RDONLY))
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        for number in taken:
            os.close(number)


def living_workers(iterator: Any) -> list[int]:
    """Local workers of this iterator that live now, oldest first."""
    try:
        children = psutil.Process(template_pid(iterator)).children()
    except psutil.NoSuchProcess:
        return []
    return [child.pid for child in children if is_alive(child.pid)]


def worker_pids(iterator: Any, least: int = 1) -> list[int]:
    """The same, as soon as there are ``least`` of them."""
    return list(until(lambda: len(pids := living_workers(iterator)) >= least and pids))


def kill(pid: int) -> int:
    """SIGKILL, and wait until it took."""
    os.kill(pid, signal.SIGKILL)
    until(lambda: not is_alive(pid))
    return pid


def is_alive(pid: int) -> bool:
    """Whether it runs (a zombie does not)."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def train_until(enough: Callable[[], Any], loader: Any, iterator: Any, *, step_s: float = 0.0) -> list[Any]:
    """Return the batches until ``enough()``, each followed by a step; AssertionError once patience ends."""
    got, deadline = [], time.monotonic() + 200.0
    while not enough():
        got.append(next(iterator))
        wait_as_work(step_s)
        assert time.monotonic() < deadline, f"{loader.decisions}, {loader.stats()}"
    return got


def outcomes(iterator: Iterator[Any], most: int = 1000) -> list[Any]:
    """Return all batches, and in the place of a batch the type of the error that came instead."""
    found: list[Any] = []
    for _ in range(most):
        try:
            found.append(next(iterator))
        except StopIteration:
            return found
        except Exception as error:
            found.append(type(error))
    raise AssertionError(f"the iterator does not end after {most} items")


def stacked(batches: Iterable[torch.Tensor]) -> torch.Tensor:
    """All batches of an epoch, one after the other."""
    return torch.cat(list(batches))


def assert_same(got: torch.Tensor, wanted: torch.Tensor) -> None:
    """Bit-identical; else says where the first differing row is, and whether it is the index or the augmentation."""
    assert got.shape == wanted.shape
    differing = (got != wanted).any(1).nonzero().flatten().tolist()
    order_differs = bool((got[:, 0] != wanted[:, 0]).any())
    assert not differing, f"{len(differing)} rows differ from row {differing[0]} on; order differs: {order_differs}"
