"""Supplies workers with tickets: draws as far ahead as the prefetch allows, and sends what waits.

Used by the thread that holds the engine's lock.
"""

from __future__ import annotations

from functools import cached_property

from dpex.engine.drawing import Drawing
from dpex.engine.event_handler import EventHandler
from dpex.measure.consumer_time import Tally
from dpex.measure.wait_causes import DISPATCH, SAMPLER
from dpex.schedule.events import SEND_EVERYTHING, SEND_FULL_MESSAGES, ConsumerWaits
from dpex.schedule.names import REMOTE
from dpex.system.clock import monotonic
from dpex.system.cpus import static_worker_count


class Supply:
    """See the module. ``collected_at``: when pools were last asked what happened, seconds."""

    def __init__(self, events: EventHandler, drawing: Drawing, tally: Tally) -> None:
        self._state = events.state
        self._performer = events.performer
        self._events = events
        self._drawing = drawing
        self._tally = tally
        self.collected_at = 0.0

    def fill(self, starving: bool = False) -> None:
        """Draw all tickets that the prefetch allows, and send what waits; if ``starving``, all of it now."""
        state = self._state
        room = state.room(starving)
        if room:
            began = monotonic()
            self._drawing.draw(state, room)
            self._tally.busy(SAMPLER, began, monotonic())
            state.dispatch.incomplete.clear()
        if state.has_to_send(starving):
            began = monotonic()
            try:
                self._performer.tell(SEND_EVERYTHING if starving else SEND_FULL_MESSAGES, self.collected_at)
            except OSError:  # no descriptor is left: an error once the consumer lacks a batch
                if starving:
                    raise
            self._tally.busy(DISPATCH, began, monotonic())

    def collect(self) -> bool:
        """Take in what the pools report. Return True if there was anything."""
        self.collected_at = now = monotonic()
        heard = self._events.collect(now)
        if heard:
            state = self._state
            state.learn()
            if state.placement.dirty:
                self._performer.tell(SEND_FULL_MESSAGES if state.schedule.ready else SEND_EVERYTHING, now)
            self._tally.busy(DISPATCH, now, monotonic())
        return heard

    def before_a_wait(self) -> None:
        """Do what a wait for workers needs to end, and what there is time for meanwhile.

        Raises:
            WorkerDiedError: The wait would not end, as no worker is left and none can be had.
        """
        sizes = self._state.sizes
        self._performer.tell(ConsumerWaits(self._cpus if REMOTE in self._performer.pools else 1), monotonic())
        self._performer.raise_fatal()
        if self._state.sizes is not sizes:  # others take over
            self.fill(starving=True)
        self._look_further_ahead()  # idle workers have nothing more urgent to do

    def _look_further_ahead(self) -> None:
        """Draw further ahead where finished batches wait behind a slow one while workers idle."""
        schedule = self._state.schedule
        while self._state.widen_behind_straggler():
            drawn = schedule.drawn
            self.fill(starving=True)
            if schedule.drawn == drawn:
                return

    @cached_property
    def _cpus(self) -> int:
        return static_worker_count()
