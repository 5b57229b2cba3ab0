"""The state of one pass over the data, without anything that acts: events in, instructions out. PURE.

`EngineState` holds the schedule (which batch is next), the prefetch (how far ahead), the placement (which pools and
workers there are, and what they are asked for), the messages under way, and the failures. It knows worker pools by what
they report (`PoolStatus`), and time as an argument. Its owner hands in events and performs what `EngineState.handle`
answers:

    for event in pool.poll():
        perform(state.handle(event, now))

Rules:

* The answer is the list ``placement.instructions``. Its owner takes each instruction out of that list once it has been
  performed, in order, and hands back what follows: a message that a pool does not take (`Refused`), workers that cannot
  be had (`ScaleRefused`), and a changed status of the pool (`Reported`).
* The status of a pool is reported before the events that the pool told.
* There is an instruction for each message, never for each batch. A batch that was made waits in ``schedule``, from
  which the consumer takes it; tickets are drawn there, too, as many as `room` says.
* Instructions that are left when a turn begins were interrupted by a signal handler. The messages among them are
  refused then, so that they are decided anew; the rest is performed.

The owner is one thread at a time. Others may read ``sizes``, ``dispatch.load``, ``failures``, ``late.made_again`` and
``scaling.refused``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from dpex.schedule.dispatch import Dispatch
from dpex.schedule.events import (
    ConsumerWaits,
    EpochBegins,
    Event,
    Notice,
    Opened,
    Refused,
    Reported,
    Resize,
    Resized,
    ScaleRefused,
    Snapshot,
    SplittingKnown,
    StatesWanted,
    TicketMade,
    TicketsWait,
    WorkerGone,
    WorkerUp,
)
from dpex.schedule.failures import Failures
from dpex.schedule.instructions import Discard, EnterEpoch, Instruction, Say, Send
from dpex.schedule.joining import Joining
from dpex.schedule.late_tickets import LateTickets
from dpex.schedule.logical_workers import LogicalWorkers
from dpex.schedule.placement import Placement
from dpex.schedule.prefetch import PrefetchRules, Sizes
from dpex.schedule.progress import LogicalPoint, ResumePoint
from dpex.schedule.scaling import Scaling
from dpex.schedule.schedule import SHARED, Schedule, Ticket
from dpex.schedule.streams import ALL, Splitting


class EngineState:
    """See the module.

    Args:
        logicals: The number of logical workers; 0: any worker makes any ticket.
        iterable: The dataset is a stream, read by each logical worker for itself.
        in_order: Batches are delivered in the order in which they were drawn.
        rules: Say how far ahead the pass runs, and how many tickets a message holds.
        sizes: Workers wanted from the start.
        tolerates: Batches are made without samples that cannot be loaded.
        splitting: Only the first stream of the dataset shows whether there are others; what is found is written here.
    """

    def __init__(
        self,
        *,
        logicals: int,
        iterable: bool,
        in_order: bool,
        rules: PrefetchRules,
        sizes: Sizes,
        tolerates: bool = False,
        splitting: Splitting | None = None,
    ) -> None:
        self._count = logicals
        self._iterable = iterable
        self._in_order = in_order
        self._now = 0.0
        self.epoch = -1
        self.rules = rules
        self.placement = placement = Placement()
        self.logicals = LogicalWorkers(placement, logicals, iterable=iterable)
        self.dispatch = Dispatch(placement, self.logicals, rules, are_bound=logicals > 0)
        self.scaling = Scaling(placement, sizes)
        self.failures = Failures(placement, self.logicals, self.dispatch, iterable=iterable, tolerates=tolerates)
        self.joining = Joining(splitting, placement, self.logicals, self.scaling)
        self.late = LateTickets(placement, self.dispatch, rules, may_make=in_order and not logicals)
        self.schedule = self._new_schedule()

    def _new_schedule(self) -> Schedule:
        prefetch = self.rules.prefetch(self.sizes)
        return Schedule(prefetch=prefetch, queues=self._count, in_order=self._in_order)

    def handle(self, event: Event, now: float = 0.0) -> list[Instruction]:
        """Take in what happened, and return what is to be done, as said at the top of the module.

        Args:
            event: What happened.
            now: Seconds of a clock that does not jump.
        """
        self._now = now
        _HANDLERS[type(event)](self, event)
        return self.placement.instructions

    # -- results, and what becomes of workers --------------------------------------------------------------------

    def made(self, event: TicketMade) -> None:
        """Handle the event that comes once for each batch."""
        schedule, number = self.schedule, event.number
        ticket = schedule.ticket(number) if event.epoch == self.epoch else None
        if ticket is None:
            if event.epoch != self.epoch or not schedule.has(number, event.value):
                self.placement.instructions.append(Discard((event.value,)))  # of an earlier epoch, or made twice
            return
        times = event.times
        self.rules.learn(times.busy_s, times.nbytes)
        self.dispatch.arrived(number)
        if event.stream_end:
            self.logicals.stream_ended(self.epoch, ticket)
            schedule.end_queue(ticket.queue)
            self.joining.settle(schedule, self._now)
        else:
            if self._count:
                self.logicals.logs[ticket.queue].made(event.epoch, number, ticket.index)
            schedule.done(number, event.value, times.samples, times.nbytes)

    def _up(self, _: WorkerUp) -> None:
        if not self._count:
            self.scaling.hand_back()
        self.logicals.worker_up(self._now)

    def _gone(self, event: WorkerGone) -> None:
        self.failures.gone(self.schedule, self.epoch, event, self._now)
        self.joining.settle(self.schedule, self._now)

    def _splitting_known(self, event: SplittingKnown) -> None:
        self.joining.known(self.schedule, event, self._now)

    def _snapshot(self, event: Snapshot) -> None:
        self.logicals.snapshot(event, self.epoch, self.schedule.position()[0])

    def _note(self, event: Notice) -> None:
        self.placement.instructions.append(Say(event.text, event.warning, event.once))

    def _reported(self, event: Reported) -> None:
        self.placement.pools[event.pool] = event.status
        self.dispatch.load.setdefault(event.pool, 0)
        self.dispatch.resume(event.pool)

    # -- what could not be performed -----------------------------------------------------------------------------

    def _refused(self, event: Refused) -> None:
        self.dispatch.refused(self.schedule, event.send)
        if event.send.worker is None:
            self.dispatch.issue_elsewhere(self.schedule, self.epoch)

    def _scale_refused(self, event: ScaleRefused) -> None:
        self.scaling.cannot_be_had(event)

    # -- the consumer --------------------------------------------------------------------------------------------

    def _opened(self, _: Opened) -> None:
        self.scaling.open()

    def _epoch_begins(self, event: EpochBegins) -> None:
        while sends := [instruction for instruction in self.placement.instructions if isinstance(instruction, Send)]:
            self.dispatch.refused(self.schedule, sends[0])
        unwanted: tuple[Callable[[], Any], ...] = tuple(d.payload for d in self.schedule.undelivered())
        if unwanted:
            self.placement.instructions.append(Discard(unwanted))
        self.logicals.new_epoch(self.epoch, self._to_be_finished() if self._count else ())
        self.epoch = self.epoch + 1 if event.resume is None else event.resume.epoch
        self.placement.instructions.append(EnterEpoch(self.epoch))
        self.dispatch.new_epoch()
        self.all_queues_are_dirty()
        self.schedule = self._new_schedule()
        if event.resume is not None:
            self._go_on(event.resume)
        self.joining.begin_epoch(self.schedule)

    def _go_on(self, point: ResumePoint) -> None:
        """Begin the epoch where another run stood."""
        self.joining.go_on(point, self._now)
        logicals = [logical.going_on(point.epoch, point.first) for logical in point.logicals]
        ended = [queue for queue, logical in enumerate(logicals) if logical.has_ended]
        self.schedule.go_on(point.first, point.turn, ended)
        self.logicals.go_on(logicals)

    def _to_be_finished(self) -> list[Ticket]:
        """Return tickets of an epoch that is broken off which logical workers still make, as PyTorch's do.

        These are the tickets that they were sent, or would have been sent if they had had a worker.
        """
        unfinished, logicals = self.schedule.unfinished(), self.logicals
        taking_part = logicals.taking_part
        return [
            ticket
            for ticket in unfinished
            if ticket.issued or (ticket.queue in taking_part and logicals.was_never_placed(ticket.queue))
        ]

    def _resize(self, event: Resize) -> None:
        if self._count:
            self.scaling.keep_workers(event.sizes)
        else:
            self.scaling.resize(event.sizes)

    def _resized(self, _: Resized) -> None:
        self.schedule.set_prefetch(self.rules.prefetch(self.sizes))

    def _states_wanted(self, _: StatesWanted) -> None:
        self.logicals.ask_states()

    def _tickets_wait(self, event: TicketsWait) -> None:
        self.dispatch.issue(self.schedule, self.epoch, self._now, starving=event.starving)

    def _consumer_waits(self, event: ConsumerWaits) -> None:
        if self.scaling.take_over_locally(event.cpus):
            self.all_queues_are_dirty()
        else:
            self.scaling.give_up_without_workers()
        self.late.look(self.schedule, self.epoch, self._now)

    def all_queues_are_dirty(self) -> None:
        """Have all queues looked at for something to send."""
        self.placement.dirty.update(self.logicals.taking_part if self._count else (SHARED,))

    # -- questions -----------------------------------------------------------------------------------------------

    @property
    def sizes(self) -> Sizes:
        """Workers and prefetch that are wanted now."""
        return self.scaling.sizes

    def point(self, undelivered: int = 0) -> ResumePoint:
        """Return where this epoch stands.

        Args:
            undelivered: Batches that left the schedule, but were not taken by the consumer.
        """
        schedule = self.schedule
        first, ahead = schedule.position()
        if self._in_order and not self._iterable:
            first -= undelivered
        return ResumePoint(
            epoch=max(0, self.epoch),
            first=first,
            ahead=ahead,
            turn=self._turn(first),
            logicals=tuple(self._logical_point(queue, first, undelivered) for queue in self.logicals.taking_part),
            streams=self.logicals.streams,
        )

    def _turn(self, first: int) -> int:
        """Return the logical worker whose turn it is at batch ``first``."""
        if not self._iterable:
            return first % max(1, self._count)
        return self.schedule.queue_of(first) if self.logicals.streams == ALL else 0

    def _logical_point(self, queue: int, first: int, undelivered: int) -> LogicalPoint:
        next_of_queue, ready, has_ended = self.schedule.standing(queue)
        if undelivered and not self._iterable:
            next_of_queue = min(next_of_queue, first)
        return self.logicals.logs[queue].point(self.epoch, next_of_queue, undelivered=ready, has_ended=has_ended)

    def room(self, starving: bool) -> int:
        """Return how many tickets should be drawn now; if ``starving``, also where they do not fill a message."""
        schedule, rules = self.schedule, self.rules
        room = schedule.room
        if room and rules.is_budgeted:
            room = rules.within_budget(room, self.scaling.sizes, schedule.in_flight, schedule.ready_bytes)
        if not room or not (starving or rules.group == 1 or room >= rules.group):
            return 0
        return room

    def has_to_send(self, starving: bool) -> bool:
        """Return True if an event `TicketsWait` would have an effect."""
        if not self.placement.dirty:
            return False
        return starving or not self.schedule.ready or self.placement.dirty != self.dispatch.incomplete

    def widen_behind_straggler(self) -> bool:
        """Draw further ahead, if allowed, as finished batches wait behind a slow one. Return True if so.

        Tickets of logical workers go to each in turn, so it may take several until an idle one has a ticket.
        """
        schedule, sizes, rules = self.schedule, self.scaling.sizes, self.rules
        is_given = sizes.prefetch is not None or sizes.tuned_prefetch is not None
        if is_given or (self._count and not rules.may_read_ahead) or not schedule.ready or schedule.room:
            return False
        at_work = schedule.at_work if self._count else schedule.in_flight
        if at_work >= self.placement.running() or not rules.widen(schedule.prefetch, schedule.ready):
            return False
        schedule.set_prefetch(rules.prefetch(sizes))
        return True

    def learn(self) -> None:
        """Set message size and prefetch by what is known of the batches so far."""
        self.rules.regroup(self.scaling.sizes, self.dispatch.workers())
        prefetch = self.rules.prefetch(self.scaling.sizes)
        if prefetch != self.schedule.prefetch:
            self.schedule.set_prefetch(prefetch)


_HANDLERS: dict[type[Any], Callable[[EngineState, Any], None]] = {
    TicketMade: EngineState.made,
    WorkerUp: EngineState._up,
    WorkerGone: EngineState._gone,
    Snapshot: EngineState._snapshot,
    SplittingKnown: EngineState._splitting_known,
    Notice: EngineState._note,
    Reported: EngineState._reported,
    Refused: EngineState._refused,
    ScaleRefused: EngineState._scale_refused,
    Opened: EngineState._opened,
    EpochBegins: EngineState._epoch_begins,
    Resize: EngineState._resize,
    Resized: EngineState._resized,
    StatesWanted: EngineState._states_wanted,
    TicketsWait: EngineState._tickets_wait,
    ConsumerWaits: EngineState._consumer_waits,
}
