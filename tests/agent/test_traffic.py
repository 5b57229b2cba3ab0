"""What an agent tells of its connections: the kernel's counts, and differences of them."""

from __future__ import annotations

import socket
import struct

from waiting import until

from dpex.pools.agent.traffic import TELL_EVERY_S, Traffic, TrafficMeter, difference
from dpex.system.tcp import TcpCounts, counts_in, tcp_counts


def test_the_kernel_counts_what_a_connection_carries() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as client:
        other, _ = server.accept()
        with other:
            client.sendall(bytes(100_000))
            left = 100_000
            while left:
                left -= len(other.recv(1 << 16))
            until(lambda: (found := tcp_counts(client)) is not None and found.acked_bytes >= 100_000)
            counts = tcp_counts(client)
    assert counts is not None
    assert counts.sent_bytes >= 100_000
    assert counts.sending_s >= 0
    assert 0 < counts.least_round_trip_s <= counts.round_trip_s < 1.0


def test_what_is_no_tcp_connection_has_no_counts() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        assert tcp_counts(ours) is None
        assert TrafficMeter(lambda: 1e9).news([ours]) is None


def test_the_fields_are_those_of_linux() -> None:
    whole = bytearray(232)
    for at, value in ((120, 1000), (168, 2_000_000), (200, 1200), (208, 200)):
        struct.pack_into("@Q", whole, at, value)
    struct.pack_into("@I", whole, 68, 5000)
    struct.pack_into("@I", whole, 148, 4000)
    assert counts_in(bytes(whole)) == TcpCounts(1000, 1200, 200, 2.0, 0.005, 0.004)
    struct.pack_into("@I", whole, 148, 0xFFFFFFFF)
    assert counts_in(bytes(whole)) == TcpCounts(1000, 1200, 200, 2.0, 0.005, 0.005)
    struct.pack_into("@I", whole, 144, 77)
    assert counts_in(bytes(whole)) == TcpCounts(1000, 1200, 200, 2.0, 0.005, 0.005, 77)
    assert counts_in(bytes(whole[:192])) is None


def test_several_connections_are_one_way() -> None:
    first = TcpCounts(100, 110, 10, 1.0, 0.02, 0.01)
    before = {4: first}
    after = {4: TcpCounts(300, 320, 20, 2.5, 0.02, 0.01), 5: TcpCounts(50, 50, 0, 0.5, 0.03, 0.02)}
    assert difference(before, after) == Traffic(250, 10, 1.5, 0.01)


def test_it_is_looked_at_now_and_then() -> None:
    now = [100.0]
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as client:
        meter = TrafficMeter(lambda: now[0])
        assert meter.news([client]) is not None
        now[0] += TELL_EVERY_S / 2
        assert meter.news([client]) is None
        now[0] += TELL_EVERY_S
        assert meter.news([client]) is not None
