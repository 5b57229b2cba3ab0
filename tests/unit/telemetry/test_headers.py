"""What requests ask for by their headers, odd ones included, and by which names the endpoint may be asked for."""

from __future__ import annotations

import importlib
import socket
from pathlib import Path

import pytest

from dpex.telemetry.http import headers
from dpex.telemetry.http.headers import OPENMETRICS, TEXT, Hosts, hosts_of, metrics_format, takes_gzip

PROMETHEUS = (
    "application/openmetrics-text;version=1.0.0;escaping=allow-utf-8;q=0.6,"
    "application/openmetrics-text;version=0.0.1;q=0.5,text/plain;version=1.0.0;escaping=allow-utf-8;q=0.4,"
    "text/plain;version=0.0.4;q=0.3,*/*;q=0.2"
)
"""What version 3.1 sends."""


@pytest.mark.parametrize(
    ("accept", "expected"),
    [
        (PROMETHEUS, OPENMETRICS),
        ("application/openmetrics-text", OPENMETRICS),
        ('Application/OpenMetrics-Text ; Version="1.0.0"', OPENMETRICS),
        ("application/openmetrics-text; version=9.9.9; escaping=zzz", OPENMETRICS),
        ("application/openmetrics-text; version=abc", TEXT),
        ("application/openmetrics-text; version=0.0.1", TEXT),
        ("application/openmetrics-text; version=", TEXT),
        ("application/openmetrics-text; q=0", TEXT),
        ("application/openmetrics-text; q=nan; escaping", OPENMETRICS),
        ("application/openmetrics-text;q=0.2, text/plain;q=0.9", TEXT),
        ("text/plain; version=x.y", TEXT),
        ("", TEXT),
        ("*/*", TEXT),
        (";;;;,,,=;q=", TEXT),
        ("text/html,application/xhtml+xml,*/*;q=0.8", TEXT),
        ("application/openmetrics-text; version=" + "9" * 5000, TEXT),
        ("\xff\0,;=\u0661", TEXT),
    ],
)
def test_the_format_that_is_asked_for(accept: str, expected: str) -> None:
    assert metrics_format(accept) == expected


def test_prometheus_client_knows_the_words_it_is_given() -> None:
    choose = importlib.import_module("prometheus_client.exposition").choose_encoder
    for kind in (OPENMETRICS, TEXT):
        assert choose(kind)[1].startswith(f"{kind}; version=")


@pytest.mark.parametrize(
    ("accept", "expected"),
    [("gzip", True), ("br, GZip;q=0.5", True), ("gzip;q=0", False), ("", False), ("gzipped", False), (";;q=,", False)],
)
def test_whether_answers_may_be_compressed(accept: str, expected: bool) -> None:
    assert takes_gzip(accept) == expected


EVERYWHERE = [
    None,
    "",
    "127.0.0.1",
    "127.0.0.1:9400",
    "10.1.2.3:9400",
    "[::1]:9400",
    "[::1]",
    "localhost",
    "LOCALHOST:1",
]
EVERYWHERE += ["a.localhost:80", "localhost.", "192.168.1.1"]
LOCAL = ["trainer", "trainer:9400", "node7.local", "ip-10-0-0-5.ec2.internal:9400", "nas.home.arpa"]
STRANGE = [
    "evil.example",
    "evil.example:9400",
    "127.0.0.1.evil.example",
    "localhost.evil.example",
    "local"[:0] + "a.local.evil.example",
]
STRANGE += ["evil.example:port", "user@localhost", "[::1", "localhost/x", "a b", "\xff.example", "127.0.0.1:", "0x7f.1"]


@pytest.mark.parametrize("host", EVERYWHERE)
def test_addresses_and_localhost_are_always_let_through(host: str | None) -> None:
    assert Hosts([], is_loopback=True).allow(host)
    assert Hosts([], is_loopback=False).allow(host)


@pytest.mark.parametrize("host", LOCAL)
def test_local_names_are_let_through_where_other_machines_may_come(host: str) -> None:
    assert not Hosts([], is_loopback=True).allow(host)
    assert Hosts([], is_loopback=False).allow(host)


@pytest.mark.parametrize("host", STRANGE)
def test_other_names_are_not(host: str) -> None:
    assert not Hosts(["metrics.example.org", ".example.net"], is_loopback=True).allow(host)
    assert not Hosts(["metrics.example.org", ".example.net"], is_loopback=False).allow(host)


def test_names_that_are_allowed() -> None:
    hosts = Hosts([" Metrics.example.org", ".example.net", ""], is_loopback=True)
    allowed = ["metrics.example.org:9400", "METRICS.EXAMPLE.ORG.", "example.net", "a.b.example.net"]
    assert all(map(hosts.allow, allowed))
    assert not any(map(hosts.allow, ["a.metrics.example.org", "badexample.net"]))
    assert Hosts(["*"], is_loopback=True).allow("evil.example")


def test_the_machines_own_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "resolv.conf").write_text("# none\nnameserver 10.0.0.1\nsearch cluster.example other.example\n\ndomain")
    monkeypatch.setattr(headers, "_RESOLVER", tmp_path / "resolv.conf")
    monkeypatch.setattr(socket, "gethostname", lambda: "node7.rack.example")
    hosts = hosts_of("bound.example", "0.0.0.0", {"DPEX_METRICS_ALLOWED_HOSTS": "one.example,two.example"})
    known = ["node7.rack.example", "node7.cluster.example", "node7.other.example", "bound.example", "two.example"]
    assert all(map(hosts.allow, known))
    assert not any(map(hosts.allow, ["rack.example", "node8.cluster.example", "three.example"]))
    given = hosts_of("bound.example", "0.0.0.0", {"DPEX_METRICS_ALLOWED_HOSTS": "one.example"}, ["four.example"])
    assert (given.allow("four.example"), given.allow("one.example")) == (True, False)
    monkeypatch.setattr(headers, "_RESOLVER", tmp_path / "missing")
    assert hosts_of("x", "::1", {}).allow("node7.rack.example")
    assert not hosts_of("x", "fe80::1%eth0", {}).allow("node7.cluster.example")
