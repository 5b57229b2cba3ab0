"""A listening socket whose `Listener.accept` neither waits nor raises, and that never spins when descriptors run out.

When a process has no descriptor left, `accept` fails at once, for ever, while the connection stays in the queue and
keeps the socket readable. So the listener asks its owner to give up a connection; failing that, it takes the next one
on a spare descriptor and hangs up, so that the client learns of it; failing that too, it rests for a while.

A listener belongs to the thread that runs the selector, but for `close`.
"""

from __future__ import annotations

import contextlib
import errno
import os
import selectors
import socket
from collections.abc import Callable, Iterable
from typing import Protocol, TypeVar

from dpex.system.clock import Clock, monotonic

REST_S = 0.2
"""How long nobody is let in while neither a descriptor nor memory is to be had."""
_FULL = (errno.EMFILE, errno.ENFILE)
_EXHAUSTED = (*_FULL, errno.ENOBUFS, errno.ENOMEM)


class Accepts(Protocol):
    """What a listener needs of a socket."""

    def accept(self) -> tuple[socket.socket, object]:
        """Return the next connection and its peer; raises OSError."""

    def fileno(self) -> int:
        """Return the descriptor."""

    def close(self) -> None:
        """Close it."""


class Listener:
    """See the module. ``found`` must listen and not block; while it does not rest ``selector`` knows it."""

    def __init__(self, found: Accepts, selector: selectors.BaseSelector, clock: Clock = monotonic) -> None:
        self._socket = found
        self._selector = selector
        self._clock = clock
        self._rests_until: float | None = None
        self._spare = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
        selector.register(found, selectors.EVENT_READ, self)

    def accept(self, make_room: Callable[[], bool]) -> socket.socket | None:
        """Return the next connection, which does not block; None if there is none or it had to be turned away.

        ``make_room`` closes a connection of the owner's and tells whether it did; it is asked if descriptors run out.
        """
        try:
            return self._accept()
        except OSError as error:
            if error.errno not in _EXHAUSTED:  # the client has gone already, or the network has
                return None
            if error.errno not in _FULL or not (make_room() or self._turn_away()):
                self._rest()
            return None  # if there is room now, the selector says at once that somebody waits

    def _accept(self) -> socket.socket:
        found, _ = self._socket.accept()
        found.setblocking(False)
        return found

    def _turn_away(self) -> bool:
        """Hang up on the next one; False if there is no spare descriptor to do it with."""
        if self._spare < 0:
            return False
        os.close(self._spare)
        self._spare = -1
        with contextlib.suppress(OSError):
            self._accept().close()
        self._find_spare()
        return self._spare >= 0

    def _find_spare(self) -> None:
        with contextlib.suppress(OSError):
            self._spare = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)

    def _rest(self) -> None:
        if self._rests_until is None:
            self._selector.unregister(self._socket)
        self._rests_until = self._clock() + REST_S

    def wait_s(self) -> float | None:
        """How long the owner may wait in its selector; None: for as long as it likes."""
        return None if self._rests_until is None else max(0.0, self._rests_until - self._clock())

    def go_on(self) -> None:
        """Listen again if it has rested; to be called at each turn of the owner's loop."""
        if self._rests_until is None or self._clock() < self._rests_until:
            return
        self._rests_until = None
        if self._spare < 0:
            self._find_spare()
        self._selector.register(self._socket, selectors.EVENT_READ, self)

    def close(self) -> None:
        """Close the socket and the spare descriptor. Idempotent."""
        self._socket.close()
        if self._spare >= 0:
            os.close(self._spare)
            self._spare = -1


class Client(Protocol):
    """A connection that may have to go when there are too many."""

    @property
    def peer(self) -> str:
        """Its address, without the port."""

    @property
    def rank(self) -> tuple[bool, float]:
        """Of one peer's connections the one with the smallest goes first."""


C = TypeVar("C", bound=Client)


def one_to_drop(clients: Iterable[C]) -> C | None:
    """The first to go of the peer that has most connections, so that no peer can keep the others out."""
    by_peer: dict[str, list[C]] = {}
    for client in clients:
        by_peer.setdefault(client.peer, []).append(client)
    if not by_peer:
        return None
    busiest = max(by_peer, key=lambda peer: len(by_peer[peer]))
    return min(by_peer[busiest], key=lambda one: one.rank)


def peer_of(connection: socket.socket) -> str:
    """The address of the other end; "" if it has gone, or is a process of this machine on a socket without a name."""
    try:
        return str(connection.getpeername()[0])
    except (OSError, IndexError):
        return ""
