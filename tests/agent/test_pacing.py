"""How many tickets an agent may hold: a link is played, batch by batch, on a clock of its own."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

import pytest

from dpex.pools.agent.pacing import LEAST, TOLERATED_S, Pace


@dataclass(kw_only=True)
class Link:
    """An agent behind a link that carries `rate` batches per second. It makes all that it holds at once."""

    rate: float
    work_s: float = 0.0
    round_trip_s: float = 0.0
    wanted: int = 32
    pace: Pace = field(default_factory=Pace)
    now: float = 0.0
    sent: deque[float] = field(default_factory=deque)
    free_at: float = 0.0
    most_held: int = 0

    def run(self, batches: int) -> float:
        """Deliver so many; returns batches per second."""
        began = self.now
        for _ in range(batches):
            self.send()
            sent_at = self.sent.popleft()
            made_at = sent_at + self.round_trip_s / 2 + self.work_s
            self.free_at = max(self.free_at, made_at) + 1.0 / self.rate
            self.now = max(self.now, self.free_at + self.round_trip_s / 2)
            held = len(self.sent)
            way_s = self.now - sent_at - self.work_s
            self.pace.answered(way_s=way_s, round_trip_s=self.round_trip_s, held=held, sent_at=sent_at, at=self.now)
            if not held:
                self.pace.rest()
        return batches / (self.now - began)

    def send(self) -> None:
        while len(self.sent) < self.wanted and self.pace.allows(len(self.sent), 1, 8):
            self.sent.append(self.now)
        self.most_held = max(self.most_held, len(self.sent))


def test_a_slow_link_holds_no_more_than_keeps_it_busy() -> None:
    link = Link(rate=10.0)
    link.run(100)
    link.most_held = 0
    assert link.run(200) > 0.97 * link.rate
    assert link.most_held <= 6


def test_a_long_way_is_no_queue() -> None:
    link = Link(rate=100.0, round_trip_s=0.1)
    link.run(200)
    assert link.run(400) > 0.97 * link.rate
    assert link.pace.most >= 10


def test_a_link_that_is_never_full_holds_nothing_back() -> None:
    link = Link(rate=10_000.0)
    link.run(500)
    assert link.most_held == link.wanted


def test_what_is_held_follows_the_link() -> None:
    link = Link(rate=5.0)
    link.run(100)
    assert link.pace.most < 8
    link.rate = 200.0
    link.run(300)
    assert link.run(200) > 0.9 * link.rate
    link.rate = 5.0
    link.run(60)
    link.most_held = 0
    link.run(50)
    assert link.most_held <= 8


@pytest.mark.parametrize("most", [1.0, 1.25, 1.9, 2.6, 3.5])
def test_who_once_held_too_much_gets_more_again(most: float) -> None:
    """Batches take four times as long to make as to send, so that less than five keep the link idle."""
    link = Link(rate=25.0, work_s=0.16)
    link.pace.answered(way_s=9.0, round_trip_s=0.0, held=7, sent_at=-9.0, at=-0.5)
    link.pace.answered(way_s=9.0, round_trip_s=0.0, held=7, sent_at=-9.0, at=-0.1)
    assert link.pace.most == LEAST
    link.pace.most = most
    link.run(100)
    assert link.run(200) > 0.97 * link.rate
    assert link.pace.most < 12


def test_batches_are_paced_by_what_travels_of_them() -> None:
    """Batches of 2.5 MB over 200 Mbit/s, which are compressed to a tenth for a while."""
    bytes_per_s, batch_bytes = 25e6, 2.5e6
    link = Link(rate=bytes_per_s / batch_bytes)
    link.run(100)
    assert link.pace.most < 8
    link.rate = bytes_per_s / (0.1 * batch_bytes)
    link.run(300)
    assert link.run(200) > 0.9 * link.rate
    link.rate = bytes_per_s / batch_bytes
    link.run(60)
    link.most_held = 0
    link.run(50)
    assert link.most_held <= 8


def test_there_is_always_one_to_try_with() -> None:
    pace = Pace()
    for number in range(20):
        pace.answered(way_s=9.0, round_trip_s=0.0, held=0, sent_at=float(number), at=number + 9.0)
    assert pace.allows(0, 1, 8)
    assert pace.allows(0, 128, 8)
    assert not pace.allows(8, 1, 8)


def test_a_little_queueing_is_tolerated() -> None:
    pace = Pace()
    for number in range(1000):
        pace.answered(way_s=0.9 * TOLERATED_S, round_trip_s=0.0, held=50, sent_at=0.0, at=number / 1000)
    assert pace.allows(50, 1, 8)


def test_it_begins_with_a_ticket_for_each_worker_and_doubles() -> None:
    link = Link(rate=1000.0, round_trip_s=0.04, wanted=64)
    link.send()
    assert len(link.sent) == 8
    link.run(8)
    assert 12 <= link.most_held <= 18
    link.run(200)
    assert link.most_held >= 36
