"""What the kernel counts of a TCP connection (Linux, ``TCP_INFO``)."""

from __future__ import annotations

import socket
import struct
from typing import NamedTuple

_LEVEL_BYTES = 256
"""More than the structure has: the kernel hands out as much as it knows."""
_AT_RTT, _AT_ACKED, _AT_UNSENT, _AT_LEAST_RTT, _AT_BUSY, _AT_SENT, _AT_RESENT = 68, 120, 144, 148, 168, 200, 208
"""Offsets in ``struct tcp_info`` of <linux/tcp.h>, to which fields are only ever appended. ``tcpi_bytes_retrans``, the
last of them, came with Linux 4.19."""
_LEAST_BYTES = _AT_RESENT + 8
_PER_S = 1_000_000
"""The kernel tells microseconds."""


class TcpCounts(NamedTuple):
    """Of one connection, since it began, for what this end sends.

    acked_bytes: the other end has them. sent_bytes: all that was sent, what was sent again included. resent_bytes: sent
    again. sending_s: how long something was under way. round_trip_s: lately; least_round_trip_s: when nothing queued.
    unsent_bytes: what waits now, and was not sent even once.
    """

    acked_bytes: int
    sent_bytes: int
    resent_bytes: int
    sending_s: float
    round_trip_s: float
    least_round_trip_s: float
    unsent_bytes: int = 0


def tcp_counts(connection: socket.socket) -> TcpCounts | None:
    """Read the counts of a connection; None if it is no TCP connection, or the kernel does not count them."""
    try:
        found = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _LEVEL_BYTES)
    except (OSError, AttributeError):
        return None
    return counts_in(found)


def counts_in(found: bytes) -> TcpCounts | None:
    """The counts in a ``struct tcp_info``, None if it ends before them."""
    if len(found) < _LEAST_BYTES:
        return None
    acked, busy, sent, resent = (
        struct.unpack_from("@Q", found, at)[0] for at in (_AT_ACKED, _AT_BUSY, _AT_SENT, _AT_RESENT)
    )
    rtt, least, unsent = (struct.unpack_from("@I", found, at)[0] for at in (_AT_RTT, _AT_LEAST_RTT, _AT_UNSENT))
    least = least if least != 0xFFFFFFFF else rtt
    return TcpCounts(acked, sent, resent, busy / _PER_S, rtt / _PER_S, least / _PER_S, unsent)
