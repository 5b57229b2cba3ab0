"""Pinning, with an accelerator that is only pretended: what a user could tell of the thread that does it."""

import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from accelerator import Accelerator, pretended

from .datasets import Counting, Failing, Of, Recording, Stream, as_tensor, augmented, epochs, pair, take
from .harness import WORKERS, Loader, caught, drain, parity

the: Accelerator


@pytest.fixture(autouse=True)
def _accelerator(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    global the
    pretending = pretended(monkeypatch)
    the = next(pretending)
    yield
    pretending.close()


def fail(_: Any = None) -> None:
    raise ValueError("of the pin")


def where_pinned(batch: torch.Tensor) -> bool:
    """Whether it was the trainer's own thread."""
    return bool(batch.pinned_in == threading.main_thread().name)  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("workers", "options"), [(0, {}), (1, {"persistent_workers": True}), (3, {"prefetch_factor": 1})], ids=str
)
@parity
def test_batches_of_two_epochs(cls: Loader, workers: int, options: dict[str, Any]) -> Any:
    seen = epochs(cls(Of(as_tensor, 17), batch_size=2, num_workers=workers, pin_memory=True, **options), 2)
    return [seen, [where_pinned(batch) for epoch in seen for batch in epoch]]


@WORKERS
@parity
def test_random_augmentations(cls: Loader, workers: int) -> Any:
    return epochs(cls(Of(augmented, 13), num_workers=workers, shuffle=True, pin_memory=True), 2)


@WORKERS
@parity
def test_streams(cls: Loader, workers: int) -> Any:
    return epochs(cls(Stream(pair, 5, 2, 9), batch_size=2, num_workers=workers, pin_memory=True), 2)


@WORKERS
@parity
def test_errors_of_the_dataset(cls: Loader, workers: int) -> Any:
    return drain(iter(cls(Failing(fail, 9, [0, 4, 8]), num_workers=workers, pin_memory=True)))


@WORKERS
@parity
def test_errors_of_pinning(cls: Loader, workers: int) -> Any:
    """From threads they come with torch's "Caught ValueError in pin memory thread for device 0."; then it goes on."""
    the.before = lambda batch: fail() if batch[0] in (0, 3, 8) else None
    return drain(iter(cls(Counting(9), num_workers=workers, pin_memory=True)))


@parity
def test_errors_name_the_device_of_the_thread_that_called_iter(cls: Loader) -> Any:
    the.before, the.index = fail, 3
    iterator = iter(cls(Counting(2), num_workers=1, pin_memory=True))
    the.index = 5
    return [drain(iterator), the.indices_set.pop()[1]]


@pytest.mark.parametrize("prefetch", [1, 2, 5])
@parity
def test_the_sampler_is_drawn_no_further_by_the_training_thread(cls: Loader, prefetch: int) -> Any:
    """However far the thread is: a sampler may draw random numbers that the training step draws from as well."""
    sampler = Drawing(range(30))
    loader = cls(Counting(30), sampler=sampler, num_workers=2, prefetch_factor=prefetch, pin_memory=True)
    seen = [[batch, sampler.seen, torch.rand(2)] for batch in loader]
    return [seen, sampler.threads]


class Drawing(Recording):
    def __init__(self, indices: Any) -> None:
        super().__init__(indices)
        self.threads: set[bool] = set()

    def __iter__(self) -> Iterator[Any]:
        for index in super().__iter__():
            self.threads.add(threading.current_thread() is threading.main_thread())
            torch.rand(())
            yield index


@pytest.mark.parametrize("taken", [0, 1, 4])
@parity
def test_persistent_workers_after_a_broken_off_epoch(cls: Loader, taken: int) -> Any:
    """Their random states are those that running ahead left them."""
    loader = cls(Of(augmented, 20), num_workers=2, prefetch_factor=2, pin_memory=True, persistent_workers=True)
    return [take(iter(loader), taken), list(loader)]


@parity
def test_timeout_while_pinning_and_going_on(cls: Loader) -> Any:
    gate = threading.Event()
    the.before = lambda batch: None if gate.wait(60.0) else fail()
    iterator = iter(cls(Counting(4), num_workers=1, pin_memory=True, timeout=0.3))
    first = caught(next, iterator)
    gate.set()  # on a busy machine the clock may run out again before the thread has pinned
    return [first, [item for item in drain(iterator) if isinstance(item, torch.Tensor)]]
