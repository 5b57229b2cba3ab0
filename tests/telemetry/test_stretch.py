"""Tiny batches made in the training process: most pass unmeasured, and everything adds up nevertheless."""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset

from dpex import AutotuneConfig, DpexDataLoader
from dpex.engine import (
    engine,
    handing_out,
    inprocess_meter,
    making_here,
    snapshots,
    supply,
    unmeasured,
    unmeasured_calls,
    waiting,
)
from dpex.engine.inprocess_sampling import TURN_S, UnmeasuredRun
from dpex.iterators import in_process
from dpex.measure.consumer_time import STEP_BUCKETS
from dpex.measure.sums import Sums
from dpex.profile.live_timer import SWITCH
from dpex.system.clock import ManualClock

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
    for module in (
        engine,
        handing_out,
        in_process,
        inprocess_meter,
        making_here,
        snapshots,
        supply,
        unmeasured,
        unmeasured_calls,
        waiting,
    ):
        monkeypatch.setattr(module, "monotonic", clock)
    monkeypatch.setattr("time.perf_counter", clock)
    monkeypatch.setenv(SWITCH, "0")
    return clock


Begun = Callable[..., Any]


@pytest.fixture(params=["worker", "batch"])
def begun(request: pytest.FixtureRequest) -> Begun:
    """Makes an iterator that is counted: torch's in-process one, or an engine's."""

    def begin(dataset: Any, **options: Any) -> Any:
        loader = DpexDataLoader(dataset, num_workers=0, seeding=request.param, **options)
        loader.diagnose()
        iterator: Any = iter(loader)
        if hasattr(iterator, "_engine"):
            iterator._engine._tally.detailed = True  # as where metrics are exported
        return iterator

    return begin


def stretch_of(batches: Any) -> UnmeasuredRun:
    stretch: UnmeasuredRun = batches._engine.stretch if hasattr(batches, "_engine") else batches._stretch
    return stretch


def sums_of(batches: Any) -> Sums:
    source = getattr(batches, "_engine", None) or batches._meter
    sums: Sums = source.sums()
    return sums


def whole_s(sums: Sums) -> float:
    return sums.wall_s


def test_all_time_has_its_place_and_all_batches_are_counted(clock: ManualClock, begun: Begun) -> None:
    data, began = Timed(8 * 1500 + 3, clock), clock.now_s
    batches, passed = begun(data, batch_size=8), 0
    for number, batch in enumerate(batches):
        assert torch.equal(batch, torch.arange(8 * number, min(len(data), 8 * number + 8)))
        clock.advance(STEP_S)
        passed += stretch_of(batches).left > 0
    sums = sums_of(batches)
    assert passed > 1000
    assert (sums.batches, sums.samples, sums.pools["inline"].tickets) == (1501, len(data), 1501)
    assert whole_s(sums) == pytest.approx(clock.now_s - began)
    assert sums.work_s == sums.stepped_s == pytest.approx(1501 * STEP_S)
    assert sums.pools["inline"].load_s == pytest.approx(len(data) * LOAD_S)
    assert sums.stepped_squared == pytest.approx(1501 * STEP_S**2)
    assert sum(sums.steps) == sum(sums.pools["inline"].services) == 1501
    assert sum(sums.waits) == 1500  # the first of a pass is none
    assert sums.delivered_at == pytest.approx(clock.now_s - STEP_S)


def test_a_pass_that_is_broken_off_is_counted_so_far(clock: ManualClock, begun: Begun) -> None:
    batches = begun(Timed(400, clock), batch_size=1)
    for _ in range(200):
        next(batches)
        clock.advance(STEP_S)
    while not stretch_of(batches).passed:
        next(batches)
        clock.advance(STEP_S)
    sums = sums_of(batches)
    assert sums.batches == sums.pools["inline"].tickets == int(batches._num_yielded)
    assert sums.work_s == pytest.approx(sums.batches * STEP_S)


