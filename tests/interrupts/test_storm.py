"""A real timer whose handler raises inside ``next()`` every two milliseconds: each sample comes once, and in order."""

import signal
import time
from collections.abc import Iterator
from typing import Any

import pytest
from places import WITHIN, Counted, TickError

from dpex import DpexDataLoader

pytestmark = [
    pytest.mark.long,
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),  # a finalizer was interrupted
]
ROWS = 60_000
EVERY_S = 0.002
STORM_S = 3.0
MOST = 1500


class Storm:
    """A handler that raises in code of dpex and of torch's loader, while it is armed."""

    def __init__(self) -> None:
        self.is_armed = False

    def __call__(self, _signal: int, frame: Any) -> None:
        if self.is_armed and frame.f_code.co_filename.startswith(WITHIN):
            raise TickError


@pytest.fixture
def storm() -> Iterator[Storm]:
    handler = Storm()
    former = signal.signal(signal.SIGALRM, handler)
    signal.setitimer(signal.ITIMER_REAL, EVERY_S, EVERY_S)
    yield handler
    handler.is_armed = False
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, former)


CASES: dict[str, dict[str, Any]] = {
    "two workers": {"num_workers": 2},
    "any worker": {"num_workers": 2, "seeding": "batch"},
    "auto": {"num_workers": "auto"},
    "in the training process": {"num_workers": 0},
    "shuffled": {"num_workers": 2, "shuffle": True},
    "stream": {"num_workers": 1},
}


@pytest.mark.parametrize("case", CASES)
def test_each_sample_comes_once_in_a_storm_of_signals(case: str, storm: Storm) -> None:
    dataset: Any = Counted(ROWS) if case == "stream" else range(ROWS)
    with DpexDataLoader(dataset, batch_size=1, collate_fn=list, **CASES[case]) as loader:
        iterator = iter(loader)
        got: list[list[int]] = []
        ticks, end = 0, time.monotonic() + STORM_S
        storm.is_armed = True
        while time.monotonic() < end and ticks < MOST:
            try:
                got.extend(map(next, (iterator,)))  # in C, as an assignment could be interrupted too
            except TickError:
                ticks += 1
        storm.is_armed = False
        got.extend(iterator)
    numbers = [number for batch in got for number in batch]
    assert (sorted(numbers) if case == "shuffled" else numbers) == list(range(ROWS))
    assert ticks > 20
