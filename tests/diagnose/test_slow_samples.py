"""Slow samples are found by their index wherever batches are made, and batches stay what they are."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset
from workload import wait_as_work

from dpex import DpexDataLoader
from dpex.diagnose.diagnosis import diagnose
from dpex.measure.sampling import SLOWEST, SlowestSamples, SlowIndex
from dpex.schedule.sample_policy import AS_TORCH
from dpex.worker import fetch
from dpex.worker.fetch import Fetcher
from tests.unit.diagnose.test_verdict import PLANTED

PLACES: dict[str, dict[str, Any]] = {
    "torch's own iterator": {"num_workers": 0, "seeding": "worker"},
    "in-process": {"num_workers": 0, "seeding": "batch"},
    "processes": {"num_workers": 2, "seeding": "batch"},
    "logical workers": {"num_workers": 2, "seeding": "worker"},
}
SLOW = (17, 41)
UNTIMED = "slowest samples: none was timed alone"


class Slow(Dataset[Any]):
    """Two indices take sixty times as long as the others."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> Any:
        wait_as_work(0.12 if index in SLOW else 0.002)
        return torch.full((2,), float(index))


class Whole(Slow):
    """Fetches a batch at once."""

    def __getitems__(self, indices: list[int]) -> list[Any]:
        return [self[index] for index in indices]


@pytest.mark.parametrize("place", PLACES)
def test_slow_samples_are_found_by_their_index(place: str) -> None:
    """Others may be slower, on a machine that has other work."""
    with DpexDataLoader(Slow(), batch_size=4, **PLACES[place]) as loader:
        loader.diagnose()
        got, _ = [list(loader) for _ in range(2)]
        diagnosis = loader.diagnose(reset=True)
        later = loader.diagnose().facts
    assert all(map(torch.equal, got, DataLoader(Slow(), batch_size=4)))
    found = {slow.shown: slow for slow in diagnosis.facts.slow_samples}
    for slow in (found[str(index)] for index in SLOW):
        assert slow.times == 2
        assert slow.seconds >= 0.12
        assert slow.seconds > diagnosis.facts.sample_s
    seconds = [slow.seconds for slow in diagnosis.facts.slow_samples]
    assert seconds == sorted(seconds, reverse=True)
    assert len(found) == len(seconds) <= SLOWEST
    assert "Slowest samples" in diagnosis.full
    assert diagnosis.to_dict()["facts"]["slow_samples"][0]["shown"] == diagnosis.facts.slow_samples[0].shown
    assert not any(UNTIMED in gap for gap in diagnosis.facts.unmeasured)
    assert later.slow_samples == ()


@pytest.mark.parametrize("seeding", ["worker", "batch"])
def test_it_is_said_where_samples_are_not_timed(seeding: Any) -> None:
    with DpexDataLoader(Whole(), batch_size=4, num_workers=0, seeding=seeding) as loader:
        loader.diagnose()
        list(loader)
        facts = loader.diagnose().facts
    assert facts.slow_samples == ()
    assert any(UNTIMED in gap for gap in facts.unmeasured)


class Clock:
    """Each sample takes what the dataset says."""

    def __init__(self, *seconds: float) -> None:
        self.seconds, self.now, self.reads = seconds, 0.0, 0

    def monotonic(self) -> float:
        self.reads += 1
        return self.now

    def __getitem__(self, index: int) -> int:
        self.now += self.seconds[index]
        return index


@pytest.fixture
def quick_and_slow(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock(0.5, *[1e-6] * 8, *[1e-3] * 6, 0.25)
    monkeypatch.setattr(fetch, "monotonic", clock.monotonic)
    monkeypatch.setattr(fetch, "time", SimpleNamespace(thread_time=lambda: 0.0))
    return clock


def test_samples_of_little_time_are_not_timed(quick_and_slow: Clock) -> None:
    options = {"iterable": False, "auto_collation": True, "drop_last": False, "samples": AS_TORCH}
    setup = SimpleNamespace(dataset=quick_and_slow, collate_fn=list, **options)
    fetcher = Fetcher(setup)  # type: ignore[arg-type]
    batch, stages = fetcher.fetch([1, 2])
    assert (batch, stages.slowest) == ([1, 2], ())
    before = quick_and_slow.reads
    batch, stages = fetcher.fetch([3, 4, 5, 15])
    assert (batch, stages.slowest, quick_and_slow.reads - before) == ([3, 4, 5, 15], (), 3)
    batch, stages = fetcher.fetch((9, 15, 10))  # the batch before took long
    assert (batch, stages.slowest) == ([9, 15, 10], (pytest.approx(0.25), 1))
    assert quick_and_slow.reads - before == 3 + 3 + 4


def test_of_each_index_the_worst_is_kept_and_how_often_it_came() -> None:
    slowest = SlowestSamples()
    for number in range(100):
        seconds = float(number * 37 % 100)
        if seconds > slowest.least_s:
            slowest.add(seconds, [number % 50], 0)
    assert [slow.seconds for slow in slowest.found()] == sorted(
        (slow.seconds for slow in slowest.found()), reverse=True
    )
    assert len(slowest.found()) == SLOWEST
    slowest.add(1000.0, torch.tensor([4, 7]), 1)
    slowest.add(2000.0, (4, 7), 1)
    worst = slowest.found()[0]
    assert (worst.shown, worst.seconds, worst.times, worst.total_s) == ("7", 2000.0, 2, 3000.0)
    slowest.add(9000.0, iter(()), 1)  # it can be gone through once, and was
    assert slowest.found()[0] == worst


class Unshowable:
    def __repr__(self) -> str:
        raise ValueError


def test_whatever_a_dataset_is_asked_for_can_be_shown() -> None:
    slowest = SlowestSamples()
    for seconds, index in enumerate((("a", 1), Unshowable(), "x" * 1000)):
        slowest.add(seconds + 1.0, [index], 0)
    long, unshowable, pair = (slow.shown for slow in slowest.found())
    assert (unshowable, pair) == ("<Unshowable>", "('a', 1)")
    assert len(long) < 200


@pytest.mark.parametrize(("times", "ratio", "is_named"), [(3, 20.0, True), (1, 20.0, False), (3, 2.0, False)])
def test_a_sample_that_repeatedly_blocks_others_is_named(times: int, ratio: float, is_named: bool) -> None:
    mean_s = PLANTED["stragglers"][2].sample_s
    slow = SlowIndex(30.0 * mean_s, "17", times, ratio * times * mean_s)
    verdict = diagnose(replace(PLANTED["stragglers"][2], slow_samples=(slow,))).verdict
    assert verdict.cause == "straggler"
    assert ("dataset index 17 was slow 3 times" in verdict.sentence) == is_named
    assert "17" not in diagnose(replace(PLANTED["reading"][2], slow_samples=(slow,))).verdict.sentence
