"""What code finds around it in a worker, and what happens here without workers."""

import multiprocessing
import os
import random
import re
import signal
import sys
import threading
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from inspection import workers_of
from torch.utils.data import Dataset, get_worker_info

from .datasets import Counting, Of, SizedStream, Stream, as_is, epochs, pair, worker_id
from .harness import PASSES, WORKERS, Loader, caught, parity, random_state

sharing_strategy: Any = torch.multiprocessing.get_sharing_strategy
SETTING: dict[str, int] = {"module global": 1}


class Curious(Counting):
    """Each item describes the worker it was made in."""

    def __getitem__(self, index: int) -> Any:
        return describe(self, index)


def kin() -> dict[str, Any]:
    """What `multiprocessing` says of this process and its parent. In a spawned worker, MAIN is the worker itself."""
    here: Any = multiprocessing.current_process()
    parent = multiprocessing.parent_process()
    assert parent is not None
    return {
        "name": re.sub(r"\d+", "1", here.name),
        "numbers": len(here._identity),
        "name is of these": here.name.endswith("-" + ":".join(map(str, here._identity))),
        "parent": parent.name,
        "parent is the main process": parent.pid == MAIN,
        "parent is alive": parent.is_alive(),
    }


def describe(dataset: Any, index: int) -> dict[str, Any]:
    info: Any = get_worker_info()
    return {
        "index": index,
        "info": info and {name: getattr(info, name) for name in ("id", "num_workers", "seed", "rng", "worker_method")},
        "info is a": type(info),
        "repr": repr(info),
        "dataset is this one": info and info.dataset is dataset,
        "same from everywhere": info is torch.utils.data._utils.worker._worker_info,
        "no new attribute": caught(setattr, info, "anything", 1) if info else None,
        "frozen": caught(setattr, info, "id", 1) if info else None,
        "threads": torch.get_num_threads() if info else None,
        "seed": torch.initial_seed() if info else None,
        "daemon": multiprocessing.current_process().daemon,
        "process": kin() if info else None,
        "main thread": threading.current_thread() is threading.main_thread(),
        "grad": torch.is_grad_enabled(),
        "default dtype": torch.get_default_dtype(),
        "directory": str(Path.cwd()),
        "arguments": sys.argv,
        "setting": SETTING["module global"],
        "environment": os.environ.get("PARITY_SETTING"),
        "start method": multiprocessing.get_start_method(allow_none=True),
        "sharing strategy": sharing_strategy(),
    }


MAIN = os.getpid()


@WORKERS
@parity
def test_the_surroundings_of_a_worker(cls: Loader, workers: int) -> Any:
    """What was set here before iter() is found there."""
    loader = cls(Curious(4), num_workers=workers, collate_fn=as_is)
    SETTING["module global"] = 2
    os.environ["PARITY_SETTING"] = "set"
    torch.set_default_dtype(torch.float64)
    try:
        with torch.no_grad():
            return [list(loader), get_worker_info(), os.getpid() == MAIN]
    finally:
        SETTING["module global"] = 1
        del os.environ["PARITY_SETTING"]
        torch.set_default_dtype(torch.float32)


@WORKERS
@parity
def test_there_is_no_worker_info_here(cls: Loader, workers: int) -> Any:
    """Not in the sampler, not between batches, not afterwards."""
    seen: list[Any] = []

    def sampler() -> Any:
        for i in range(4):
            seen.append(get_worker_info())
            yield i

    for _ in cls(Counting(4), sampler=sampler(), num_workers=workers):
        seen.append(get_worker_info())  # noqa: PERF401  # the sampler adds to the same list
    return [seen, get_worker_info()]


def child_ends() -> None:
    pass


def start_a_child(index: int) -> Any:
    child = multiprocessing.Process(target=child_ends)
    started = caught(child.start)
    if started is None:
        child.join()
    return started


@parity
def test_workers_are_daemons_and_may_have_no_children(cls: Loader) -> Any:
    return list(cls(Of(start_a_child, 2), num_workers=2, collate_fn=as_is))


class Shares(Counting):
    """worker_init_fn changes the worker's copy through `get_worker_info().dataset`."""

    share: Any = "the main process's"

    def __getitem__(self, index: int) -> Any:
        return self.share, index


def share_out(worker: int) -> None:
    info: Any = get_worker_info()
    info.dataset.share = (worker, info.id, info.num_workers, random.random(), np.random.rand(), torch.rand(1).item())


@pytest.mark.smoke
@PASSES
@parity
def test_worker_init_fn(cls: Loader, workers: int, persistent: bool) -> Any:
    dataset = Shares(5)
    loader = cls(
        dataset, num_workers=workers, worker_init_fn=share_out, persistent_workers=persistent, collate_fn=as_is
    )
    return [epochs(loader, 2), dataset.share]


