"""The main series in Ray's own metrics, so that a monitor of the Ray cluster shows them.

A daemon thread ("dpex-ray-metrics") writes them every `EVERY_S` while there are loaders and Ray is initialised. Ray
puts ``ray_`` before the names and ``_total`` after those of counters. It refuses to add 0, and loses its metrics when
it is shut down.
"""

from __future__ import annotations

import importlib
import itertools
import logging
import os
import threading
from typing import Any

from dpex.system.ray_package import is_ray_connected
from dpex.telemetry.catalog import BY_NAME
from dpex.telemetry.loader_metrics import Key, LoaderMetrics

logger = logging.getLogger("dpex")

EVERY_S = 5.0
"""Seconds between writes; Ray exports metrics every ten seconds by default."""
STOP_S = 2.0
"""Seconds that `RayMirror.leave` waits for the thread. It ends within milliseconds unless Ray hangs."""
HEADLINES = (
    *("dpex_consumer_seconds_total", "dpex_wait_seconds_total", "dpex_batches_total", "dpex_samples_total"),
    *("dpex_workers_wanted", "dpex_workers_running", "dpex_ready_batches", "dpex_worker_restarts_total"),
)
"""The metrics of the catalogue that are written."""


class RayMirror:
    """Writes ledgers into Ray's metrics. There is one, `mirror`; any thread may call it."""

    def __init__(self, every_s: float = EVERY_S) -> None:
        self._every_s = every_s
        self._lock = threading.RLock()
        self._tokens = itertools.count()
        self._members: dict[int, LoaderMetrics] = {}
        self._left: list[LoaderMetrics] = []
        self._metrics: dict[str, Any] = {}
        self._written: dict[tuple[str, Key], float] = {}
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._pid = os.getpid()

    def join(self, ledger: LoaderMetrics) -> int:
        """Write another ledger from now on; returns the argument of `leave`."""
        with self._lock:
            token = next(self._tokens)
            if self._pid != os.getpid():
                self._pid, self._members, self._thread = os.getpid(), {}, None
            self._members[token] = ledger
            if self._thread is None or not self._thread.is_alive():
                self._stop = threading.Event()
                self._thread = threading.Thread(
                    target=self._run, args=(self._stop,), name="dpex-ray-metrics", daemon=True
                )
                self._thread.start()
            return token

    def leave(self, token: int) -> None:
        """Write a loader's last counts and drop it; the thread ends with the last loader. Idempotent."""
        with self._lock:
            ledger = self._members.pop(token, None)
            if ledger is None or self._pid != os.getpid():
                return
            self._left.append(ledger)
            if self._members:
                return
            thread, self._thread = self._thread, None
            self._stop.set()
        if thread is not None and thread is not threading.current_thread():
            thread.join(STOP_S)

    def _run(self, stop: threading.Event) -> None:
        while not stop.wait(self._every_s):
            self._turn()
        self._turn()

    def _turn(self) -> None:
        """Write all ledgers, with those that left since the last turn."""
        left, self._left = self._left, []
        try:
            if is_ray_connected():
                for ledger in {id(ledger): ledger for ledger in (*left, *list(self._members.values()))}.values():
                    self.write(ledger)
            else:
                self._metrics.clear()
        except Exception as error:
            logger.info("metrics could not be written to Ray: %s", error)
            self._metrics.clear()

    def write(self, ledger: LoaderMetrics) -> None:
        """Write the changes since the last time."""
        readings = ledger.read()
        for key, value in readings.counters.items():
            if key[0] in HEADLINES:
                known = self._written.get((ledger.name, key), 0.0)
                if value > known:
                    self._metric(key[0]).inc(value - known, tags=_tags(ledger.name, key))
                    self._written[ledger.name, key] = value
                elif value < known:  # a new loader of that name
                    self._written[ledger.name, key] = 0.0
        for key, value in readings.gauges.items():
            if key[0] in HEADLINES:
                self._metric(key[0]).set(value, tags=_tags(ledger.name, key))

    def _metric(self, name: str) -> Any:
        found = self._metrics.get(name)
        if found is None:
            metric, kinds = BY_NAME[name], importlib.import_module("ray.util.metrics")
            make = kinds.Counter if metric.kind == "counter" else kinds.Gauge
            found = self._metrics[name] = make(name.removesuffix("_total"), metric.help, metric.label_names)
        return found


def _tags(loader: str, key: Key) -> dict[str, str]:
    return dict(zip(BY_NAME[key[0]].label_names, (loader, *key[1:]), strict=True))


mirror = RayMirror()
