"""The network from each node between two looks."""

from __future__ import annotations

from dpex.measure.sums import NodeStats
from dpex.telemetry.http.frames import NodeLink, node_links


def test_ways_are_told_of_machines_that_measure_them() -> None:
    before = {"a": NodeStats(links=1, sent_bytes=100), "gone": NodeStats(links=1, sent_bytes=5)}
    after = {
        "a": NodeStats(links=1, sent_bytes=300, resent_bytes=100, sending_s=2.0, round_trip_s=0.01),
        "new": NodeStats(links=1, sent_bytes=50),
        "here": NodeStats(tickets=7),
    }
    assert node_links(before, after, 2.0) == {
        "a": NodeLink(bytes_per_s=100.0, bandwidth=150.0, round_trip_s=0.01, loss=0.25),
        "new": NodeLink(bytes_per_s=25.0, bandwidth=0.0, round_trip_s=0.0, loss=0.0),
    }
    assert node_links(before, after, 0.0) == {}
