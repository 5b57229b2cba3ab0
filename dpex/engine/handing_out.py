"""Hands out the batch that is next in turn: finds it, opens it, or has it made in the training process.

Used by the consumer's thread under the engine's lock. What an exception of a signal handler breaks off is gone on with
by the next call (see `dpex.system.interrupts`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from typing import Any

from dpex.core.engine_state import EngineState
from dpex.core.schedule import Delivery
from dpex.engine.drawing import Drawing
from dpex.engine.event_handler import NOT_BLOCKED, EventHandler
from dpex.engine.making_here import MakingHere
from dpex.engine.plan import EnginePlan
from dpex.engine.supply import Supply
from dpex.engine.waiting import TICK_S, Waiting
from dpex.measure.consumer_time import Tally
from dpex.measure.wait_causes import SAMPLER, Making
from dpex.pools.base import WorkerPool
from dpex.system.clock import monotonic
from dpex.system.interrupts import is_interrupt, keep_result


class HandingOut:
    """See the module.

    ``schedule``: of the epoch. ``delivery``: what is next in turn, from when that is known until it is handed out.
    ``opened_at``: when the latest batch began to be opened, or was made.
    """

    def __init__(
        self,
        plan: EnginePlan,
        state: EngineState,
        pools: Mapping[str, WorkerPool],
        event_handler: EventHandler,
        drawing: Drawing,
        supply: Supply,
        making: MakingHere,
        waiting: Waiting,
        tally: Tally,
    ) -> None:
        self.delivery: Delivery | None = None
        self.opened_at = 0.0
        self._opened_into: list[Any] = []
        self._plan = plan
        self._state = state
        self._pools = pools
        self._event_handler = event_handler
        self._drawing = drawing
        self._drawn = drawing.drawn
        self.schedule = state.schedule
        self._supply = supply
        self._making = making
        self._waiting = waiting
        self._tally = tally

    def seek(self, hand: list[Any], entered: float) -> Callable[[], Any] | None:
        """The next batch in turn: hand it out, make it, or return what to wait for."""
        schedule, pinner = self.schedule, self._plan.pinner
        if self._making.unsettled is not None:
            self._making.settle()
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
            if self._state.is_all_made_here():
                self._making.make_next()
            elif not self._supply.collect():
                if schedule.finished:
                    raise StopIteration
                if (wait := self._make_or_wait(entered)) is not None:
                    return wait

    def _make_or_wait(self, entered: float) -> Callable[[], Any] | None:
        """Make a batch in place of workers, or do what is to be done before a wait and return it."""
        if self._state.must_be_made_here_meanwhile():
            self._making.make_next()
            return None
        ticket = self._state.ticket_to_stand_in_for()
        pause_s = TICK_S if ticket is None else self._making.pause_s()
        if ticket is not None and pause_s <= 0.0:
            self._making.stand_in(ticket)
            return None
        self._supply.before_a_wait()
        self._making.rest()
        late = self._state.late.to_be_made_here
        if late is None:
            return self._waiting.for_results(entered, pause_s)
        self._making.make_late(late)
        return None

    def hand_out(self, hand: list[Any]) -> None:
        """Open what is to be delivered; each step may be done again, should it be broken off."""
        delivery = self.delivery
        if delivery is not None and not self._opened_into:
            self.schedule.deliver(delivery)
            self._count(delivery)
            if self._plan.logicals or (self._pools and not self._state.is_all_made_here()):
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

    def straight_through(self, hand: list[Any]) -> None:
        """Draw, make and hand out one batch, with nothing else on its way: an error of its own is its delivery."""
        drawn, schedule = self._drawn, self.schedule
        if not drawn:
            began = monotonic()
            self._drawing.draw_one(schedule)
            self._tally.busy(SAMPLER, began, monotonic())
        try:
            made, samples = self._making.make(schedule.drawn, drawn[0])
        except Exception as error:
            if not is_interrupt(error):
                schedule.straight_through(drawn)
            raise
        self.opened_at = monotonic()
        self._tally.batches += 1  # from here on without a call: see `dpex.system.interrupts`
        self._tally.samples += samples
        schedule.drawn = schedule.next_number = schedule.drawn + 1
        schedule.delivered += 1
        del drawn[0]
        hand += (made,)

    def holds_a_batch(self) -> bool:
        """Whether a batch has left the schedule and was not handed out."""
        return self.delivery is not None and not self.schedule.awaits(self.delivery)

    def drop(self) -> None:
        """Of an epoch that was broken off: decoding a batch and dropping it gives its memory back."""
        taken, self.delivery = self.delivery, None
        if taken is not None:
            with contextlib.suppress(Exception):
                taken.payload()
