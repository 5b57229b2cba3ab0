"""The counts of a loader over all its iterators, by the names of the catalogue, and as Prometheus metric families.

The counts of an ended iterator stay in the ledger. Reading takes no lock that `add_iterator`, a batch or the end of an
iterator could wait for. No counter ever shrinks, even if it is read in the middle of a change. Each scrape builds the
families with prometheus-client, which this module imports only then.
"""

from __future__ import annotations

import importlib
import logging
import platform
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import reduce
from itertools import accumulate
from typing import TYPE_CHECKING, Any

from dpex.autotune.types import Decision
from dpex.diagnose.diagnosis import DiagnosisSource
from dpex.engine.snapshots import CounterSource
from dpex.measure.ledger import LastReading, Ledger
from dpex.measure.pool_reading import PoolReading
from dpex.measure.reading import Reading
from dpex.measure.record import Record
from dpex.measure.settings import KNOBS
from dpex.system.clock import monotonic
from dpex.system.gpu.nvml import Gpus
from dpex.telemetry.catalog import BY_NAME, ERROR, MACHINE, METRICS, OTHERS, Metric
from dpex.version import VERSION

if TYPE_CHECKING:
    from dpex.autotune.runtime.tuner import Tuner

logger: logging.Logger = logging.getLogger("dpex")

Key = tuple[str, ...]
"""A metric's name, and the values of its labels except ``loader``."""


@dataclass(kw_only=True)
class MetricValues:
    """Counters and gauges by key, and histograms (counts by bucket, and the sum)."""

    counters: dict[Key, float] = field(default_factory=dict)
    gauges: dict[Key, float] = field(default_factory=dict)
    histograms: dict[Key, tuple[list[int], float]] = field(default_factory=dict)


class IteratorCounts(LastReading[Reading]):
    """The counts of an iterator in the ledger: the present ones, or the last ones once it has ended."""

    def freeze(self, last: Reading | None = None) -> None:
        """Keep the counts and release the iterator. Takes no lock, as a garbage collection can call this anywhere."""
        if not self.has_ended:
            super().freeze((last or self.read()).at_rest())


class LoaderMetrics:
    """The ledger of all loaders of one name.

    Attributes:
        info: Labels of ``dpex_loader_info`` after the name.
        tuner: The latest loader's tuner, or None.
        case: The source of the latest loader's diagnoses, or None.
        cache_bytes: A function that returns the fields of `Reading` that describe the loader's cache.
    """

    def __init__(self, name: str, info: Sequence[str] = ()) -> None:
        self.name = name
        self.info: tuple[str, ...] = tuple(info)
        self.tuner: Tuner | None = None
        self.case: DiagnosisSource | None = None
        self.cache_bytes: Callable[[], dict[str, Any]] = dict
        self._ledger: Ledger[IteratorCounts] = Ledger(Reading.plus)
        self._reading = threading.Lock()
        self._seen: dict[Key, float] = {}

    def add_iterator(self, source: CounterSource) -> IteratorCounts:
        """Count another iterator; call `IteratorCounts.freeze` when it has ended."""
        entry = IteratorCounts(source.reading)
        self._ledger.add(entry)
        return entry

    def reading(self) -> Reading:
        """Return the present counts of all iterators together."""
        return replace(self._ledger.read(), **self.cache_bytes())

    def read(self) -> MetricValues:
        """Return the counts and the tuner's decisions under the catalogue's names; readers take turns."""
        with self._reading:
            found = values_of(self.reading()) if self._ledger.entries else MetricValues()
            if self.tuner is not None:
                _add_tuner(found, self.tuner.decisions)
            for key, value in found.counters.items():
                found.counters[key] = self._seen[key] = max(value, self._seen.get(key, 0.0))
            return found


def values_of(reading: Reading) -> MetricValues:
    """Return a reading under the catalogue's names."""
    found = MetricValues()
    pools = {name: replace(pool, nodes=_few(pool.nodes)) for name, pool in reading.pools.items()}
    _add(found, replace(reading, pools=pools), ())
    found.counters["dpex_consumer_seconds_total", "wait"] = reading.wait_s
    for kind in ERROR.values:
        found.counters.setdefault(("dpex_errors_total", kind), 0)
    if reading.delivered_at:
        ago_s = monotonic() - reading.delivered_at
        found.gauges["dpex_last_batch_timestamp_seconds",] = time.time() - ago_s
    return found


def _few(machines: Mapping[str, PoolReading]) -> Mapping[str, PoolReading]:
    """Return the first machines that measure their connection, and the sum of all others. The order never changes."""
    kept = MACHINE.most - 1
    rest = [one for one in list(machines.values())[kept:] if one.sent_bytes]
    few = {place: one for place, one in list(machines.items())[:kept] if one.sent_bytes}
    return {**few, OTHERS: reduce(PoolReading.plus, rest)} if rest else few


def _add(found: MetricValues, record: Record, labels: Key) -> None:
    """Add each exported field of a record, and of the records in it. ``labels`` are common to all of them."""
    for name, declared in record.declared().items():
        value, key = getattr(record, name), (declared.metric, *labels)
        if isinstance(value, Mapping):
            for inner, one in value.items():
                if isinstance(one, Record):
                    _add(found, one, (*labels, inner))
                elif declared.metric:
                    _put(found, (*key, inner), one)
        elif not declared.metric or value is None or value == ():
            continue
        elif declared.total:
            found.histograms[key] = (list(value), getattr(record, declared.total))
        else:
            label = declared.label or declared.stage
            _put(found, (*key, label) if label else key, value)


