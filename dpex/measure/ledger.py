"""Counts that one thread changes and others read: a sequence lock, and the counts of iterators that have ended.

Reading takes no lock that the counting thread, or the end of an iterator, could wait for.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import reduce
from time import sleep
from typing import Generic, TypeVar

from dpex.measure.reading import Reading

PAUSE_S = 0.0001
"""Seconds between two tries. A writer that was preempted during a change needs the CPU to finish it."""
MOST_TRIES = 4000
"""Tries, about half a second. A busy machine keeps a thread from running for tens of milliseconds. A change that takes
longer was given up: an exception of a signal handler ended it, or the reader is such a handler itself. Tries are
counted, because tests of users may stop the clock."""

T = TypeVar("T")


class Seqlock:
    """A sequence lock: a single thread writes several values, and any thread reads a consistent set of them.

    The writer never waits. It calls ``begin`` and ``end`` around each change. `read` is for any thread, and repeats
    until no change overlaps.

    ``changes`` is odd during a change. A writer that cannot afford two calls makes the assignments of `begin` and `end`
    itself.
    """

    __slots__ = ("_given_up", "changes")

    def __init__(self) -> None:
        self.changes: int = 0
        self._given_up = -1

    def begin(self) -> None:
        """Begin a change, or begin an abandoned change again."""
        self.changes |= 1

    def end(self) -> None:
        self.changes = (self.changes | 1) + 1

    def read(self, values: Callable[[], T]) -> T:
        """Return ``values()`` from between two changes, or the present values if a change was abandoned."""
        for _ in range(MOST_TRIES):
            changes = self.changes
            if changes % 2 == 0:
                found = values()
                if changes == self.changes:
                    return found
            elif changes == self._given_up:
                return values()
            sleep(PAUSE_S)
        self._given_up = changes
        return values()


class LastReading(Generic[T]):
    """The present value of a source, and its last value once it has ended.

    `end` takes no lock, as a garbage collection may call it anywhere.
    """

    def __init__(self, read: Callable[[], T]) -> None:
        self._read: Callable[[], T] | None = read
        self._last: list[T] = []

    def end(self, last: T | None = None) -> None:
        """Keep the present value, or ``last`` if the source cannot be read any more; let go of the source.

        Idempotent.
        """
        read = self._read
        if read is not None:
            self._last.append(read() if last is None else last)
            self._read = None

    @property
    def has_ended(self) -> bool:
        """True if the value does not change any more."""
        return self._read is None

    def read(self) -> T:
        read = self._read
        return self._last[0] if read is None else read()


E = TypeVar("E", bound=LastReading[Reading])


class Ledger(Generic[E]):
    """The counts of several iterators together. ``join`` adds two, as `Reading.plus` or `Reading.then`."""

    def __init__(self, join: Callable[[Reading, Reading], Reading]) -> None:
        self._join = join
        self._lock = threading.Lock()
        self._state: tuple[Reading, tuple[E, ...]] = (Reading(), ())

    @property
    def entries(self) -> tuple[E, ...]:
        """Iterators that are still read one by one."""
        return self._state[1]

    def add(self, entry: E) -> None:
        """Count another iterator. Those that have ended are joined into one value."""
        with self._lock:
            past, entries = self._state
            ended = [other for other in entries if other.has_ended]
            past = reduce(self._join, [other.read() for other in ended], past)
            self._state = (past, (*(other for other in entries if other not in ended), entry))

    def read(self) -> Reading:
        past, entries = self._state
        return reduce(self._join, [entry.read() for entry in entries], past)

    def clear(self) -> tuple[E, ...]:
        """Forget the iterators that have ended; return all other iterators."""
        with self._lock:
            alive = tuple(entry for entry in self._state[1] if not entry.has_ended)
            self._state = (Reading(), alive)
            return alive
