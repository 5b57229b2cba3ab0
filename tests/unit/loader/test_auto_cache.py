"""Samples are cached between two passes if that is predicted to pay, and only as long as it does."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dpex.autotune.types import Settings
from dpex.cache import memory_store
from dpex.cache.dataset import CachedDataset
from dpex.diagnose.what_if import Prediction
from dpex.loader.auto_cache import AutoCache
from dpex.loader.runtime import LoaderRuntime
from dpex.measure.sums import PoolStats, Sums

HERE = Settings(local=2, prefetch=4)


class Images:
    def __len__(self) -> int:
        return 1000

    def __getitem__(self, index: int) -> int:
        return index


class Run:
    """A loader of which each pass has 100 batches of 10 samples, and takes as long as is said."""

    def __init__(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, **rates: float) -> None:
        monkeypatch.setattr(memory_store, "SHARED_MEMORY", tmp_path)
        self.predictions = [prediction(kind, rate) for kind, rate in rates.items()]
        self.sums = Sums()
        self.cache = AutoCache(Images(), clock=lambda: 0.0)
        self.book = SimpleNamespace(read=lambda: self.sums)

    def diagnose(self, _: Sums) -> Any:
        return SimpleNamespace(predictions=self.predictions, facts=SimpleNamespace(transforms=(), pools={}))

    def passed(self, rate: float, hits: int = 0, sample_bytes: int = 100) -> bool:
        """A pass ends and the next one begins; return True if that one has a cache."""
        pool = PoolStats(cache_hits=hits, cache_misses=1000 - hits)
        more = Sums(
            batches=100, samples=1000, work_s=100 / rate, batch_bytes=10.0 * sample_bytes, pools={"local": pool}
        )
        self.sums = self.sums.then(more)
        self.cache.before_pass(self, HERE)  # type: ignore[arg-type]
        return isinstance(self.cache.dataset, CachedDataset)


def prediction(kind: Any, rate: float) -> Prediction:
    zeros = dict.fromkeys(("wait", "low", "high", "rate_low", "rate_high"), 0.0)
    return Prediction(change=f"`{kind}`", kind=kind, settings=HERE, rate=rate, **zeros)


def test_a_cache_that_pays_is_switched_on_and_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(tmp_path, monkeypatch, cached=50.0, prefetch=12.0)
    assert run.passed(10.0)
    (decision,) = run.cache.decisions
    assert (decision.reason, decision.predicted_rate, decision.outcome) == ("cache", 50.0, None)
    assert "1,000 samples of 0.0001 MB fit into memory" in decision.text
    assert run.passed(9.0)
    assert run.cache.decisions[0].outcome is None, "the pass that fills it is not judged"
    assert run.passed(40.0, hits=1000)
    outcome = run.cache.decisions[0].outcome
    assert outcome is not None
    assert (outcome.rate, outcome.kept) == (pytest.approx(40.0), True)
    assert run.passed(1.0, hits=1000), "the decision is settled"


def test_the_decision_stands_among_those_of_the_tuner(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, runtime = Run(tmp_path, monkeypatch, cached=50.0), LoaderRuntime()
    run.passed(10.0)
    (found,) = run.cache.decisions
    before, after = replace(found, at=-1.0, reason="start"), replace(found, at=1.0, reason="too few")
    runtime.auto_cache, runtime.tuner = run.cache, SimpleNamespace(decisions=[before, after])  # type: ignore[assignment]
    assert runtime.decisions == [before, found, after]
    runtime.dismiss_tuner()
    assert runtime.decisions == [before, found, after]


def test_a_cache_that_does_not_pay_is_switched_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(tmp_path, monkeypatch, cached=50.0)
    assert run.passed(10.0)
    assert not run.passed(10.1, hits=1000)
    assert run.cache.decisions[0].outcome is not None
    assert not run.cache.decisions[0].outcome.kept
    assert not run.passed(10.0), "it is not tried again"


def test_a_random_dataset_gets_no_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(tmp_path, monkeypatch, cached=50.0)
    assert run.passed(10.0)
    run.cache.dataset._memory.note_random()
    assert not run.passed(10.0)


@pytest.mark.parametrize(
    ("rates", "sample_bytes"),
    [({}, 100), ({"cached": 50.0, "prefetch": 60.0}, 100), ({"cached": 50.0}, 1 << 40)],
    ids=["nothing predicted", "prefetch is better", "too large"],
)
def test_a_cache_that_is_not_worth_it_or_too_large_stays_off(
    rates: dict[str, float], sample_bytes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Run(tmp_path, monkeypatch, **rates)
    assert not run.passed(10.0, sample_bytes=sample_bytes)
    assert run.cache.decisions == []
