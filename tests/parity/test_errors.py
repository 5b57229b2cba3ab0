"""Errors: which type, with which words, at which position, and what comes after."""

from __future__ import annotations

import faulthandler
import os
import signal
import traceback
import warnings
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from waiting import until

from .datasets import GATE_GIVE_UP_S, Counting, Failing, Gate, Gated, Of, Stream, as_is, take, worker_id
from .harness import WORKERS, Caught, Loader, candidate, caught, drain, parity

# torch's half-built iterators complain in __del__
HALF_BUILT = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")


class PlainError(Exception):
    pass


class WithMessageError(Exception):
    """Takes its text by keyword, as some libraries' errors do."""

    def __init__(self, *, message: str) -> None:
        super().__init__(message)
        self.message = message


class UnconstructibleError(Exception):
    """Cannot be made from one text."""

    def __init__(self, code: int, detail: str) -> None:
        super().__init__(f"{code}: {detail}")


class NoArgumentsError(Exception):
    def __init__(self) -> None:
        super().__init__("fixed words")


class UnprintableError(Exception):
    def __str__(self) -> str:
        raise ValueError("no words")


class UnpicklableError(Exception):
    def __init__(self, message: str = "holds a lock") -> None:
        import threading

        super().__init__(message)
        self.lock = threading.Lock()


class OwnKeyError(KeyError):
    pass


def raising(make: Callable[[], BaseException]) -> Callable[[], None]:
    def fail() -> None:
        raise make()

    return fail


def chained() -> None:
    try:
        raise KeyError("first")
    except KeyError as error:
        raise ValueError("second") from error


def during_another() -> None:
    try:
        raise KeyError("first")
    except KeyError:
        raise ValueError("second")  # noqa: B904


def deep(level: int = 3) -> None:
    if level:
        deep(level - 1)
    raise LookupError("at the bottom")


def noted() -> None:
    error = ValueError("with a note")
    if hasattr(error, "add_note"):
        error.add_note("and here it is")
    raise error


# A class that cannot be pickled has no place here: with torch the worker's sending thread dies of it and
# next() waits for ever.
FAILURES: dict[str, Callable[[], None]] = {
    "ValueError": raising(lambda: ValueError("bad sample")),
    "no text": raising(ValueError),
    "KeyError": raising(lambda: KeyError("missing")),
    "KeyError of several lines": raising(lambda: KeyError("one\ntwo")),
    "own KeyError": raising(lambda: OwnKeyError("missing")),
    "IndexError": raising(lambda: IndexError("out of range")),
    "StopAsyncIteration": raising(lambda: StopAsyncIteration("odd")),
    "OSError": raising(lambda: FileNotFoundError(2, "No such file", "x.jpg")),
    "UnicodeDecodeError": raising(lambda: UnicodeDecodeError("utf-8", b"\xff", 0, 1, "bad byte")),
    "MemoryError": raising(lambda: MemoryError("too much")),
    "plain class": raising(lambda: PlainError("hm")),
    "message by keyword": raising(lambda: WithMessageError(message="said by keyword")),
    "unconstructible": raising(lambda: UnconstructibleError(4, "x")),
    "no arguments": raising(NoArgumentsError),
    "unprintable": raising(UnprintableError),
    "unpicklable": raising(UnpicklableError),
    "chained": chained,
    "during another": during_another,
    "deep": deep,
    "noted": noted,
    "torch": lambda: torch.ones(2) @ torch.ones(3),  # type: ignore[dict-item]
    "longer than a message": raising(lambda: ValueError("x" * 1_000_000)),
}


def fail_as_told(index: Any) -> Any:
    if index in FAILURES:
        FAILURES[index]()
    return index


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("batch_size", [None, 1])
@parity
def test_every_kind_of_error(cls: Loader, workers: int, batch_size: int | None) -> Any:
    """Each at its position, and a good batch after each."""
    indices = [index for kind in FAILURES for index in (kind, f"after {kind}")]
    loader = cls(Of(fail_as_told, 0), batch_size, sampler=indices, num_workers=workers, collate_fn=as_is)
    iterator = iter(loader)
    return {index: caught(next, iterator) for index in indices}


def wordy() -> None:
    raise ValueError("x" * 40_000)


@parity
def test_many_long_errors(cls: Loader) -> Any:
    """More text than a message holds, although each alone would fit."""
    return drain(iter(cls(Failing(wordy, 40, list(range(40))), num_workers=1)))


