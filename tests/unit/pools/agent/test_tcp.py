"""What the kernel counts of a TCP connection."""

import socket
import struct
from dataclasses import replace

from dpex.measure.pool_reading import PoolReading
from dpex.pools.agent.serving import LOOK_EVERY_S, TrafficMeter, counts_in, tcp_counts


def test_what_is_no_tcp_connection_has_no_counts() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        assert tcp_counts(ours) is None
        assert TrafficMeter(ours, lambda: 1e9).news() is None


def test_the_fields_are_those_of_linux() -> None:
    whole = bytearray(232)
    for at, value in ((120, 1000), (168, 2_000_000), (208, 200)):
        struct.pack_into("@Q", whole, at, value)
    struct.pack_into("@I", whole, 68, 5000)
    struct.pack_into("@I", whole, 148, 4000)
    counts = PoolReading(links=1, sent_bytes=1000, resent_bytes=200, sending_s=2.0, round_trip_s=0.004)
    assert counts_in(bytes(whole)) == counts
    struct.pack_into("@I", whole, 148, 0xFFFFFFFF)
    assert counts_in(bytes(whole)) == replace(counts, round_trip_s=0.005)
    assert counts_in(bytes(whole[:192])) is None


def test_news_are_of_what_was_sent_since_the_last_look() -> None:
    now = [100.0]
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as client:
        meter = TrafficMeter(client, lambda: now[0])
        assert meter.news() is not None
        now[0] += LOOK_EVERY_S / 2
        assert meter.news() is None
        now[0] += LOOK_EVERY_S
        assert meter.news() is not None
