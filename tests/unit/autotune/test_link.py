"""The way to remote workers: what it is taken to carry, and when batches queue on it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from dpex.autotune.link import Link
from dpex.autotune.types import Sample, Settings
from dpex.measure.samples import PoolSample

FOUR = PoolSample(requested=4, running=4, tickets=20, load_s=2.0)


def window(in_flight: int, remote: PoolSample = FOUR, *, batch_bytes: float = 1e6, head_s: float = 0.0) -> Sample:
    """A second in which remote workers took 100 ms for a batch, and idled for half of the time."""
    settings = Settings(remote=4, prefetch=64)
    sample = Sample(at=0.0, seconds=1.0, settings=settings, batches=20, wait_s=0.9, work_s=0.1, head_s=head_s)
    return replace(sample, in_flight=in_flight, batch_bytes=batch_bytes, remote=remote)


def link(*samples: Sample) -> Link:
    made = Link()
    for sample in samples:
        made.add(sample)
    return made


def test_the_way_is_what_is_in_flight_and_in_nobody_s_hands() -> None:
    """Two of four batches are at workers, two under way: a tenth of a second at 20 a second."""
    found = link(*[window(4)] * 3)
    assert found.travel_s == pytest.approx(0.1)
    assert found.jammed == pytest.approx(0.0)


def test_more_than_the_way_explains_queues_on_it() -> None:
    assert link(*[window(4)] * 3, window(30)).jammed == pytest.approx(26.0)


def test_what_new_workers_have_just_begun_queues_nowhere() -> None:
    """Twelve workers more hold a batch each, of which none has come in the first 0.2 s, twice what one takes."""
    sixteen = replace(FOUR, requested=16, running=16)
    grown = replace(window(30, replace(sixteen, tickets=4, load_s=0.4)), seconds=0.06)
    found = link(*[window(4)] * 3)
    found.resized()
    for sample in [grown] * 4:
        found.add(sample)
        assert found.jammed == 0.0
    for sample in [window(30, sixteen)] * 4:
        found.add(sample)
    assert found.jammed == pytest.approx(26.0)


def test_workers_at_batches_that_do_not_count_yet_have_no_time_to_spare() -> None:
    """Three windows of 0.25 s see the end of nine of the batches that three workers take 0.2 s for."""
    three = replace(FOUR, requested=3, running=3)
    found = link(*[window(4)] * 3)
    found.resized()
    for tickets in (3, 3, 3, 6) * 3:
        came = replace(three, tickets=tickets, load_s=0.2 * tickets)
        found.add(replace(window(24, came), seconds=0.25))
        assert found.jammed == 0.0


def test_a_way_that_was_never_seen_without_a_queue_is_told_from_distance() -> None:
    """Forty batches under way at 20 a second would be two seconds of distance."""
    assert link(*[window(42)] * 3).jammed == pytest.approx(40 - 0.2 * 20)


def test_workers_without_time_to_spare_are_why_batches_wait() -> None:
    assert link(*[window(42, replace(FOUR, load_s=4.0))] * 3).jammed == 0.0


@pytest.mark.parametrize(("in_flight", "is_stuck"), [(4, False), (30, True)])
def test_nothing_comes_at_all(in_flight: int, is_stuck: bool) -> None:
    """Four batches may be slow ones, at four workers; thirty are not."""
    found = link(window(in_flight, replace(FOUR, tickets=0, load_s=0.0), head_s=0.9))
    assert found.is_stuck is is_stuck
    assert found.jammed == (in_flight if is_stuck else 0)


def test_an_unknown_network_is_taken_to_carry_ten_gigabits_and_then_twice_what_was_seen() -> None:
    assert Link().rate(1e8) == pytest.approx(12.5)
    assert link(window(4)).rate(1e8) == pytest.approx(12.5)
    assert link(window(4, batch_bytes=1e8)).rate(1e8) == pytest.approx(40)
    assert Link().rate(0.0) == float("inf")


def test_a_short_window_in_which_little_was_made_by_chance_shows_no_queue() -> None:
    """Workers that are busy all the time: in one window in three less of what they make comes."""
    more, little = replace(FOUR, load_s=5.1), replace(FOUR, load_s=1.8)
    assert link(*[window(42, more), window(42, more), window(42, little)]).jammed == 0.0
    assert link(*[window(42), window(42), window(42, little)]).jammed > 30


def sending(share: float, *, links: int = 2) -> Sample:
    """A second in which each of several machines sent for this share of the time: 20 MB came."""
    return window(4, replace(FOUR, links=links, sending_s=share * links))


def test_machines_that_send_all_the_time_show_what_the_way_carries() -> None:
    found = link(*[sending(1.0)] * 3)
    assert found.rate(1e6) == pytest.approx(20)
    found.add(sending(0.8))
    assert found.rate(1e6) == pytest.approx(20)
    for _ in range(3):
        found.add(sending(0.5))
    assert found.rate(1e6) == pytest.approx(1250)


def test_nothing_queues_on_a_way_that_is_mostly_idle() -> None:
    """Forty batches wait for local workers, while remote ones have time to spare."""
    assert link(*[window(42, replace(FOUR, links=1, sending_s=0.95))] * 3).jammed > 30
    assert link(*[window(42, replace(FOUR, links=1, sending_s=0.01))] * 3).jammed == 0.0


def test_machines_that_measure_the_way_tell_how_long_it_is() -> None:
    """What is in flight may wait for local workers, and then says little of the way."""
    measured = replace(FOUR, links=1, round_trip_s=0.002)
    assert link(*[window(42, measured)] * 3).travel_s == pytest.approx(0.002)
    assert link(*[window(4, replace(measured, round_trip_s=0.5))] * 3).travel_s == pytest.approx(0.1)


def test_without_machines_that_measure_it_the_way_is_presumed() -> None:
    found = link(sending(1.0))
    assert found.rate(1e6) == pytest.approx(20)
    found.add(sending(1.0, links=0))
    assert found.rate(1e6) == pytest.approx(1250)
