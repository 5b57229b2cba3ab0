"""Builds Prometheus's families from ledgers and GPU readings when they are scraped; nothing is done per batch.

prometheus-client is imported with the first scrape. Nothing here waits for a loader.
"""

from __future__ import annotations

import importlib
import logging
import platform
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Protocol

import dpex
from dpex.system.clock import monotonic
from dpex.system.gpu.nvml import GpuSample
from dpex.telemetry.catalog import BY_NAME, METRICS
from dpex.telemetry.loader_metrics import Key, LoaderMetrics, Readings
from dpex.telemetry.metric import Metric

logger = logging.getLogger("dpex")

_GPU_GAUGES = {
    "kernel_active_ratio": "dpex_gpu_kernel_active_ratio",
    "sm_active_ratio": "dpex_gpu_sm_active_ratio",
    "sm_occupancy_ratio": "dpex_gpu_sm_occupancy_ratio",
    "dram_active_ratio": "dpex_gpu_dram_active_ratio",
    "memory_used_bytes": "dpex_gpu_memory_used_bytes",
    "memory_total_bytes": "dpex_gpu_memory_size_bytes",
}
"""What `GpuSample` calls it, and its metric."""


class GpuSource(Protocol):
    """Looks at GPUs, in a thread of its own; see `dpex.system.gpu.watch.GpuView`."""

    @property
    def gpus(self) -> tuple[GpuSample, ...]:
        """The GPUs that training uses, as last seen; does not wait."""


class Families:
    """The families of one scrape, by metric; each is made when its first sample comes."""

    def __init__(self) -> None:
        self._core = importlib.import_module("prometheus_client.metrics_core")
        self._found: dict[str, Any] = {}

    def add(self, name: str, labels: Iterable[str], value: float) -> None:
        """One sample of a counter, a gauge or an info."""
        self._family(BY_NAME[name]).add_metric(list(labels), value)

    def add_histogram(self, name: str, labels: Iterable[str], counts: Iterable[int], total: float) -> None:
        """All samples of a histogram; ``counts`` are those of the single buckets, the infinite one last."""
        metric, buckets, sum_so_far = BY_NAME[name], [], 0
        for bound, count in zip([*map(str, metric.buckets), "+Inf"], counts, strict=True):
            sum_so_far += count
            buckets.append((bound, sum_so_far))
        self._family(metric).add_metric(list(labels), buckets, total)

    def _family(self, metric: Metric) -> Any:
        if metric.name not in self._found:
            self._found[metric.name] = self.new(metric)
        return self._found[metric.name]

    def new(self, metric: Metric) -> Any:
        """An empty family."""
        kinds = {"counter": "Counter", "histogram": "Histogram"}
        make = getattr(self._core, f"{kinds.get(metric.kind, 'Gauge')}MetricFamily")
        return make(metric.name, metric.help, labels=metric.label_names, unit=metric.unit)

    def in_order(self) -> list[Any]:
        """In the order of the catalogue."""
        return [self._found[metric.name] for metric in METRICS if metric.name in self._found]


class Collector:
    """What a registry asks at each scrape. ``gpu`` may be set at any time.

    Without it, and until it has seen a GPU, no series tells of GPUs, those about collecting included.
    """

    def __init__(self, ledgers: Callable[[], Iterable[LoaderMetrics]], gpu: GpuSource | None = None) -> None:
        self.gpu = gpu
        self._ledgers = ledgers
        self._lock = threading.Lock()
        self._errors = {"loaders": 0}
        self._pcie = _Growing()

    def describe(self) -> list[Any]:
        """All families, without samples."""
        families = Families()
        return [families.new(metric) for metric in METRICS]

    def collect(self) -> Iterator[Any]:
        """All families with their samples; one scrape at a time."""
        with self._lock:
            families = Families()
            families.add("dpex_build_info", _versions(), 1.0)
            self._run("loaders", self._add_loaders, families)
            if self.gpu is not None:
                self._run("gpu", self._add_gpus, families)
            for name, count in self._errors.items():
                families.add("dpex_collect_errors_total", [name], count)
        yield from families.in_order()

    def _run(self, name: str, collect: Callable[[Families], None], families: Families) -> None:
        began = monotonic()
        try:
            collect(families)
        except Exception:
            self._errors[name] = self._errors.get(name, 0) + 1
            logger.exception("metrics of %s could not be collected; this is an error in dpex", name)
        if name in self._errors:
            families.add("dpex_collect_duration_seconds", [name], monotonic() - began)

    def _add_loaders(self, families: Families) -> None:
        merged: dict[str, Readings] = {}
        infos: dict[str, tuple[str, ...]] = {}
        for ledger in self._ledgers():
            merged.setdefault(ledger.name, Readings()).add(ledger.read())
            infos[ledger.name] = ledger.info
        for loader, readings in merged.items():
            for values in (readings.counters, readings.gauges):
                for key, value in values.items():
                    families.add(key[0], (loader, *key[1:]), value)
            for key, (counts, total) in readings.histograms.items():
                families.add_histogram(key[0], (loader, *key[1:]), counts, total)
            if infos[loader]:
                families.add("dpex_loader_info", (loader, *infos[loader]), 1.0)

    def _add_gpus(self, families: Families) -> None:
        assert self.gpu is not None
        for gpu in self.gpu.gpus:
            self._errors.setdefault("gpu", 0)
            families.add("dpex_gpu_info", [gpu.uuid, "" if gpu.index is None else str(gpu.index), gpu.model], 1.0)
            for name, metric in _GPU_GAUGES.items():
                value = getattr(gpu, name)
                if value is not None:
                    families.add(metric, [gpu.uuid], value)
            self._add_bus(families, gpu)

    def _add_bus(self, families: Families, gpu: GpuSample) -> None:
        for direction, value in (("rx", gpu.pcie_rx_bytes), ("tx", gpu.pcie_tx_bytes)):
            if value is not None:
                name = "dpex_gpu_pcie_bytes_total"
                families.add(name, [gpu.uuid, direction], self._pcie((name, gpu.uuid, direction), value))


class _Growing:
    """Makes of a count that begins anew with each reader one that only grows while the process lives."""

    def __init__(self) -> None:
        self._last: dict[Key, float] = {}
        self._sums: dict[Key, float] = {}

    def __call__(self, key: Key, value: float) -> float:
        last = self._last.get(key, value)
        self._last[key] = value
        self._sums[key] = self._sums.get(key, 0.0) + (value - last if value >= last else value)
        return self._sums[key]


def _versions() -> list[str]:
    torch = sys.modules.get("torch")
    return [dpex.__version__, platform.python_version(), str(getattr(torch, "__version__", ""))]
