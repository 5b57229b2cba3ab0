"""How many connections an agent is to have, on links of which the rate for each number is known."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from dpex.pools.agent.parallel import BUSY, MORE, MOST, REST_S, WORTH, ConnectionCount, ConnectionsWanted
from dpex.pools.agent.traffic import Traffic

WINDOW_S = 0.25


class Simulated:
    """A link that carries ``rate(connections)`` bytes per second while something is sent."""

    def __init__(
        self, rate: Callable[[int], float], *, round_trip_s: float = 0.05, lost: float = 0.0, busy: float = 1.0
    ) -> None:
        self.rate, self.round_trip_s, self.lost, self.busy = rate, round_trip_s, lost, busy
        self.count, self.now = ConnectionCount(), 0.0
        self.changes: list[ConnectionsWanted] = []

    def run(self, seconds: float) -> list[ConnectionsWanted]:
        """The changes in that time."""
        began = len(self.changes)
        end = self.now + seconds
        while self.now < end:
            self.now += WINDOW_S
            sending_s = self.busy * WINDOW_S
            sent = round(self.rate(1 + self.count.extra) * sending_s)
            traffic = Traffic(sent, round(self.lost * sent), sending_s, self.round_trip_s)
            if (change := self.count.look(traffic, self.now)) is not None:
                self.changes.append(change)
        return self.changes[began:]


def test_where_each_connection_carries_as_much_there_are_as_many_as_allowed() -> None:
    link = Simulated(lambda connections: 1e6 * connections, lost=0.01)
    changes = link.run(40.0)
    kept = [change for change in changes if change.gained is not None]
    assert [change.extra for change in kept] == [MORE, 2 * MORE, MOST]
    assert kept[0].gained == pytest.approx(1 + MORE, rel=0.1)
    assert link.count.extra == MOST


def test_a_link_that_one_connection_fills_keeps_one_and_is_tried_again_after_a_rest() -> None:
    link = Simulated(lambda _: 1e8)
    assert [change.extra for change in link.run(20.0)] == [MORE, 0]
    assert link.count.extra == 0
    assert [change.extra for change in link.run(REST_S)] == [MORE, 0]
    assert link.run(REST_S) == []  # it rests for twice as long now
    assert [change.extra for change in link.run(REST_S)] == [MORE, 0]


def test_no_more_are_kept_than_gain() -> None:
    """Five fill the link, so that nine gain nothing."""
    link = Simulated(lambda connections: 1e6 * min(connections, 5))
    link.run(30.0)
    assert link.count.extra == MORE


@pytest.mark.parametrize(("gain", "extra"), [(0.95 * WORTH, 0), (1.05 * WORTH, MORE)])
def test_a_gain_has_to_be_worth_it(gain: float, extra: int) -> None:
    link = Simulated(lambda connections: 1e6 * (gain if connections > 1 else 1.0))
    link.run(30.0)
    assert link.count.extra == extra


def test_nothing_is_tried_on_a_short_link_without_losses() -> None:
    link = Simulated(lambda connections: 1e9 * connections, round_trip_s=0.0005)
    assert link.run(200.0) == []


def test_nothing_is_tried_where_the_link_is_idle_half_of_the_time() -> None:
    link = Simulated(lambda connections: 1e6 * connections, busy=0.8 * BUSY)
    assert link.run(200.0) == []


def test_connections_that_cannot_be_made_are_not_asked_for_again_at_once() -> None:
    link = Simulated(lambda connections: 1e6 * connections)
    assert [change.extra for change in link.run(3.0)] == [MORE]
    link.count.failed(link.now)
    assert link.count.extra == 0
    assert link.run(0.9 * REST_S) == []
    assert link.run(10.0)
