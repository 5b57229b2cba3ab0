"""A sequence lock, apart as it is a data structure: one thread changes several values, any other reads them together.

The writer never waits. A reader that meets a change under way reads again once it is over.
"""

from __future__ import annotations

from collections.abc import Callable
from time import monotonic, sleep
from typing import TypeVar

PAUSE_S = 0.0001
"""Between two tries: the writer may have been stopped in the middle of a change, and goes on only if others pause."""
PATIENCE_S = 0.5
"""A busy machine keeps a thread from running for tens of milliseconds. A change that takes longer than this was given
up: an exception of a signal handler ended it, or the reader is such a handler itself."""

Found = TypeVar("Found")


class Seqlock:
    """``begin`` and ``end`` are the writer's, around each change; `read` is for any thread.

    ``changes`` counts them, and is odd while one is under way. A writer that cannot afford the calls does to
    ``changes`` what `begin` and `end` do.
    """

    __slots__ = ("_given_up", "changes")

    def __init__(self) -> None:
        self.changes = 0
        self._given_up = -1

    def begin(self) -> None:
        """Begin a change; one that was given up begins again."""
        self.changes |= 1

    def end(self) -> None:
        """End a change."""
        self.changes = (self.changes | 1) + 1

    def read(self, values: Callable[[], Found]) -> Found:
        """Return ``values()`` from between two changes, or the present ones if a change was given up."""
        began = 0.0
        while True:
            changes = self.changes
            if changes % 2 == 0:
                found = values()
                if changes == self.changes:
                    return found
            elif changes == self._given_up:
                return values()
            now = monotonic()
            began = began or now
            if now - began > PATIENCE_S:
                self._given_up = changes
                return values()
            sleep(PAUSE_S)
