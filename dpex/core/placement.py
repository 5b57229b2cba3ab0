"""Where each logical worker lives. PURE: no I/O, no time; it decides, the engine acts.

A logical worker is *homeless* (it has a random state, or none yet, and waits for a host), *at home*, or *leaving* (told
to give up its state). Hosts are named by (lane, number). A host is given a second logical worker only when every host
of the wanted number is up, or when the engine says that waiting any longer makes no sense.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple


class Place(NamedTuple):
    """A host: the lane's name and the host's number in it."""

    lane: str
    host: int


class Homes:
    """Homes of logical workers 0…count-1."""

    def __init__(self, count: int) -> None:
        self.home: list[Place | None] = [None] * count
        self.leaving: set[int] = set()
        self.state: list[Any] = [None] * count
        self._tenants: dict[Place, set[int]] = {}

    def tenants(self, place: Place) -> set[int]:
        """Logical workers that live at ``place`` (leaving ones included)."""
        return self._tenants.get(place, set())

    def homeless(self) -> list[int]:
        """Logical workers that wait for a host."""
        return [k for k, place in enumerate(self.home) if place is None]

    def settle(self, logical: int, place: Place) -> Any:
        """``logical`` lives at ``place`` from now on; returns the random state to take along."""
        self.home[logical] = place
        self._tenants.setdefault(place, set()).add(logical)
        state, self.state[logical] = self.state[logical], None
        return state

    def leave(self, logical: int) -> Place:
        """``logical`` was told to give up its state; returns where it still lives."""
        place = self.home[logical]
        assert place is not None
        self.leaving.add(logical)
        return place

    def left(self, logical: int, state: Any) -> None:
        """``logical`` is homeless, with that random state."""
        place = self.home[logical]
        if place is not None:
            self._tenants[place].discard(logical)
        self.home[logical] = None
        self.leaving.discard(logical)
        self.state[logical] = state

    def evicted(self, place: Place) -> list[int]:
        """The host is gone: who lived there (they are homeless now, without a state)."""
        gone = sorted(self._tenants.pop(place, ()))
        for logical in gone:
            self.home[logical] = None
            self.leaving.discard(logical)
        return gone

    def choose(self, hosts: Iterable[Place], wanted: int, *, crowd: bool) -> list[tuple[int, Place]]:
        """Who moves where now: homeless logical workers to the emptiest hosts.

        A host takes at most ceil(count / wanted); with ``crowd`` there is no such limit.
        """
        load = {place: len(self.tenants(place)) for place in hosts}
        limit = -(-len(self.home) // max(1, wanted))
        moves: list[tuple[int, Place]] = []
        for logical in self.homeless():
            place = min(load, key=lambda p: (load[p], p.lane != "local", p.host), default=None)
            if place is None or (load[place] >= limit and not crowd):
                break
            load[place] += 1
            moves.append((logical, place))
        return moves

    def spare(self, hosts: Iterable[Place]) -> int | None:
        """A logical worker that should move, because some host is empty while its own has two or more."""
        load = {place: len(self.tenants(place)) for place in hosts}
        if not load or min(load.values()) > 0 or self.leaving or self.homeless():
            return None
        fullest = max(load, key=lambda p: load[p])
        return max(self.tenants(fullest)) if load[fullest] > 1 else None
