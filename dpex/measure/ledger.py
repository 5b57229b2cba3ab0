"""The sums of the counts of several iterators, including ended ones.

Reading takes no lock, so the end of an iterator never waits for a reader.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import reduce
from typing import Generic, TypeVar

from dpex.measure.reading import Reading

T = TypeVar("T")


class LastReading(Generic[T]):
    """The present value of a source, and the last value once the source has ended.

    `freeze` takes no lock, because the garbage collector may call it at any point.
    """

    def __init__(self, read: Callable[[], T]) -> None:
        self._read: Callable[[], T] | None = read
        self._last: list[T] = []

    def freeze(self, last: T | None = None) -> None:
        """Keep the present value, or ``last`` if given, and drop the reference to the source. Idempotent.

        Give ``last`` if the source cannot be read any more.
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
    """The counts of several iterators together. ``join`` adds two readings: `Reading.plus` or `Reading.then`."""

    def __init__(self, join: Callable[[Reading, Reading], Reading]) -> None:
        self._join = join
        self._lock = threading.Lock()
        self._state: tuple[Reading, tuple[E, ...]] = (Reading(), ())

    @property
    def entries(self) -> tuple[E, ...]:
        """Iterators that are still read one by one."""
        return self._state[1]

    def add(self, entry: E) -> None:
        """Count another iterator. Ended iterators are joined into one value."""
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
