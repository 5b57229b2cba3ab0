"""Waits of the consumer: for what, for how long, and what they are put down to."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from dpex.core.engine_state import EngineState
from dpex.engine.drawing import Drawing
from dpex.engine.event_handler import ANY, EventHandler
from dpex.engine.plan import EnginePlan
from dpex.errors import BatchTimeoutError
from dpex.measure.consumer_time import Tally
from dpex.measure.wait_causes import H2D, NONE_YET, READ, STARTUP, STRAGGLER
from dpex.pools.base import WorkerPool
from dpex.system.clock import monotonic
from dpex.system.wakeup import Wakeup

if TYPE_CHECKING:
    from dpex.engine.pin_memory import Pinner

TICK_S = 1.0
"""The longest sleep: some things happen without waking anybody."""


class Waiting:
    """Prepares waits under the engine's lock, and returns what waits, which is called without it."""

    def __init__(
        self,
        plan: EnginePlan,
        state: EngineState,
        pools: Mapping[str, WorkerPool],
        event_handler: EventHandler,
        drawing: Drawing,
        tally: Tally,
        errors: Counter[str],
        wakeup: Wakeup,
    ) -> None:
        self._plan = plan
        self._state = state
        self._pools = pools
        self._event_handler = event_handler
        self._drawing = drawing
        self._tally = tally
        self._errors = errors
        self._wakeup = wakeup

    def for_results(self, entered: float) -> Callable[[], Any]:
        """Return the wait for workers, of a call that began at ``entered``; it lasts `TICK_S` at the longest.

        Raises:
            BatchTimeoutError: it took too long already.
        """
        limit = TICK_S
        if math.isfinite(self._state.late.due_at):
            limit = min(limit, max(0.0, self._state.late.due_at - monotonic()))
        if self._plan.timeout_s > 0:
            left = entered + self._plan.timeout_s - monotonic()
            if left <= 0:
                raise self._timed_out()
            limit = min(limit, left)
        self._wakeup.watch(self._descriptors())
        self._tally.block(monotonic(), self._cause(), self._idle_ratio())
        return partial(self._wakeup.sleep, limit)

    def _descriptors(self) -> list[int]:
        """Of the pools, and of those who read, while there is room for what they have read."""
        watched = [fd for pool in self._pools.values() for fd in pool.descriptors()]
        reading = self._drawing.descriptors()
        return watched + reading if reading and self._state.room(starving=True) else watched

    def for_pinning(self, pinner: Pinner, entered: float) -> Callable[[], Any] | None:
        """Have what is next in turn pinned; returns the wait for the first of it."""
        job = pinner.hand_over(self._state.schedule, 1 + pinner.ahead)
        if job is None or job.finished.is_set():
            return None
        deadline = entered + self._plan.timeout_s if self._plan.timeout_s > 0 else math.inf
        self._tally.block(monotonic(), H2D)
        return partial(self._await_pinned, pinner, job, deadline)

    def _await_pinned(self, pinner: Pinner, job: Any, deadline: float) -> None:
        if not pinner.wait(job, deadline):
            raise self._timed_out()

    def _timed_out(self) -> BatchTimeoutError:
        self._errors["timeout"] += 1
        return BatchTimeoutError(f"DataLoader timed out after {self._plan.timeout_s} seconds")

    def _cause(self) -> int:
        """For want of what the consumer is about to wait; the batch itself may have to tell."""
        schedule = self._state.schedule
        if schedule.ready:
            return STRAGGLER
        if not self._state.placement.running():
            return STARTUP
        if self._drawing.awaits_reading(schedule):
            return READ
        self._event_handler.awaited = schedule.next_number if self._plan.in_order else ANY
        return NONE_YET

    def _idle_ratio(self) -> float:
        """Part of the workers that has nothing to do."""
        schedule, workers = self._state.schedule, self._state.placement.running()
        if self._plan.logicals:
            at_work = schedule.at_work
        else:
            load = self._state.dispatch.load
            at_work = schedule.pending() + sum(min(load[n], pool.at_work()) for n, pool in self._pools.items())
        return max(0.0, 1.0 - at_work / workers) if workers else 0.0
