"""`DpexDataLoader.diagnose`: what is counted, from when on, and what is said when nothing is."""

import pickle
import time
from typing import Any

import pytest

from dpex import DpexDataLoader
from tests.diagnose.planted import Planted, compute

KINDS: dict[str, dict[str, Any]] = {
    "here": {"num_workers": 0},
    "here, per batch": {"num_workers": 0, "seeding": "batch"},
    "local": {"num_workers": 2},
    "kept": {"num_workers": 2, "persistent_workers": True},
    "auto": {"num_workers": "auto"},
}


@pytest.mark.parametrize("kind", KINDS)
def test_all_passes_are_counted_until_reset(kind: str) -> None:
    with DpexDataLoader(Planted(40), batch_size=4, **KINDS[kind]) as loader:
        loader.diagnose()
        for _ in range(3):
            list(loader)
        facts = loader.diagnose(reset=True).facts
        assert (facts.batches, facts.samples, facts.passes) == (30, 120, 3)
        assert facts.tickets == 30
        assert facts.wall_s > 0
        assert loader.diagnose().facts.batches == 0
        list(loader)
        facts = loader.diagnose().facts
        assert (facts.batches, facts.samples, facts.passes) == (10, 40, 1)


@pytest.mark.smoke
def test_in_the_middle_of_a_pass() -> None:
    with DpexDataLoader(Planted(80), batch_size=4, num_workers=2) as loader:
        iterator = iter(loader)
        for _ in range(5):
            next(iterator)
        assert loader.diagnose(reset=True).facts.batches == 5
        for _ in range(4):
            next(iterator)
        facts = loader.diagnose().facts
        assert facts.batches == 4
        assert facts.workers == 2


def test_nothing_measured_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    loader = DpexDataLoader(Planted(8), num_workers=0)
    list(loader)
    diagnosis = loader.diagnose()
    assert diagnosis.verdict.cause == "too-early"
    assert "Not measured: epochs before this call: without workers it is measured from the next iter() on" in str(
        diagnosis
    )
    list(loader)
    assert loader.diagnose().facts.batches == 8
    monkeypatch.setattr("sys.platform", "darwin")
    torchs = DpexDataLoader(Planted(8), num_workers=1).diagnose()
    assert "Not measured: anything: PyTorch's own iterators" in str(torchs)
    assert torchs.advice != diagnosis.advice  # which is to train for longer


def test_a_pickled_loader_begins_anew() -> None:
    loader = DpexDataLoader(Planted(8), num_workers=1)
    list(loader)
    assert pickle.loads(pickle.dumps(loader)).diagnose().facts.batches == 0


def rate_of(loader: DpexDataLoader[Any]) -> float:
    """Batches per second of a pass whose steps compute for 200 µs."""
    began, count = time.perf_counter(), 0
    for _ in loader:
        compute(0.0002)
        count += 1
    return count / (time.perf_counter() - began)


@pytest.mark.alone
def test_tiny_batches_gain_without_workers_what_was_predicted() -> None:
    """The prediction is a lower bound: batches are made sooner on a CPU that no worker needs beside them."""
    dataset = Planted(12_000)
    with DpexDataLoader(dataset, batch_size=2, num_workers=2, seeding="batch") as loader:
        rate_of(loader)
        found = loader.diagnose()
    predicted = next(one for one in found.predictions if one.kind == "inline")
    measured = max(rate_of(DpexDataLoader(dataset, batch_size=2, num_workers=0)) for _ in range(2))
    assert measured > found.facts.rate
    assert predicted.rate_low < measured < 2.0 * predicted.rate_high