class Counted(Counting):
    """Its own method is the worker_init_fn: both must be the same copy."""

    def __init__(self, length: int) -> None:
        super().__init__(length)
        self.calls: list[int] = []

    def begin(self, worker: int) -> None:
        self.calls.append(worker)

    def __getitem__(self, index: int) -> Any:
        return index, list(self.calls)


@PASSES
@parity
def test_worker_init_fn_is_a_method_of_the_dataset(cls: Loader, workers: int, persistent: bool) -> Any:
    """Called once per worker process: in each epoch anew, or once for persistent workers."""
    dataset = Counted(6)
    loader = cls(
        dataset, num_workers=workers, worker_init_fn=dataset.begin, persistent_workers=persistent, collate_fn=as_is
    )
    return [epochs(loader, 2), dataset.calls]


@parity
def test_worker_init_fn_can_be_a_closure_and_set_later(cls: Loader) -> Any:
    note = {"from": "outside"}

    def init(worker: int) -> None:
        SETTING["module global"] = 40 + worker

    loader = cls(Of(lambda i: (SETTING["module global"], note["from"]), 4), num_workers=2)
    seen = [list(loader)]
    loader.worker_init_fn = init
    seen.append(list(loader))
    return [seen, SETTING]


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="needs sched_setaffinity")
@parity
def test_the_processor_a_worker_chose_stays_its_own(cls: Loader) -> Any:
    chosen = max(os.sched_getaffinity(0))

    def init(worker: int) -> None:
        os.sched_setaffinity(0, [chosen])

    loader = cls(Of(lambda i: sorted(os.sched_getaffinity(0)), 2), num_workers=2, worker_init_fn=init, collate_fn=as_is)
    return [list(loader), os.sched_getaffinity(0)]


class Restarted(Stream):
    """Counts how often its worker copy was started."""

    starts = 0

    def __iter__(self) -> Any:
        self.starts += 1
        return iter([(worker_id(), self.starts)] * 2)


@PASSES
@parity
def test_how_often_a_stream_is_started(cls: Loader, workers: int, persistent: bool) -> Any:
    dataset = Restarted(pair, 1)
    return [epochs(cls(dataset, num_workers=workers, persistent_workers=persistent), 3), dataset.starts]


class Sharded(SizedStream):
    """The split by worker that torch's documentation shows."""

    def __iter__(self) -> Any:
        info = get_worker_info()
        worker, workers = (info.id, info.num_workers) if info else (0, 1)
        per_worker = -(-self.reported // workers)
        return iter(range(worker * per_worker, min((worker + 1) * per_worker, self.reported)))


@pytest.mark.parametrize("workers", [0, 1, 2, 3])
@parity
def test_a_sharded_stream(cls: Loader, workers: int) -> Any:
    loader = cls(Sharded(pair, 11), batch_size=2, num_workers=workers)
    return [len(loader), epochs(loader, 2)]


@WORKERS
@parity
def test_open_handles_and_locks_come_along(cls: Loader, workers: int) -> Any:
    """A fork inherits what pickle cannot send."""
    lock = threading.Lock()
    with Path(__file__).open() as file:

        class Holds:
            held = (lock, file, lambda x: x + 1)

            def __len__(self) -> int:
                return 4

            def __getitem__(self, index: int) -> Any:
                with self.held[0]:
                    assert not self.held[1].closed
                    return self.held[2](index)

        return list(cls(Holds(), batch_size=2, num_workers=workers))


@parity
def test_shared_memory_between_here_and_the_workers(cls: Loader) -> Any:
    """multiprocessing's values and torch's shared tensors are the same memory in a worker."""
    counter = multiprocessing.Value("i", 0)
    tensor: Any = torch.zeros(4)
    tensor.share_memory_()

    def touch(index: int) -> int:
        with counter.get_lock():
            counter.value += 1
        tensor[index] = index + 1
        return index

    return [list(cls(Of(touch, 4), num_workers=2)), counter.value, tensor]


@parity
def test_all_workers_run_at_the_same_time(cls: Loader) -> Any:
    barrier = multiprocessing.Barrier(4)

    def meet(index: int) -> int:
        return barrier.wait(60.0) >= 0

    return list(cls(Of(meet, 4), num_workers=4))


@WORKERS
@parity
def test_a_convolution_was_run_here_before(cls: Loader, workers: int) -> Any:
    """Thread pools do not survive a fork; a worker must not hang on them."""
    x, w = torch.ones(1, 1, 24_000), torch.ones(1, 1, 2)
    torch.nn.functional.conv1d(x, w)
    return list(cls(Of(lambda i: torch.nn.functional.conv1d(x, w).sum(), 2), num_workers=workers))


@parity
def test_nothing_leaves_this_process_without_workers(cls: Loader) -> Any:
    """The very objects are used: dataset, samples, batches, even if they cannot be pickled."""
    tensor = torch.ones(3)
    kept: list[Any] = []

    class Local:
        def __len__(self) -> int:
            return 2

        def __getitem__(self, index: int) -> Any:
            kept.append((os.getpid() == MAIN, threading.current_thread() is threading.main_thread()))
            return tensor

        def __reduce__(self) -> Any:
            raise TypeError("not to be pickled")

    dataset = Local()
    loader = cls(dataset, collate_fn=lambda batch: batch, batch_size=1)
    batches = list(loader)
    single = next(iter(cls(dataset, batch_size=None)))
    return [kept, [b[0] is tensor for b in batches], single is tensor, loader.dataset is dataset, get_worker_info()]


@WORKERS
@parity
def test_the_main_process_keeps_its_settings(cls: Loader, workers: int) -> Any:
    """Threads, handlers and random state of this process are not a worker's business."""
    before = (torch.get_num_threads(), signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM))
    list(cls(Counting(4), num_workers=workers))
    after = (torch.get_num_threads(), signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM))
    return [before == after, random_state()]


