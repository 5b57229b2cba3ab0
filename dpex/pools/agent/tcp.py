"""Read what the kernel counts of a TCP connection (Linux, ``TCP_INFO``), apart from the code that serves over it."""

from __future__ import annotations

import socket
import struct

from dpex.measure.sums import LinkSums
from dpex.system.clock import Clock, monotonic

LOOK_EVERY_S = 0.25
"""Seconds between two looks of a meter. A look takes microseconds; a window of the tuner is rarely shorter."""
_INFO_BYTES = 256
"""More than the structure has: the kernel returns as much as it knows."""
_AT_RTT, _AT_ACKED, _AT_LEAST_RTT, _AT_BUSY, _AT_RESENT = 68, 120, 148, 168, 208
"""Offsets in ``struct tcp_info`` of <linux/tcp.h>, to which fields are only ever appended. ``tcpi_bytes_retrans``, the
last of them, came with Linux 4.19."""
_UNKNOWN_RTT = 0xFFFFFFFF
_PER_S = 1_000_000
"""The kernel counts microseconds."""


def tcp_counts(connection: socket.socket) -> LinkSums | None:
    """Return the counts of a connection; None if it is no TCP connection, or the kernel does not count them."""
    try:
        found = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _INFO_BYTES)
    except (OSError, AttributeError):
        return None
    return counts_in(found)


def counts_in(found: bytes) -> LinkSums | None:
    """Return the counts in a ``struct tcp_info``, None if it ends before them."""
    if len(found) < _AT_RESENT + 8:
        return None
    acked, busy, resent = (struct.unpack_from("@Q", found, at)[0] for at in (_AT_ACKED, _AT_BUSY, _AT_RESENT))
    latest, least = (struct.unpack_from("@I", found, at)[0] for at in (_AT_RTT, _AT_LEAST_RTT))
    round_trip = latest if least == _UNKNOWN_RTT else least
    return LinkSums(
        links=1, sent_bytes=acked, resent_bytes=resent, sending_s=busy / _PER_S, round_trip_s=round_trip / _PER_S
    )


class TrafficMeter:
    """Measures what a connection carries, look by look."""

    def __init__(self, connection: socket.socket, clock: Clock = monotonic) -> None:
        self._connection = connection
        self._clock = clock
        self._looked_at = 0.0
        self._counts = LinkSums()

    def news(self) -> LinkSums | None:
        """Return what was carried since the last look; None if it is too early, or the connection is not counted."""
        now = self._clock()
        if now - self._looked_at < LOOK_EVERY_S:
            return None
        self._looked_at = now
        found = tcp_counts(self._connection)
        if found is None:
            return None
        before, self._counts = self._counts, found
        return found.since(before)
