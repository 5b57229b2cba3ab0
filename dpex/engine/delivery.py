"""Delivers the next batch in turn, or the error in its place. If the loader pins batches, it is pinned beforehand.

The consumer's thread calls it under the engine's lock. The pinning thread calls `take_results`, `may_take_results`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from threading import get_ident
from typing import TYPE_CHECKING, Any

from dpex.engine.pools import NOT_BLOCKED, Pools
from dpex.errors import BatchTimeoutError, SampleTimeoutError, WorkerDiedError
from dpex.measure.causes import H2D
from dpex.measure.consumer_time import Tally
from dpex.schedule.engine_state import EngineState
from dpex.schedule.schedule import MadeBatch
from dpex.system.clock import monotonic
from dpex.worker.decoded_stream import FailedRead
from dpex.worker.fetch import Failure

if TYPE_CHECKING:
    from dpex.device.pinning import Pinner
    from dpex.engine.plan import EnginePlan

OF_WORKERS = (WorkerDiedError, SampleTimeoutError)
"""Errors that report lost workers."""
ERRORS = (FailedRead, *OF_WORKERS)
"""Types of values that take the place of a batch that could not be made."""


class Delivery:
    """See the module.

    Attributes:
        opened_s: Seconds that the current call of ``next()`` took to open its batch; None until the batch is open.
        value: The batch, or the error in its place, that the current call of ``next()`` is to return.
    """

    def __init__(self, plan: EnginePlan, state: EngineState, pools: Pools, tally: Tally) -> None:
        self.opened_s: float | None = None
        self.value: Any = None
        self._plan = plan
        self._state = state
        self._pools = pools
        self._tally = tally

    def hand_out(self, batch: MadeBatch, holds: bool) -> None:
        """Open the batch that is next in turn.

        ``holds``: True if another engine decodes the batch. The batch then stays in `Schedule.held`.
        """
        began = monotonic()
        value = batch.payload()
        if type(value) is Failure:
            try:
                value.wrapper.reraise()
            except Exception as error:
                value = FailedRead(error)
        self.opened_s = monotonic() - began
        schedule, errors = self._state.schedule, self._tally.errors
        if holds:
            schedule.held.append((value, batch))
            schedule.deliver(batch)
        else:
            self.value = value
            schedule.deliver(batch, get_ident())
            if type(value) is FailedRead:
                errors["batch"] += 1
        if isinstance(value, OF_WORKERS):
            errors["worker"] += 1
        self._count(batch)

    def _count(self, batch: MadeBatch) -> None:
        tally, pools = self._tally, self._pools
        tally.batches += 1
        tally.samples += batch.samples
        if tally.pending_s:
            tally.explain(pools.awaited_times)
        pools.awaited, pools.awaited_times = NOT_BLOCKED, None
        if self._plan.pinner is not None:
            self._plan.pinner.copied_bytes += batch.nbytes

    # -- page-locked memory, and devices -------------------------------------------------------------------------

    def wait_for_pinning(self, pinner: Pinner, entered: float) -> Callable[[], Any] | None:
        """Have the next batch in turn pinned. Return a function that waits for it, or None if no wait is needed.

        ``entered``: The time at which ``next()`` was called.
        """
        job = pinner.first(self._state.schedule)
        if job is None or job.finished.is_set():
            return None
        deadline = entered + self._plan.timeout_s if self._plan.timeout_s > 0 else math.inf
        self._tally.block(monotonic(), H2D)
        return partial(self._await_pinned, pinner, job, deadline)

    def _await_pinned(self, pinner: Pinner, job: Any, deadline: float) -> None:
        if not pinner.wait(job, deadline):
            raise self.timed_out()

    def take_results(self, pinner: Pinner) -> bool:
        """Take in finished batches and queue the next ones for pinning. Return True if there was an event or error."""
        has_events, schedule, pools = False, self._state.schedule, self._pools
        try:
            if len(schedule.upcoming(pinner.ahead)) < pinner.ahead:
                has_events = pools.take_results()
        except Exception as error:
            pools.fatal, has_events = error, True
        pinner.hand_over(schedule, pinner.ahead)
        return has_events

    def may_take_results(self, pinner: Pinner) -> bool:
        """Return True if fewer than ``pinner.ahead`` batches wait, and neither an error nor a deferred event waits."""
        if self._pools.must_wait_for_the_consumer:
            return False
        return len(self._state.schedule.upcoming(pinner.ahead)) < pinner.ahead

    # -- errors --------------------------------------------------------------------------------------------------

    def timed_out(self) -> BatchTimeoutError:
        self._tally.errors["timeout"] += 1
        return BatchTimeoutError(f"DataLoader timed out after {self._plan.timeout_s:g} seconds")
