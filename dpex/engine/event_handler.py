"""Takes in what pools report: measures it, and hands it to the engine's state.

Used by the thread that holds the engine's lock: the consumer's, which takes in everything (`collect`), or the one that
pins, which takes in batches and random states only (`listen`). Any other event, and all that came after it, waits for
the consumer, in order; so does an error.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from dpex.engine.performer import Performer
from dpex.engine.sample_errors import NOBODY, SampleErrors
from dpex.engine.wakeup import Wakeup
from dpex.measure.batch_times import BatchTimes
from dpex.measure.sampling import SlowestSamples
from dpex.schedule.engine_state import EngineState
from dpex.schedule.events import PoolEvent, Snapshot, TicketMade
from dpex.schedule.schedule import Schedule

if TYPE_CHECKING:
    from dpex.device.pinning import Pinner

NOT_BLOCKED, ANY = -2, -1
"""In place of the number of the batch that is waited for."""


class EventHandler:
    """Events of the pools.

    Attributes:
        state: The engine's state, which is told the events.
        performer: The pools, and what performs instructions.
        wakeup: Wakes the consumer.
        sample_errors: Samples that could not be loaded.
        awaited: The number of the batch that the consumer waits for, or `NOT_BLOCKED` or `ANY`.
        awaited_times: What making that batch took, once it is here.
        slow_samples: The samples that took longest.
    """

    def __init__(
        self, state: EngineState, performer: Performer, wakeup: Wakeup, sample_errors: SampleErrors = NOBODY
    ) -> None:
        self.state = state
        self.performer = performer
        self.wakeup = wakeup
        self._unheard: deque[PoolEvent] = deque()
        self._overheard = False
        self.awaited = NOT_BLOCKED
        self.awaited_times: BatchTimes | None = None
        self.slow_samples = SlowestSamples()
        self.sample_errors = sample_errors

    def listen(self, pinner: Pinner) -> list[int]:
        """In the thread that pins, take in a few batches and hand them over. Return the descriptors to watch."""
        schedule, performer = self.state.schedule, self.performer
        try:
            if not is_enough_ahead(schedule, pinner):
                self.overhear()
        except Exception as error:
            performer.fatal = error
        pinner.hand_over(schedule, pinner.ahead)
        if performer.fatal is not None or self._unheard or is_enough_ahead(schedule, pinner):
            return []
        return [fd for pool in performer.pools.values() for fd in pool.descriptors()]

    def overhear(self) -> None:
        """Take in batches and states. The consumer is woken if there was anything."""
        if self._unheard:
            return
        for name, pool in list(self.performer.pools.items()):
            events = pool.poll()
            self.performer.report(name)
            self._unheard.extend(events)
            events.clear()
        if self._unheard:
            self._overheard = True
            self.wakeup.ring()
        while self._unheard and isinstance(self._unheard[0], (TicketMade, Snapshot)):
            self._hear(self._unheard.popleft(), 0.0)

    def collect(self, now: float) -> bool:
        """Take in everything. Return True if there was anything since the last call.

        Raises:
            Exception: What ends the epoch.
        """
        performer = self.performer
        heard, self._overheard = self._overheard, False
        while self._unheard:
            self._hear(self._unheard[0], now)
            del self._unheard[0]
        for name, pool in list(performer.pools.items()):
            events = pool.poll()
            performer.report(name)
            heard = heard or bool(events)
            while events:  # one whose handling was broken off is handled again (see `dpex.system.interrupts`)
                self._hear(events[0], now)
                del events[0]
        performer.perform()
        performer.raise_fatal()
        return heard

    def _hear(self, event: PoolEvent, now: float) -> None:
        if type(event) is not TicketMade:
            self.state.handle(event, now)
            return
        slowest, number = event.times.slowest, event.number
        if (
            (slowest and slowest[0] > self.slow_samples.least_s)
            or self.awaited in (number, ANY)
            or self.sample_errors.is_on
        ):
            self._measure(event)
        self.state.made(event)

    def _measure(self, event: TicketMade) -> None:
        """Keep what is needed of a result that is slow, awaited, or has failed samples."""
        state = self.state
        ticket = state.schedule.ticket(event.number)
        if ticket is None or event.epoch != state.epoch:
            return
        times = event.times
        if times.slowest and times.slowest[0] > self.slow_samples.least_s:
            self.slow_samples.add(times.slowest[0], ticket.index, times.slowest[1])
        if self.sample_errors.is_on:
            self.sample_errors.made((event.epoch, event.number), times.samples, times.failed)
        if self.awaited in (event.number, ANY):
            self.awaited_times = times


def is_enough_ahead(schedule: Schedule, pinner: Pinner) -> bool:
    """Return True if as many batches wait for their delivery as are pinned ahead of it."""
    return len(schedule.upcoming(pinner.ahead)) >= pinner.ahead
