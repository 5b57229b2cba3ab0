"""What the endpoint serves: ``/metrics``, the page at ``/`` with ``/api/state`` and ``/diagnosis.json`` behind it, and
``/diagnosis``, the report in full.

No request makes training wait: the page comes from memory, and metrics are rendered for the first who asks and kept for
all others for `KEPT_S`, or as long as it takes for rendering to take `MOST_SHARE` of a core. Nothing on the page comes
from another origin, and what users name (loaders, datasets) reaches it as JSON only.
"""

from __future__ import annotations

import hashlib
import logging
import re
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from functools import cache
from importlib.resources import files
from typing import Any, NamedTuple
from urllib.parse import parse_qs, urlencode

from dpex.system.clock import Clock, monotonic
from dpex.telemetry.http.diagnoses import STRETCHES, Diagnoses, as_html, as_json
from dpex.telemetry.http.headers import HOSTS_VARIABLE, Hosts, metrics_format, takes_gzip
from dpex.telemetry.http.history import HistorySampler
from dpex.telemetry.http.server import Answer, Request

logger = logging.getLogger("dpex")
Wsgi = Callable[[Any, Any], Iterable[bytes]]

KEPT_S, MOST_KEPT_S = 0.25, 2.0
"""How long rendered metrics are handed out, at least and at most: less than anybody's scrape interval."""
MOST_SHARE = 0.005
"""Of a core, for rendering: metrics of many loaders take milliseconds, and are kept for longer."""
MOST_COPIES = 16
"""Rendered answers that are kept: one for each format and loader."""
MOST_SHOWN = 200
"""Letters of a host's name in an answer or a warning."""
PAGE = {"/": "index.html"} | {
    f"/static/{name}": name
    for name in (
        "page.js",
        "charts.js",
        "page.css",
        "icon.svg",
        "uPlot.iife.min.js",
        "uPlot.min.css",
        "uPlot.LICENSE.txt",
    )
}
"""Paths of what is served from the package."""
KINDS = {
    "html": "text/html; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "css": "text/css; charset=utf-8",
    "svg": "image/svg+xml",
    "txt": "text/plain; charset=utf-8",
    "json": "application/json",
}
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
REPORT_POLICY = (
    "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
"""The report is one file, styles included, and has no scripts."""
_SAFE = [
    ("X-Content-Type-Options", "nosniff"),
    ("Referrer-Policy", "no-referrer"),
    ("Cross-Origin-Resource-Policy", "same-origin"),
]
SAFE = [*_SAFE, ("Content-Security-Policy", POLICY)]
SAFE_REPORT = [*_SAFE, ("Content-Security-Policy", REPORT_POLICY)]
FRESH = ("Cache-Control", "no-store")
OK, UNCHANGED = "200 OK", "304 Not Modified"
ALLOW = ("Allow", "GET, HEAD, OPTIONS")


def kept_s(cost_s: float) -> float:
    """How long an answer that took so much CPU is handed out."""
    return min(MOST_KEPT_S, max(KEPT_S, cost_s / MOST_SHARE))


class Asset(NamedTuple):
    """A file of the page, and its hash."""

    body: bytes
    kind: str
    tag: str


@cache
def asset(name: str) -> Asset:
    """From the package, once."""
    body = (files("dpex.telemetry") / "static" / name).read_bytes()
    return Asset(body, KINDS[name.rpartition(".")[2]], f'"{hashlib.sha256(body).hexdigest()[:20]}"')


class _Copy(NamedTuple):
    answer: Answer
    until: float


class CachedAnswer:
    """A WSGI application's answers, each asked for once, handed out for a while, and waited for meanwhile."""

    def __init__(self, app: Wsgi, clock: Clock = monotonic, cpu: Callable[[], float] = time.thread_time) -> None:
        self._app = app
        self._clock = clock
        self._cpu = cpu
        self._lock = threading.Lock()
        self._copies: dict[tuple[str, ...], _Copy] = {}

    def answer(self, request: Request) -> Answer:
        """As the application would answer now, or did a moment ago."""
        key = _asked(request)
        with self._lock:
            now = self._clock()
            self._drop_old(now)
            if key not in self._copies:
                began = self._cpu()
                answer = self._ask(*key)
                self._copies[key] = _Copy(answer, now + kept_s(self._cpu() - began))
            return self._copies[key].answer

    def _drop_old(self, now: float) -> None:
        if len(self._copies) >= MOST_COPIES:
            self._copies.clear()
        for key in [key for key, copy in self._copies.items() if now >= copy.until]:
            del self._copies[key]

    def _ask(self, accept: str, encoding: str, query: str) -> Answer:
        found: list[Any] = []
        environ = {
            "REQUEST_METHOD": "GET",
            "PATH_INFO": "/metrics",
            "QUERY_STRING": query,
            "HTTP_ACCEPT": accept,
            "HTTP_ACCEPT_ENCODING": encoding,
        }
        body = b"".join(self._app(environ, lambda *answer: found.extend(answer[:2])))
        return Answer(found[0], [*found[1], SAFE[0]], body)


def _asked(request: Request) -> tuple[str, str, str]:
    """Format, compression and selection, worded alike by all who ask for the same.

    prometheus-client gets no other words than these: it fails at a version that is no number.
    """
    names = parse_qs(request.query).get("name[]", []) if request.query else ()
    query = urlencode([("name[]", name) for name in sorted(set(names))]) if names else ""
    encoding = "gzip" if takes_gzip(request.headers.get("accept-encoding", "")) else ""
    return metrics_format(request.headers.get("accept", "")), encoding, query


class Site:
    """See the module; ``metrics`` is prometheus-client's application. hosts: those it answers for, None: any."""

    def __init__(self, metrics: Wsgi, sampler: HistorySampler, diagnoses: Diagnoses) -> None:
        self.hosts: Hosts | None = None
        self._warned = False
        self._metrics = CachedAnswer(metrics)
        self._sampler = sampler
        self._diagnoses = diagnoses
        self._made: Mapping[str, Callable[[Request], Answer]] = {
            "/metrics": self._metrics.answer,
            "/api/state": self._state,
            "/diagnosis": self._diagnosis,
            "/diagnosis.json": self._diagnosis,
        }

    def __call__(self, request: Request) -> Answer:
        """The answer, its body included, to HEAD as to GET."""
        path, method = request.path, request.method
        host = request.headers.get("host")
        if self.hosts is not None and not self.hosts.allow(host):
            return self._misdirected(host)
        if path not in self._made and path not in PAGE:
            return _said("404 Not Found", "there is /, /metrics, /diagnosis, /diagnosis.json and /api/state")
        if method == "OPTIONS":
            return Answer(OK, [ALLOW], b"")
        if method not in ("GET", "HEAD"):
            return _said("405 Method Not Allowed", "use GET or HEAD", ALLOW)
        return self._made[path](request) if path in self._made else _file(PAGE[path], request)

    def _misdirected(self, host: str | None) -> Answer:
        """Somebody thinks that this is another host, or this host has a name that is not known here."""
        text = (
            f"this endpoint is not known as {str(host)[:MOST_SHOWN]!r}. Ask for it by its address; or, if that name is "
            f"meant to reach it, put the name into {HOSTS_VARIABLE} in the environment of the training process "
            "(several with commas between them; .example.org for a whole domain; * for any)"
        )
        if not self._warned:
            self._warned = True
            logger.warning("metrics: a request was refused: %s", text)
        return _said("421 Misdirected Request", text)

    def _state(self, request: Request) -> Answer:
        since = parse_qs(request.query).get("since", ["0"])[-1]
        if not re.fullmatch(r"[0-9]{1,15}", since):
            return _said("400 Bad Request", "since: give the number of the latest frame you have, or leave it out")
        return Answer(OK, [("Content-Type", KINDS["json"]), FRESH, *SAFE], self._sampler.state(int(since)))

    def _diagnosis(self, request: Request) -> Answer:
        query = parse_qs(request.query)
        stretch = query.get("stretch", ["run"])[-1]
        if stretch not in STRETCHES:
            return _said("400 Bad Request", "stretch: give run or recent, or leave it out")
        told = self._diagnoses.tell(query.get("loader", [None])[-1], stretch)
        if told is None:
            return _said("404 Not Found", "loader: there is none of that name, or it was not iterated yet")
        if request.path == "/diagnosis":
            return Answer(OK, [("Content-Type", KINDS["html"]), FRESH, *SAFE_REPORT], as_html(told))
        return Answer(OK, [("Content-Type", KINDS["json"]), FRESH, *SAFE], as_json(told))


def _file(name: str, request: Request) -> Answer:
    found = asset(name)
    headers = [("ETag", found.tag), ("Cache-Control", "no-cache"), *SAFE]
    if found.tag in request.headers.get("if-none-match", ""):
        return Answer(UNCHANGED, headers, b"")
    return Answer(OK, [("Content-Type", found.kind), *headers], found.body)


def _said(status: str, text: str, *headers: tuple[str, str]) -> Answer:
    return Answer(status, [("Content-Type", KINDS["txt"]), *headers, *SAFE], f"{status}: {text}\n".encode())
