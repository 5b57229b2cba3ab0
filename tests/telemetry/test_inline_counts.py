"""What is counted of batches that are made in the training process: everything adds up, and nothing ever shrinks."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils.data import Dataset
from waiting import ManualClock

from dpex import DpexDataLoader
from dpex.engine import in_process
from dpex.measure.reading import Reading
from dpex.profile.live_timer import SWITCH
from dpex.worker import fetch

STEP_S, LOAD_S = 20e-6, 10e-6


class Timed(Dataset[Any]):
    """Samples that take as long as is said."""

    def __init__(self, size: int, clock: ManualClock, seconds: Callable[[int], float] = lambda index: LOAD_S) -> None:
        self.size, self.clock, self.seconds = size, clock, seconds
        self.called: Callable[[], None] = lambda: None
        self.bad = -1

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> Any:
        self.called()
        self.clock.advance(self.seconds(index))
        self.called()
        if index == self.bad:
            raise ValueError(f"no sample {index}")
        return torch.tensor(index)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> ManualClock:
    clock = ManualClock(100.0)
    for module in (in_process, fetch):
        monkeypatch.setattr(module, "monotonic", clock)
    monkeypatch.setenv(SWITCH, "0")
    return clock


Begun = Callable[..., Any]


@pytest.fixture(params=["worker", "batch"])
def begun(request: pytest.FixtureRequest) -> Begun:
    """Makes an iterator that is counted."""

    def begin(dataset: Any, **options: Any) -> Any:
        loader = DpexDataLoader(dataset, num_workers=0, seeding=request.param, **options)
        loader.diagnose()
        return iter(loader)

    return begin


def sums_of(batches: Any) -> Reading:
    sums: Reading = batches.meter.reading()
    return sums


def test_all_time_has_its_place_and_all_batches_are_counted(clock: ManualClock, begun: Begun) -> None:
    data, began = Timed(8 * 150 + 3, clock), clock.now_s
    for number, batch in enumerate(batches := begun(data, batch_size=8)):
        assert torch.equal(batch, torch.arange(8 * number, min(len(data), 8 * number + 8)))
        stats = batches.meter.stats()
        assert stats.batches == stats.pools["inline"].tickets == number + 1
        assert stats.wait_s + stats.work_s == pytest.approx(clock.now_s - began)
        clock.advance(STEP_S)
    sums = sums_of(batches)
    assert (sums.batches, sums.samples, sums.pools["inline"].tickets) == (151, len(data), 151)
    assert sums.wall_s == pytest.approx(clock.now_s - began)
    assert sums.work_s == sums.stepped_s == pytest.approx(151 * STEP_S)
    assert sums.pools["inline"].load_s == pytest.approx(len(data) * LOAD_S)
    assert sum(sums.steps) == sum(sums.pools["inline"].services) == 151
    assert sum(sums.waits) == 150  # the first of a pass is none
    assert sums.delivered_at == pytest.approx(clock.now_s - STEP_S)


def counts(sums: Reading) -> list[float]:
    pool = sums.pools["inline"]
    parts = (pool.tickets, pool.load_s, pool.load_cpu_s, pool.collate_s, pool.collate_cpu_s)
    histograms = (*sums.waits, *sums.steps, *pool.services, sums.waited_s)
    return [*sums.causes.values(), sums.transfer_s, sums.work_s, sums.batches, sums.samples, *parts, *histograms]


class Watch:
    """Reads, and sees that nothing shrinks."""

    def __init__(self, sums: Callable[[], Reading]) -> None:
        self.sums, self.readings = sums, 0
        self.before = counts(sums())

    def look(self) -> None:
        now = counts(self.sums())
        assert all(new >= old - 1e-9 for old, new in zip(self.before, now, strict=True))
        self.before, self.readings = now, self.readings + 1


def test_nothing_ever_shrinks(clock: ManualClock, begun: Begun) -> None:
    data = Timed(1201, clock, lambda index: LOAD_S if index % 97 else 0.004)
    batches = begun(data, batch_size=2)
    watch = Watch(lambda: sums_of(batches))
    data.called = watch.look
    for number, _ in enumerate(batches):
        watch.look()
        clock.advance(STEP_S if number % 77 else 0.003)
        watch.look()
    watch.look()
    assert watch.before[-1] > 0
    assert sums_of(batches).samples == 1201


def test_an_error_is_the_users_and_is_counted(clock: ManualClock, begun: Begun) -> None:
    data = Timed(20, clock)
    data.bad = 7
    batches = begun(data, batch_size=1)
    for _ in range(7):
        next(batches)
    with pytest.raises(ValueError, match="no sample 7"):
        next(batches)
    sums = sums_of(batches)
    assert (sums.batches, sums.samples, sums.errors) == (7, 7, {"batch": 1})
    assert len(list(batches)) == 12
    assert sums_of(batches).batches == 19