def test_a_user_s_statistics_know_of_batches_that_passed(clock: ManualClock, begun: Begun) -> None:
    batches, began = begun(Timed(3000, clock), batch_size=2), clock.now_s
    source = getattr(batches, "_engine", None) or batches._meter
    for number, _ in enumerate(batches):
        stats = source.stats()
        made = stats.pools["inline"]
        assert stats.batches == made.tickets == number + 1
        assert stats.wait_s + stats.work_s == pytest.approx(clock.now_s - began)
        assert made.load_s == pytest.approx(2 * LOAD_S * (number + 1))
        clock.advance(STEP_S)


def test_the_tuner_s_look_knows_of_batches_that_passed(clock: ManualClock) -> None:
    loader = DpexDataLoader(Timed(3000, clock), batch_size=2, num_workers=0, seeding="batch")
    batches: Any = iter(loader)
    began, passed = None, 0
    for number, _ in enumerate(batches):
        began = clock.now_s if began is None else began  # the first call is the start's
        look = batches._engine.look()
        assert (look.times.batches, look.made_here.tickets, look.away_s) == (number, number + 1, 0.0)
        assert look.times.seconds == pytest.approx(clock.now_s - began)
        assert look.times.work_s == pytest.approx(number * STEP_S)
        assert look.made_here.load_s == pytest.approx(2 * LOAD_S * (number + 1))
        passed += stretch_of(batches).left > 0
        clock.advance(STEP_S)
    assert passed > 1000


@pytest.mark.parametrize("how", ["tuned", "after workers"])
def test_batches_pass_wherever_they_are_made_here(how: str) -> None:
    """Also those of a loader that is tuned, or whose workers have left."""
    data = torch.utils.data.TensorDataset(torch.arange(200_000))
    options: dict[str, Any] = {"num_workers": 1, "seeding": "batch"}
    if how == "tuned":
        options = {"num_workers": "auto", "autotune": AutotuneConfig(max_local=0)}
    with DpexDataLoader(data, batch_size=2, **options) as loader:
        batches: Any = iter(loader)
        got = [next(batches)]
        if how == "after workers":
            loader.resize(local=0)
        while not stretch_of(batches).passed:
            got.append(next(batches))
        got += islice(batches, 100)
        assert loader.stats().batches == len(got)
        if how == "after workers":
            loader.resize(local=1)
            got += islice(batches, 100)
            assert not stretch_of(batches).size
        assert torch.equal(torch.cat([values for (values,) in got]), torch.arange(2 * len(got)))


def test_a_sudden_long_step_is_work_while_it_lasts_and_afterwards(clock: ManualClock, begun: Begun) -> None:
    batches = begun(Timed(1000, clock), batch_size=1)
    while stretch_of(batches).left < 5 or not stretch_of(batches).passed:
        next(batches)
        clock.advance(STEP_S)
    before = sums_of(batches)
    for second in range(1, 6):
        clock.advance(1.0)
        assert sums_of(batches).work_s == pytest.approx(before.work_s + second)
    next(batches)
    after = sums_of(batches)
    assert after.work_s == pytest.approx(before.work_s + 5.0)
    assert after.steps[bisect_left(STEP_BUCKETS, 5.0)] == 1
    assert stretch_of(batches).passed == 0


def test_a_sudden_long_batch_is_the_datasets(clock: ManualClock, begun: Begun) -> None:
    slow: list[int] = []
    batches = begun(Timed(1000, clock, lambda index: 3.0 if index in slow else LOAD_S), batch_size=1)
    while stretch_of(batches).left < 5 or not stretch_of(batches).passed:
        next(batches)
        clock.advance(STEP_S)
    before = sums_of(batches)
    slow.append(int(batches._num_yielded))
    next(batches)
    for found in (sums_of(batches), (next(batches), sums_of(batches))[1]):
        assert found.pools["inline"].load_s - before.pools["inline"].load_s == pytest.approx(3.0, rel=0.001)
        assert found.work_s == pytest.approx(before.work_s, abs=1e-4)
        assert found.causes["unknown"] < 0.001


