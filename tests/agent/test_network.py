"""The loader behind a link with a rate and a delay, in network namespaces of this machine."""

from dataclasses import replace
from typing import Any

import pytest
from waiting import until

from benchmarks.drills.trainer import BATCH, Work
from benchmarks.drills.watched import AFTER, Watched
from benchmarks.network.links import Link, Network, why_not
from dpex.system.clock import monotonic

pytestmark = [pytest.mark.long, pytest.mark.skipif(bool(why_not()), reason=why_not())]


SIZE = 12_800
BATCH_BYTES = 8 * SIZE * BATCH
"""0.4 MB."""


def training_with_a_node(network: Network, *, also_local: int = 1, **work: Any) -> Watched:
    """Two workers behind the link, and one beside the trainer."""
    where: dict[str, Any] = {"nodes": network.nodes, "reached_at": network.address}
    made = Work(place="agents", workers=2, also_local=also_local, **where, **work)
    return Watched(made, enter=network.enter(network.trainer))


def end(training: Watched) -> dict[str, Any]:
    """Let the training end; what it tells of its node."""
    assert training.finish() == 0, training.errors()
    assert (training.lost, training.repeated) == (0, 0)
    (node,) = training.end["nodes"]
    return dict(node)


def test_what_a_link_carries_is_measured_and_told() -> None:
    """Batches of 0.4 MB over 80 Mbit/s, 20 ms there and back: 24 per second at most."""
    link = Link(bits_per_s=80e6, round_trip_s=0.02)
    with Network([link]) as network, training_with_a_node(network, size=SIZE) as training:
        training.until(lambda: training.made_by("remote") >= 10)
        node = end(training)
    assert node["tickets"] >= 10
    assert node["links"] == 1
    assert node["sent_bytes"] > 0
    assert node["sending_s"] > 0
    assert node["sent_bytes"] / node["sending_s"] < 1.5 * link.bytes_per_s
    assert node["round_trip_s"] >= 0.02


def test_late_batches_of_a_slow_link_are_remade_locally() -> None:
    """Batches of 0.4 MB over 1 Mbit/s: each takes more than three seconds to arrive."""
    with (
        Network([Link(bits_per_s=1e6, round_trip_s=0.01)]) as network,
        training_with_a_node(network, size=SIZE) as training,
    ):
        training.until(lambda: training.late >= 3)
        end(training)


CUT_S = 3.0
"""What the node holds is late by then, and made again where training runs; a machine is given up after 15 s."""

GIVEN_UP_S = 80.0
"""A connection is given up after 15 s; the kernel by itself waits for 15 minutes."""


def test_a_disconnected_node_is_lost_only_after_a_timeout() -> None:
    link = Link(bits_per_s=1e9, round_trip_s=0.001)
    with Network([link]) as network, training_with_a_node(network) as training:
        training.until_all_run()
        network.set(0, replace(link, loss=1.0))
        cut_at = monotonic()
        until(lambda: training.hear() and monotonic() - cut_at > CUT_S)
        network.set(0, link)
        training.take(AFTER)
        assert (training.deaths, training.warnings) == (0, [])
        network.set(0, replace(link, loss=1.0))
        training.until(lambda: training.deaths == 2, GIVEN_UP_S)
        training.take(AFTER)
        assert training.finish() == 0, training.errors()
    assert "its connection ended" in " ".join(training.warnings)
    assert (training.lost, training.repeated) == (0, 0)


def test_all_batches_come_through_a_slow_and_lossy_link() -> None:
    """Batches of 64 KB over 20 Mbit/s, 50 ms there and back, of which one packet in fifty is lost."""
    with (
        Network([Link(bits_per_s=20e6, round_trip_s=0.05, loss=0.02)]) as network,
        training_with_a_node(network, size=2048) as training,
    ):
        training.until_all_run()
        training.until(lambda: training.made_by("remote") > 20)
        assert training.finish() == 0, training.errors()
    assert (training.lost, training.repeated, training.deaths) == (0, 0, 0)
