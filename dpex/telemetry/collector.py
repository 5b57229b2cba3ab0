"""Builds Prometheus's metric families from ledgers and GPU readings when they are scraped; no work is done per batch.

prometheus-client is imported with the first scrape. Nothing here waits for a loader.
"""

from __future__ import annotations

import importlib
import logging
import platform
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from itertools import accumulate
from typing import Any

import dpex
from dpex.system.gpu.nvml import Gpus
from dpex.telemetry.catalog import BY_NAME, METRICS, Metric
from dpex.telemetry.loader_metrics import LoaderMetrics

logger = logging.getLogger("dpex")

_GPU_GAUGES = {
    "kernel_active_ratio": "dpex_gpu_kernel_active_ratio",
    "sm_active_ratio": "dpex_gpu_sm_active_ratio",
    "sm_occupancy_ratio": "dpex_gpu_sm_occupancy_ratio",
    "dram_active_ratio": "dpex_gpu_dram_active_ratio",
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
        """Add a sample of a counter, a gauge or an info."""
        self[name].add_metric(list(labels), value)

    def add_histogram(self, name: str, labels: Iterable[str], counts: Iterable[int], total: float) -> None:
        """Add the samples of a histogram; ``counts`` are those of the single buckets, the infinite one last."""
        bounds = [*map(str, BY_NAME[name].buckets), "+Inf"]
        self[name].add_metric(list(labels), list(zip(bounds, accumulate(counts), strict=True)), total)


class Collector:
    """The collector of the registry. ``gpu`` can be set at any time. GPUs have no series until one is seen."""

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
            families.add("dpex_build_info", [dpex.__version__, platform.python_version(), torch], 1.0)
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
            for direction, value in (("rx", gpu.pcie_rx_bytes), ("tx", gpu.pcie_tx_bytes)):
                if value is not None:
                    families.add("dpex_gpu_pcie_bytes_total", [gpu.uuid, direction], value)
