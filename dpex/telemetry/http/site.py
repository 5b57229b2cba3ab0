"""The routes of the endpoint (metrics, live page, diagnosis), and the check of the ``Host`` header.

No request makes the training loop wait. The page loads nothing from other origins, and names that users give (loaders,
datasets) reach it as JSON only.
"""

from __future__ import annotations

import ipaddress
import json
import logging
import re
import socket
from collections.abc import Callable, Iterable, Mapping
from functools import cache
from http import HTTPStatus
from importlib.resources import files
from typing import Any
from urllib.parse import parse_qs

from dpex.diagnose.report import COLUMNS
from dpex.system.user_warnings import is_first
from dpex.telemetry.http.history import STRETCHES, HistorySampler, TimedDiagnosis
from dpex.telemetry.http.server import Answer, Request

logger: logging.Logger = logging.getLogger("dpex")
Wsgi = Callable[[Any, Any], Iterable[bytes]]

DIAGNOSES_VERSION = 1
"""Version of the JSON of ``/diagnosis.json``. Each diagnosis in it has a version of its own."""
LEAST_COLUMNS = 40
"""Minimum width of a report in text, in characters."""
MOST_SHOWN = 200
"""Maximum characters of a host name or an error that an answer or a warning repeats."""
HOSTS_VARIABLE = "DPEX_METRICS_ALLOWED_HOSTS"
_STATIC = ("page.js", "charts.js", "page.css", "icon.svg", "uPlot.iife.min.js", "uPlot.min.css", "uPlot.LICENSE.txt")
PAGE = {"/": "index.html"} | {f"/static/{name}": name for name in _STATIC}
"""Files of the package by path."""
KINDS = {
    "html": "text/html; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "css": "text/css; charset=utf-8",
    "svg": "image/svg+xml",
    "txt": "text/plain; charset=utf-8",
    "json": "application/json",
}
_NOWHERE = "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
POLICY = f"default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; {_NOWHERE}"
HEADERS = (
    ("X-Content-Type-Options", "nosniff"),
    ("Referrer-Policy", "no-referrer"),
    ("Cross-Origin-Resource-Policy", "same-origin"),
    ("Content-Security-Policy", POLICY),
)
_NEGOTIATED = ("Accept", "Accept-Encoding")
"""Headers by which prometheus-client chooses the format."""
_RESERVED = (".local", ".internal", ".home.arpa")
"""Suffixes that names in public DNS cannot have, by RFC 6762, RFC 8375 and ICANN's resolution on .internal."""
_HOST = re.compile(r"(\[[0-9a-f:.]+\]|[a-z0-9._-]+)(:[0-9]{1,5})?", re.IGNORECASE)


class Hosts:
    """The host names under which the endpoint may be addressed. Other names are refused, to prevent DNS rebinding.

    A web page can make a name of its own resolve to this machine and then read the endpoint through the browser of a
    visitor. The ``Host`` header reveals this. IP addresses and ``localhost`` are accepted. If other machines can
    connect, names that public DNS cannot have are accepted, too, as Prometheus uses names of machines and containers.

    Args:
        bound_to: The ``host`` of the configuration.
        address: The address that the server listens on.
        allowed: Further names; ``.example.org`` is that domain and all names in it, ``*`` is any name.
    """

    def __init__(self, bound_to: str, address: str, allowed: Iterable[str]) -> None:
        self._is_loopback = ipaddress.ip_address(address.partition("%")[0]).is_loopback
        self._names = {name.strip().lower().rstrip(".") for name in (bound_to, socket.gethostname(), *allowed)} - {""}

    def allow(self, header: str | None) -> bool:
        """Return True if this ``Host`` header is allowed. A request without one is allowed: browsers send one."""
        if not header or "*" in self._names:
            return True
        found = _HOST.fullmatch(header)
        name = found[1].lower().rstrip(".") if found else ""
        return bool(name) and (_is_address(name.strip("[]")) or self._is_known(name))

    def _is_known(self, name: str) -> bool:
        if f".{name}".endswith((".localhost", *(one for one in self._names if one.startswith(".")))):
            return True
        return name in self._names or (not self._is_loopback and ("." not in name or name.endswith(_RESERVED)))


def _is_address(text: str) -> bool:
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return False
    return True


@cache
def asset(name: str) -> bytes:
    return (files("dpex.telemetry") / "static" / name).read_bytes()