def _put(found: MetricValues, key: Key, value: float) -> None:
    """Add a value if its metric exists for these labels. For example, the training process has no restarts, and a
    metric with the label ``machine`` has no value without a machine."""
    metric = BY_NAME[key[0]]
    if len(metric.labels) != len(key):
        return
    if all(not label.values or text in label.values for label, text in zip(metric.labels[1:], key[1:], strict=True)):
        (found.counters if metric.kind == "counter" else found.gauges)[key] = value


def _add_tuner(found: MetricValues, decisions: Sequence[Decision]) -> None:
    for knob in KNOBS:
        for direction, sign in (("up", 1), ("down", -1)):
            changes = (sign * (getattr(d.new, knob) - getattr(d.old, knob)) for d in decisions)
            found.counters["dpex_tuner_decisions_total", knob, direction] = sum(change > 0 for change in changes)
    judged = [(decision, outcome) for decision in decisions if (outcome := decision.outcome) is not None]
    found.counters["dpex_tuner_undone_total",] = sum(not outcome.kept for _, outcome in judged)
    predicted = [pair for pair in judged if pair[0].predicted_rate]
    if predicted:
        decision, outcome = predicted[-1]
        found.gauges |= {
            ("dpex_tuner_predicted_wait_ratio",): decision.predicted_wait,
            ("dpex_tuner_measured_wait_ratio",): outcome.wait,
            ("dpex_tuner_predicted_batches_per_second",): decision.predicted_rate,
            ("dpex_tuner_measured_batches_per_second",): outcome.rate,
        }


# -- families ----------------------------------------------------------------------------------------------------------

_GPU_GAUGES = {
    "kernel_active_ratio": "dpex_gpu_kernel_active_ratio",
    "memory_used_bytes": "dpex_gpu_memory_used_bytes",
    "memory_total_bytes": "dpex_gpu_memory_size_bytes",
}
"""Metrics by the field of `GpuSample` that they export."""


def _family(metric: Metric) -> Any:
    kinds = {"counter": "Counter", "histogram": "Histogram"}
    core = importlib.import_module("prometheus_client.metrics_core")
    make = getattr(core, f"{kinds.get(metric.kind, 'Gauge')}MetricFamily")
    return make(metric.name, metric.help, labels=metric.label_names, unit=metric.unit)


class Families(dict[str, Any]):
    """The families of one scrape by name. A family is made with its first sample, so that none is empty."""

    def __missing__(self, name: str) -> Any:
        self[name] = _family(BY_NAME[name])
        return self[name]

    def add(self, name: str, labels: Iterable[str], value: float) -> None:
        self[name].add_metric(list(labels), value)

    def add_histogram(self, name: str, labels: Iterable[str], counts: Iterable[int], total: float) -> None:
        """Add the samples of a histogram; ``counts`` are by bucket, the infinite bucket last."""
        bounds = [*map(str, BY_NAME[name].buckets), "+Inf"]
        self[name].add_metric(list(labels), list(zip(bounds, accumulate(counts), strict=True)), total)


class Collector:
    """The collector of the registry. ``gpu`` can be set at any time. GPUs have no series until a GPU is seen."""

    def __init__(self, ledgers: Callable[[], Iterable[LoaderMetrics]], gpu: Gpus | None = None) -> None:
        self.gpu = gpu
        self._ledgers = ledgers
        self._lock = threading.Lock()

    def describe(self) -> list[Any]:
        """Return all families, without samples."""
        return [_family(metric) for metric in METRICS]

    def collect(self) -> Iterator[Any]:
        """Return the families with their samples; scrapes take turns."""
        with self._lock:
            families = Families()
            torch = str(getattr(sys.modules.get("torch"), "__version__", ""))
            families.add("dpex_build_info", [VERSION, platform.python_version(), torch], 1.0)
            for add in (self._add_loaders, self._add_gpus):
                try:
                    add(families)
                except Exception:
                    logger.exception("some metrics could not be collected; this is an error in dpex")
        yield from (families[metric.name] for metric in METRICS if metric.name in families)

    def _add_loaders(self, families: Families) -> None:
        for ledger in self._ledgers():
            loader, readings = ledger.name, ledger.read()
            for key, value in (*readings.counters.items(), *readings.gauges.items()):
                families.add(key[0], (loader, *key[1:]), value)
            for key, (counts, total) in readings.histograms.items():
                families.add_histogram(key[0], (loader, *key[1:]), counts, total)
            if ledger.info:
                families.add("dpex_loader_info", (loader, *ledger.info), 1.0)

    def _add_gpus(self, families: Families) -> None:
        for gpu in self.gpu.latest() if self.gpu is not None else ():
            families.add("dpex_gpu_info", [gpu.uuid, "" if gpu.index is None else str(gpu.index), gpu.model], 1.0)
            for name, metric in _GPU_GAUGES.items():
                value = getattr(gpu, name)
                if value is not None:
                    families.add(metric, [gpu.uuid], value)
