"""Drives one pass over the data: sampler → schedule → lanes → consumer.

All work happens inside `Engine.next`, in the consumer's thread; where batches are pinned, a thread also takes results
in (`listen`). `resize` may be called from any thread: it is carried out at once when the engine is idle, else at the
next turn. The engine never refers to the iterator that owns it, so that dropping the iterator ends everything.

`prefetch` decides how far ahead it runs, `assignment` where logical workers live, `dispatch` who is sent what,
`scaling` how many hosts lanes are asked for, `event_handler` what becomes of what they say, `failures` what follows
when one dies. All of them are called under the engine's lock and none refers to it. `snapshots` is what others see of
it.
"""

from __future__ import annotations

import contextlib
import math
import os
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import islice
from threading import get_native_id
from typing import Any

from dpex.core.placement import Place
from dpex.core.prefetch import Pace, Sizes
from dpex.core.schedule import Delivery, Schedule
from dpex.engine.assignment import Tenancy
from dpex.engine.dispatch import Dispatch
from dpex.engine.event_handler import ANY, NOT_BLOCKED, Intake
from dpex.engine.failures import Casualties
from dpex.engine.pin_memory import AHEAD, Pinner
from dpex.engine.scaling import LaneName, Staffing
from dpex.engine.snapshots import EngineView
from dpex.engine.unmeasured import Passing
from dpex.errors import InterruptedSamplerError, IteratorClosedError, WorkerDiedError
from dpex.measure.consumer_time import Look, Sums, Tally
from dpex.measure.stall_causes import H2D, NONE_YET, STARTUP, STRAGGLER, Making
from dpex.pools.base import Lane, LaneTimes
from dpex.stats import LoaderStats
from dpex.system.clock import monotonic
from dpex.system.cpu_clocks import HelperThreads
from dpex.system.forks import watch
from dpex.system.gpu.stall import GpuStall
from dpex.system.interrupts import has_ended, is_interrupt, keep_result, with_lock
from dpex.system.run_queue import OwnQueue
from dpex.system.wakeup import Bell
from dpex.worker.core import Failure, Stages

