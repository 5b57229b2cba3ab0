"""A training as the producer sees it: its connection, what it is still to be sent, and what it wants."""

from __future__ import annotations

import marshal
import os
import select
import socket
from collections import deque
from typing import Any

from dpex.pools.share.memory import DESCRIPTORS_A_MESSAGE, MadeBatch, SharedSegment, send_segments
from dpex.pools.share.place import peer
from dpex.system.processes import pidfd

MESSAGE_BYTES = 48 << 10
"""Bytes of batches in one message. A single batch may be larger, up to a worker's longest message."""
BUFFER_BYTES = 1 << 20
"""Bytes of the socket's buffer, if the system allows it: trees of a few large batches, or many tiny batches."""


class Subscriber:
    """See the module. ``wanted``: workers. ``is_behind``: it has had the notice that it is behind the others."""

    def __init__(self, number: int, connection: socket.socket) -> None:
        self.number = number
        self.socket = connection
        self.socket.setblocking(False)
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, BUFFER_BYTES)
        self.wanted = 0
        self.is_admitted = False
        self.is_behind = False
        who = peer(connection)
        self._is_own = who.uid == os.getuid()
        self._process = pidfd(who.pid)
        self._outbox: deque[bytes | list[SharedSegment]] = deque()
        self._known: set[int] = set()
        self._batches: list[tuple[bytes, bool]] = []
        self._bytes = 0
        self._told: tuple[Any, ...] = ()

    def is_alive(self) -> bool:
        """Return True if it is a process of this user that runs: processes that it forked may hold its socket."""
        if not self._is_own or self._process < 0:
            return self._is_own
        poller = select.poll()
        poller.register(self._process, select.POLLIN)
        return not poller.poll(0)

    def watch(self, poller: select.poll) -> None:
        """Have ``poller`` wait for what it says, for room to tell it more, and for its end."""
        poller.register(self.socket, select.POLLIN | (select.POLLOUT if self._outbox else 0))
        if self._process >= 0:
            poller.register(self._process, select.POLLIN)

    def tell(self, *message: Any) -> None:
        """Send a message of plain values after what it was sent so far."""
        self._end_message()
        self._outbox.append(marshal.dumps(message))

    def report(self, fields: tuple[Any, ...]) -> None:
        """Tell how the pool stands, if that has changed."""
        if fields != self._told:
            self._told = fields
            self.tell("status", *fields)

    def deliver(self, batch: MadeBatch, *, is_first: bool) -> None:
        """Send a batch, and before it the memory it lies in if that is new there."""
        new = [one for one in batch.segments.values() if one.number not in self._known]
        if new:
            self._end_message()
            self._known.update(one.number for one in new)
            for at in range(0, len(new), DESCRIPTORS_A_MESSAGE):
                self._outbox.append(new[at : at + DESCRIPTORS_A_MESSAGE])
        if self._bytes + len(batch.data) > MESSAGE_BYTES:
            self._end_message()
        self._batches.append((batch.data, is_first))
        self._bytes += len(batch.data)

    def forget(self, segments: list[int]) -> None:
        """Nothing will lie in these any more."""
        known = [number for number in segments if number in self._known]
        if known:
            self._known.difference_update(known)
            self.tell("forget", known)

    def _end_message(self) -> None:
        if self._batches:
            self._outbox.append(marshal.dumps(("made", self._batches)))
            self._batches, self._bytes = [], 0

    def flush(self) -> bool:
        """Send as much as the socket takes; return False if the training has gone."""
        self._end_message()
        try:
            while self._outbox:
                message = self._outbox[0]
                if isinstance(message, bytes):
                    self.socket.send(message)
                else:
                    send_segments(self.socket, message)
                self._outbox.popleft()
        except BlockingIOError:
            return True
        except OSError:
            return False
        return True

    def close(self) -> None:
        """Nothing more is said."""
        self.socket.close()
        if self._process >= 0:
            os.close(self._process)
            self._process = -1
