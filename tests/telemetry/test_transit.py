"""How long batches were on their way from a remote worker, by the trainer's clock alone."""

from __future__ import annotations

from typing import Any

import pytest

from dpex.measure.consumer_time import NodeSums
from dpex.pools.ray.cluster import Actor
from dpex.pools.ray.handles import Call, Host, node_sums, transit_s
from dpex.pools.ray.results import Landed


def call(sent_at: float) -> Call:
    made = Call("work", lambda: None, [])
    made.sent_at = sent_at
    return made


def landed(at: float, *busy: tuple[float, float, float]) -> Landed:
    """An answer with a batch for each (load_s, collate_s, encode_s)."""
    results: list[tuple[Any, ...]] = [
        (0, number, 0, None, (load_s, collate_s, 0.0, 0.0, 1), 0.0, encode_s, 0)
        for number, (load_s, collate_s, encode_s) in enumerate(busy)
    ]
    return Landed(results, None, at, streamed=True)


@pytest.fixture
def host() -> Host:
    return Host(1, 0, Actor(None))


def test_of_one_call_it_is_what_the_worker_was_not_busy(host: Host) -> None:
    assert transit_s(host, call(10.0), landed(12.0, (0.5, 0.25, 0.25))) == pytest.approx(1.0)


def test_a_call_that_waited_behind_another_was_not_on_its_way(host: Host) -> None:
    transit_s(host, call(10.0), landed(12.0, (1.0, 0.0, 0.0)))
    assert transit_s(host, call(10.0), landed(13.5, (1.0, 0.0, 0.0))) == pytest.approx(0.5)


def test_a_call_sent_later_counts_from_there(host: Host) -> None:
    transit_s(host, call(10.0), landed(12.0, (1.0, 0.0, 0.0)))
    assert transit_s(host, call(20.0), landed(21.25, (1.0, 0.0, 0.0))) == pytest.approx(0.25)


def test_the_batches_of_an_answer_share_it_evenly(host: Host) -> None:
    assert transit_s(host, call(0.0), landed(4.0, (1.0, 0.0, 0.0), (0.5, 0.25, 0.25))) == pytest.approx(1.0)


def test_it_is_never_negative(host: Host) -> None:
    """The worker's clock may run faster than ours."""
    assert transit_s(host, call(0.0), landed(1.0, (1.5, 0.0, 0.0))) == 0.0


def test_what_an_answer_adds_to_its_machine() -> None:
    """Run queues count for the batches that they were asked of."""
    answer = landed(12.0, (0.5, 0.25, 0.25), (1.0, 0.0, 0.0))
    known = node_sums(answer._replace(queued_s=0.5))
    assert known == NodeSums(tickets=2, busy_s=2.0, cpu_s=0.0, queued_s=0.5, asked_s=2.0)
    unknown = node_sums(answer)
    assert unknown == NodeSums(tickets=2, busy_s=2.0)
    assert known.plus(unknown) == NodeSums(tickets=4, busy_s=4.0, queued_s=0.5, asked_s=2.0)
