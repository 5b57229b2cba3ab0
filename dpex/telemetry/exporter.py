"""The endpoint of this process: one for all its loaders, up while at least one that asked for it lives.

A daemon thread serves what `dpex.telemetry.http.site` has, by `dpex.telemetry.http.server`; prometheus-client renders
the metrics. A process that was forked from one that serves never does so itself, and neither does a worker. All state
is behind one lock that no batch ever takes; a garbage collection may end a loader in any thread, so what a loader's end
calls (`Membership.leave`) may run inside any of this.
"""

from __future__ import annotations

import errno
import importlib
import itertools
import logging
import os
import socket
import ssl
import threading
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from dpex.core.names import encodable
from dpex.errors import OptionError
from dpex.options import MetricsConfig, TLSConfig
from dpex.system.directories import DIRECTORY_VARIABLE, own_directories, to_look_in
from dpex.system.gpu.watch import view
from dpex.telemetry.collector import Collector
from dpex.telemetry.discovery import Announcement, identity, targets
from dpex.telemetry.http.diagnoses import Diagnoses
from dpex.telemetry.http.headers import hosts_of
from dpex.telemetry.http.history import HistorySampler
from dpex.telemetry.http.server import App, Server, tls
from dpex.telemetry.http.site import Site
from dpex.telemetry.loader_metrics import LoaderMetrics

logger = logging.getLogger("dpex")

PORT_VARIABLE = "DPEX_METRICS_PORT"
_ANY = ("0.0.0.0", "::", "")


@dataclass(frozen=True, kw_only=True)
class Endpoint:
    """Where to serve. port: the one that was settled, of ``config`` or of the environment; 0: whichever is free."""

    port: int
    config: MetricsConfig


class _MetricsServer:
    """The running server, its registry, its sampler, its announcement, and the GPUs while it runs."""

    def __init__(
        self, endpoint: Endpoint, collector: Collector, ledgers: Callable[[], Iterable[LoaderMetrics]]
    ) -> None:
        self.endpoint = endpoint
        client = importlib.import_module("prometheus_client")
        client.disable_created_metrics()
        registry = client.CollectorRegistry()
        registry.register(collector)
        diagnoses = Diagnoses(ledgers)
        self._sampler = HistorySampler(ledgers, identity(os.environ), diagnoses.mark)
        site = Site(client.make_wsgi_app(registry), self._sampler, diagnoses)
        self._http = _listening(endpoint, site)
        config = endpoint.config
        if config.tls is None:
            site.hosts = hosts_of(config.host, self._http.address, os.environ, config.allowed_hosts)
        self.port = self._http.port
        self._http.start()
        self._sampler.start()
        self._gpus = collector.gpu = view()
        self._announcement = self._announce()
        self._say_which_port()

    def _announce(self) -> Announcement | None:
        """In the directory that was given, else in the first of this user's own that is safe."""
        given = self.endpoint.config.directory or os.environ.get(DIRECTORY_VARIABLE)
        target, labels = self._target(), {**identity(os.environ), **self._scheme()}
        refused = []
        for directory in [Path(given)] if given else own_directories(os.environ):
            try:
                found = Announcement(directory, target, labels, own=not given)
            except OSError as error:
                refused.append(str(error))
                continue
            if refused:
                logger.warning("metrics: announced in %s, as %s", directory, "; ".join(refused))
            logger.info("metrics and a live page are served at %s, announced in %s", self.url, found.path)
            return found
        why = "; ".join(refused)
        logger.warning("metrics: Prometheus cannot find this process by itself, it serves at %s: %s", target, why)
        return None

    @property
    def url(self) -> str:
        """Address of the live page; ``metrics`` below it is Prometheus's."""
        return f"{'https' if self.endpoint.config.tls else 'http'}://{self._target()}/"

    def _target(self) -> str:
        host = self.endpoint.config.host
        host = socket.gethostname() if host in _ANY else host
        return f"[{host}]:{self.port}" if ":" in host else f"{host}:{self.port}"

    def _scheme(self) -> dict[str, str]:
        return {"__scheme__": "https"} if self.endpoint.config.tls else {}

    def _say_which_port(self) -> None:
        """Where it is not the one that was wanted."""
        wanted = self.endpoint.port
        if wanted in (0, self.port):
            return
        found = (
            "" if self._announcement is None else f", and Prometheus finds it through {self._announcement.path.parent}"
        )
        logger.warning(
            "metrics: port %d is taken on %s by %s; this process serves its metrics on port %d%s. Give metrics_port=0 "
            "(or DPEX_METRICS_PORT=0) where several processes of a machine train",
            wanted,
            self.endpoint.config.host,
            _holder(wanted, self.endpoint.config.directory),
            self.port,
            found,
        )

    def stop(self) -> None:
        """Soon, from any thread; idempotent. The collector sees no GPU afterwards, unless it has others."""
        if self._gpus is not None:
            self._gpus.close()
        if self._announcement is not None:
            self._announcement.withdraw()
        wait = threading.current_thread() not in (self._http.thread, self._sampler.thread)
        self._http.stop(wait=wait)
        self._sampler.stop(wait=wait)

    def abandon(self) -> None:
        """In a forked process: give up the parent's socket, so that its port is free once the parent has ended."""
        self._http.abandon()


