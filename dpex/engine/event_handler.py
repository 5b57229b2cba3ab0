"""Takes in what lanes have to say, and tells whom it concerns.

Used by the thread that holds the engine's lock: the consumer's, which takes in everything (`collect`), or the one that
pins, which takes in batches and random states only (`overhear`). What else it meets, and what came after that, waits
for the consumer, in order; so does an error.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Mapping

from dpex.core.prefetch import Pace
from dpex.core.schedule import Schedule
from dpex.engine.assignment import Tenancy
from dpex.engine.dispatch import Dispatch
from dpex.engine.failures import Casualties
from dpex.measure.sampling import SlowBatch, Slowest, SlowestSamples
from dpex.pools.base import Event, Gone, Lane, Made, Note, Released, Snapshot, Up
from dpex.system.user_warnings import warn
from dpex.system.wakeup import Bell

logger = logging.getLogger("dpex")

NOT_BLOCKED, ANY = -2, -1
"""In place of the number of the batch that is waited for."""


class Intake:
    """``lanes`` are the engine's own. ``fatal``: what ends the epoch at the consumer's next turn.

    ``awaited``: the number of the batch that the consumer waits for; ``awaited_making``: how it was made, once it is
    here (see `dpex.measure.stall_causes.Making`).
    """

    def __init__(
        self,
        lanes: Mapping[str, Lane],
        tenancy: Tenancy,
        pace: Pace,
        dispatch: Dispatch,
        casualties: Casualties,
        bell: Bell,
        *,
        logical: bool,
    ) -> None:
        self._lanes = lanes
        self._tenancy = tenancy
        self._pace = pace
        self._dispatch = dispatch
        self._casualties = casualties
        self._bell = bell
        self._logical = logical
        self._unheard: deque[tuple[Lane, Event]] = deque()
        self._overheard = False
        self.fatal: Exception | None = None
        self.awaited = NOT_BLOCKED
        self.awaited_making: tuple[float, ...] = ()
        self.slowest = Slowest()
        self.slow_samples = SlowestSamples()

    @property
    def waits_for_consumer(self) -> bool:
        """Whether there is something that only the consumer's thread may take in."""
        return self.fatal is not None or bool(self._unheard)

    def overhear(self, schedule: Schedule, epoch: int) -> None:
        """Take in batches, in another thread; the consumer is woken by whatever there was."""
        if self._unheard:
            return
        for lane in list(self._lanes.values()):
            events = lane.poll()
            self._unheard.extend((lane, event) for event in events)
            events.clear()
        if self._unheard:
            self._overheard = True
            self._bell.ring()
        while self._unheard and isinstance(self._unheard[0][1], (Made, Snapshot)):
            self._hear(schedule, epoch, *self._unheard.popleft())

    def collect(self, schedule: Schedule, epoch: int) -> bool:
        """Take in everything; True if there was anything, also since the last time.

        Raises:
            Exception: what ends the epoch.
        """
        heard, self._overheard = self._overheard, False
        while self._unheard:
            self._hear(schedule, epoch, *self._unheard[0])
            del self._unheard[0]
        for lane in list(self._lanes.values()):
            events = lane.poll()
            heard = heard or bool(events)
            while events:  # one whose handling was broken off is handled again (see `dpex.system.interrupts`)
                self._hear(schedule, epoch, lane, events[0])
                del events[0]
        if self.fatal is not None:
            error, self.fatal = self.fatal, None
            raise error
        return heard

    def _hear(self, schedule: Schedule, epoch: int, lane: Lane, event: Event) -> None:
        if type(event) is Made:
            self._made(schedule, epoch, event)
        elif isinstance(event, Up):
            self._tenancy.host_up()
        elif isinstance(event, Gone):
            self.fatal = self._casualties.gone(schedule, lane, event) or self.fatal
        elif isinstance(event, Released):
            self._tenancy.released(event)
        elif isinstance(event, Snapshot):
            self._tenancy.snapshot(event)
        elif isinstance(event, Note):
            _say(event)

    def _made(self, schedule: Schedule, epoch: int, event: Made) -> None:
        if event.epoch != epoch:
            return
        ticket = schedule.ticket(event.number)
        if ticket is None:
            if not schedule.has(event.number, event.value):
                event.value()  # made twice: decoding and dropping it gives its memory back
            return
        self._pace.learn(event.service_s, event.nbytes)
        if event.service_s > self.slowest.least_s:
            self.slowest.add(SlowBatch(event.service_s, epoch, event.number, ticket.index, *event.making[:2]))
        if event.slowest and event.slowest[0] > self.slow_samples.least_s:
            self.slow_samples.add(event.slowest[0], ticket.index, event.slowest[1])
        if self.awaited in (event.number, ANY):
            self.awaited_making = event.making
        self._dispatch.arrived(event.number)
        if self._logical:
            self._tenancy.made(epoch, ticket)
        if event.stream_end:
            self._tenancy.stream_ended(ticket.queue)
            schedule.end_queue(ticket.queue)
        else:
            schedule.done(event.number, event.value, event.samples, event.nbytes)


def _say(note: Note) -> None:
    if note.warning:
        warn(note.text)
    else:
        logger.info(note.text)
