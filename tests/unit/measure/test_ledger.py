"""Counts outlive iterators, never shrink, and leave out what nobody can tell."""

from dataclasses import replace
from typing import Any

import pytest
from decisions import a_decision

from dpex.autotune.types import Outcome
from dpex.measure.causes import TIMED
from dpex.measure.pool_reading import PoolReading
from dpex.measure.reading import Reading
from dpex.measure.settings import Settings
from dpex.system.gpu.nvml import GpuSample
from dpex.telemetry.catalog import BY_NAME, METRICS
from dpex.telemetry.loader_metrics import Collector, LoaderMetrics, values_of

NOTHING = Reading(causes=dict.fromkeys(TIMED, 0.0), waits=(0,) * 14, steps=(0,) * 14)


class Engine:
    """Says what it is told to."""

    def __init__(self, **changes: Any) -> None:
        self.now = replace(NOTHING, **changes)

    def reading(self) -> Reading:
        return self.now


def batches(ledger: LoaderMetrics) -> float:
    return ledger.read().counters["dpex_batches_total",]


def test_what_has_ended_stays_counted() -> None:
    ledger = LoaderMetrics("a")
    for epoch in range(4):
        engine = Engine(batches=10, ready=3, waits=(1,) * 14, waited_s=0.5)
        entry = ledger.add_iterator(engine)
        assert batches(ledger) == 10 * (epoch + 1)
        entry.freeze()
        entry.freeze()
        engine.now = replace(engine.now, batches=1000)
        found = ledger.read()
        assert found.counters["dpex_batches_total",] == 10 * (epoch + 1)
        assert found.gauges["dpex_ready_batches",] == 0
        assert found.histograms["dpex_batch_wait_seconds",] == ([epoch + 1] * 14, 0.5 * (epoch + 1))
    assert len(ledger._ledger.entries) <= 2  # the rest is folded


def test_gpu_stall_sums_over_iterators_and_is_absent_without_gpu() -> None:
    ledger, key = LoaderMetrics("a"), ("dpex_gpu_stall_seconds_total",)
    before = ledger.add_iterator(Engine())  # CUDA is not used yet
    assert key not in ledger.read().counters
    seen = []
    for _ in range(3):
        engine = Engine(gpu_stall_s=0.0)
        entry = ledger.add_iterator(engine)
        seen.append(ledger.read().counters[key])
        engine.now = replace(engine.now, gpu_stall_s=2.0)
        entry.freeze()
        seen.append(ledger.read().counters[key])
    before.freeze()
    assert seen == [0.0, 2.0, 2.0, 4.0, 4.0, 6.0]
    assert ledger.read().counters[key] == 6.0


def test_iterators_at_the_same_time_add_up() -> None:
    ledger = LoaderMetrics("a")
    entries = [ledger.add_iterator(Engine(batches=5, ready=2, prefetch=4)) for _ in range(2)]
    assert batches(ledger) == 10
    assert ledger.read().gauges["dpex_ready_batches",] == 4
    entries[0].freeze()
    assert batches(ledger) == 10
    assert ledger.read().gauges["dpex_prefetch_batches",] == 4


def test_a_count_read_during_a_change_does_not_shrink() -> None:
    ledger, engine = LoaderMetrics("a"), Engine(batches=7)
    ledger.add_iterator(engine)
    assert batches(ledger) == 7
    engine.now = replace(engine.now, batches=5)
    assert batches(ledger) == 7
    engine.now = replace(engine.now, batches=8)
    assert batches(ledger) == 8


def test_network_metrics_have_seven_machines_and_the_others() -> None:
    machines = {f"m{number}": PoolReading(links=1, sent_bytes=number, round_trip_s=0.1) for number in range(12)}
    found = values_of(Reading(pools={"remote": PoolReading(sent_bytes=66, nodes=machines), "local": PoolReading()}))
    sent = {key[2]: value for key, value in found.counters.items() if key[0] == "dpex_network_sent_bytes_total"}
    assert sent == {**{f"m{number}": number for number in range(1, 8)}, "others": 8 + 9 + 10 + 11}
    assert found.gauges["dpex_network_round_trip_seconds", "remote", "m1"] == 0.1
    assert found.gauges["dpex_network_round_trip_seconds", "remote", "others"] == 0.1