def bad_value() -> None:
    raise ValueError("bad sample")


@pytest.mark.parametrize(
    ("workers", "at"),
    [*((0, [at]) for at in (0, 4, 9)), (1, [9]), (1, list(range(10))), (3, [0]), (3, [3, 4, 5]), (3, list(range(10)))],
)
@parity
def test_iteration_goes_on_after_an_error(cls: Loader, workers: int, at: list[int]) -> Any:
    loader = cls(Failing(bad_value, 10, at), batch_size=2, num_workers=workers)
    return [drain(iter(loader)), drain(iter(loader))]


@pytest.mark.smoke
@WORKERS
@parity
def test_an_error_ends_a_for_loop_and_the_loader_lives_on(cls: Loader, workers: int) -> Any:
    data = Failing(bad_value, 6, [2])
    loader = cls(data, num_workers=workers)
    seen: list[Any] = []
    for _ in range(2):
        try:
            for batch in loader:
                seen.append(batch)  # noqa: PERF402  # what came before the error counts too
        except ValueError as error:
            seen.append(Caught(error.with_traceback(None)))
    data.at = frozenset()
    return [seen, list(loader)]


def failing_element(worker: int, k: int) -> Any:
    if worker == 1 and k == 2:
        raise ValueError(f"element {k}")
    return worker, k


@pytest.mark.parametrize(("workers", "batch_size"), [(1, 2), (2, None), (2, 2), (3, 1)])
@parity
def test_a_stream_ends_with_its_error_and_the_others_go_on(cls: Loader, workers: int, batch_size: int | None) -> Any:
    return drain(iter(cls(Stream(failing_element, 5), batch_size, num_workers=workers)))


class Resuming(Stream):
    """Not a generator: its iterator can go on after an error."""

    def __iter__(self) -> Any:
        return ResumingIterator()


class ResumingIterator:
    def __init__(self) -> None:
        self.k = 0

    def __iter__(self) -> ResumingIterator:
        return self

    def __next__(self) -> tuple[int, int]:
        self.k += 1
        if self.k == 3:
            raise KeyError("third")
        if self.k > 6:
            raise StopIteration
        return worker_id(), self.k


@WORKERS
@pytest.mark.parametrize("batch_size", [None, 2])
@parity
def test_a_stream_that_goes_on_after_its_error(cls: Loader, workers: int, batch_size: int | None) -> Any:
    return drain(iter(cls(Resuming(failing_element, 1), batch_size, num_workers=workers)))


class NoStart(Stream):
    def __iter__(self) -> Any:
        raise RuntimeError("cannot open the source")


@WORKERS
@parity
def test_a_stream_that_cannot_start(cls: Loader, workers: int) -> Any:
    loader = cls(NoStart(failing_element, 1), num_workers=workers)
    iterator = caught(iter, loader)
    if isinstance(iterator, Caught):
        return iterator
    return [caught(next, iterator) for _ in range(max(1, workers))]


def fail_init(worker: int) -> None:
    raise KeyError(f"worker {worker} cannot begin")


def fail_init_of_one(worker: int) -> None:
    if worker == 1:
        raise KeyError(f"worker {worker} cannot begin")


@pytest.mark.parametrize("init", [fail_init, fail_init_of_one])
@parity
def test_worker_init_fn_fails(cls: Loader, init: Any) -> Any:
    """It comes with that worker's first batch; of the rest is asked only that none comes from that worker."""
    seen = drain(iter(cls(Counting(6), num_workers=2, worker_init_fn=init)))
    return seen[:2], ["an error" if isinstance(item, Caught) else item for item in seen[2:]]


def bad_collate(batch: list[int]) -> Any:
    if 2 in batch:
        raise TypeError("cannot put these together")
    return batch


@WORKERS
@parity
def test_the_collate_function_fails(cls: Loader, workers: int) -> Any:
    return drain(iter(cls(Counting(8), batch_size=2, num_workers=workers, collate_fn=bad_collate)))


class LazyError(Exception):
    pass


@pytest.mark.parametrize("at", [0, 5])
@parity
def test_the_sampler_fails(cls: Loader, at: int) -> Any:
    return drawn_from_a_sampler_that_fails(cls, 0, at)


def drawn_from_a_sampler_that_fails(cls: Loader, workers: int, at: int) -> Any:
    def sampler() -> Any:
        for i in range(10):
            if i == at:
                raise LazyError("the sampler")
            yield i

    iterator = caught(iter, cls(Counting(10), sampler=sampler(), num_workers=workers))
    return iterator if isinstance(iterator, Caught) else drain(iterator)


