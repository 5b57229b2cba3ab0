"""The loader behind a link with a rate and a delay, in network namespaces of this machine."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import asdict

import pytest

from benchmarks.network.links import Link, Network, why_not
from benchmarks.network.measure import Request
from benchmarks.process import ROOT

pytestmark = [
    pytest.mark.timeout(240),
    pytest.mark.skipif(bool(why_not()), reason=why_not()),
]


def test_what_a_link_carries_is_measured_and_told() -> None:
    """Batches of 0.4 MB over 80 Mbit/s, 20 ms there and back: ten per second and machine at most."""
    link = Link(bits_per_s=80e6, round_trip_s=0.02)
    with Network([link]) as network:
        request = Request(
            split=(1, 2),
            most=(1, 2),
            nodes=network.nodes,
            reached_at=network.address,
            rooms=[2],
            window_s=0.0,
            least_remote=10,
            wait_s=0.01,
            side=96,
        )
        command = [sys.executable, "-m", "benchmarks.network.measure", json.dumps(asdict(request))]
        done = subprocess.run([*network.enter(network.trainer), *command], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["batches"] > 0
    (node,) = found["nodes"].values()
    assert node["tickets"] >= 10
    assert node["links"] == 1
    assert node["sent_bytes"] > 0
    assert node["sending_s"] > 0
    assert node["sent_bytes"] / node["sending_s"] < 1.5 * link.bytes_per_s
    assert node["round_trip_s"] >= 0.02