def test_decisions_by_knob_and_direction_and_what_they_brought() -> None:
    few, many = Settings(local=1, prefetch=2), Settings(local=4, remote=2, prefetch=8)

    class Tuner:
        decisions = (
            a_decision(old=few, new=many, outcome=Outcome(rate=9.0, wait=0.2, kept=True, at=1.0)),
            a_decision(old=many, new=few, predicted_wait=0.0, outcome=Outcome(rate=8.0, wait=0.3, kept=False, at=2.0)),
            a_decision(old=few, new=replace(few, prefetch=3), predicted_wait=0.7),
        )

    ledger = LoaderMetrics("a")
    ledger.tuner = Tuner()
    found = ledger.read()
    changes = {key[1:]: value for key, value in found.counters.items() if key[0] == "dpex_tuner_decisions_total"}
    assert changes == {
        ("local", "up"): 1,
        ("local", "down"): 1,
        ("remote", "up"): 1,
        ("remote", "down"): 1,
        ("prefetch", "up"): 2,
        ("prefetch", "down"): 1,
    }
    assert found.counters["dpex_tuner_undone_total",] == 1
    assert found.gauges["dpex_tuner_predicted_wait_ratio",] == 0.0
    assert found.gauges["dpex_tuner_measured_wait_ratio",] == 0.3


def samples(collector: Collector) -> dict[tuple[str, frozenset[Any]], float]:
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in collector.collect()
        for sample in family.samples
    }


class Gpus:
    def __init__(self, *gpus: GpuSample) -> None:
        self.latest = lambda: gpus


BARE = GpuSample(uuid="GPU-1", ordinal=0, index=3, model="X")


def test_all_families_are_described_under_their_names() -> None:
    described = {family.name: family for family in Collector(list).describe()}
    assert set(described) == {metric.name.removesuffix("_total") for metric in METRICS}
    assert all(family.documentation for family in described.values())


def test_what_a_gpu_cannot_tell_has_no_series() -> None:
    found = samples(Collector(list, Gpus(replace(BARE, kernel_active_ratio=0.5))))
    gpu = {name for name, _ in found if "gpu" in name}
    assert gpu == {"dpex_gpu_info", "dpex_gpu_kernel_active_ratio"}
    assert found["dpex_gpu_info", frozenset({("gpu", "GPU-1"), ("index", "3"), ("model", "X")})] == 1.0


def test_a_source_that_fails_is_logged_and_the_rest_is_there(caplog: pytest.LogCaptureFixture) -> None:
    class Broken:
        def latest(self) -> tuple[GpuSample, ...]:
            raise RuntimeError("the driver is gone")

    ledger = LoaderMetrics("a", ("D", "4", "batch"))
    ledger.add_iterator(Engine(batches=3, pools={"local": PoolReading(services=(0,) * 14, running=2)}))
    collector = Collector(lambda: [ledger], Broken())
    for _ in range(2):
        assert samples(collector)["dpex_batches_total", frozenset({("loader", "a")})] == 3
    assert "the driver is gone" in caplog.text


def test_buckets_are_cumulative_and_end_in_all() -> None:
    ledger = LoaderMetrics("a")
    ledger.add_iterator(Engine(waits=(1, 2, 0, 3, *(0,) * 9, 4), waited_s=9.5))
    found = samples(Collector(lambda: [ledger]))
    counts = {
        dict(labels)["le"]: count for (name, labels), count in found.items() if name == "dpex_batch_wait_seconds_bucket"
    }
    bounds = [*map(str, BY_NAME["dpex_batch_wait_seconds"].buckets), "+Inf"]
    assert [counts[bound] for bound in bounds] == [1, 3, 3, *(6,) * 10, 10]
    assert found["dpex_batch_wait_seconds_sum", frozenset({("loader", "a")})] == 9.5
