"""Exceptions of signal handlers inside ``next()``, several consumers, and a loader that is closed meanwhile.

A real signal is raised where dpex calls the k-th function inside ``next()``, for one k after the other. The module
`test_sweep` raises one at every place where CPython looks for signals.
"""

import pickle
import random
import signal
import sys
import threading
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import pytest
import torch
from families import Augmented, Of, seeded
from inspection import engine_of
from places import TickError
from torch.utils.data import Dataset
from waiting import until

import dpex
from dpex import DpexDataLoader, IteratorClosedError
from dpex.worker.batch_seeding import InProcessMaker
from dpex.worker.setup import modes_here

pytestmark = [
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # a generator was just being closed
]
PACKAGE = str(Path(dpex.__file__).parent)
ROWS = 120
KINDS: dict[str, dict[str, Any]] = {
    "worker": {"num_workers": 2},
    "batch": {"num_workers": 2, "seeding": "batch"},
    "out of order": {"num_workers": 2, "seeding": "batch", "in_order": False},
}


def loader_of(kind: str, **options: Any) -> DpexDataLoader[Any]:
    dataset = Augmented(ROWS, extra=1000)
    batches = [list(range(at, at + 4)) for at in range(0, ROWS, 4)]  # a list: a generator would end with an exception
    return DpexDataLoader(dataset, batch_sampler=batches, generator=seeded(), **KINDS[kind], **options)


class Ticking:
    """A signal comes at the ``at``-th place where dpex calls a function of ``within``, while it is armed; its handler
    raises."""

    def __init__(self, at: int, within: str = PACKAGE) -> None:
        self.left = at
        self.within = within
        self.came = False

    def __call__(self, frame: FrameType, event: str, _: Any) -> Any:
        if (
            event == "call"
            and frame.f_code.co_filename.startswith(self.within)
            and "finalize" not in frame.f_code.co_name
        ):
            self.left -= 1
            if not self.left:
                self.came = True
                sys.settrace(None)
                signal.raise_signal(signal.SIGUSR1)
        return None


def test_an_epoch_is_whole_after_an_interrupted_iter() -> None:
    def interrupt(frame: FrameType, event: str, _: Any) -> None:
        if event == "call" and frame.f_code.co_name == "_new_draws":
            sys.settrace(None)
            signal.raise_signal(signal.SIGUSR1)

    options: Any = {"num_workers": 1, "seeding": "batch", "persistent_workers": True}
    with DpexDataLoader(Augmented(ROWS), batch_size=4, **options) as loader:
        assert len(list(loader)) == ROWS // 4
        sys.settrace(interrupt)
        with pytest.raises(TickError):
            iter(loader)
        assert len(list(loader)) == ROWS // 4


def fingerprints() -> dict[str, Any]:
    """Return values by name that are unequal (``!=``) once a global generator has moved."""
    return {
        "python": hash(random.getstate()),
        "numpy": pickle.dumps(np.random.get_bit_generator().state),  # type: ignore[attr-defined]
        "torch": torch.default_generator.get_state().numpy().tobytes(),
    }


def test_an_interrupt_restores_generators_and_thread_counts() -> None:
    process = InProcessMaker(7, modes_here())
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    before = fingerprints()
    at, came = 0, True
    while came:
        at += 1
        ticking = Ticking(at)
        sys.settrace(ticking)
        try:
            process.make(lambda _: (random.random(), np.random.normal(), torch.randn(())), None, 3, 0)
        except TickError:
            pass
        finally:
            sys.settrace(None)
        came = ticking.came
        assert (fingerprints(), torch.get_num_threads()) == (before, 2)
    torch.set_num_threads(threads)
    assert at > 5


def test_a_dataset_error_is_raised_once_and_the_rest_comes() -> None:
    """It stands in place of a batch, with and without workers."""

    class Bad(Dataset[torch.Tensor]):
        def __len__(self) -> int:
            return 6

        def __getitem__(self, index: int) -> torch.Tensor:
            if index == 3:
                raise LookupError
            return torch.tensor(index)

    for workers in (0, 1):
        iterator = iter(DpexDataLoader(Bad(), batch_size=1, num_workers=workers, seeding="batch"))
        seen: list[Any] = []
        for _ in range(6):
            try:
                seen.append(int(next(iterator)))
            except LookupError:
                seen.append("error")
        assert seen == [0, 1, 2, "error", 4, 5]
        assert next(iterator, "end") == "end"


@pytest.mark.parametrize("kind", KINDS)
def test_two_consumers_share_the_batches(kind: str) -> None:
    loader = loader_of(kind)
    iterator = iter(loader)
    shares: list[list[torch.Tensor]] = [[], []]
    errors: list[BaseException] = []

    def consume(share: list[torch.Tensor]) -> None:
        try:
            share.extend(iterator)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=consume, args=(share,)) for share in shares]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert errors == []
    assert sorted(torch.cat(shares[0] + shares[1])[:, 0].tolist()) == list(range(ROWS))
    for share in shares:
        numbers = [int(batch[0, 0]) for batch in share]
        assert kind == "out of order" or numbers == sorted(numbers)


def gated_at(index: int) -> torch.Tensor:
    """Its second half waits for a file that never comes."""
    if index >= 4:
        threading.Event().wait()
    return torch.tensor(index)


@pytest.mark.parametrize(
    ("seeding", "persistent"), [pytest.param("worker", False, marks=pytest.mark.long), ("batch", True)]
)
def test_closing_ends_a_consumer_that_waits_in_another_thread(seeding: Any, persistent: bool) -> None:
    loader = DpexDataLoader(
        Of(gated_at, 8), batch_size=2, num_workers=2, seeding=seeding, persistent_workers=persistent
    )
    iterator = iter(loader)
    got: list[Any] = []

    def consume() -> None:
        try:
            got.extend(iterator)
        except BaseException as error:
            got.append(error)

    thread = threading.Thread(target=consume)
    thread.start()
    engine = engine_of(iterator)
    until(lambda: not thread.is_alive() or (engine._tally.batches == 2 and engine._tally.blocked_at), 60.0)
    assert thread.is_alive()
    loader.close()
    thread.join(60.0)
    assert not thread.is_alive()
    assert isinstance(got[-1], IteratorClosedError)
    with pytest.raises(IteratorClosedError, match=r"was closed: call iter\(loader\) for a new one"):
        next(iterator)


def test_a_handler_that_closes_the_loader_ends_the_loop_in_order() -> None:
    loader = loader_of("batch")
    iterator = iter(loader)
    former = signal.signal(signal.SIGUSR1, lambda *_: loader.close())
    try:
        for at in range(1, 40, 5):
            ticking = Ticking(at)
            iterator = iter(loader)
            next(iterator)
            sys.settrace(ticking)
            with pytest.raises(IteratorClosedError):
                for _ in iterator:
                    pass
            sys.settrace(None)
    finally:
        sys.settrace(None)
        signal.signal(signal.SIGUSR1, former)
