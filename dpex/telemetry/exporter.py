"""The endpoint of this process, and the registration of loaders at the endpoint.

All loaders share one endpoint, which is open while a loader that requested metrics exists.

`dpex.telemetry.http` is the server, and prometheus-client renders the metrics. Workers and forks of a serving process
do not serve. One lock guards the state; no batch takes it. A garbage collection can end a loader in any thread and at
any line, so `Exporter.unregister` can be called inside any method of this module.
"""

from __future__ import annotations

import errno
import importlib
import itertools
import logging
import os
import socket
import sys
import threading
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from dpex.errors import OptionError
from dpex.options import MetricsConfig
from dpex.schedule.names import encodable
from dpex.system.directories import DIRECTORY_VARIABLE, own_directories
from dpex.system.gpu.nvml import process_gpus
from dpex.telemetry.discovery import Announcement, identity
from dpex.telemetry.http.history import HistorySampler
from dpex.telemetry.http.server import App, Server, tls
from dpex.telemetry.http.site import HOSTS_VARIABLE, Hosts, Site
from dpex.telemetry.loader_metrics import Collector, LoaderMetrics

logger: logging.Logger = logging.getLogger("dpex")

PORT_VARIABLE = "DPEX_METRICS_PORT"


def requested_port(port: int | None, config: MetricsConfig | None, environment: Mapping[str, str]) -> int | None:
    """Return the port from a loader's options, else from ``$DPEX_METRICS_PORT``; None if no metrics are requested.

    Raises:
        OptionError: The variable is not a port.
    """
    text = environment.get(PORT_VARIABLE, "")
    if port is not None or not text:
        return 0 if port is None and config is not None else port
    if not (text.isascii() and text.isdigit() and int(text) <= 65535):
        raise OptionError(f"{PORT_VARIABLE}={text!r}: give a port from 1 to 65535, or 0 for a free one")
    return int(text)


class _MetricsServer:
    """The running server with its registry, sampler, announcement, and view of the GPUs."""

    def __init__(
        self, wanted: int, config: MetricsConfig, collector: Collector, ledgers: Callable[[], Iterable[LoaderMetrics]]
    ) -> None:
        self.wanted, self.config = wanted, config
        client = importlib.import_module("prometheus_client")
        client.disable_created_metrics()
        registry = client.CollectorRegistry()
        registry.register(collector)
        self._sampler = HistorySampler(ledgers, identity(os.environ))
        site = Site(client.make_wsgi_app(registry), self._sampler)
        self._http = _listening(wanted, config, site)
        self.port = self._http.port
        if config.tls is None:
            given = config.allowed_hosts
            allowed = os.environ.get(HOSTS_VARIABLE, "").split(",") if given is None else given
            site.hosts = Hosts(config.host, self._http.address, allowed)
        host = socket.gethostname() if config.host in ("0.0.0.0", "::", "") else config.host
        self._target = f"[{host}]:{self.port}" if ":" in host else f"{host}:{self.port}"
        self.url = f"{'https' if config.tls else 'http'}://{self._target}/"
        self._http.start()
        self._sampler.start()
        collector.gpu = process_gpus()
        self._announcement = self._announce()
        if not wanted:
            print(f"dpex: the live page and the metrics are at {self.url}", file=sys.stderr, flush=True)
        elif wanted != self.port:
            self._warn_of_port()

    def _announce(self) -> Announcement | None:
        """Write the announcement into the given directory, or into the first safe one of this user."""
        given = self.config.directory or os.environ.get(DIRECTORY_VARIABLE)
        labels = identity(os.environ) | ({"__scheme__": "https"} if self.config.tls else {})
        refused = []
        for directory in [Path(given)] if given else own_directories(os.environ):
            try:
                found = Announcement(directory, self._target, labels, own=not given)
            except OSError as error:
                refused.append(str(error))
                continue
            if refused:
                logger.warning("metrics: announced in %s, because %s", directory, "; ".join(refused))
            return found
        why = "; ".join(refused)
        logger.warning("metrics: Prometheus cannot find this process, which serves at %s: %s", self._target, why)
        return None

    def _warn_of_port(self) -> None:
        found = self._announcement
        logger.warning(
            "metrics: port %d is taken on %s; this process serves its metrics on port %d%s. Give metrics_port=0 (or "
            "DPEX_METRICS_PORT=0) where several processes of a machine train",
            self.wanted,
            self.config.host,
            self.port,
            "" if found is None else f", and Prometheus finds it through {found.path.parent}",
        )

    def stop(self) -> None:
        """End the server, its threads and its announcement. From any thread; idempotent."""
        if self._announcement is not None:
            self._announcement.withdraw()
        wait = not threading.current_thread().name.startswith("dpex-metrics")
        self._http.stop(wait=wait)
        self._sampler.stop(wait=wait)

    def abandon(self) -> None:
        """Close the parent's sockets in a forked process, so that the port is free once the parent has ended."""
        self._http.abandon()


