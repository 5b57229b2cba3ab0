"""What a request's headers ask for, whatever they hold: the format of metrics, and the host that is meant.

The host is checked against DNS rebinding: a web page may have its own name point at this endpoint and then read it, as
the browser takes both for one site; the name gives it away. Addresses are let through, as a page that was loaded from
one cannot have it point elsewhere. Where other machines may come, so are names that nobody can register on the
internet, for Prometheus scrapes by the names of machines and containers. Under TLS the certificate does all this.
"""

from __future__ import annotations

import ipaddress
import re
import socket
from collections.abc import Iterable, Mapping
from functools import lru_cache
from pathlib import Path

MOST_KNOWN = 32
"""Headers whose meaning is kept: whoever scrapes sends the same ones each time, and reading them takes 40 us."""
OPENMETRICS, TEXT = "application/openmetrics-text", "text/plain"
HOSTS_VARIABLE = "DPEX_METRICS_ALLOWED_HOSTS"
_RESERVED = (".local", ".internal", ".home.arpa")
"""Ends of names that the internet's DNS does not have: RFC 6762 and 8375, and ICANN's resolution on .internal."""
_HOST = re.compile(r"(?P<name>\[[0-9a-f:.]+\]|[a-z0-9._-]+)(:[0-9]{1,5})?", re.IGNORECASE)
_RESOLVER = Path("/etc/resolv.conf")


@lru_cache(MOST_KNOWN)
def metrics_format(accept: str) -> str:
    """`OPENMETRICS` where that is asked for, in a version there is and liked no less than text; else `TEXT`."""
    liked = {OPENMETRICS: 0.0, TEXT: 0.0}
    for kind, parameters in map(_media_range, accept.split(",")):
        is_known = kind == TEXT or (kind == OPENMETRICS and _is_new(parameters.get("version", "1")))
        if is_known:
            liked[kind] = max(liked[kind], _quality(parameters))
    return OPENMETRICS if liked[OPENMETRICS] >= max(liked[TEXT], 0.001) else TEXT


@lru_cache(MOST_KNOWN)
def takes_gzip(accept_encoding: str) -> bool:
    """Whether an answer may be compressed so."""
    ranges = map(_media_range, accept_encoding.split(","))
    return any(kind == "gzip" and _quality(parameters) > 0 for kind, parameters in ranges)


def _media_range(text: str) -> tuple[str, Mapping[str, str]]:
    kind, *parameters = text.split(";")
    pairs = (parameter.partition("=") for parameter in parameters)
    return kind.strip().lower(), {name.strip().lower(): value.strip(' "') for name, _, value in pairs}


def _quality(parameters: Mapping[str, str]) -> float:
    text = parameters.get("q", "1")
    return float(text) if re.fullmatch(r"[01](\.[0-9]{0,3})?", text) else 1.0


def _is_new(version: str) -> bool:
    """Not of the drafts before 1.0."""
    return re.fullmatch(r"[1-9][0-9]{0,3}(\.[0-9]{1,4}){0,2}", version) is not None


class Hosts:
    """Which hosts a request may name: addresses, "localhost", and these; unless ``is_loopback``, local names as well.

    ``allowed`` may hold ``.example.org`` for that domain and all in it, and ``*`` for any name.
    """

    def __init__(self, allowed: Iterable[str], *, is_loopback: bool) -> None:
        self._is_loopback = is_loopback
        self._found = lru_cache(MOST_KNOWN)(self._decide)
        given = {name.strip().lower().rstrip(".") for name in allowed} - {""}
        self._any = "*" in given
        self._names = frozenset(given)
        self._ends = tuple(name for name in given if name.startswith("."))

    def allow(self, host: str | None) -> bool:
        """Whether to answer a request with that header. None: it has none, so it comes from no browser."""
        return self._any or not host or self._found(host)

    def _decide(self, host: str) -> bool:
        found = _HOST.fullmatch(host)
        return found is not None and self._is_ours(found["name"].lower().rstrip("."))

    def _is_ours(self, name: str) -> bool:
        if _is_address(name.strip("[]")) or name == "localhost" or name.endswith((".localhost", *self._ends)):
            return True
        if name in self._names or f".{name}" in self._names:
            return True
        return not self._is_loopback and ("." not in name or name.endswith(_RESERVED))


def hosts_of(
    bound_to: str, address: str, environment: Mapping[str, str], further: Iterable[str] | None = None
) -> Hosts:
    """Those of an endpoint: what was given to bind to, this machine's names, and ``further`` ones.

    ``further``: None for those of ``$DPEX_METRICS_ALLOWED_HOSTS``. ``address``: what it is bound to.

    No name is looked up in the network.
    """
    is_loopback = ipaddress.ip_address(address.partition("%")[0]).is_loopback
    given = environment.get(HOSTS_VARIABLE, "").split(",") if further is None else further
    return Hosts([bound_to, *given, *_names()], is_loopback=is_loopback)


def _is_address(text: str) -> bool:
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return False
    return True


def _names() -> list[str]:
    name = socket.gethostname()
    return [name, *(f"{name.partition('.')[0]}.{domain}" for domain in _search_domains())]


def _search_domains() -> list[str]:
    try:
        lines = [line.split() for line in _RESOLVER.read_text(errors="replace").splitlines()]
    except OSError:
        return []
    return [domain for words in lines if words and words[0] in ("search", "domain") for domain in words[1:]]