COLLECT_EVERY_S = 0.001
_ERRORS = (Failure, WorkerDiedError)
TICK_S = 1.0
_INTERRUPTED = (
    "{kind}, raised by a signal handler, came out of the sampler, a generator that ended with it: this epoch has "
    "{drawn} batches and no more. Those not yet returned come with the next calls of next(). Begin a new epoch for all "
    "batches; to go on after such an exception, use a sampler whose iterator is no generator"
)
_INHERITED = (
    "this iterator belongs to process {0._pid}, from which this one was forked: its workers answer to that "
    "process only. Call iter(loader) for an iterator of this process; with "
    "persistent_workers=True, which keeps the first iterator, "
    "make a new DpexDataLoader here"
)


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What does not change while the engine lives.

    make_unmeasured: as ``make_inline``, without stage times; None: every batch made in this process is measured.
    """

    logicals: int
    iterable: bool
    in_order: bool
    timeout_s: float
    base_window: int
    stretch: bool
    memory_budget: int | None
    make_lane: Callable[[LaneName, int], Lane]
    make_inline: Callable[[int, Any, int], tuple[Any, Stages]]
    make_unmeasured: Callable[[int, Any, int], Any] | None = None
    pinner: Pinner | None = None
    gpu: GpuStall[Any] | None = None
    metered: bool = False


class Engine:
    """See the module."""

    def __init__(self, plan: Plan, sizes: Sizes) -> None:
        began = monotonic()
        self._plan = plan
        self._sizes = sizes
        self._pid = os.getpid()
        self._turn = threading.RLock()
        """Of the consumer; ``_lock`` guards what is shared with other threads, and is free while the consumer waits."""
        self._lock = threading.RLock()
        self.returned: deque[Any] = deque()
        """Batches that were handed out, but could not be taken: they come first."""
        self._delivery: Delivery | None = None
        self._opened_into: list[Any] = []
        self._opened_at = 0.0
        self._drawn: deque[Any] = deque()
        self._sampler_lost_to: BaseException | None = None
        self._wishes: deque[Sizes] = deque(maxlen=1)
        self._bell = Bell()
        self._lanes: dict[str, Lane] = {}
        self._closed = False
        self._dirty: set[int] = set()
        self._tenancy = Tenancy(plan.logicals, plan.iterable, self._lanes, self._dirty)
        self._pace = Pace(
            base_window=plan.base_window,
            logical=plan.logicals > 0,
            stretch=plan.stretch,
            memory_budget=plan.memory_budget,
        )
        self._dispatch = Dispatch(self._lanes, self._tenancy, self._pace, self._dirty, logical=plan.logicals > 0)
        self._staffing = Staffing(plan.make_lane, self._lanes, self._tenancy, self._dispatch)
        self._casualties = Casualties(self._tenancy, self._dispatch, self._dirty, iterable=plan.iterable)
        self._intake = Intake(
            self._lanes,
            self._tenancy,
            self._pace,
            self._dispatch,
            self._casualties,
            self._bell,
            logical=plan.logicals > 0,
        )
        self._epoch = -1
        self._consumer = 0
        self._tally = Tally(detailed=plan.metered, queue=OwnQueue().seconds)
        self._here = LaneTimes()
        self._passing = Passing(self._tally, self._here, plan.gpu)
        self._stretch = self._passing.stretch
        self._stages_here: tuple[float, float, float, float, int] | None = None
        self._helpers = HelperThreads()
        self._granting = False
        self._errors: Counter[str] = Counter()
        self._collected_at = 0.0
        self.sampler: Iterator[Any] = iter(())
        self.schedule = self._new_schedule()
        self._view = EngineView(
            tally=self._tally,
            here=self._here,
            errors=self._errors,
            pace=self._pace,
            lanes=self._lanes,
            dispatch=self._dispatch,
            casualties=self._casualties,
            slowest=self._intake.slowest,
            slow_samples=self._intake.slow_samples,
            gpu=plan.gpu,
            passing=self._passing,
        )
        watch(self)
        self._staffing.open(sizes)
        self._tally.causes[STARTUP] += monotonic() - began

    # -- life ----------------------------------------------------------------------------------------------------

    def _new_schedule(self) -> Schedule:
        return Schedule(window=self._pace.window(self._sizes), queues=self._plan.logicals, in_order=self._plan.in_order)

    def begin_epoch(self, sampler: Iterator[Any]) -> None:
        """Start a pass: tickets are drawn from ``sampler``, up to the window at once.

        Raises:
            IteratorClosedError: it was closed, or this process is a forked child of its owner.
        """
        with self._lock:
            if self._closed:
                raise self._why_closed()
            began = monotonic()
            self._passing.end()
            self._drop_undelivered()
            self._tenancy.new_epoch(self._epoch, self.schedule.issued() if self._plan.logicals else ())
            self._epoch += 1
            for lane in self._lanes.values():
                lane.new_epoch(self._epoch)
            self.sampler = sampler
            self._drawn.clear()
            self._sampler_lost_to = None
            self._dispatch.new_epoch()
            self.schedule = self._new_schedule()
            self._tally.returned_at = 0.0
            self._consumer = get_native_id()
            if self._lanes or self._sizes.local + self._sizes.remote:
                self._fill()
            self._tally.causes[STARTUP] += monotonic() - began

    def _drop_undelivered(self) -> None:
        """What was made in an epoch that was broken off: decoding and dropping it gives its memory back."""
        self.returned.clear()
        taken, self._delivery = self._delivery, None
        for delivery in (*self.schedule.undelivered(), *([taken] if taken is not None else [])):
            with contextlib.suppress(Exception):
                delivery.payload()

    def close(self, grace_s: float = 5.0) -> None:
        """End all lanes; idempotent, and harmless in a process that was forked from the owner.

        From any thread: a consumer that waits in `next` meanwhile gets an `IteratorClosedError`.
        """
        if self._closed or os.getpid() != self._pid:
            return
        self._closed = True
        self._bell.ring()
        with_lock(self._lock, lambda _: self._end_lanes(grace_s), grace_s)

    def _end_lanes(self, grace_s: float) -> None:
        for lane in self._lanes.values():
            lane.close(grace_s)
        self._bell.close()

    def inherited(self) -> None:
        """See `dpex.system.forks`: in this process it only knows that it is closed. Its workers are the parent's."""
        self._closed = True
        self._lock, self._turn = threading.RLock(), threading.RLock()

    def _why_closed(self) -> IteratorClosedError:
        return IteratorClosedError("this iterator was closed" if os.getpid() == self._pid else _INHERITED.format(self))

    @property
    def closed(self) -> bool:
        """Whether `close` has been called, or this process was forked from the owner."""
        return self._closed

    # -- the consumer --------------------------------------------------------------------------------------------

    def next(self, hand: list[Any]) -> None:
        """Put the next batch into ``hand``, which is empty.

        Consumers in several threads come one after the other, and each batch goes to one of them. What an exception of
        a signal handler breaks off here is gone on with by the next call (see `dpex.system.interrupts`); a batch that
        is in ``hand`` by then is the caller's to put into ``returned``.

        Raises:
            StopIteration: at the end.
            Exception: the batch's own, in its place.
            RuntimeError: on a timeout.
            IteratorClosedError: it was closed.
        """
        with self._turn:
            if self._stretch.left and self._pass(hand):
                return
            tally, over, entered = self._tally, False, monotonic()
            gpu, mark = self._plan.gpu, None
            self._opened_at, self._stages_here = 0.0, None
            if self._plan.make_unmeasured is not None:
                self._passing.entered(entered)
            tally.enter(entered)
            starting = tally.starting
            try:
                if gpu is not None:
                    mark = gpu.enter()
                while not hand:
                    with self._lock:
                        wait = self._attend(hand, entered)
                    if wait is not None:
                        wait()
                if type(hand[0]) in _ERRORS:
                    self._raise_from(hand)
            except StopIteration:
                over = True
                raise
            except Exception as error:
                self._note(error)
                raise
            finally:
                now = monotonic()
                if tally.blocked_at:
                    tally.unblock(now)
                if gpu is not None:
                    gpu.leave(mark, now - entered, starting=tally.starting, over=over)
                tally.leave(self._opened_at, now, over=over)
            if not starting:
                self._may_pass_next(now, entered)

    def _may_pass_next(self, now: float, entered: float) -> None:
        """The call that began at ``entered`` is over, and was measured: maybe those after it need not be."""
        stages = self._stages_here
        if self._plan.make_unmeasured is not None and stages is not None and not self._lanes:
            self._passing.left(now, entered, self._opened_at, stages)

    def _note(self, error: Exception) -> None:
        """Count an error that comes out of `next`. Raises IteratorClosedError where it may come of being closed."""
        if isinstance(error, WorkerDiedError):
            self._errors["worker"] += 1
        if self._closed and not isinstance(error, IteratorClosedError):
            raise self._why_closed() from error  # a signal handler, or another thread, has done so just now

    def _raise_from(self, hand: list[Any]) -> None:
        value = hand[0]
        del hand[:]
        if isinstance(value, WorkerDiedError):
            raise value
        self._errors["batch"] += 1
        value.wrapper.reraise()

    def _attend(self, hand: list[Any], entered: float) -> Callable[[], Any] | None:
        """Attend to what happened since the last call, then to the next batch: returns what to wait for first."""
        if self._tally.blocked_at:
            self._tally.unblock(monotonic())
            if not self._closed:
                self._bell.hush()
        if self._closed:
            raise StopIteration if self.schedule.finished else self._why_closed()
        if self._delivery is not None:
            self._hand_out(hand)
        if self.returned:
            hand += (self.returned[0],)
            del self.returned[0]
        if hand:
            return None
        if self._wishes:
            self._grant_wishes()
        if entered - self._collected_at > COLLECT_EVERY_S:
            self._collect()
        if self._plan.pinner is None and self.schedule.idle and self._all_inline():
            self._straight_through(hand)
            return None
        return self._seek(hand, entered)

    def _seek(self, hand: list[Any], entered: float) -> Callable[[], Any] | None:
        """The next batch in turn: hand it out, make it, or return what to wait for."""
        schedule, pinner = self.schedule, self._plan.pinner
        while True:
            if pinner is not None and (wait := self._pinning(pinner, entered)) is not None:
                return wait
            self._delivery = schedule.peek()
            if self._delivery is not None:
                self._hand_out(hand)
                return None
            if schedule.finished:
                raise StopIteration
            self._fill(starving=True)
            if self._all_inline():
                self._make_inline()
            elif not self._collect():
                if schedule.finished:
                    raise StopIteration
                if not self._nobody_is_there():
                    return self._prepared_wait(entered)
                self._make_inline()

    def _hand_out(self, hand: list[Any]) -> None:
        """Open what is to be delivered; each step may be done again, should it be broken off."""
        delivery = self._delivery
        if delivery is not None and not self._opened_into:
            self.schedule.deliver(delivery)
            self._count(delivery)
            if self._plan.logicals or (self._lanes and not self._all_inline()):
                self._fill()
            self._opened_at = monotonic()
            self._opened_into = hand
            try:
                keep_result(hand, delivery.payload)
            except Exception as error:
                if not is_interrupt(error):  # it is not going to open, and the batches behind it are waited for
                    self._delivery = None
                raise
        self._delivery, self._opened_into = None, []

    def _count(self, delivery: Delivery) -> None:
        tally, intake = self._tally, self._intake
        tally.batches += 1
        tally.samples += delivery.samples
        if tally.pending_s:
            tally.explain(Making(*intake.awaited_making) if intake.awaited_making else None)
        intake.awaited, intake.awaited_making = NOT_BLOCKED, ()
        if self._plan.pinner is not None:
            tally.pinned_bytes += delivery.nbytes

    def _pinning(self, pinner: Pinner, entered: float) -> Callable[[], Any] | None:
        """Have what is next in turn pinned; returns the wait for the first of it."""
        job = pinner.hand_over(self.schedule, 1 + AHEAD)
        if job is None or job.finished.is_set():
            return None
        deadline = entered + self._plan.timeout_s if self._plan.timeout_s > 0 else math.inf
        self._tally.block(monotonic(), H2D)
        return partial(self._await_pinned, pinner, job, deadline)

    def _await_pinned(self, pinner: Pinner, job: Any, deadline: float) -> None:
        if not pinner.wait(job, deadline):
            raise self._timed_out()

    def _why_blocked(self) -> int:
        """For want of what the consumer is about to wait; the batch itself may have to tell."""
        if self.schedule.ready:
            return STRAGGLER
        if not any(lane.counts.running for lane in self._lanes.values()):
            return STARTUP
        self._intake.awaited = self.schedule.next_number if self._plan.in_order else ANY
        return NONE_YET

    def _idle_ratio(self) -> float:
        """Workers that have nothing to do."""
        lanes, schedule = self._lanes.values(), self.schedule
        hosts = sum(lane.counts.running for lane in lanes)
        if self._plan.logicals:
            at_work = schedule.at_work
        else:
            at_work = schedule.pending() + sum(min(self._dispatch.load[lane.name], lane.at_work()) for lane in lanes)
        return max(0.0, 1.0 - at_work / hosts) if hosts else 0.0

    def _timed_out(self) -> RuntimeError:
        self._errors["timeout"] += 1
        return RuntimeError(f"DataLoader timed out after {self._plan.timeout_s} seconds")

    def _prepared_wait(self, entered: float) -> Callable[[], Any]:
        """Do what is to be done before a wait, and return it."""
        limit = TICK_S
        if self._plan.timeout_s > 0:
            left = entered + self._plan.timeout_s - monotonic()
            if left <= 0:
                raise self._timed_out()
            limit = min(limit, left)
        self._widen_for_stragglers()
        self._take_over_locally()
        self._staffing.give_up_if_nobody_can_come()
        self._bell.watch(fd for lane in self._lanes.values() for fd in lane.descriptors())
        self._tally.block(monotonic(), self._why_blocked(), self._idle_ratio())
        return partial(self._bell.sleep, limit)

    def _widen_for_stragglers(self) -> None:
        """Finished batches wait behind a slow one, and nothing is left to hand out: look further ahead.

        Tickets of logical workers go to each in turn, so that it may take several until somebody idle has one.
        """
        schedule, plan = self.schedule, self._plan
        said = self._sizes.prefetch is not None or self._sizes.depth is not None
        if said or (plan.logicals and not plan.stretch):
            return
        hosts = sum(lane.counts.running for lane in self._lanes.values())
        while schedule.ready and not schedule.room and self._at_work() < hosts:
            drawn = schedule.drawn
            if not self._pace.widen(schedule.window, schedule.ready):
                return
            schedule.set_window(self._pace.window(self._sizes))
            self._fill(starving=True)
            if schedule.drawn == drawn:
                return

    def _at_work(self) -> int:
        """Workers that have something to do, if each has one ticket at most, or those of its logical workers."""
        return self.schedule.at_work if self._plan.logicals else self.schedule.in_flight

    def _take_over_locally(self) -> None:
        sizes = self._staffing.take_over_locally(self._sizes, self._epoch)
        if sizes is not None:
            self._sizes = sizes
            self._dirty.update(range(max(1, self._plan.logicals)))
            self._fill(starving=True)

    # -- drawing -------------------------------------------------------------------------------------------------

    def _fill(self, starving: bool = False) -> None:
        schedule = self.schedule
        room = schedule.room
        if room and self._pace.is_budgeted:
            room = self._pace.within_budget(room, self._sizes, schedule.in_flight, schedule.ready_bytes)
        if room and (starving or self._pace.group == 1 or room >= self._pace.group):
            if self._all_inline():
                room = 1 if not schedule.in_flight else 0
            if room:
                self._draw(room)
                self._dispatch.incomplete.clear()
        if self._dirty and (starving or not schedule.ready or self._dirty != self._dispatch.incomplete):
            try:
                self._dispatch.issue(schedule, self._epoch, starving=starving)
            except OSError:  # no descriptor is left: an error once somebody is short of a batch
                if starving:
                    raise

    def _draw(self, count: int) -> None:
        """Draw from the sampler, after what an exception kept from being made a ticket."""
        drawn, schedule = self._drawn, self.schedule
        self._draw_indices(max(0, count - len(drawn)))
        over = len(drawn) < count
        try:
            for _ in range(min(count, len(drawn))):
                self._dirty.add(schedule.draw_first(drawn).queue)
        except BaseException:
            self._dirty.update(range(max(1, self._plan.logicals)))
            raise
        if over:
            self._end_of_sampler()

    def _draw_indices(self, count: int) -> None:
        """Take that many indices out of the sampler, or as many as it still has."""
        try:
            self._drawn.extend(islice(self.sampler, count))
        except BaseException as error:
            if is_interrupt(error) and has_ended(self.sampler):
                self._sampler_lost_to = error
            raise

    def _end_of_sampler(self) -> None:
        """Nothing more is drawn. Raises InterruptedSamplerError if there would have been more."""
        self.schedule.end_of_sampler()
        error, self._sampler_lost_to = self._sampler_lost_to, None
        if error is not None:
            text = _INTERRUPTED.format(kind=type(error).__name__, drawn=self.schedule.drawn)
            raise InterruptedSamplerError(text) from error

    # -- in this process -----------------------------------------------------------------------------------------

    def _all_inline(self) -> bool:
        sizes = self._sizes
        if sizes.local or sizes.remote:
            return False
        for lane in self._lanes.values():  # noqa: SIM110  (`any` of a generator costs thrice as much, per batch)
            if lane.counts.requested:
                return False
        return True

    def _nobody_is_there(self) -> bool:
        """Whether local workers are seconds away, or cannot be started, and this process may make batches meanwhile.

        It may under ``seeding="batch"``, where nobody can tell who made a batch, and where local workers are wanted:
        this machine can read the data.
        """
        if self._plan.logicals or self._plan.iterable or not self.schedule.pending():
            return False
        local = self._lanes.get("local")
        if local is None or not local.counts.wanted:
            return False
        none_can_come = local.failed is not None or local.counts.most == 0
        is_coming_slowly = local.starts_slowly and local.counts.requested > 0
        return (none_can_come or is_coming_slowly) and not any(lane.hosts() for lane in self._lanes.values())

    def _straight_through(self, hand: list[Any]) -> None:
        """Draw, make and hand out one batch, with nothing else on its way: an error of its own is its delivery."""
        drawn, schedule = self._drawn, self.schedule
        if not drawn:
            self._draw_one()
        try:
            made, samples = self._made_here(schedule.drawn, drawn[0])
        except Exception as error:
            if not is_interrupt(error):
                schedule.straight_through(drawn)
            raise
        self._opened_at = monotonic()
        self._tally.batches += 1  # from here on without a call: see `dpex.system.interrupts`
        self._tally.samples += samples
        schedule.drawn = schedule.next_number = schedule.drawn + 1
        schedule.delivered += 1
        del drawn[0]
        hand += (made,)

    def _draw_one(self) -> None:
        """Have an index in ``_drawn``, which is empty. Raises StopIteration if there is none any more."""
        self._draw_indices(1)
        if not self._drawn:
            self._end_of_sampler()
            raise StopIteration

    def _pass(self, hand: list[Any]) -> bool:
        """As `_straight_through`, without measuring it; False: there is something to attend to, or to be measured."""
        stretch, schedule, drawn, entered = self._stretch, self.schedule, self._drawn, monotonic()
        with self._lock:
            if entered >= stretch.until or self._closed or self._wishes or self._lanes or self.returned:
                return False
            inside_s, _ = stretch.spent
            stretch.spent = inside_s, entered
            try:
                if not drawn:
                    self._draw_one()
                stretch.index = index = drawn[0]
                made = self._plan.make_unmeasured(schedule.drawn, index, self._epoch)  # type: ignore[misc]
                stretch.left -= 1  # from here on without a call: see `dpex.system.interrupts`
                schedule.drawn = schedule.next_number = schedule.drawn + 1
                schedule.delivered += 1
                del drawn[0]
                hand += (made,)
            except BaseException as error:
                self._passing.broke_off(error)
                if drawn and isinstance(error, Exception) and not is_interrupt(error):
                    self._errors["batch"] += not isinstance(error, StopIteration)
                    schedule.straight_through(drawn)
                if isinstance(error, Exception) and not isinstance(error, StopIteration):
                    self._note(error)
                raise
        stretch.left_at = now = monotonic()
        stretch.spent = inside_s + now - entered, 0.0
        return True

    def _make_inline(self) -> None:
        for ticket in self.schedule.take(1):
            try:
                made, samples = self._made_here(ticket.number, ticket.index)
            except BaseException as error:
                self.schedule.give_back([ticket])
                if not is_interrupt(error):  # its error is its delivery
                    self.schedule.done(ticket.number, None)
                    self.schedule.pop()
                raise
            self.schedule.done(ticket.number, lambda made=made: made, samples)

    def _made_here(self, number: int, index: Any) -> tuple[Any, int]:
        """A batch made in this process, and how many samples it has."""
        helpers = self._helpers
        if helpers.is_looking:
            helpers.begin()
        began = monotonic()
        try:
            made, stages = self._plan.make_inline(number, index, self._epoch)
        except BaseException as error:
            self._errors["batch"] += isinstance(error, Exception) and not isinstance(error, StopIteration)
            raise
        now = monotonic()
        service_s = now - began
        if helpers.is_looking or now >= helpers.due:
            helpers.end(now, service_s)
        fetch_s, collate_s, fetch_cpu_s, collate_cpu_s, samples, steps, slowest = stages
        load_s = service_s - collate_s  # what is neither the dataset's nor the collate function's is seeding: computed
        helped = helpers.ratio(service_s) if helpers.each_s else 0.0
        load_cpu_s = fetch_cpu_s + load_s - fetch_s + helped * load_s
        collate_cpu_s += helped * collate_s
        counted = load_s, collate_s, load_cpu_s, collate_cpu_s, samples, steps, slowest
        self._stages_here = counted[:5]
        self._here.count(counted, load_cpu_s + collate_cpu_s, 0.0)
        self._tally.made_here(load_s, load_cpu_s, collate_s)
        if slowest and slowest[0] > self._intake.slow_samples.least_s:
            self._intake.slow_samples.add(slowest[0], index, slowest[1])
        self._pace.learn_here(service_s)
        return made, samples

    # -- events --------------------------------------------------------------------------------------------------

    def listen(self) -> list[int]:
        """In the thread that pins: take in a few batches and hand them over; returns the descriptors to watch.

        Whatever else happened waits for the consumer, and so does what came after it.
        """
        with self._lock:
            if self._closed or self._plan.pinner is None:
                return []
            try:
                if not self._enough_ahead():
                    self._intake.overhear(self.schedule, self._epoch)
            except Exception as error:
                self._intake.fatal = error
            self._plan.pinner.hand_over(self.schedule, AHEAD)
            if self._intake.waits_for_consumer or self._enough_ahead():
                return []
            return [fd for lane in self._lanes.values() for fd in lane.descriptors()]

    def _enough_ahead(self) -> bool:
        return len(self.schedule.upcoming(AHEAD)) == AHEAD

    def _collect(self) -> bool:
        """Take in what the lanes have to say; True if there was anything."""
        self._collected_at = monotonic()
        heard = self._intake.collect(self.schedule, self._epoch)
        if heard:
            self._learn()
            if self._dirty:
                self._dispatch.issue(self.schedule, self._epoch, starving=not self.schedule.ready)
        return heard

    def _learn(self) -> None:
        """Set message size and window by what is known of the work."""
        self._pace.regroup(self._sizes, self._dispatch.hosts())
        window = self._pace.window(self._sizes)
        if window != self.schedule.window:
            self.schedule.set_window(window)

    # -- resizing ------------------------------------------------------------------------------------------------

    def resize(self, sizes: Sizes) -> None:
        """Change hosts and window, from any thread; at once if the engine is idle, else within its next turn."""
        if self._closed:
            return
        self._wishes.append(sizes)
        with_lock(self._lock, self._grant_if)
        self._bell.ring()

    def _grant_if(self, is_idle: bool) -> None:
        if is_idle and not self._closed:
            self._grant_wishes()

    def wish(self, sizes: Sizes) -> None:
        """As `resize`, but only ever carried out by the consumer's thread, within its next turn."""
        if self._closed:
            return
        self._wishes.append(sizes)
        self._bell.ring()

    def _grant_wishes(self) -> None:
        """Carry out the latest wish; those before it do not matter any more."""
        if self._wishes:
            self._granting = True
            try:
                wish = self._wishes[-1]
                self._sizes = wish if self._plan.iterable else self._staffing.grant(wish, self._epoch)
            finally:
                self._granting = False
            if self._wishes[-1] is wish:
                self._wishes.pop()
        self.schedule.set_window(self._pace.window(self._sizes))
        self._tenancy.rebalance()
        if self._lanes:
            self._fill()

    # -- looking in ----------------------------------------------------------------------------------------------

    def stats(self) -> LoaderStats:
        """A snapshot; see `LoaderStats`."""
        return self._view.stats(self.schedule, self._epoch)

    def look(self) -> Look:
        """For the tuner, from its thread: does not wait for the consumer."""
        return self._view.look(
            self.schedule,
            self._epoch,
            self._sizes,
            unwilling=self._granting or bool(self._wishes),
            refused=self._staffing.refused,
            thread=self._consumer,
        )

    def sums(self) -> Sums:
        """For whoever exports metrics, from any thread: does not wait for the consumer either."""
        return self._view.sums(self.schedule)

    def first_tenant(self, place: Place) -> int:
        """The lowest number of the logical workers that live there, or a number above all of them."""
        return min(self._tenancy.tenants(place), default=self._plan.logicals)

    def lane(self, name: str) -> Lane | None:
        """The lane of that name, if it was ever needed."""
        return self._lanes.get(name)