def _listening(port: int, config: MetricsConfig, app: App) -> Server:
    """Listen on the requested port, or on a free one if another process has it. Raises OptionError."""
    files, host = config.tls, config.host
    try:
        context = None if files is None else tls(files.certfile, files.keyfile, files.client_cafile)
    except OSError as error:
        raise OptionError(f"metrics: {files}: {error}. Give PEM files that can be read and belong together") from error
    try:
        try:
            return Server(host, port, app, context)
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise
            return Server(host, 0, app, context)
    except OSError as error:
        raise OptionError(
            f"metrics: nothing can listen on host={host!r}, port={port}: {error}. Give an address of this machine and "
            "a port that this user may open, by metrics_config=MetricsConfig(host=...) and metrics_port=..."
        ) from error


class Registration(NamedTuple):
    """The registration of one loader. It does not keep the loader alive. It ends with ``end()`` or with the loader."""

    ledger: LoaderMetrics
    end: Callable[[], object]


class Exporter:
    """The ledgers of this process and its endpoint. There is one, `exporter`."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._numbers = itertools.count(1)
        self._known: weakref.WeakValueDictionary[str, LoaderMetrics] = weakref.WeakValueDictionary()
        self._members: dict[int, LoaderMetrics] = {}
        self._tokens = itertools.count()
        self._server: _MetricsServer | None = None
        self._hooked = False
        self._forked = False
        self.collector: Collector = Collector(self.ledgers)

    def ledgers(self) -> list[LoaderMetrics]:
        return list({id(ledger): ledger for ledger in list(self._members.values())}.values())

    @property
    def port(self) -> int | None:
        """Return the port on which this process serves; None if it does not."""
        server = self._server
        return None if server is None else server.port

    @property
    def url(self) -> str | None:
        """Return the address of the live page; None if this process does not serve."""
        server = self._server
        return None if server is None else server.url

    def register(
        self, owner: object, port: int | None, config: MetricsConfig | None, name: str | None, info: Sequence[str]
    ) -> Registration | None:
        """Export a loader, on a free port if the requested one is taken. Loaders of one name share a ledger.

        Returns:
            None if no metrics are requested, or if this process was forked from a serving process.

        Raises:
            OptionError: The port is not valid, nothing can listen on the host, or the certificate cannot be read.
        """
        port = requested_port(port, config, os.environ)
        with self._lock:
            if port is None or self._forked:
                return None
            name = encodable(name or f"loader-{next(self._numbers)}")
            ledger = self._known.get(name)
            if ledger is None:
                ledger = self._known[name] = LoaderMetrics(name)
            ledger.info = tuple(map(encodable, info))
            token = next(self._tokens)
            self._members[token] = ledger  # before serving, so that the end of another loader does not stop the server
            try:
                self._serve(port, config or MetricsConfig())
            except BaseException:
                del self._members[token]
                raise
        return Registration(ledger, weakref.finalize(owner, self.unregister, token))

    def _serve(self, port: int, config: MetricsConfig) -> None:
        if not self._hooked:
            self._hooked = True
            os.register_at_fork(after_in_child=self._abandon_after_fork)
        if self._server is None:
            self._server = _MetricsServer(port, config, self.collector, self.ledgers)
        elif port not in (0, self._server.port, self._server.wanted):
            logger.warning(
                "metrics: port %d is not opened: the loaders of a process share one endpoint. The metrics of this "
                "loader are on port %d, too",
                port,
                self._server.port,
            )

    def unregister(self, token: int) -> None:
        """Stop exporting a loader; the server stops with the last one. Idempotent."""
        with self._lock:
            self._members.pop(token, None)
            if self._members:
                return
            server, self._server = self._server, None
        if server is not None:
            server.stop()

    def _abandon_after_fork(self) -> None:
        self._lock = threading.RLock()
        server, self._server = self._server, None
        self._members = {}
        if server is not None:
            self._forked = True
            server.abandon()


exporter: Exporter = Exporter()