class Site:
    """The application of the endpoint's server.

    Args:
        metrics: prometheus-client's application.
        hosts: Names under which the endpoint may be addressed; None for any.
    """

    def __init__(self, metrics: Wsgi, sampler: HistorySampler, hosts: Hosts | None = None) -> None:
        self.hosts = hosts
        self._wsgi = metrics
        self._sampler = sampler
        self._routes: Mapping[str, Callable[[Request], Answer]] = {
            "/metrics": self._metrics,
            "/api/state": self._state,
            "/diagnosis.json": self._diagnoses,
            "/diagnosis.txt": self._reports,
        }

    def __call__(self, request: Request) -> Answer:
        """Return the answer to a GET or HEAD request, with its body."""
        host = request.headers.get("Host")
        if self.hosts is not None and not self.hosts.allow(host):
            return self._misdirected(host)
        if request.path in PAGE:
            name = PAGE[request.path]
            return _made(KINDS[name.rpartition(".")[2]], asset(name))
        if request.path not in self._routes:
            return _error(HTTPStatus.NOT_FOUND, "there is /, /metrics, /diagnosis.txt, /diagnosis.json and /api/state")
        return self._routes[request.path](request)

    def _misdirected(self, host: str | None) -> Answer:
        text = (
            f"this endpoint is not known as {str(host)[:MOST_SHOWN]!r}. Ask for it by its address, or add the name to "
            f"MetricsConfig(allowed_hosts=[...]) or, without that, to {HOSTS_VARIABLE} in the environment of the "
            "training process (names separated by commas; .example.org for a whole domain; * for any name)"
        )
        if is_first("metrics: a request was refused"):
            logger.warning("metrics: a request was refused: %s", text)
        return _error(HTTPStatus.MISDIRECTED_REQUEST, text)

    def _metrics(self, request: Request) -> Answer:
        found: list[Any] = []
        accept = {f"HTTP_{name.upper().replace('-', '_')}": request.headers.get(name, "") for name in _NEGOTIATED}
        environ = {"REQUEST_METHOD": "GET", "PATH_INFO": "/metrics", "QUERY_STRING": request.query, **accept}
        try:
            body = b"".join(self._wsgi(environ, lambda *answer: found.extend(answer[:2])))
        except (TypeError, ValueError) as error:  # prometheus-client raises it if a version in Accept is no number
            return _error(HTTPStatus.BAD_REQUEST, f"Accept: {str(error)[:MOST_SHOWN]}")
        return Answer(HTTPStatus(int(found[0].split()[0])), [*found[1], *HEADERS], body)

    def _state(self, request: Request) -> Answer:
        since = parse_qs(request.query).get("since", ["0"])[-1]
        if not re.fullmatch(r"[0-9]{1,15}", since):
            return _error(
                HTTPStatus.BAD_REQUEST, "since: give the number of the latest frame you have, or leave it out"
            )
        return _made(KINDS["json"], self._sampler.state(int(since)))

    def _diagnoses(self, request: Request) -> Answer:
        found = self._found(request)
        if isinstance(found, Answer):
            return found
        answer = {"version": DIAGNOSES_VERSION, "loaders": [one.as_data() for one in found]}
        return _made(KINDS["json"], json.dumps(answer, allow_nan=False).encode())

    def _reports(self, request: Request) -> Answer:
        found = self._found(request)
        if isinstance(found, Answer):
            return found
        query = parse_qs(request.query)
        columns = query.get("columns", [str(COLUMNS)])[-1]
        if not re.fullmatch(r"[0-9]{1,6}", columns):
            return _error(HTTPStatus.BAD_REQUEST, "columns: give the width of the terminal, or leave it out")
        width = min(COLUMNS, max(LEAST_COLUMNS, int(columns)))
        text = self._sampler.text(found, is_whole="loader" not in query, columns=width)
        return _made(KINDS["txt"], text.encode())

    def _found(self, request: Request) -> list[TimedDiagnosis] | Answer:
        """Return the diagnoses that are asked for, or the error of a wrong query."""
        query = parse_qs(request.query)
        stretch = query.get("stretch", ["run"])[-1]
        if stretch not in STRETCHES:
            return _error(HTTPStatus.BAD_REQUEST, "stretch: give run or recent, or leave it out")
        found = self._sampler.diagnoses(query.get("loader", [None])[-1], stretch)
        if found is None:
            return _error(HTTPStatus.NOT_FOUND, "loader: no loader of that name has been iterated in this process")
        return found


def _made(kind: str, body: bytes) -> Answer:
    return Answer(HTTPStatus.OK, [("Content-Type", kind), ("Cache-Control", "no-store"), *HEADERS], body)


def _error(status: HTTPStatus, text: str) -> Answer:
    return Answer(
        status, [("Content-Type", KINDS["txt"]), *HEADERS], f"{status.value} {status.phrase}: {text}\n".encode()
    )
