"""Drives one pass over the data: sampler → schedule → lanes → consumer.

All work happens inside `Engine.next`, in the consumer's thread; where batches are pinned, a thread also takes results
in (`listen`). `resize` may be called from any thread: it is carried out at once when the engine is idle, else at the
next turn. The engine never refers to the iterator that owns it, so that dropping the iterator ends everything.

`pace` decides how far ahead it runs, `tenancy` where logical workers live.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import select
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from threading import get_native_id
from typing import Any, Literal

from dpex.alerts import warn
from dpex.autotune.types import LaneSample
from dpex.causes import H2D, NONE_YET, STARTUP, STRAGGLER, Making
from dpex.clock import monotonic
from dpex.cpus import static_worker_count
from dpex.errors import WorkerDiedError
from dpex.gpu.stall import GpuStall
from dpex.homes import Place
from dpex.lanes.base import CRASHES_IN_A_ROW, Event, Gone, Lane, LaneTimes, Made, Note, Released, Snapshot, Up
from dpex.meter import LaneSums, Look, Sums, Tally, lane_sums
from dpex.pace import Pace, Sizes
from dpex.pin import AHEAD, Pinner
from dpex.sampling import SlowBatch, Slowest
from dpex.schedule import Delivery, Schedule, Ticket
from dpex.stats import LaneStats, LoaderStats
from dpex.tenancy import Tenancy
from dpex.worker import Failure, Stages

logger = logging.getLogger("dpex")

COLLECT_EVERY_S = 0.001
TICK_S = 1.0
NOT_BLOCKED, ANY = -2, -1
"""In place of the number of the batch that is waited for."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What does not change while the engine lives."""

    logicals: int
    iterable: bool
    in_order: bool
    timeout_s: float
    base_window: int
    stretch: bool
    memory_budget: int | None
    make_lane: Callable[[Literal["local", "remote"], int], Lane]
    make_inline: Callable[[int, Any, int], tuple[Any, Stages]]
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
        self._lock = threading.RLock()
        self._wishes: deque[Sizes] = deque(maxlen=1)
        self._wake_lock = threading.RLock()
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._lanes: dict[str, Lane] = {}
        self._poller: tuple[tuple[int, ...], Any] = ((), None)
        self._closed = False
        self._fatal: Exception | None = None
        self._unheard: deque[tuple[Lane, Event]] = deque()
        self._overheard = False
        self._dirty: set[int] = set()
        self._tenancy = Tenancy(plan.logicals, plan.iterable, self._lanes, self._dirty)
        self._load: dict[str, int] = {}
        self._carrier: dict[int, str] = {}
        self._pace = Pace(
            base_window=plan.base_window,
            logical=plan.logicals > 0,
            stretch=plan.stretch,
            memory_budget=plan.memory_budget,
        )
        self._epoch = -1
        self._consumer = 0
        self._tally = Tally(detailed=plan.metered)
        self._awaited = NOT_BLOCKED
        self._awaited_making: tuple[float, ...] = ()
        self._here = LaneTimes()
        self._granting = False
        self._refused: str | None = None
        self._deaths: Counter[str] = Counter()
        self._errors: Counter[str] = Counter()
        self._remade = 0
        self._slowest = Slowest()
        self._collected_at = 0.0
        self.sampler: Iterator[Any] = iter(())
        self.schedule = self._new_schedule()
        self._open_lanes()
        self._tally.causes[STARTUP] += monotonic() - began

    # -- life ----------------------------------------------------------------------------------------------------

    def _new_schedule(self) -> Schedule:
        return Schedule(window=self._pace.window(self._sizes), queues=self._plan.logicals, in_order=self._plan.in_order)

    def _open_lanes(self) -> None:
        for name, count in (("local", self._sizes.local), ("remote", self._sizes.remote)):
            if count > 0:
                self._lane(name, count)

    def _lane(self, name: str, count: int) -> Lane:
        lane = self._lanes.get(name)
        if lane is None:
            lane = self._lanes[name] = self._plan.make_lane(name, count)  # type: ignore[arg-type]
            lane.new_epoch(max(0, self._epoch))
            self._load[name] = 0
        else:
            lane.resize(count)
        return lane

    def begin_epoch(self, sampler: Iterator[Any]) -> None:
        """Start a pass: tickets are drawn from ``sampler``, up to the window at once."""
        with self._lock:
            began = monotonic()
            self._drop_undelivered()
            self._tenancy.new_epoch(self._epoch, self.schedule.issued() if self._plan.logicals else ())
            self._epoch += 1
            for lane in self._lanes.values():
                lane.new_epoch(self._epoch)
            self.sampler = sampler
            self._carrier.clear()
            self._load = dict.fromkeys(self._load, 0)
            self.schedule = self._new_schedule()
            self._tally.returned_at = 0.0
            self._consumer = get_native_id()
            if self._lanes or self._sizes.local + self._sizes.remote:
                self._fill()
            self._tally.causes[STARTUP] += monotonic() - began

    def _drop_undelivered(self) -> None:
        """What was made in an epoch that was broken off: decoding and dropping it gives its memory back."""
        for delivery in self.schedule.undelivered():
            with contextlib.suppress(Exception):
                delivery.payload()

    def close(self, grace_s: float = 5.0) -> None:
        """End all lanes; idempotent, and harmless in a process that was forked from the owner."""
        if self._closed or os.getpid() != self._pid:
            return
        self._closed = True
        for lane in self._lanes.values():
            lane.close(grace_s)
        with self._wake_lock:
            os.close(self._wake)

    @property
    def closed(self) -> bool:
        """Whether `close` has been called."""
        return self._closed

    # -- the consumer --------------------------------------------------------------------------------------------

    def next(self) -> Any:
        """The next batch; raises its error in its place, StopIteration at the end, RuntimeError on a timeout."""
        with self._lock:
            tally, over, opened, entered = self._tally, False, 0.0, monotonic()
            tally.enter(entered)
            gpu, mark = self._plan.gpu, None
            try:
                if gpu is not None:
                    mark = gpu.enter()
                delivery = self._await_delivery(entered)
                if self._plan.logicals or self._lanes:
                    self._fill()
                opened = monotonic()
                return self._open(delivery)
            except StopIteration:
                over = True
                raise
            except WorkerDiedError:
                self._errors["worker"] += 1
                raise
            finally:
                now = monotonic()
                if gpu is not None:
                    gpu.leave(mark, now - entered, starting=tally.starting, over=over)
                tally.leave(opened, now, over=over)

    def _await_delivery(self, entered: float) -> Delivery:
        if self._closed:
            raise StopIteration if self.schedule.finished else RuntimeError("this iterator was closed")
        if self._wishes:
            self._grant_wishes()
        if entered - self._collected_at > COLLECT_EVERY_S:
            self._collect()
        while True:
            if self._plan.pinner is not None:
                self._await_pinning(self._plan.pinner, entered)
            delivery = self.schedule.pop()
            if delivery is not None:
                self._count(delivery)
                return delivery
            if self.schedule.finished:
                raise StopIteration
            self._fill(starving=True)
            if self._all_inline():
                self._make_inline()
            elif not self._collect():
                if self.schedule.finished:
                    raise StopIteration
                self._wait(entered)

    def _count(self, delivery: Delivery) -> None:
        tally = self._tally
        tally.batches += 1
        tally.samples += delivery.samples
        if tally.pending_s:
            tally.explain(Making(*self._awaited_making) if self._awaited_making else None)
        self._awaited, self._awaited_making = NOT_BLOCKED, ()
        if self._plan.pinner is not None:
            tally.pinned_bytes += delivery.nbytes

    def _open(self, delivery: Delivery) -> Any:
        value = delivery.payload()
        if isinstance(value, Failure):
            self._errors["batch"] += 1
            value.wrapper.reraise()
        if isinstance(value, WorkerDiedError):
            raise value
        return value

    def _await_pinning(self, pinner: Pinner, entered: float) -> None:
        """Have what is next in turn pinned, and wait for the first of it."""
        deadline = entered + self._plan.timeout_s if self._plan.timeout_s > 0 else math.inf
        while (job := pinner.hand_over(self.schedule, 1 + AHEAD)) is not None and not job.finished.is_set():
            if not self._blocked(partial(pinner.wait, job, deadline), H2D):
                raise self._timed_out()

    def _blocked(self, wait: Callable[[], Any], cause: int, idle_ratio: float = 0.0) -> Any:
        """Wait without the lock, for that cause."""
        self._tally.block(monotonic(), cause, idle_ratio)
        self._lock.release()
        try:
            return wait()
        finally:
            self._lock.acquire()
            self._tally.unblock(monotonic())

    def _why_blocked(self) -> int:
        """For want of what the consumer is about to wait; the batch itself may have to tell."""
        if self.schedule.ready:
            return STRAGGLER
        if not any(lane.counts.running for lane in self._lanes.values()):
            return STARTUP
        self._awaited = self.schedule.next_number if self._plan.in_order else ANY
        return NONE_YET

    def _idle_ratio(self) -> float:
        """Workers that have nothing to do."""
        lanes, schedule = self._lanes.values(), self.schedule
        hosts = sum(lane.counts.running for lane in lanes)
        if self._plan.logicals:
            at_work = schedule.at_work
        else:
            at_work = schedule.pending() + sum(min(self._load[lane.name], lane.at_work()) for lane in lanes)
        return max(0.0, 1.0 - at_work / hosts) if hosts else 0.0

    def _timed_out(self) -> RuntimeError:
        self._errors["timeout"] += 1
        return RuntimeError(f"DataLoader timed out after {self._plan.timeout_s} seconds")

    def _wait(self, entered: float) -> None:
        limit = TICK_S
        if self._plan.timeout_s > 0:
            left = entered + self._plan.timeout_s - monotonic()
            if left <= 0:
                raise self._timed_out()
            limit = min(limit, left)
        self._widen_for_stragglers()
        self._take_over_locally()
        self._give_up_if_nobody_can_come()
        descriptors = (self._wake, *(fd for lane in self._lanes.values() for fd in lane.descriptors()))
        if self._poller[0] != descriptors:
            poller = select.poll()
            for fd in descriptors:
                poller.register(fd, select.POLLIN)
            self._poller = (descriptors, poller)
        self._blocked(partial(self._poller[1].poll, limit * 1000 + 0.5), self._why_blocked(), self._idle_ratio())
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._wake)
        if self._wishes:
            self._grant_wishes()

    def _widen_for_stragglers(self) -> None:
        """Finished batches wait behind a slow one, and nothing is left to hand out: look further ahead."""
        schedule = self.schedule
        said = self._sizes.prefetch is not None or self._sizes.depth is not None
        if said or self._plan.logicals or not schedule.ready or schedule.room:
            return
        hosts = sum(lane.counts.running for lane in self._lanes.values())
        if schedule.in_flight < hosts and self._pace.widen(schedule.window, schedule.ready):
            schedule.set_window(self._pace.window(self._sizes))
            self._fill(starving=True)

    def _take_over_locally(self) -> None:
        """No cluster is left: as many workers as this machine has CPUs for do the work."""
        remote = self._lanes.get("remote")
        local = self._lanes.get("local")
        if remote is None or remote.failed is None or self._tenancy.places() or (local and local.counts.wanted):
            return
        count = max(1, min(self._sizes.remote + self._sizes.local, static_worker_count()))
        warn(f"no remote worker is left ({remote.failed}): {count} local workers take over")
        self._sizes = replace(self._sizes, local=count)
        self._lane("local", count)
        self._dirty.update(range(max(1, self._plan.logicals)))
        self._fill(starving=True)

    def _give_up_if_nobody_can_come(self) -> None:
        """Every lane that is wanted has failed, and nobody is left: waiting would be for ever."""
        wanted = [lane for lane in self._lanes.values() if lane.counts.wanted]
        if wanted and all(lane.failed for lane in wanted) and not any(lane.counts.requested for lane in wanted):
            raise WorkerDiedError("; ".join(str(lane.failed) for lane in wanted))

    # -- drawing and issuing -------------------------------------------------------------------------------------

    def _fill(self, starving: bool = False) -> None:
        schedule = self.schedule
        room = schedule.room
        if room and (starving or self._pace.group == 1 or room >= self._pace.group):
            if self._all_inline():
                room = 1 if not schedule.in_flight else 0
            for _ in range(room):
                try:
                    index = next(self.sampler)
                except StopIteration:
                    schedule.end_of_sampler()
                    break
                self._dirty.add(schedule.draw(index).queue)
        if self._dirty:
            self._issue(starving)

    def _issue(self, starving: bool) -> None:
        if not self._plan.logicals:
            self._issue_shared(starving)
            return
        self._tenancy.settle()
        for queue in sorted(self._dirty):
            if self._issue_logical(queue, starving):
                self._dirty.discard(queue)

    def _issue_shared(self, starving: bool) -> None:
        schedule, pace = self.schedule, self._pace
        while (waiting := schedule.pending()) and self._lanes:
            lane = self._least_loaded()
            if lane is None or (waiting < pace.group and not starving and schedule.ready):
                return
            size = pace.message_size(schedule.window, len(lane.hosts()), lane.name == "remote")
            tickets = schedule.take(min(waiting, size))
            if not lane.send(tickets, self._epoch):
                schedule.give_back(tickets)
                return
            self._on_its_way(tickets, lane)
        if not schedule.pending():
            self._dirty.clear()

    def _on_its_way(self, tickets: list[Ticket], lane: Lane) -> None:
        self._load[lane.name] += len(tickets)
        for ticket in tickets:
            self._carrier[ticket.number] = lane.name

    def _arrived(self, number: int) -> None:
        """A ticket came back, made or lost."""
        carrier = self._carrier.pop(number, None)
        if carrier is not None:
            self._load[carrier] -= 1

    def _least_loaded(self) -> Lane | None:
        best, best_load = None, 0.0
        only = len(self._lanes) == 1
        for name, lane in self._lanes.items():
            hosts = len(lane.hosts())
            if not hosts:
                continue
            load = self._load[name] / hosts
            if best is None or load < best_load:
                best, best_load = lane, load
        if (
            best is not None
            and not only
            and best_load >= max(2 * self._pace.group, self.schedule.window / self._hosts())
        ):
            return None
        return best

    def _hosts(self) -> int:
        return max(1, sum(len(lane.hosts()) for lane in self._lanes.values()))

    def _issue_logical(self, queue: int, starving: bool) -> bool:
        """Send what waits for one logical worker; True if nothing waits any longer."""
        home = self._tenancy.home(queue)
        if home is None:
            return False
        schedule, group, (lane, host) = self.schedule, self._pace.group, home
        while waiting := schedule.pending(queue):
            if waiting < group and not starving and schedule.ready:
                return False
            tickets = schedule.take(min(waiting, group), queue)
            if not lane.send(tickets, self._epoch, host):
                schedule.give_back(tickets)
                return False
            self._tenancy.sent(queue)
            self._on_its_way(tickets, lane)
        return True

    # -- in this process -----------------------------------------------------------------------------------------

    def _all_inline(self) -> bool:
        return self._sizes.local + self._sizes.remote == 0 and not any(
            lane.counts.requested for lane in self._lanes.values()
        )

    def _make_inline(self) -> None:
        for ticket in self.schedule.take(1):
            began = monotonic()
            try:
                made, stages = self._plan.make_inline(ticket.number, ticket.index, self._epoch)
            except BaseException as error:
                self._errors["batch"] += isinstance(error, Exception) and not isinstance(error, StopIteration)
                self.schedule.give_back([ticket])
                self.schedule.done(ticket.number, None)
                self.schedule.pop()
                raise
            self._count_here(stages, monotonic() - began)
            self.schedule.done(ticket.number, lambda made=made: made, stages.samples)

    def _count_here(self, stages: Stages, service_s: float) -> None:
        """What is neither the dataset's nor the collate function's is seeding, which computes: it counts as loading."""
        fetch_s, collate_s, fetch_cpu_s, collate_cpu_s, samples = stages
        load_s = service_s - collate_s
        load_cpu_s = fetch_cpu_s + load_s - fetch_s
        self._here.count((load_s, collate_s, load_cpu_s, collate_cpu_s, samples), load_cpu_s + collate_cpu_s, 0.0)
        self._tally.made_here(load_s, load_cpu_s, collate_s)
        self._pace.learn_here(service_s)

    # -- events --------------------------------------------------------------------------------------------------

    def listen(self) -> list[int]:
        """In the thread that pins: take in a few batches and hand them over; returns the descriptors to watch.

        Whatever else happened waits for the consumer, and so does what came after it.
        """
        with self._lock:
            if self._closed or self._plan.pinner is None:
                return []
            try:
                self._overhear()
            except Exception as error:
                self._fatal = error
            self._plan.pinner.hand_over(self.schedule, AHEAD)
            if self._fatal is not None or self._unheard or self._enough_ahead():
                return []
            return [fd for lane in self._lanes.values() for fd in lane.descriptors()]

    def _overhear(self) -> None:
        if self._unheard or self._enough_ahead():
            return
        for lane in list(self._lanes.values()):
            self._unheard.extend((lane, event) for event in lane.poll())
        if self._unheard:
            self._overheard = True
            os.eventfd_write(self._wake, 1)
        while self._unheard and isinstance(self._unheard[0][1], (Made, Snapshot)):
            self._hear(*self._unheard.popleft())

    def _enough_ahead(self) -> bool:
        return len(self.schedule.upcoming(AHEAD)) == AHEAD

    def _collect(self) -> bool:
        """Take in what the lanes have to say; True if there was anything."""
        self._collected_at = monotonic()
        heard, self._overheard = self._overheard, False
        while self._unheard:
            self._hear(*self._unheard.popleft())
        for lane in list(self._lanes.values()):
            events = lane.poll()
            heard = heard or bool(events)
            for event in events:
                self._hear(lane, event)
        if self._fatal is not None:
            error, self._fatal = self._fatal, None
            raise error
        if heard:
            self._learn()
            if self._dirty:
                self._issue(starving=not self.schedule.ready)
        return heard

    def _hear(self, lane: Lane, event: Event) -> None:
        if type(event) is Made:
            self._made(lane, event)
        elif isinstance(event, Up):
            self._tenancy.host_up()
        elif isinstance(event, Gone):
            self._gone(lane, event)
        elif isinstance(event, Released):
            self._tenancy.released(event)
        elif isinstance(event, Snapshot):
            self._tenancy.snapshot(event)
        elif isinstance(event, Note):
            self._say(event)

    def _made(self, lane: Lane, event: Made) -> None:
        schedule = self.schedule
        if event.epoch != self._epoch:
            return
        ticket = schedule.ticket(event.number)
        if ticket is None:
            event.value()  # made twice: decoding and dropping it gives its memory back
            return
        self._pace.learn(event.service_s, event.nbytes)
        if event.service_s > self._slowest.least_s:
            slow = SlowBatch(event.service_s, event.epoch, event.number, ticket.index, *event.making[:2])
            self._slowest.add(slow)
        self._arrived(event.number)
        if self._plan.logicals:
            self._tenancy.made(self._epoch, ticket)
        if event.stream_end:
            self._tenancy.stream_ended(ticket.queue)
            schedule.end_queue(ticket.queue)
        else:
            schedule.done(event.number, event.value, event.samples, event.nbytes)
        if self._awaited in (event.number, ANY):
            self._awaited_making = event.making

    def _learn(self) -> None:
        """Set message size and window by what is known of the work."""
        self._pace.regroup(self._sizes, self._hosts())
        window = self._pace.window(self._sizes)
        if window != self.schedule.window:
            self.schedule.set_window(window)

    def _gone(self, lane: Lane, event: Gone) -> None:
        given_up = self.schedule.lost(event.lost, event.guilty)
        for number in event.lost:
            self._arrived(number)
            ticket = self.schedule.ticket(number)
            if ticket is not None:
                self._dirty.add(ticket.queue)
        for ticket in given_up:
            error = _gave_up(ticket, event.why)
            self.schedule.done(ticket.number, lambda error=error: error)
        if not event.expected:
            self._deaths[lane.name] += 1
            self._remade += len(event.lost)
            if not given_up and not self._plan.iterable:
                self._warn_of_death(event)
        for stream in self._tenancy.host_gone(Place(lane.name, event.host)):
            self._fail_stream(stream, event)
        if lane.crashes > CRASHES_IN_A_ROW + lane.counts.wanted and not event.expected:
            text = f"{event.why}; {lane.crashes} workers in a row died before they made a single batch"
            self._fatal = WorkerDiedError(text)

    def _warn_of_death(self, event: Gone) -> None:
        held = f"; what it held ({len(event.lost)} tickets) is made again" if event.lost else ""
        warn(f"{event.why}{held}. The epoch goes on.")

    def _say(self, note: Note) -> None:
        if note.warning:
            warn(note.text)
        else:
            logger.info(note.text)

    def _fail_stream(self, logical: int, event: Gone) -> None:
        """A stream cannot be taken up where it was: say so at its place, and go on without it."""
        numbers = sorted(t.number for t in self.schedule.open_tickets(logical))
        error = WorkerDiedError(
            f"{event.why}; stream {logical} of the IterableDataset cannot go on elsewhere without repeating or losing "
            "samples, as it has no state that could be moved"
        )
        if numbers:
            self.schedule.done(numbers[0], lambda: error)
        self.schedule.end_queue(logical)
        if not numbers:
            self._fatal = error

    # -- resizing ------------------------------------------------------------------------------------------------

    def resize(self, sizes: Sizes) -> None:
        """Change hosts and window, from any thread; at once if the engine is idle, else within its next turn."""
        self._wishes.append(sizes)
        if self._lock.acquire(blocking=False):
            try:
                if not self._closed:
                    self._grant_wishes()
            finally:
                self._lock.release()
        with self._wake_lock:
            if not self._closed:
                os.eventfd_write(self._wake, 1)

    def wish(self, sizes: Sizes) -> None:
        """As `resize`, but only ever carried out by the consumer's thread, within its next turn."""
        self._wishes.append(sizes)
        with self._wake_lock:
            if not self._closed:
                os.eventfd_write(self._wake, 1)

    def _grant_wishes(self) -> None:
        """Carry out the latest wish; those before it do not matter any more."""
        if self._wishes:
            self._granting = True
            self._sizes = self._wishes.pop()
            if not self._plan.iterable:
                for name, count in (("local", self._sizes.local), ("remote", self._sizes.remote)):
                    if count > 0 or name in self._lanes:
                        self._grant_lane(name, count)
            self._granting = False
        self.schedule.set_window(self._pace.window(self._sizes))
        self._tenancy.rebalance()
        if self._lanes:
            self._fill()

    def _grant_lane(self, name: str, count: int) -> None:
        """A tuner's wish for remote workers that cannot be granted must not end the user's training."""
        try:
            self._lane(name, count)
        except Exception as error:
            if name == "local" or self._sizes.depth is None:
                raise
            logger.info("no remote workers for this loader: %s", error)
            self._refused = str(error)
            self._sizes = replace(self._sizes, remote=0, local=self._sizes.local or 1)
            self._lane("local", self._sizes.local)

    # -- looking in ----------------------------------------------------------------------------------------------

    def stats(self) -> LoaderStats:
        """A snapshot; see `LoaderStats`."""
        schedule, tally = self.schedule, self._tally
        return LoaderStats(
            epoch=max(0, self._epoch),
            batches=tally.batches,
            prefetch=schedule.window,
            in_flight=schedule.in_flight,
            ready=schedule.ready,
            batch_bytes=self._pace.nbytes,
            ready_bytes=schedule.ready * self._pace.nbytes,
            wait_s=tally.inside_s,
            own_s=max(0.0, tally.inside_s - tally.blocked_s - tally.first_blocked_s),
            head_s=tally.head_s,
            work_s=tally.work_s,
            first_batch_s=tally.first_batch_s,
            gpu_stall_s=self._plan.gpu.stall_s if self._plan.gpu is not None else None,
            deaths=self._deaths.total(),
            remade=self._remade,
            lanes={name: self._lane_stats(lane) for name, lane in self._lanes.items()},
        )

    def _lane_stats(self, lane: Lane) -> LaneStats:
        counts, times = lane.counts, lane.times
        return LaneStats(
            wanted=counts.wanted,
            requested=counts.requested,
            running=counts.running,
            in_flight=self._load.get(lane.name, 0),
            tickets=times.tickets,
            fetch_s=times.fetch_s,
            collate_s=times.collate_s,
            encode_s=times.encode_s,
            cpu_s=times.cpu_s,
        )

    def look(self) -> Look:
        """For the tuner, from its thread: does not wait for the consumer."""
        now, schedule, lanes = monotonic(), self.schedule, dict(self._lanes)
        return Look(
            at=now,
            epoch=max(0, self._epoch),
            times=self._tally.times(now),
            sizes=self._sizes,
            unwilling=self._granting or bool(self._wishes),
            refused=self._refused,
            away_s=self._tally.away_s(now),
            ready=schedule.ready,
            in_flight=schedule.in_flight,
            batch_bytes=self._pace.nbytes,
            gpu_stall_s=self._plan.gpu.stall_s if self._plan.gpu is not None else None,
            thread=self._consumer,
            made_here=_lane_sample(self._here),
            local=_lane_sample(lanes["local"].times, lanes["local"]) if "local" in lanes else LaneSample(),
            remote=_lane_sample(lanes["remote"].times, lanes["remote"]) if "remote" in lanes else LaneSample(),
            pids=tuple(h.pid for h in getattr(lanes.get("local"), "handles", ()) if h.pid and h.exitcode is None),
        )

    def sums(self) -> Sums:
        """For whoever exports metrics, from any thread: does not wait for the consumer either."""
        tally, lanes = self._tally, dict(self._lanes)
        local, remote = (lanes[name].times if name in lanes else LaneTimes() for name in ("local", "remote"))
        moved = {"shm": local.nbytes, "network": remote.streamed_bytes, "h2d": tally.pinned_bytes}
        return tally.sums(
            monotonic(),
            errors=dict(self._errors),
            remade=self._remade,
            moved_bytes={**moved, "object_store": remote.nbytes - remote.streamed_bytes},
            lanes={"inline": lane_sums(self._here), **{name: self._lane_sums(lane) for name, lane in lanes.items()}},
            ready=self.schedule.ready,
            window=self.schedule.window,
            is_capped=self._pace.is_capped,
            slowest=self._slowest.found(),
        )

    def _lane_sums(self, lane: Lane) -> LaneSums:
        sums = lane_sums(lane.times)
        return replace(
            sums,
            deaths=self._deaths[lane.name],
            wanted=lane.counts.wanted,
            requested=lane.counts.requested,
            running=lane.counts.running,
            in_flight=self._load.get(lane.name, 0),
        )

    def first_tenant(self, place: Place) -> int:
        """The lowest number of the logical workers that live there, or a number above all of them."""
        return min(self._tenancy.tenants(place), default=self._plan.logicals)

    def lane(self, name: str) -> Lane | None:
        """The lane of that name, if it was ever needed."""
        return self._lanes.get(name)


def _lane_sample(times: LaneTimes, lane: Lane | None = None) -> LaneSample:
    return LaneSample(
        requested=lane.counts.requested if lane is not None else 0,
        running=lane.counts.running if lane is not None else 0,
        tickets=times.tickets,
        read_s=times.fetch_s,
        collate_s=times.collate_s,
        encode_s=times.encode_s,
        cpu_s=times.cpu_s,
        services_s=tuple(times.services_s),
    )


def _gave_up(ticket: Ticket, why: str) -> WorkerDiedError:
    return WorkerDiedError(
        f"{why}. Batch {ticket.number} (dataset indices {_shortened(ticket.index)}) killed {ticket.deaths} workers, "
        "one after the other, and is given up"
    )


def _shortened(index: Any, most: int = 200) -> str:
    text = repr(index)
    return text if len(text) <= most else f"{text[:most]}… ({len(text)} characters)"