LONG = pytest.param("forkserver", marks=pytest.mark.long)  # each of torch's workers imports torch, as with spawn
CONTEXTS = pytest.mark.parametrize("method", ["spawn", LONG])


@pytest.mark.parametrize("method", [pytest.param("spawn", marks=pytest.mark.smoke), LONG])
@parity
def test_start_methods(cls: Loader, method: str) -> Any:
    """A worker that starts from nothing: order, seeds, worker info and worker_init_fn as ever."""
    loader = cls(
        Curious(4),
        batch_size=2,
        num_workers=1,
        multiprocessing_context=method,
        worker_init_fn=share_out,
        collate_fn=as_is,
        generator=torch.Generator().manual_seed(2),
        persistent_workers=True,
    )
    return [epochs(loader, 2), next(iter(loader)), loader.generator]


def who_am_i_at(index: int) -> torch.Tensor:
    """Sample: the worker's number and its process."""
    return torch.tensor([get_worker_info().id, os.getpid()])


class Process(Dataset[Any]):
    """Sample: the number of its worker, and the numbers that `multiprocessing` gives the process."""

    def __len__(self) -> int:
        return 6

    def __getitem__(self, index: int) -> Any:
        here: Any = multiprocessing.current_process()
        return get_worker_info().id, here._identity


@pytest.mark.parametrize("method", [None, "fork"])
@parity
def test_workers_are_numbered_like_other_processes_of_the_main(cls: Loader, method: str | None) -> Any:
    """Datasets pick a port or a device by that number."""
    before = multiprocessing.Process()._identity[0]  # type: ignore[attr-defined]
    loader = cls(Process(), batch_size=1, num_workers=3, multiprocessing_context=method, collate_fn=as_is)
    numbers = [(worker, [one - before for one in identity]) for _ in range(2) for ((worker, identity),) in loader]
    return numbers, multiprocessing.Process()._identity[0] - before  # type: ignore[attr-defined]


@pytest.mark.parametrize("method", ["fork", LONG])
@parity
def test_workers_are_listed_by_number(cls: Loader, method: str) -> Any:
    """However long each takes to start."""
    iterator = iter(cls(Of(who_am_i_at, 12), batch_size=1, num_workers=3, multiprocessing_context=method))
    pids = dict(torch.cat(list(iterator)).tolist())
    return [[pids[number] for number in range(3)] == [worker.pid for worker in workers_of(iterator)], sorted(pids)]


@CONTEXTS
@parity
def test_start_methods_refuse_what_cannot_be_pickled(cls: Loader, method: str) -> Any:
    """The error has the kind and the words of pickle's own, after a warning that begins with torch's words.

    Functions without a name travel, unlike with torch: see `tests/pools/test_cells.py`.
    """
    options: dict[str, Any] = {"num_workers": 1, "multiprocessing_context": method}
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        error = caught(iter, cls(threading.Lock(), sampler=[1], **options))
    words = "Got pickle error when attempting to start a worker Process."
    own = "cannot pickle '_thread.lock' object"
    warned = [(w.category, str(w.message).startswith(words)) for w in said]
    return [isinstance(error.error, TypeError), own in str(error.error), warned]
