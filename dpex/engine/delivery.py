"""The batch that is next in turn: has it pinned, opens it, hands it out, or raises the error in its place.

Used by the consumer's thread under the engine's lock. What a signal handler interrupts here is resumed by the next call
(see `dpex.system.interrupts`).
"""

from __future__ import annotations

import contextlib
import math
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from dpex.engine.pools import NOT_BLOCKED, Pools
from dpex.errors import BatchTimeoutError, SampleTimeoutError, WorkerDiedError
from dpex.measure.consumer_time import H2D, Tally
from dpex.schedule.engine_state import EngineState
from dpex.schedule.schedule import MadeBatch
from dpex.system.clock import monotonic
from dpex.system.interrupts import is_interrupt, keep_result
from dpex.worker.decoded_stream import FailedRead
from dpex.worker.fetch import Failure

if TYPE_CHECKING:
    from dpex.device.pinning import Pinner
    from dpex.engine.engine import EnginePlan

OF_WORKERS = (WorkerDiedError, SampleTimeoutError)
"""Errors that say that workers were lost."""
ERRORS = (Failure, FailedRead, *OF_WORKERS)
"""Types of what stands in place of a batch that could not be made."""


class Delivery:
    """See the module.

    Attributes:
        batch: The batch that is next in turn, from when it is known until it is handed out.
        opened_at: When the latest batch began to be opened, seconds.
    """

    def __init__(self, plan: EnginePlan, state: EngineState, pools: Pools, tally: Tally) -> None:
        self.batch: MadeBatch | None = None
        self.opened_at = 0.0
        self._opened_into: list[Any] = []
        self._plan = plan
        self._state = state
        self._pools = pools
        self._tally = tally

    def hand_out(self, hand: list[Any], fill: Callable[[], None]) -> None:
        """Open what is to be delivered. Each step may be repeated if it was interrupted.

        ``fill``: draws and sends tickets, so that workers go on while this batch is opened.
        """
        batch = self.batch
        if batch is not None and not self._opened_into:
            self._state.schedule.deliver(batch)
            self._count(batch)
            fill()
            self.opened_at = monotonic()
            self._opened_into = hand
            try:
                keep_result(hand, batch.payload)
            except Exception as error:
                if not is_interrupt(error):  # it will never open, and the batches behind it are waited for
                    self.batch = None
                raise
        self.batch, self._opened_into = None, []

    def _count(self, batch: MadeBatch) -> None:
        tally, pools = self._tally, self._pools
        tally.batches += 1
        tally.samples += batch.samples
        if tally.pending_s:
            tally.explain(pools.awaited_times)
        pools.awaited, pools.awaited_times = NOT_BLOCKED, None
        if self._plan.pinner is not None:
            tally.pinned_bytes += batch.nbytes

    def holds_a_batch(self) -> bool:
        """Return True if a batch has left the schedule and was not handed out."""
        return self.batch is not None and not self._state.schedule.awaits(self.batch)

    def drop(self) -> None:
        """Decode and drop the batch of an epoch that was broken off, which gives its memory back."""
        taken, self.batch = self.batch, None
        if taken is not None:
            with contextlib.suppress(Exception):
                taken.payload()

    # -- page-locked memory, and devices -------------------------------------------------------------------------

    def wait_for_pinning(self, pinner: Pinner, entered: float) -> Callable[[], Any] | None:
        """Have the next batch in turn pinned. Return the wait for it, of a call that began at ``entered``."""
        job = pinner.first(self._state.schedule)
        if job is None or job.finished.is_set():
            return None
        deadline = entered + self._plan.timeout_s if self._plan.timeout_s > 0 else math.inf
        self._tally.block(monotonic(), H2D)
        return partial(self._await_pinned, pinner, job, deadline)

    def _await_pinned(self, pinner: Pinner, job: Any, deadline: float) -> None:
        if not pinner.wait(job, deadline):
            raise self.timed_out()

    def overhear(self, pinner: Pinner) -> bool:
        """In the thread that pins, take in a few batches and have them pinned. Return True if there was anything."""
        heard, schedule, pools = False, self._state.schedule, self._pools
        try:
            if len(schedule.upcoming(pinner.ahead)) < pinner.ahead:
                heard = pools.overhear()
        except Exception as error:
            pools.fatal, heard = error, True
        pinner.hand_over(schedule, pinner.ahead)
        return heard

    def may_overhear(self, pinner: Pinner) -> bool:
        """Return True if fewer batches wait for their delivery than are pinned ahead of it, and no error does."""
        if self._pools.must_wait_for_the_consumer:
            return False
        return len(self._state.schedule.upcoming(pinner.ahead)) < pinner.ahead

    # -- errors --------------------------------------------------------------------------------------------------

    def timed_out(self) -> BatchTimeoutError:
        """Return the error that no batch came in time, counted."""
        self._tally.errors["timeout"] += 1
        return BatchTimeoutError(f"DataLoader timed out after {self._plan.timeout_s:g} seconds")


def raise_from(hand: list[Any], errors: Counter[str]) -> None:
    """Take the error that ``hand`` holds out of it, count it if it is the batch's own, and raise it."""
    value = hand[0]
    del hand[:]
    if isinstance(value, OF_WORKERS):
        raise value
    errors["batch"] += 1
    if isinstance(value, FailedRead):
        raise value.error
    value.wrapper.reraise()