@pytest.mark.parametrize(("workers", "at"), [(1, 0), (1, 3), (2, 5), (2, 8)])
def test_a_sampler_that_fails_costs_no_batch(workers: int, at: int) -> None:
    """Its error stands in place of a batch. torch raises it some batches ahead, and loses one of them."""
    found = drawn_from_a_sampler_that_fails(candidate(), workers, at)
    assert [int(batch) for batch in found if not isinstance(batch, Caught)] == list(range(at))
    assert sum(isinstance(it, Caught) for it in found) == 1


class NoIterator:
    def __iter__(self) -> Any:
        raise LazyError("no iterator")

    def __len__(self) -> int:
        return 3


@HALF_BUILT
@WORKERS
@parity
def test_the_sampler_cannot_start(cls: Loader, workers: int) -> Any:
    return [
        caught(lambda size: list(cls(Counting(3), size, sampler=NoIterator(), num_workers=workers)), size)
        for size in (1, None)
    ]


@pytest.mark.parametrize("timeout", [0.1, 1])
@parity
def test_timeout(cls: Loader, timeout: float) -> Any:
    """The words, and that asking again works."""
    dataset = Gated(4, at=[0])
    iterator = iter(cls(dataset, num_workers=1, timeout=timeout))
    first = caught(next, iterator)
    dataset.gate.open()
    return [first, [until_it_comes(iterator) for _ in range(4)], caught(next, iterator)]


def until_it_comes(iterator: Any) -> Any:
    """The next batch, however often the clock of a busy machine runs out before."""
    for _ in range(200):
        item = caught(next, iterator)
        if not (isinstance(item, Caught) and "timed out" in str(item.error)):
            return item
    raise AssertionError("nothing came")


def wait_until_it_sleeps(pid: int) -> None:
    """Return when a process's main thread has slept for a while: it waits, and not for a CPU or the interpreter."""
    states: deque[str] = deque(maxlen=20)

    def sleeps_on() -> bool:
        states.append(Path(f"/proc/{pid}/task/{pid}/stat").read_text().rpartition(")")[2].split()[0])
        return states.count("S") == states.maxlen

    until(sleeps_on, GATE_GIVE_UP_S, pause_s=0.005)


class Interrupting(Counting):
    """Making item 2 interrupts the process that built the dataset, which is then waiting for it."""

    def __init__(self, length: int) -> None:
        super().__init__(length)
        self.trainer = os.getpid()
        self.asked, self.interrupted = Gate(), Gate()

    def __getitem__(self, index: int) -> Any:
        if index == 2:
            self.asked.wait()
            wait_until_it_sleeps(self.trainer)
            os.kill(self.trainer, signal.SIGINT)
            self.interrupted.wait()
        return index


@parity
def test_an_interrupt_reaches_next(cls: Loader) -> Any:
    """Ctrl-C while next() waits; afterwards the same iterator gives what was missing."""
    dataset = Interrupting(5)
    iterator = iter(cls(dataset, num_workers=1))
    first = take(iterator, 2)
    dataset.asked.open()
    interrupted = caught(next, iterator)
    dataset.interrupted.open()
    return [first, interrupted, drain(iterator)]


def vanish(index: int) -> int:
    if index == 2:
        os._exit(3)
    return index


def fall_over(index: int) -> int:
    if index == 2:
        os.kill(os.getpid(), signal.SIGSEGV)
    return index


def silence(worker: int) -> None:
    """torch and pytest would write of the crash to the worker's stderr."""
    faulthandler.disable()
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)


@pytest.mark.parametrize(
    ("end", "words"), [(vanish, "exited unexpectedly"), (fall_over, "is killed by signal: Segmentation fault")]
)
@parity
def test_a_sample_that_ends_every_worker(cls: Loader, end: Any, words: str) -> Any:
    """A RuntimeError with torch's words in its traceback, no later than at that sample.

    torch reports a death when it hears of it, maybe a batch early; what is said and tried before is free.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        iterator = iter(cls(Of(end, 6), num_workers=1, prefetch_factor=1, worker_init_fn=silence))
        items = (caught(next, iterator) for _ in range(3))
        error = next(item.error for item in items if isinstance(item, Caught))
    text = "".join(traceback.format_exception(error))
    return [isinstance(error, RuntimeError), "DataLoader worker (pid" in text, words in text]
