"""The batch that is next in turn: finds it, opens it, hands it out, or raises the error in its place.

Used by the consumer's thread under the engine's lock. What a signal handler interrupts here is resumed by the next call
(see `dpex.system.interrupts`).
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable
from typing import Any

from dpex.engine.event_handler import NOT_BLOCKED, EventHandler
from dpex.engine.plan import EnginePlan
from dpex.engine.supply import Supply
from dpex.engine.waiting import Waiting
from dpex.errors import SampleTimeoutError, WorkerDiedError
from dpex.measure.consumer_time import Tally
from dpex.schedule.schedule import Delivery
from dpex.system.clock import monotonic
from dpex.system.interrupts import is_interrupt, keep_result
from dpex.worker.decoded_stream import FailedRead
from dpex.worker.outcome import Failure

_OF_WORKERS = (WorkerDiedError, SampleTimeoutError)
ERRORS = (Failure, FailedRead, *_OF_WORKERS)
"""Types of what stands in place of a batch that could not be made."""


class NextBatch:
    """See the module.

    Attributes:
        schedule: The schedule of the epoch.
        delivery: The batch that is next in turn, from when it is known until it is handed out.
        opened_at: When the latest batch began to be opened, seconds.
    """

    def __init__(self, plan: EnginePlan, events: EventHandler, supply: Supply, waiting: Waiting, tally: Tally) -> None:
        self.schedule = events.state.schedule
        self.delivery: Delivery | None = None
        self.opened_at = 0.0
        self._opened_into: list[Any] = []
        self._plan = plan
        self._events = events
        self._supply = supply
        self._waiting = waiting
        self._tally = tally

    def seek(self, hand: list[Any], entered: float) -> Callable[[], Any] | None:
        """Hand out the next batch in turn, or return the wait for it."""
        schedule, pinner = self.schedule, self._plan.pinner
        while True:
            if pinner is not None and (wait := self._waiting.for_pinning(pinner, entered)) is not None:
                return wait
            self.delivery = schedule.peek()
            if self.delivery is not None:
                self.hand_out(hand)
                return None
            if schedule.finished:
                raise StopIteration
            self._supply.fill(starving=True)
            if not self._supply.collect():
                if schedule.finished:
                    raise StopIteration
                self._supply.before_a_wait()
                return self._waiting.for_results(entered)

    def hand_out(self, hand: list[Any]) -> None:
        """Open what is to be delivered. Each step may be repeated if it was interrupted."""
        delivery = self.delivery
        if delivery is not None and not self._opened_into:
            self.schedule.deliver(delivery)
            self._count(delivery)
            self._supply.fill()
            self.opened_at = monotonic()
            self._opened_into = hand
            try:
                keep_result(hand, delivery.payload)
            except Exception as error:
                if not is_interrupt(error):  # it will never open, and the batches behind it are waited for
                    self.delivery = None
                raise
        self.delivery, self._opened_into = None, []

    def _count(self, delivery: Delivery) -> None:
        tally, events = self._tally, self._events
        tally.batches += 1
        tally.samples += delivery.samples
        if tally.pending_s:
            tally.explain(events.awaited_times)
        events.awaited, events.awaited_times = NOT_BLOCKED, None
        if self._plan.pinner is not None:
            tally.pinned_bytes += delivery.nbytes

    def holds_a_batch(self) -> bool:
        """Return True if a batch has left the schedule and was not handed out."""
        return self.delivery is not None and not self.schedule.awaits(self.delivery)

    def drop(self) -> None:
        """Decode and drop the batch of an epoch that was broken off, which gives its memory back."""
        taken, self.delivery = self.delivery, None
        if taken is not None:
            with contextlib.suppress(Exception):
                taken.payload()


def raise_from(hand: list[Any], errors: Counter[str]) -> None:
    """Take the error that ``hand`` holds out of it, count it if it is the batch's own, and raise it."""
    value = hand[0]
    del hand[:]
    if isinstance(value, _OF_WORKERS):
        raise value
    errors["batch"] += 1
    if isinstance(value, FailedRead):
        raise value.error
    value.wrapper.reraise()


def count_death(error: Exception, errors: Counter[str]) -> None:
    """Count an error if it says that workers were lost."""
    if isinstance(error, _OF_WORKERS):
        errors["worker"] += 1
