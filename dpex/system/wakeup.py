"""Let a thread sleep until a descriptor of its choice is readable, or any thread rings.

`Wakeup.set_descriptors` and `Wakeup.sleep` are for one thread at a time. A ring while no thread sleeps ends the next
sleep at once. Several rings count as one. The lock is reentrant, because a garbage collection or a signal handler may
ring at any point.
"""

from __future__ import annotations

import contextlib
import os
import select
import threading
from collections.abc import Iterable


class Wakeup:
    """See the module. It holds one descriptor until `close`, or until it is not referenced any more."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._descriptor = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._closed = False
        self._was_rung = False
        self._watched: tuple[int, ...] = ()
        self._poll = select.poll()

    def ring(self) -> None:
        """Wake the thread that sleeps. Does nothing once this is closed."""
        with self._lock:
            if not self._closed:
                os.eventfd_write(self._descriptor, 1)

    def set_descriptors(self, descriptors: Iterable[int]) -> None:
        """Set the descriptors that end a sleep when they become readable. They replace those of the previous call."""
        watched = (self._descriptor, *descriptors)
        if watched != self._watched:
            self._watched, self._poll = watched, select.poll()
            for descriptor in watched:
                self._poll.register(descriptor, select.POLLIN)

    def sleep(self, limit_s: float | None = None) -> None:
        """Sleep until a descriptor is readable or a thread rings, at most for ``limit_s`` seconds (None: no limit)."""
        for descriptor, _ in self._poll.poll(None if limit_s is None else limit_s * 1000 + 0.5):
            if descriptor == self._descriptor:
                self._was_rung = True

    def clear(self) -> None:
        """Reset the wakeup if a ring ended a sleep since the last call."""
        if self._was_rung:
            with contextlib.suppress(BlockingIOError):
                os.eventfd_read(self._descriptor)
            self._was_rung = False

    def close(self) -> None:
        """Close the descriptor; idempotent."""
        with self._lock:
            if not self._closed:
                self._closed = True
                os.close(self._descriptor)

    def __del__(self) -> None:
        self.close()
