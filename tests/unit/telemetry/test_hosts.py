"""The host names under which the endpoint can be addressed."""

import socket
from collections.abc import Iterable

import pytest

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
    "a.local.evil.example",
]
STRANGE += ["evil.example:port", "user@localhost", "[::1", "localhost/x", "a b", "\xff.example", "127.0.0.1:", "0x7f.1"]


@pytest.mark.parametrize("is_loopback", [True, False])
def test_only_addresses_localhost_and_local_names_are_allowed(is_loopback: bool) -> None:
    hosts = _Hosts(["metrics.example.org", ".example.net"], is_loopback=is_loopback)
    assert [host for host in EVERYWHERE if not hosts.allow(host)] == []
    assert [host for host in LOCAL if hosts.allow(host)] == ([] if is_loopback else LOCAL)
    assert [host for host in STRANGE if hosts.allow(host)] == []


def test_names_that_are_allowed() -> None:
    hosts = _Hosts([" Metrics.example.org", ".example.net", ""], is_loopback=True)
    allowed = ["metrics.example.org:9400", "METRICS.EXAMPLE.ORG.", "example.net", "a.b.example.net"]
    assert all(map(hosts.allow, allowed))
    assert not any(map(hosts.allow, ["a.metrics.example.org", "badexample.net"]))
    assert _Hosts(["*"], is_loopback=True).allow("evil.example")


def test_the_machines_own_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "gethostname", lambda: "node7.rack.example")
    hosts = Hosts("bound.example", "::1", ["one.example", "two.example"])
    assert all(map(hosts.allow, ["node7.rack.example", "bound.example", "two.example"]))
    assert not any(map(hosts.allow, ["rack.example", "node8.rack.example", "three.example"]))
    assert not Hosts("x", "fe80::1%eth0", []).allow("node8.rack.example")
