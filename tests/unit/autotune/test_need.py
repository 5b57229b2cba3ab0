"""How many remote workers a loop that waits would need, from one window."""

from __future__ import annotations

from dataclasses import replace

import pytest

from dpex.autotune.need import made_without, remote_need
from dpex.autotune.types import Sample, Settings
from dpex.measure.node_links import node_links
from dpex.measure.samples import PoolSample
from dpex.measure.sums import NodeSums
from dpex.schedule.room import NodeLink

BUSY = PoolSample(requested=4, running=4, tickets=20, load_s=4.0)
"""Each batch takes 0.2 s, so four workers make 20 a second."""
WAITING = Sample(
    at=1.0, seconds=1.0, settings=Settings(remote=4), batches=20, wait_s=0.75, own_s=0.05, work_s=0.2, remote=BUSY
)


@pytest.mark.parametrize(
    ("sample", "need"),
    [
        pytest.param(WAITING, 16.0, id="a loop of 80 a second"),
        pytest.param(replace(WAITING, wait_s=0.005, work_s=0.945), 4.0, id="hardly waits"),
        pytest.param(replace(WAITING, batches=0), None, id="no batch"),
        pytest.param(
            replace(WAITING, remote=PoolSample(), local=PoolSample(running=2, tickets=20, load_s=2.0)),
            6.0,
            id="none of them yet: by what a local one takes",
        ),
        pytest.param(
            replace(WAITING, remote=replace(BUSY, tickets=10, load_s=2.0), local=PoolSample(tickets=10)),
            16.0,
            id="half is made here",
        ),
        pytest.param(replace(WAITING, remote=PoolSample()), None, id="nobody made any"),
        pytest.param(replace(WAITING, wait_s=0.0, own_s=0.0, work_s=0.0), None, id="no time"),
    ],
)
def test_need(sample: Sample, need: float | None) -> None:
    assert remote_need(sample, 0.01) == (None if need is None else pytest.approx(need))


def test_what_this_machine_makes_counts_as_the_remote_workers_that_it_spares() -> None:
    assert made_without(WAITING) == 0
    assert made_without(replace(WAITING, seconds=0.5, local=PoolSample(tickets=5))) == pytest.approx(5 / 0.5 * 0.2)
    assert made_without(replace(WAITING, remote=PoolSample(), local=PoolSample(tickets=20, load_s=2.0))) == 2.0
    assert made_without(replace(WAITING, remote=PoolSample())) == 0


def test_ways_are_told_of_machines_that_measure_them() -> None:
    before = {"a": NodeSums(links=1, sent_bytes=100), "gone": NodeSums(links=1, sent_bytes=5)}
    after = {
        "a": NodeSums(links=1, sent_bytes=300, resent_bytes=100, sending_s=2.0, round_trip_s=0.01),
        "new": NodeSums(links=1, sent_bytes=50),
        "here": NodeSums(tickets=7),
    }
    assert node_links(before, after, 2.0) == {
        "a": NodeLink(bytes_per_s=100.0, bandwidth=150.0, round_trip_s=0.01, loss=0.25),
        "new": NodeLink(bytes_per_s=25.0, bandwidth=0.0, round_trip_s=0.0, loss=0.0),
    }
    assert node_links(before, after, 0.0) == {}