def _holder(port: int, directory: str | None) -> str:
    """Who has a port of this machine, as far as announcements tell."""
    node = socket.gethostname()
    for found in targets(*([Path(directory)] if directory else to_look_in(os.environ))):
        labels = found.labels
        if found.url.endswith(f":{port}") and labels.get("node") == node and not found.gone:
            return f"rank {labels.get('rank')} of run {labels.get('run_id')}"
    return "another program"


def _listening(endpoint: Endpoint, app: App) -> Server:
    """On the port that is wanted, or where another process has it on one that is free.

    Raises:
        OptionError: nothing can listen on that host, or there is no such certificate.
    """
    context, host, port = _tls_context(endpoint.config.tls), endpoint.config.host, endpoint.port
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
            "a port that this user may open, by metrics=MetricsConfig(host=..., port=...)"
        ) from error


def _tls_context(files: TLSConfig | None) -> ssl.SSLContext | None:
    if files is None:
        return None
    try:
        return tls(files.certfile, files.keyfile, files.client_cafile)
    except OSError as error:
        raise OptionError(f"metrics: {files}: {error}. Give PEM files that can be read and belong together") from error


class Exporter:
    """See the module. There is one, `exporter`."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._numbers = itertools.count(1)
        self._known: weakref.WeakValueDictionary[str, LoaderMetrics] = weakref.WeakValueDictionary()
        self._members: dict[int, LoaderMetrics] = {}
        self._tokens = itertools.count()
        self._server: _MetricsServer | None = None
        self._hooked = False
        self._forked = False
        self.collector = Collector(self.ledgers)

    def ledger(self, name: str | None, info: Sequence[str]) -> LoaderMetrics:
        """The ledger of that name, or one with a new name; loaders of one name share theirs."""
        with self._lock:
            name = encodable(name or f"loader-{next(self._numbers)}")
            found = self._known.get(name)
            if found is None:
                found = self._known[name] = LoaderMetrics(name)
            found.info = tuple(map(encodable, info))
            return found

    def ledgers(self) -> list[LoaderMetrics]:
        """Those that are exported."""
        return list({id(ledger): ledger for ledger in list(self._members.values())}.values())

    @property
    def port(self) -> int | None:
        """Where this process serves, if it does."""
        server = self._server
        return None if server is None else server.port

    @property
    def url(self) -> str | None:
        """Address of the live page, if this process serves one."""
        server = self._server
        return None if server is None else server.url

    def join(self, endpoint: Endpoint, ledger: LoaderMetrics) -> int | None:
        """Export this ledger too; returns what `leave` takes. None: this process never serves.

        Where the port is taken the process serves on one that is free, and says so.

        Raises:
            OptionError: nothing can listen on that host, or there is no such certificate.
        """
        with self._lock:
            if self._forked:
                return None
            token = next(self._tokens)
            self._members[token] = ledger  # first, so that no loader that ends meanwhile stops the server
            try:
                self._serve(endpoint)
            except BaseException:
                del self._members[token]
                raise
            return token

    def _serve(self, endpoint: Endpoint) -> None:
        if not self._hooked:
            self._hooked = True
            os.register_at_fork(after_in_child=self._leave_to_parent)
        if self._server is None:
            self._server = _MetricsServer(endpoint, self.collector, self.ledgers)
        elif endpoint.port not in (0, self._server.port, self._server.endpoint.port):
            logger.warning(
                "metrics: port %d is not opened: the loaders of a process share one endpoint, and this one's metrics "
                "are served with those of the others on port %d",
                endpoint.port,
                self._server.port,
            )

    def leave(self, token: int) -> None:
        """This loader is no more; with the last one the server stops. Idempotent."""
        with self._lock:
            self._members.pop(token, None)
            if self._members:
                return
            server, self._server = self._server, None
        if server is not None:
            server.stop()

    def _leave_to_parent(self) -> None:
        self._lock = threading.RLock()
        server, self._server = self._server, None
        self._members = {}
        if server is not None:
            self._forked = True
            server.abandon()


exporter = Exporter()
