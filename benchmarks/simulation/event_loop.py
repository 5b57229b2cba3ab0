"""Virtual time, and resources that are shared on it as a kernel or a network shares them."""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable
from itertools import count

_Event = tuple[float, int, Callable[[], None], bool]


class EventLoop:
    """Virtual time, and what is to happen at which moment."""

    def __init__(self) -> None:
        self.now = 0.0
        self._events: list[_Event] = []
        self._order = count()

    def at(self, when: float, act: Callable[[], None], *, is_fixed: bool = False) -> None:
        """Do something at a moment, not before what was planned for the same moment earlier.

        With ``is_fixed`` it happens at that moment even if programs were stopped meanwhile.
        """
        heapq.heappush(self._events, (when, next(self._order), act, is_fixed))

    def after(self, delay: float, act: Callable[[], None]) -> None:
        """Do something a while from now."""
        heapq.heappush(self._events, (self.now + delay, next(self._order), act, False))

    def run(self, until: float) -> None:
        """Let time pass."""
        events = self._events
        while events and events[0][0] <= until:
            self.now, _, act, _ = heapq.heappop(events)
            act()
        self.now = until

    def postpone(self, seconds: float) -> None:
        """Everything but what is fixed happens that much later."""
        moved = [(when if fixed else when + seconds, order, act, fixed) for when, order, act, fixed in self._events]
        self._events[:] = moved
        heapq.heapify(self._events)


class SharedResource:
    """A resource shared equally by its jobs, none of which gets more than ``each`` (work per second).

    All jobs receive the same service per second, so one running total (``_served``) orders their ends: a job ends when
    the total has grown by its work. ``others_s`` is what somebody else took so far, up to the last change. With
    ``loss`` the whole gets slower with each further job: capacity / (1 + loss * (jobs - 1)).
    """

    def __init__(self, loop: EventLoop, capacity: float, each: float = 1.0) -> None:
        self._loop = loop
        self._capacity = capacity
        self._each = each
        self._loss = 0.0
        self._others = 0.0
        self._speed = each
        self._served = 0.0
        self._since = 0.0
        self._plan = 0
        self._planned_at = math.inf
        self._is_ending = False
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
        if not self._is_ending:
            self._changed()

    def set(
        self,
        *,
        capacity: float | None = None,
        others: float | None = None,
        each: float | None = None,
        loss: float | None = None,
    ) -> None:
        """Change what there is to share, or what somebody else takes part in sharing."""
        self._advance()
        self._capacity = self._capacity if capacity is None else capacity
        self._others = self._others if others is None else others
        self._each = self._each if each is None else each
        self._loss = self._loss if loss is None else loss
        self._changed()

    @property
    def jobs(self) -> int:
        """How many share it now."""
        return len(self._jobs)

    def taken_by_others(self) -> float:
        """``others_s`` up to now."""
        self._advance()
        return self.others_s

    def stop(self, seconds: float) -> None:
        """Serve nobody for so long from now on; the loop must postpone its events by as much."""
        self._advance()
        self._since += seconds
        self._planned_at += seconds

    def _advance(self) -> None:
        """Count what was served up to now."""
        passed = self._loop.now - self._since
        if passed > 0:
            self._since = self._loop.now
            self._served = self._served + passed * self._speed if self._jobs else 0.0
            if self._others:
                self.others_s += passed * self._speed * self._others

    def _changed(self) -> None:
        """Jobs or capacity are others than before: plan when the first job ends, if that is sooner than was planned."""
        jobs = len(self._jobs)
        wanting = jobs + self._others
        whole = self._capacity / (1.0 + self._loss * (jobs - 1)) if self._loss and jobs > 1 else self._capacity
        self._speed = min(self._each, whole / wanting) if wanting else self._each
        if jobs:
            when = self._since + max(0.0, self._jobs[0][0] - self._served) / self._speed
            if when < self._planned_at:
                self._plan += 1
                self._planned_at = when
                plan = self._plan
                self._loop.at(when, lambda: self._look(plan))

    def _look(self, plan: int) -> None:
        """The first job may have ended; if it got slower meanwhile, look again later."""
        if plan != self._plan:
            return
        self._planned_at = math.inf
        self._advance()
        ended = []
        limit = self._served * (1.0 + 1e-9) + self._speed * 1e-12  # a rest too small to move the clock is none
        while self._jobs and self._jobs[0][0] <= limit:
            ended.append(heapq.heappop(self._jobs)[2])
        self._is_ending = True
        for then in ended:
            then()
        self._is_ending = False
        self._changed()
