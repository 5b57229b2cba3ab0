"""Waits of the consumer: for what, how long, and to which cause they are attributed."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from dpex.engine.drawing import Drawing
from dpex.engine.event_handler import ANY, EventHandler
from dpex.engine.plan import EnginePlan
from dpex.errors import BatchTimeoutError
from dpex.measure.consumer_time import Tally
from dpex.measure.wait_causes import H2D, NONE_YET, READ, STARTUP, STRAGGLER
from dpex.system.clock import monotonic

if TYPE_CHECKING:
    from dpex.device.pinning import Pinner

TICK_S = 1.0
"""The longest sleep, seconds: some changes wake no thread."""


class Waiting:
    """Prepares waits under the engine's lock, and returns the function that waits, which is called without it."""

    def __init__(self, plan: EnginePlan, events: EventHandler, drawing: Drawing, tally: Tally) -> None:
        self._plan = plan
        self._state = events.state
        self._events = events
        self._drawing = drawing
        self._tally = tally

    def for_results(self, entered: float) -> Callable[[], Any]:
        """Return the wait for workers of a call that began at ``entered``. It lasts `TICK_S` at the most.

        Raises:
            BatchTimeoutError: The call has taken too long already.
        """
        limit = TICK_S
        if math.isfinite(self._state.late.due_at):
            limit = min(limit, max(0.0, self._state.late.due_at - monotonic()))
        if self._plan.timeout_s > 0:
            left = entered + self._plan.timeout_s - monotonic()
            if left <= 0:
                raise self._timed_out()
            limit = min(limit, left)
        self._events.wakeup.watch(self._descriptors())
        self._tally.block(monotonic(), self._cause(), self._idle_ratio())
        return partial(self._events.wakeup.sleep, limit)

    def _descriptors(self) -> list[int]:
        """Return those of the pools, and of the engine that reads while there is room for what it has read."""
        watched = [fd for pool in self._events.performer.pools.values() for fd in pool.descriptors()]
        reading = self._drawing.descriptors()
        return watched + reading if reading and self._state.room(starving=True) else watched

    def for_pinning(self, pinner: Pinner, entered: float) -> Callable[[], Any] | None:
        """Have the next batch in turn pinned. Return the wait for it."""
        job = pinner.first(self._state.schedule)
        if job is None or job.finished.is_set():
            return None
        deadline = entered + self._plan.timeout_s if self._plan.timeout_s > 0 else math.inf
        self._tally.block(monotonic(), H2D)
        return partial(self._await_pinned, pinner, job, deadline)

    def _await_pinned(self, pinner: Pinner, job: Any, deadline: float) -> None:
        if not pinner.wait(job, deadline):
            raise self._timed_out()

    def _timed_out(self) -> BatchTimeoutError:
        self._tally.errors["timeout"] += 1
        return BatchTimeoutError(f"DataLoader timed out after {self._plan.timeout_s:g} seconds")

    def _cause(self) -> int:
        """Return the cause of the wait that is about to begin. It may be known only once the batch is here."""
        schedule = self._state.schedule
        if schedule.ready:
            return STRAGGLER
        if not self._state.placement.running():
            return STARTUP
        if self._drawing.awaits_reading(schedule):
            return READ
        self._events.awaited = schedule.next_number if self._plan.in_order else ANY
        return NONE_YET

    def _idle_ratio(self) -> float:
        """Return the part of the workers that have nothing to do."""
        schedule, workers = self._state.schedule, self._state.placement.running()
        if self._plan.logicals:
            at_work = schedule.at_work
        else:
            load = self._state.dispatch.load
            at_work = schedule.pending() + sum(
                min(load[n], pool.at_work()) for n, pool in self._events.performer.pools.items()
            )
        return max(0.0, 1.0 - at_work / workers) if workers else 0.0