def counts(sums: Sums) -> list[float]:
    pool = sums.pools["inline"]
    parts = (pool.tickets, pool.load_s, pool.load_cpu_s, pool.collate_s, pool.collate_cpu_s)
    histograms = (*sums.waits, *sums.steps, *pool.services, sums.waited_s, sums.stepped_squared)
    return [
        *sums.causes.values(),
        sums.transfer_s,
        sums.work_s,
        sums.batches,
        sums.samples,
        *parts,
        *histograms,
    ]


class Watch:
    """Reads, and sees that nothing shrinks."""

    def __init__(self, sums: Callable[[], Sums]) -> None:
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


def test_nothing_shrinks_for_another_thread(begun: Begun) -> None:
    batches = begun(torch.utils.data.TensorDataset(torch.zeros(10**7)), batch_size=1)
    next(batches)
    watch = Watch(lambda: sums_of(batches))
    over, errors = threading.Event(), []

    def read() -> None:
        try:
            while watch.readings < 300:
                watch.look()
        except BaseException as error:
            errors.append(error)
        over.set()

    reader = threading.Thread(target=read, name="reader")
    reader.start()
    while not over.is_set():
        next(batches)
    reader.join()
    assert not errors


def test_an_error_in_a_call_that_passes_is_the_users_and_is_counted(clock: ManualClock, begun: Begun) -> None:
    data = Timed(1000, clock)
    batches = begun(data, batch_size=1)
    while stretch_of(batches).left < 5 or not stretch_of(batches).passed:
        next(batches)
        clock.advance(STEP_S)
    got = int(batches._num_yielded)
    data.bad = got
    with pytest.raises(ValueError, match=f"no sample {got}"):
        next(batches)
    sums = sums_of(batches)
    assert (sums.batches, sums.samples, sums.errors) == (got, got, {"batch": 1})
    assert len(list(batches)) == 1000 - got - 1
    assert sums_of(batches).batches == 999


class Stream(IterableDataset[Any]):
    def __init__(self, clock: ManualClock) -> None:
        self.clock = clock

    def __iter__(self) -> Iterator[Any]:
        for index in range(200):
            self.clock.advance(LOAD_S)
            yield index


@pytest.mark.parametrize("kind", ["slow", "a stream", "samples"])
def test_what_is_measured_every_time(clock: ManualClock, kind: str, begun: Begun) -> None:
    data: Any = Stream(clock) if kind == "a stream" else Timed(200, clock)
    batches = begun(data, batch_size=None if kind == "samples" else 1)
    for _ in batches:
        assert not stretch_of(batches).size
        clock.advance(TURN_S if kind == "slow" else STEP_S)
    assert sums_of(batches).batches == 200


def test_a_loop_that_has_become_slow_is_measured_every_time_again(clock: ManualClock, begun: Begun) -> None:
    batches = begun(Timed(2000, clock), batch_size=1)
    sizes = []
    for number, _ in enumerate(batches):
        clock.advance(STEP_S if number < 1000 else 0.001)
        sizes.append(stretch_of(batches).size)
    assert max(sizes[:1000]) > 0
    assert max(sizes[1100:]) == 0


def test_batches_are_torchs() -> None:
    data = torch.utils.data.TensorDataset(torch.rand(3000, 2))
    torch.manual_seed(0)
    expected = list(DataLoader(data, batch_size=2, shuffle=True))
    torch.manual_seed(0)
    loader = DpexDataLoader(data, batch_size=2, num_workers=0, shuffle=True)
    loader.diagnose()
    got = list(loader)
    assert len(got) == len(expected)
    assert all(torch.equal(one[0], other[0]) for one, other in zip(got, expected, strict=True))
