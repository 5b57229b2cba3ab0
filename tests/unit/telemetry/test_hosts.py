"""The host names under which the endpoint can be addressed."""

from __future__ import annotations

import socket
from collections.abc import Iterable
from pathlib import Path

import pytest

from dpex.telemetry.http import site
from dpex.telemetry.http.site import Hosts


class _Hosts(Hosts):
    """Of an endpoint on the loopback address, or on all."""

    def __init__(self, allowed: Iterable[str], *, is_loopback: bool) -> None:
        super().__init__("localhost", "127.0.0.1" if is_loopback else "0.0.0.0", allowed)


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
    assert _Hosts([], is_loopback=True).allow(host)
    assert _Hosts([], is_loopback=False).allow(host)


@pytest.mark.parametrize("host", LOCAL)
def test_local_names_are_let_through_where_other_machines_may_come(host: str) -> None:
    assert not _Hosts([], is_loopback=True).allow(host)
    assert _Hosts([], is_loopback=False).allow(host)


@pytest.mark.parametrize("host", STRANGE)
def test_other_names_are_not(host: str) -> None:
    assert not _Hosts(["metrics.example.org", ".example.net"], is_loopback=True).allow(host)
    assert not _Hosts(["metrics.example.org", ".example.net"], is_loopback=False).allow(host)


def test_names_that_are_allowed() -> None:
    hosts = _Hosts([" Metrics.example.org", ".example.net", ""], is_loopback=True)
    allowed = ["metrics.example.org:9400", "METRICS.EXAMPLE.ORG.", "example.net", "a.b.example.net"]
    assert all(map(hosts.allow, allowed))
    assert not any(map(hosts.allow, ["a.metrics.example.org", "badexample.net"]))
    assert _Hosts(["*"], is_loopback=True).allow("evil.example")


def test_the_machines_own_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "resolv.conf").write_text("# none\nnameserver 10.0.0.1\nsearch cluster.example other.example\n\ndomain")
    monkeypatch.setattr(site, "_RESOLVER", tmp_path / "resolv.conf")
    monkeypatch.setattr(socket, "gethostname", lambda: "node7.rack.example")
    hosts = Hosts("bound.example", "0.0.0.0", ["one.example", "two.example"])
    known = ["node7.rack.example", "node7.cluster.example", "node7.other.example", "bound.example", "two.example"]
    assert all(map(hosts.allow, known))
    assert not any(map(hosts.allow, ["rack.example", "node8.cluster.example", "three.example"]))
    monkeypatch.setattr(site, "_RESOLVER", tmp_path / "missing")
    assert Hosts("x", "::1", []).allow("node7.rack.example")
    assert not Hosts("x", "fe80::1%eth0", []).allow("node7.cluster.example")
