"""`DpexDataLoader.diagnose`: what is counted, from when on, and what is said when nothing is."""

from __future__ import annotations

import pickle
from collections import Counter
from typing import Any

import pytest

from dpex import DpexDataLoader
from dpex.engine.loader_counters import LoaderCounters
from dpex.measure.sampling import KEPT, Reservoir
from dpex.measure.sums import SERVICES_KEPT, PoolStats
from dpex.options import WorkerConfig
from tests.diagnose.planted import Planted

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


def test_nothing_measured_is_said() -> None:
    loader = DpexDataLoader(Planted(8), num_workers=0)
    list(loader)
    diagnosis = loader.diagnose()
    assert diagnosis.verdict.cause == "too-early"
    assert "without workers it is measured from now on" in diagnosis.full
    list(loader)
    assert loader.diagnose().facts.batches == 8
    torchs = DpexDataLoader(Planted(8), num_workers=1, worker_config=WorkerConfig(local_engine="torch"))
    assert "PyTorch's own iterators" in torchs.diagnose().full


def test_a_pickled_loader_begins_anew() -> None:
    loader = DpexDataLoader(Planted(8), num_workers=1)
    list(loader)
    assert pickle.loads(pickle.dumps(loader)).diagnose().facts.batches == 0


def test_ended_pages_are_folded() -> None:
    class Ended:
        def sums(self) -> Any:
            return DpexDataLoader(Planted(1), num_workers=0) and _sums

    with DpexDataLoader(Planted(8), batch_size=4, num_workers=1) as loader:
        iterator = iter(loader)
        list(iterator)
        _sums = iterator._engine.sums()  # type: ignore[attr-defined]
    book = LoaderCounters()
    for _ in range(5):
        book.open(Ended()).end()
    assert len(book._pages.entries) <= 2
    assert book.read().batches == 10


def test_of_many_service_times_some_are_kept() -> None:
    reservoir = Reservoir()
    for number in range(20 * KEPT):
        if number + 1 >= reservoir.due:
            reservoir.keep(float(number % 10))
    assert len(reservoir.kept) == KEPT
    shares = [reservoir.kept.count(float(digit)) / KEPT for digit in range(10)]
    assert max(shares) < 0.2
    pool = PoolStats(kept_s=[1.0])
    for _ in range(4):
        pool = pool.then(PoolStats(kept_s=reservoir.kept))
    assert len(pool.kept_s) == SERVICES_KEPT


def test_early_and_late_values_are_kept_alike() -> None:
    """Of each eighth of the values an eighth is kept, and few of all values are looked at."""
    reservoir, looked_at = Reservoir(), 0
    for number in range(1, 64 * KEPT + 1):
        if number >= reservoir.due:
            assert number == reservoir.due
            reservoir.keep(float(number))
            looked_at += 1
    eighths = Counter(int((number - 1) // (8 * KEPT)) for number in reservoir.kept)
    expected = KEPT / 8
    assert len(eighths) == 8
    assert all(abs(count - expected) < 5 * expected**0.5 for count in eighths.values())
    assert looked_at < 8 * KEPT  # KEPT * (1 + ln 64) are to be expected
