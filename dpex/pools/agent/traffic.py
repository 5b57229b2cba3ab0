"""What an agent tells of its way to the trainer: what has come through since it was last told."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from typing import NamedTuple

from dpex.system.clock import Clock, monotonic
from dpex.system.tcp import TcpCounts, tcp_counts

TELL_EVERY_S = 0.25
"""A look takes some microseconds, and a window of the tuner is rarely shorter."""


class Traffic(NamedTuple):
    """What an agent's connections carried, as `dpex.measure.sums.LinkSums` counts it."""

    sent_bytes: int
    resent_bytes: int
    sending_s: float
    round_trip_s: float


class TrafficMeter:
    """Differences of the kernel's counts of some connections, which carry at the same time.

    ``unsent_bytes``: what waited in the kernel for its turn at the latest look.
    """

    def __init__(self, clock: Clock = monotonic) -> None:
        self._clock = clock
        self.unsent_bytes = 0
        self._looked_at = 0.0
        self._known: dict[int, TcpCounts] = {}

    def news(self, connections: Sequence[socket.socket]) -> Traffic | None:
        """What is new, if it is time to look; None: nothing to tell."""
        now = self._clock()
        if now - self._looked_at < TELL_EVERY_S:
            return None
        self._looked_at = now
        found = {one.fileno(): counts for one in connections if (counts := tcp_counts(one)) is not None}
        before, self._known = self._known, found
        self.unsent_bytes = sum(counts.unsent_bytes for counts in found.values())
        return difference(before, found) if found else None


_NOTHING = TcpCounts(0, 0, 0, 0.0, 0.0, 0.0)


def difference(before: dict[int, TcpCounts], after: dict[int, TcpCounts]) -> Traffic:
    """What was carried between two looks: the longest time that a connection was at it is the time of all."""
    pairs = [(counts, before.get(number, _NOTHING)) for number, counts in after.items()]
    return Traffic(
        sum(now.acked_bytes - then.acked_bytes for now, then in pairs),
        sum(now.resent_bytes - then.resent_bytes for now, then in pairs),
        max(now.sending_s - then.sending_s for now, then in pairs),
        min(counts.least_round_trip_s for counts in after.values()),
    )
