"""Pinning without an accelerator, the profiler's mark, threads, forks, and what is left of processes."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from accelerator import is_available
from inspection import iterator_of, shut_down, workers_of
from torch._C._profiler import _ExperimentalConfig
from torch.autograd.profiler import profile
from torch_features import HAS_ACCELERATOR, needs_profiles_of_all_threads

from .datasets import Counting, Of, as_tensor, epochs, take
from .harness import WORKERS, Loader, caught, parity

NO_ACCELERATOR = pytest.mark.skipif(is_available(), reason="says what happens without an accelerator")


@NO_ACCELERATOR
@WORKERS
@pytest.mark.parametrize("device", ["", "cuda"] if HAS_ACCELERATOR else [""])  # torch 2.4 fails at "cuda"
@parity
def test_pin_memory_without_an_accelerator(cls: Loader, workers: int, device: str) -> Any:
    """A warning at each new iterator, and batches that are not pinned."""
    loader = cls(Of(as_tensor, 3), num_workers=workers, pin_memory=True, pin_memory_device=device)
    batches = epochs(loader, 2)
    return [batches, [batch.is_pinned() for epoch in batches for batch in epoch], loader.pin_memory]


class Pinnable:
    def __init__(self, samples: list[Any]) -> None:
        self.samples = samples
        self.pinned = 0

    def pin_memory(self) -> Pinnable:
        self.pinned += 1
        return self


@NO_ACCELERATOR
@WORKERS
@parity
def test_own_pin_memory_is_not_called_without_an_accelerator(cls: Loader, workers: int) -> Any:
    return list(cls(Counting(3), collate_fn=Pinnable, num_workers=workers, pin_memory=True))


def marks(recorded: Any) -> list[Any]:
    return [(event.key, event.count) for event in recorded.key_averages() if "DataLoader" in event.key]


@WORKERS
@parity
def test_the_profiler_s_mark(cls: Loader, workers: int) -> Any:
    """`enumerate(DataLoader)#<iterator>.__next__`, once for each next() while it is on, the last one included."""
    loader = cls(Counting(9), num_workers=workers)
    iterator = iter(loader)
    seen = take(iterator, 2)
    with profile() as part:
        seen += take(iterator, 3)
    seen += iterator
    with profile() as whole:
        seen += loader
    return [seen, marks(part), marks(whole)]


@needs_profiles_of_all_threads
@WORKERS
@pytest.mark.parametrize("all_threads", [False, True])
@parity
def test_the_profiler_s_mark_of_another_thread(cls: Loader, workers: int, all_threads: bool) -> Any:
    """One that is asked to looks at all threads, those too in which torch says that no profiler is on."""
    seen: list[Any] = []
    thread = threading.Thread(target=lambda: seen.extend(cls(Counting(3), num_workers=workers)))
    with torch.profiler.profile(experimental_config=_ExperimentalConfig(profile_all_threads=all_threads)) as recorded:
        thread.start()
        thread.join()
    return [seen, marks(recorded)]


@WORKERS
@parity
def test_grad_mode_and_threads_of_this_process(cls: Loader, workers: int) -> Any:
    with torch.no_grad():
        first = list(cls(Of(as_tensor, 2), num_workers=workers))
    with torch.inference_mode():
        second = list(cls(Of(as_tensor, 2), num_workers=workers))
    return [first, second, [batch.is_inference() for batch in first + second], torch.get_num_threads()]


@WORKERS
@parity
def test_an_iterator_made_here_and_used_in_another_thread(cls: Loader, workers: int) -> Any:
    iterator = iter(cls(Counting(7), batch_size=2, num_workers=workers))
    seen: list[Any] = take(iterator, 1)
    thread = threading.Thread(target=lambda: seen.extend(caught(list, iterator)))
    thread.start()
    thread.join()
    return seen


@parity
def test_shutting_workers_down_by_hand(cls: Loader) -> Any:
    """`_shutdown_workers()` and `_iterator = None` is how libraries free persistent workers today."""
    loader = cls(Counting(6), num_workers=2, persistent_workers=True)
    first = list(loader)
    assert loader._iterator is not None
    workers = workers_of(iterator_of(loader))
    shut_down(iterator_of(loader))
    shut_down(iterator_of(loader))
    loader._iterator = None
    return [first, [worker.is_alive() for worker in workers], list(loader)]
