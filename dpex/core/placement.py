"""Where each logical worker lives. PURE: no I/O, no time; it decides, the engine acts.

A logical worker is *unassigned* (it has a random state, or none yet, and waits for a worker), *assigned*, or *leaving*
(told to give up its state). Workers are named by (pool, number). A worker is given a second logical worker only when
every worker of the wanted number is up, or when the engine says that waiting any longer makes no sense.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

from dpex.core.names import LOCAL


class Place(NamedTuple):
    """A worker: the pool's name and the worker's number in it."""

    pool: str
    worker: int


class Placement:
    """Placement of logical workers 0…count-1."""

    def __init__(self, count: int) -> None:
        self.place_of: list[Place | None] = [None] * count
        self.leaving: set[int] = set()
        self.state: list[Any] = [None] * count
        self._logical_workers: dict[Place, set[int]] = {}

    def logical_workers(self, place: Place) -> set[int]:
        """Logical workers that live at ``place`` (leaving ones included)."""
        return self._logical_workers.get(place, set())

    def unassigned(self) -> list[int]:
        """Logical workers that wait for a worker."""
        return [k for k, place in enumerate(self.place_of) if place is None]

    def settle(self, logical: int, place: Place) -> Any:
        """``logical`` lives at ``place`` from now on; returns the random state to take along."""
        self.place_of[logical] = place
        self._logical_workers.setdefault(place, set()).add(logical)
        state, self.state[logical] = self.state[logical], None
        return state

    def leave(self, logical: int) -> Place:
        """``logical`` was told to give up its state; returns where it still lives."""
        place = self.place_of[logical]
        assert place is not None
        self.leaving.add(logical)
        return place

    def left(self, logical: int, state: Any) -> None:
        """``logical`` is unassigned, with that random state."""
        place = self.place_of[logical]
        if place is not None:
            self._logical_workers[place].discard(logical)
        self.place_of[logical] = None
        self.leaving.discard(logical)
        self.state[logical] = state

    def evicted(self, place: Place) -> list[int]:
        """The worker is gone: who lived there (they are unassigned now, without a state)."""
        gone = sorted(self._logical_workers.pop(place, ()))
        for logical in gone:
            self.place_of[logical] = None
            self.leaving.discard(logical)
        return gone

    def choose(self, workers: Iterable[Place], wanted: int, *, crowd: bool) -> list[tuple[int, Place]]:
        """Who moves where now: unassigned logical workers to the emptiest workers.

        A worker takes at most ceil(count / wanted); with ``crowd`` there is no such limit.
        """
        load = {place: len(self.logical_workers(place)) for place in workers}
        limit = -(-len(self.place_of) // max(1, wanted))
        moves: list[tuple[int, Place]] = []
        for logical in self.unassigned():
            place = min(load, key=lambda p: (load[p], p.pool != LOCAL, p.worker), default=None)
            if place is None or (load[place] >= limit and not crowd):
                break
            load[place] += 1
            moves.append((logical, place))
        return moves

    def spare(self, workers: Iterable[Place]) -> int | None:
        """A logical worker that should move, because some worker is empty while its own has two or more."""
        load = {place: len(self.logical_workers(place)) for place in workers}
        if not load or min(load.values()) > 0 or self.leaving or self.unassigned():
            return None
        fullest = max(load, key=lambda p: load[p])
        return max(self.logical_workers(fullest)) if load[fullest] > 1 else None
