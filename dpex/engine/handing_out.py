"""Hands out the batch that is next in turn: finds it, and opens it.

Used by the consumer's thread under the engine's lock. What an exception of a signal handler breaks off is gone on with
by the next call (see `dpex.system.interrupts`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

from dpex.core.engine_state import EngineState
from dpex.core.schedule import Delivery
from dpex.engine.event_handler import NOT_BLOCKED, EventHandler
from dpex.engine.plan import EnginePlan
from dpex.engine.supply import Supply
from dpex.engine.waiting import Waiting
from dpex.measure.consumer_time import Tally
from dpex.measure.wait_causes import Making
from dpex.system.clock import monotonic
from dpex.system.interrupts import is_interrupt, keep_result


class HandingOut:
    """See the module.

    ``schedule``: of the epoch. ``delivery``: what is next in turn, from when that is known until it is handed out.
    ``opened_at``: when the latest batch began to be opened.
    """

    def __init__(
        self,
        plan: EnginePlan,
        state: EngineState,
        event_handler: EventHandler,
        supply: Supply,
        waiting: Waiting,
        tally: Tally,
    ) -> None:
        self.delivery: Delivery | None = None
        self.opened_at = 0.0
        self._opened_into: list[Any] = []
        self._plan = plan
        self._state = state
        self._event_handler = event_handler
        self.schedule = state.schedule
        self._supply = supply
        self._waiting = waiting
        self._tally = tally

    def seek(self, hand: list[Any], entered: float) -> Callable[[], Any] | None:
        """Hand out the next batch in turn, or return what to wait for."""
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
        """Open what is to be delivered; each step may be done again, should it be broken off."""
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
                if not is_interrupt(error):  # it is not going to open, and the batches behind it are waited for
                    self.delivery = None
                raise
        self.delivery, self._opened_into = None, []

    def _count(self, delivery: Delivery) -> None:
        tally, events = self._tally, self._event_handler
        tally.batches += 1
        tally.samples += delivery.samples
        if tally.pending_s:
            tally.explain(Making(*events.awaited_making) if events.awaited_making else None)
        events.awaited, events.awaited_making = NOT_BLOCKED, ()
        if self._plan.pinner is not None:
            tally.pinned_bytes += delivery.nbytes

    def holds_a_batch(self) -> bool:
        """Whether a batch has left the schedule and was not handed out."""
        return self.delivery is not None and not self.schedule.awaits(self.delivery)

    def drop(self) -> None:
        """Of an epoch that was broken off: decoding a batch and dropping it gives its memory back."""
        taken, self.delivery = self.delivery, None
        if taken is not None:
            with contextlib.suppress(Exception):
                taken.payload()
