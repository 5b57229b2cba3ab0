"""Virtual time, and resources that are shared on it as a kernel or a network shares them."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from itertools import count


class EventLoop:
    """Virtual time, and what is to happen at which moment."""

    def __init__(self) -> None:
        self.now = 0.0
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._order = count()

    def at(self, when: float, act: Callable[[], None]) -> None:
        """Do something at a moment, not before what was planned for the same moment earlier."""
        heapq.heappush(self._events, (when, next(self._order), act))

    def after(self, delay: float, act: Callable[[], None]) -> None:
        """Do something a while from now."""
        self.at(self.now + delay, act)

    def run(self, until: float) -> None:
        """Let time pass."""
        while self._events and self._events[0][0] <= until:
            self.now, _, act = heapq.heappop(self._events)
            act()
        self.now = until


class SharedResource:
    """A resource shared equally by its jobs, none of which gets more than ``each`` (work per second).

    All jobs receive the same service per second, so one running total (``_served``) orders their ends: a job ends when
    the total has grown by its work. ``others_s`` is what somebody else took so far, up to the last change.
    """

    def __init__(self, loop: EventLoop, capacity: float, each: float = 1.0) -> None:
        self._loop = loop
        self._capacity = capacity
        self._each = each
        self._others = 0.0
        self._served = 0.0
        self._since = 0.0
        self._plan = 0
        self.others_s = 0.0
        self._jobs: list[tuple[float, int, Callable[[], None]]] = []
        self._order = count()

    def start(self, work: float, then: Callable[[], None]) -> None:
        """A job of that much work; ``then`` happens at its end."""
        if work <= 0:
            self._loop.after(0.0, then)
            return
        self._advance()
        heapq.heappush(self._jobs, (self._served + work, next(self._order), then))
        self._replan()

    def set(self, *, capacity: float | None = None, others: float | None = None) -> None:
        """Change what there is to share, or what somebody else takes part in sharing."""
        self._advance()
        self._capacity = self._capacity if capacity is None else capacity
        self._others = self._others if others is None else others
        self._replan()

    @property
    def jobs(self) -> int:
        """How many share it now."""
        return len(self._jobs)

    def taken_by_others(self) -> float:
        """``others_s`` up to now."""
        self._advance()
        return self.others_s

    def _speed(self) -> float:
        wanting = len(self._jobs) + self._others
        return min(self._each, self._capacity / wanting) if wanting else self._each

    def _advance(self) -> None:
        passed = self._loop.now - self._since
        self._since = self._loop.now
        if passed > 0:
            self._served = self._served + passed * self._speed() if self._jobs else 0.0
            self.others_s += passed * self._speed() * self._others

    def _replan(self) -> None:
        self._plan += 1
        if self._jobs:
            plan = self._plan
            left = max(0.0, self._jobs[0][0] - self._served)
            self._loop.after(left / self._speed(), lambda: self._ended(plan))

    def _ended(self, plan: int) -> None:
        if plan != self._plan:
            return
        self._advance()
        ended = []  # the first at least: rounding must not leave it a rest too small to move the loop
        limit = max(self._served, self._jobs[0][0]) * (1.0 + 1e-9)
        while self._jobs and self._jobs[0][0] <= limit:
            ended.append(heapq.heappop(self._jobs)[2])
        self._replan()
        for then in ended:
            then()
