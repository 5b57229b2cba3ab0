"""Keeps what iterators counted once they are gone. Reading takes no lock that an iterator could wait for. PURE but for
its lock."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import reduce
from typing import Generic, Protocol, TypeVar

from dpex.measure.sums import Sums

T = TypeVar("T")


class LastReading(Generic[T]):
    """What ``read`` returns while its source lives, and what it returned last once that has ended.

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
        """Whether the value will stay as it is."""
        return self._read is None

    def read(self) -> T:
        """The present value, or the last one."""
        read = self._read
        return self._last[0] if read is None else read()


class Entry(Protocol):
    """An iterator in the ledger."""

    @property
    def has_ended(self) -> bool:
        """Whether its counts will stay as they are."""

    def read(self) -> Sums:
        """Its counts."""


E = TypeVar("E", bound=Entry)


class Ledger(Generic[E]):
    """The counts of several iterators as one. ``join``: how two become one, `Sums.plus` or `Sums.then`."""

    def __init__(self, join: Callable[[Sums, Sums], Sums]) -> None:
        self._join = join
        self._lock = threading.Lock()
        self._state: tuple[Sums, tuple[E, ...]] = (Sums(), ())

    @property
    def entries(self) -> tuple[E, ...]:
        """Those that were not folded yet."""
        return self._state[1]

    def add(self, entry: E) -> None:
        """Count this one too; those that have ended are folded into one value."""
        with self._lock:
            past, entries = self._state
            ended = [other for other in entries if other.has_ended]
            past = reduce(self._join, [other.read() for other in ended], past)
            self._state = (past, (*(other for other in entries if other not in ended), entry))

    def read(self) -> Sums:
        """All of it now."""
        past, entries = self._state
        return reduce(self._join, [entry.read() for entry in entries], past)

    def clear(self) -> tuple[E, ...]:
        """Forget those that have ended; returns the others."""
        with self._lock:
            alive = tuple(entry for entry in self._state[1] if not entry.has_ended)
            self._state = (Sums(), alive)
            return alive
