"""The bytes of a frame's buffers over several connections at once, as GridFTP's parallel streams carry a file.

A single connection does not fill every link: what TCP may have under way shrinks with each loss, and a long way bounds
it (Mathis and others, 1997: the rate is in proportion to 1 / (round trip x square root of the loss)). Each connection
is cut back by itself, so several carry as many times as much.

The bytes are cut into stripes, of which each connection gets every n-th: both ends know where each belongs, so nothing
travels with them. Connections wait for each other at the end of a frame only.
"""

from __future__ import annotations

import select
import socket
from collections.abc import Iterable, Sequence

STRIPED_FROM_BYTES = 1 << 18
"""Frames with less go over the one connection, which they do not keep busy for long."""
MOST_STRIPE_BYTES = 1 << 18
"""Short enough that all connections have the same to do, and long enough that system calls cost nothing."""
PIECES_A_CALL = 512
"""Pieces handed to the system at once; the least that POSIX systems with IOV_MAX have is 1024."""


def split(pieces: Iterable[memoryview], connections: int) -> list[list[memoryview]]:
    """What belongs to each connection, in order: stripe k to connection k modulo their number."""
    pieces = [piece for piece in pieces if piece.nbytes]
    total = sum(piece.nbytes for piece in pieces)
    stripe = max(1, min(MOST_STRIPE_BYTES, -(-total // connections)))
    shares: list[list[memoryview]] = [[] for _ in range(connections)]
    at, left = 0, stripe
    for piece in pieces:
        while piece.nbytes:
            part, piece = piece[:left], piece[left:]
            shares[at].append(part)
            left -= part.nbytes
            if not left:
                at, left = (at + 1) % connections, stripe
    return shares


def receive_split(connections: Sequence[socket.socket], views: Iterable[memoryview]) -> bool:
    """Fill the views with what comes over the connections, whichever comes first; False if one of them ends before.

    Raises:
        OSError: A connection broke.
    """
    shares = split(views, len(connections))
    left = {one.fileno(): (one, share) for one, share in zip(connections, shares, strict=True) if share}
    poller = select.poll()
    for descriptor in left:
        poller.register(descriptor, select.POLLIN)
    while left:
        for descriptor, _ in poller.poll():
            if descriptor < 0 or descriptor not in left:
                return False
            connection, share = left[descriptor]
            if not _take(connection, share):
                return False
            if not share:
                poller.unregister(descriptor)
                del left[descriptor]
    return True


def _take(connection: socket.socket, share: list[memoryview]) -> bool:
    """Fill what is here already; False at the end of the connection."""
    try:
        came = connection.recvmsg_into(share[:PIECES_A_CALL], 0, socket.MSG_DONTWAIT)[0]
    except BlockingIOError:
        return True
    if not came:
        return False
    full = 0
    while full < len(share) and came >= share[full].nbytes:
        came -= share[full].nbytes
        full += 1
    del share[:full]
    if came:
        share[0] = share[0][came:]
    return True
