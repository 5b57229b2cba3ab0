"""The state of one pass over the data: events in, instructions out. PURE.

`EngineState` joins the `Schedule` (which batch is next), the `Placement` (which worker has which tickets), the logical
workers and the failures. Worker pools appear as reports (`PoolStatus`), and time is an argument. The owner calls these
methods::

    for event in pool.poll():
        state.apply_event(event, now)
    perform(state.placement.instructions)

Rules:

* The owner removes each instruction from ``placement.instructions`` once it has performed the instruction, in order.
* If a pool does not take a message, the owner calls `refused`. If it cannot start workers, the owner calls
  `Placement.scale_refused`.
* The owner reports a changed status of a pool (`Placement.update_status`) before it hands in the events of that pool.
* Each message has an instruction. A finished batch waits in ``schedule`` until the consumer takes it. The owner draws
  `room` tickets from ``schedule``.

The owner is one thread at a time. Other threads may read ``placement``, ``failures`` and ``late.made_again``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from dpex.measure.settings import Settings
from dpex.schedule.events import (
    Discard,
    EnterEpoch,
    PoolEvent,
    Send,
    Snapshot,
    TicketMade,
    WorkerGone,
    WorkerUp,
)
from dpex.schedule.failures import Failures, LateTickets
from dpex.schedule.logical_workers import LogicalWorkers
from dpex.schedule.placement import Placement
from dpex.schedule.prefetch import PrefetchRules
from dpex.schedule.progress import ResumePoint
from dpex.schedule.schedule import SHARED, Schedule


class EngineState:
    """See the module.

    Args:
        logicals: The number of logical workers; 0: any worker makes any ticket.
        iterable: True if each logical worker reads a stream of its own.
        tolerates: True if batches omit samples that fail to load.
    """

    def __init__(
        self,
        *,
        logicals: int,
        iterable: bool,
        in_order: bool,
        rules: PrefetchRules,
        settings: Settings,
        tolerates: bool = False,
    ) -> None:
        self._count = logicals
        self._iterable = iterable
        self._in_order = in_order
        self.epoch: int = -1
        self.rules = rules
        self.placement: Placement = Placement(settings, rules)
        self.logicals: LogicalWorkers = LogicalWorkers(self.placement, logicals, iterable=iterable)
        self.failures: Failures = Failures(self.placement, self.logicals, iterable=iterable, tolerates=tolerates)
        self.late: LateTickets = LateTickets(self.placement, may_make=in_order and not logicals)
        self.schedule: Schedule = self._new_schedule()

    def _new_schedule(self) -> Schedule:
        prefetch = self.rules.prefetch(self.placement.settings)
        return Schedule(prefetch=prefetch, queues=self._count, in_order=self._in_order)

    # -- events of the pools -------------------------------------------------------------------------------------

    def apply_event(self, event: PoolEvent, now: float) -> None:
        """Take in an event of a pool at ``now``, in seconds of a monotonic clock."""
        if isinstance(event, TicketMade):
            self.apply_made(event)
        elif isinstance(event, WorkerUp):
            if not self._count:
                self.placement.hand_back()
            self.logicals.worker_up(now)
        elif isinstance(event, WorkerGone):
            self.failures.worker_ended(self.schedule, self.epoch, event, now)
        elif isinstance(event, Snapshot):
            self.logicals.snapshot(event, self.epoch, self.schedule.position()[0])
        else:
            self.placement.instructions.append(event)

    def apply_made(self, event: TicketMade) -> None:
        """Take in the result of a ticket."""
        schedule, number = self.schedule, event.number
        ticket = schedule.ticket(number) if event.epoch == self.epoch else None
        if ticket is None:
            self.placement.instructions.append(Discard((event.value,)))  # the epoch is over, or it was made twice
            return
        times = event.times
        self.rules.add_batch(times.busy_s, times.nbytes)
        self.placement.remove_ticket(number)
        if event.stream_end:
            self.logicals.stream_ended(self.epoch, ticket)
            schedule.end_queue(ticket.queue)
        else:
            if self._count:
                self.logicals.logs[ticket.queue].add_made(event.epoch, number, ticket.index)
            schedule.accept_result(number, event.value, times.samples, times.nbytes)

    def refused(self, send: Send) -> None:
        """Take back a message that a pool could not take."""
        self._take_back(send)
        if send.worker is None:
            self.placement.issue_elsewhere(self.schedule, self.epoch)

    def _take_back(self, send: Send) -> None:
        self.logicals.refused(self.placement.refused(self.schedule, send))

    # -- the consumer --------------------------------------------------------------------------------------------

    def begin_epoch(self, resume: ResumePoint | None = None, now: float = 0.0) -> None:
        """Begin an epoch at ``now``, in seconds. Undelivered batches of the epoch before it are dropped.

        Args:
            resume: The point from which the epoch resumes, if an earlier run began it.
            now: The time, in seconds.
        """
        placement, former = self.placement, self.schedule
        while sends := [instruction for instruction in placement.instructions if isinstance(instruction, Send)]:
            self._take_back(sends[0])
        unwanted: tuple[Callable[[], Any], ...] = tuple(delivery.payload for delivery in former.made())
        if unwanted:
            placement.instructions.append(Discard(unwanted))
        self.logicals.new_epoch(self.epoch, former)
        self.epoch = self.epoch + 1 if resume is None else resume.epoch
        placement.instructions.append(EnterEpoch(self.epoch))
        placement.new_epoch()
        self.all_queues_are_dirty()
        self.schedule = self._new_schedule()
        if resume is not None:
            self.logicals.resume_at(resume, self.schedule)

    def resize(self, settings: Settings) -> None:
        """Ask for other numbers of workers. `settle_prefetch` changes the prefetch once the pools were asked."""
        if self._count:
            self.placement.keep_workers(settings)
        else:
            self.placement.resize(settings)

    def settle_prefetch(self) -> None:
        """Set the prefetch from the wanted settings and from the times and bytes of the batches so far."""
        prefetch = self.rules.prefetch(self.placement.settings)
        if prefetch != self.schedule.prefetch:
            self.schedule.set_prefetch(prefetch)

    def issue(self, now: float, *, starving: bool) -> None:
        """Send waiting tickets, as far as workers take them; if ``starving``, incomplete messages as well."""
        self.placement.incomplete.clear()
        sender = self.logicals if self._count else self.placement
        sender.issue(self.schedule, self.epoch, now, starving=starving)

    def consumer_waits(self, cpus: int, now: float) -> None:
        """Prepare for a wait of the consumer, on a machine that has CPUs for ``cpus`` workers."""
        if self.placement.take_over_locally(cpus):
            self.all_queues_are_dirty()
        else:
            self.placement.give_up_without_workers()
        self.late.remake_late(self.schedule, self.epoch, now)

    def all_queues_are_dirty(self) -> None:
        """Mark all queues as possibly having tickets to send."""
        self.placement.dirty.update(range(self._count) if self._count else (SHARED,))

    # -- questions -----------------------------------------------------------------------------------------------

    def point(self) -> ResumePoint:
        """Return the progress of this epoch. Tickets of streams are interchangeable, so only their number counts."""
        first, ahead = self.schedule.position()
        turn = self.schedule.queue_of(first) if self._iterable else first % max(1, self._count)
        if self._iterable:
            first, ahead = first + len(ahead), frozenset()
        points = []
        for queue, log in enumerate(self.logicals.logs):
            next_of_queue, delivered, has_ended = self.schedule.standing(queue)
            points.append(log.point(self.epoch, next_of_queue, delivered=delivered, has_ended=has_ended))
        return ResumePoint(
            epoch=max(0, self.epoch),
            first=first,
            ahead=ahead,
            turn=turn,
            logicals=tuple(points),
        )

    def room(self, starving: bool) -> int:
        """Return the number of tickets to draw now; 0 if they would not fill a message, unless ``starving``."""
        schedule, rules = self.schedule, self.rules
        room = schedule.room
        if room and rules.is_budgeted:
            room = rules.within_budget(room, self.placement.settings, schedule.in_flight, schedule.ready_bytes)
        if not room or not (starving or rules.group == 1 or room >= rules.group):
            return 0
        return room

    def has_to_send(self, starving: bool) -> bool:
        """Return True if `issue` would have an effect."""
        if not self.placement.dirty:
            return False
        return starving or not self.schedule.ready or self.placement.dirty != self.placement.incomplete

    def apply_averages(self) -> None:
        """Set message size and prefetch from the times and bytes of the batches so far."""
        self.rules.regroup(self.placement.settings, max(1, self.placement.serving()))
        self.settle_prefetch()
