"""Drives one pass over the data: sampler → schedule → lanes → consumer. No thread of its own.

All work happens inside `Engine.next`, in the consumer's thread; `resize` may be called from any thread: it is carried
out at once when the engine is idle, else at the next turn. The engine never refers to the iterator that owns it, so
that dropping the iterator ends everything.

How far it runs ahead (the *window*) is PyTorch's ``num_workers * prefetch_factor`` unless something better is known:

* Tiny batches (under `TINY_S`) are worth grouping, many tickets to a message, which takes a wider window. That draws
  further ahead from the sampler, so it is done only for samplers that cannot tell (see `epoch.draws_ahead_safely`).
* The way to a remote worker and back is long: with such samplers each has `REMOTE_DEPTH` batches in flight, as far as
  `REMOTE_BYTES` allow.
* Under ``seeding="batch"``, when made batches wait behind a straggler while workers idle, the window widens.
* An explicit ``prefetch_factor`` or ``resize(prefetch=…)`` is kept to the letter; so is ``memory_budget``.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import select
import threading
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any, Literal

from dpex.alerts import warn
from dpex.clock import monotonic
from dpex.cpus import static_worker_count
from dpex.errors import WorkerDiedError
from dpex.homes import Homes, Place
from dpex.lanes.base import CRASHES_IN_A_ROW, Event, Gone, Lane, Made, Note, Released, Snapshot, Up
from dpex.schedule import Delivery, Schedule, Ticket
from dpex.stats import LaneStats, LoaderStats
from dpex.worker import Failure

logger = logging.getLogger("dpex")

TINY_S = 0.0003
MESSAGE_S = 0.001
LARGEST_GROUP = 128
STRETCH_BYTES = 16 << 20
REMOTE_DEPTH = 4
REMOTE_BYTES = 1 << 30
STRAGGLER_FACTOR = 8
STRAGGLER_BYTES = 512 << 20
COLLECT_EVERY_S = 0.001
CROWD_AFTER_S = 5.0
TICK_S = 1.0


@dataclass(kw_only=True)
class Sizes:
    """What is wanted: hosts by lane, and the window; ``prefetch=None`` leaves the window to the engine."""

    local: int
    remote: int
    prefetch: int | None


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
    make_inline: Callable[[int, Any, int], Any]
    prepare: Callable[[Schedule, float], bool] | None = None
    """Called before a batch is taken from the schedule; False if it was not ready by the given time (`clock`)."""


@dataclass
class _Mood:
    """What was learnt of the work so far: averages that forget slowly."""

    service_s: float = 0.0
    nbytes: float = 0.0
    largest: int = 0
    seen: int = 0

    def learn(self, service_s: float, nbytes: int) -> None:
        """Take in one result."""
        self.seen += 1
        weight = max(0.02, 1.0 / self.seen)
        self.service_s += weight * (service_s - self.service_s)
        self.nbytes += weight * (nbytes - self.nbytes)
        if nbytes > self.largest:
            self.largest = nbytes


class Engine:
    """See the module."""

    def __init__(self, plan: Plan, sizes: Sizes) -> None:
        self._plan = plan
        self._sizes = sizes
        self._pid = os.getpid()
        self._lock = threading.RLock()
        self._wishes: deque[Sizes] = deque()
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._lanes: dict[str, Lane] = {}
        self._poller: tuple[tuple[int, ...], Any] = ((), None)
        self._closed = False
        self._homes = Homes(plan.logicals)
        self._snapshots: dict[int, Any] = {}
        self._since: list[deque[tuple[int, int, Any]]] = [deque() for _ in range(plan.logicals)]
        self._started: set[int] = set()
        self._vacating: set[Place] = set()
        self._first_up_at: float | None = None
        self._replaying: dict[int, deque[Ticket]] = {}
        self._fatal: WorkerDiedError | None = None
        self._dirty: set[int] = set()
        self._load: dict[str, int] = {}
        self._carrier: dict[int, str] = {}
        self._mood = _Mood()
        self._group = 1
        self._straggler_window = 0
        self._epoch = -1
        self._batches = 0
        self._deaths = 0
        self._remade = 0
        self._wait_s = 0.0
        self._work_s = 0.0
        self._first_batch_s = 0.0
        self._returned_at: float | None = None
        self._collected_at = 0.0
        self.sampler: Iterator[Any] = iter(())
        self.schedule = self._new_schedule()
        self._open_lanes()

    # -- life ----------------------------------------------------------------------------------------------------

    def _new_schedule(self) -> Schedule:
        return Schedule(window=self._window(), queues=self._plan.logicals, in_order=self._plan.in_order)

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
            self._note_unfinished()
            self._epoch += 1
            for lane in self._lanes.values():
                lane.new_epoch(self._epoch)
            self.sampler = sampler
            self._started.clear()
            self._carrier.clear()
            self._load = dict.fromkeys(self._load, 0)
            self.schedule = self._new_schedule()
            self._returned_at = None
            if self._lanes or self._sizes.local + self._sizes.remote:
                self._fill()

    def _note_unfinished(self) -> None:
        """An epoch was broken off: as in torch, its logical workers still make what they hold, and draw for it."""
        if not self._plan.iterable and self._plan.logicals:
            for ticket in self.schedule.issued():
                self._since[ticket.queue].append((self._epoch, ticket.number, ticket.index))

    def close(self, grace_s: float = 5.0) -> None:
        """End all lanes; idempotent, and harmless in a process that was forked from the owner."""
        if self._closed or os.getpid() != self._pid:
            return
        self._closed = True
        for lane in self._lanes.values():
            lane.close(grace_s)
        os.close(self._wake)

    @property
    def closed(self) -> bool:
        """Whether `close` has been called."""
        return self._closed

    # -- the consumer --------------------------------------------------------------------------------------------

    def next(self) -> Any:
        """The next batch; raises its error in its place, StopIteration at the end, RuntimeError on a timeout."""
        with self._lock:
            entered = monotonic()
            if self._returned_at is not None:
                self._work_s += entered - self._returned_at
            try:
                delivery = self._await_delivery(entered)
                if self._plan.logicals or self._lanes:
                    self._fill()
                return self._open(delivery)
            finally:
                self._returned_at = monotonic()
                waited = self._returned_at - entered
                self._wait_s += waited
                if self._batches == 1:
                    self._first_batch_s = waited

    def _await_delivery(self, entered: float) -> Delivery:
        if self._closed:
            raise StopIteration if self.schedule.finished else RuntimeError("this iterator was closed")
        if self._wishes:
            self._grant_wishes()
        if entered - self._collected_at > COLLECT_EVERY_S:
            self._collect()
        while True:
            if self._plan.prepare is not None and not self._plan.prepare(self.schedule, self._deadline(entered)):
                raise self._timed_out()
            delivery = self.schedule.pop()
            if delivery is not None:
                self._batches += 1
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

    def _open(self, delivery: Delivery) -> Any:
        value = delivery.payload()
        if isinstance(value, Failure):
            value.wrapper.reraise()
        if isinstance(value, WorkerDiedError):
            raise value
        return value

    def _deadline(self, entered: float) -> float:
        return entered + self._plan.timeout_s if self._plan.timeout_s > 0 else math.inf

    def _timed_out(self) -> RuntimeError:
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
        descriptors = (self._wake, *(fd for lane in self._lanes.values() for fd in lane.descriptors()))
        if self._poller[0] != descriptors:
            poller = select.poll()
            for fd in descriptors:
                poller.register(fd, select.POLLIN)
            self._poller = (descriptors, poller)
        self._lock.release()
        try:
            self._poller[1].poll(limit * 1000 + 0.5)
        finally:
            self._lock.acquire()
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._wake)
        if self._wishes:
            self._grant_wishes()

    def _widen_for_stragglers(self) -> None:
        """Finished batches wait behind a slow one, and nothing is left to hand out: look further ahead."""
        schedule = self.schedule
        if self._plan.logicals or self._sizes.prefetch is not None or not schedule.ready or schedule.room:
            return
        hosts = sum(lane.counts.running for lane in self._lanes.values())
        if schedule.in_flight >= hosts or schedule.ready * self._mood.nbytes > STRAGGLER_BYTES:
            return
        widest = STRAGGLER_FACTOR * self._plan.base_window
        self._straggler_window = min(widest, schedule.window + max(1, schedule.window // 4))
        schedule.set_window(self._window())
        self._fill(starving=True)

    def _take_over_locally(self) -> None:
        """No cluster is left: as many workers as this machine has CPUs for do the work."""
        remote = self._lanes.get("remote")
        local = self._lanes.get("local")
        if remote is None or remote.failed is None or self._places() or (local and local.counts.wanted):
            return
        count = max(1, min(self._sizes.remote + self._sizes.local, static_worker_count()))
        warn(f"no remote worker is left ({remote.failed}): {count} local workers take over")
        self._sizes = replace(self._sizes, local=count)
        self._lane("local", count)
        self._dirty.update(range(max(1, self._plan.logicals)))
        self._fill(starving=True)

    # -- drawing and issuing -------------------------------------------------------------------------------------

    def _window(self) -> int:
        plan, mood = self._plan, self._mood
        if self._sizes.prefetch is not None:
            window = self._sizes.prefetch
        else:
            hosts = max(1, self._sizes.local + self._sizes.remote)
            window = max(plan.base_window, self._straggler_window, 2 * hosts if not plan.logicals else 1)
            if self._group > 1 and plan.stretch:
                window = max(window, 4 * self._group * max(hosts, 1))
            if self._sizes.remote and plan.stretch:
                affordable = int(REMOTE_BYTES // max(1.0, mood.nbytes))
                window = max(window, min(affordable, REMOTE_DEPTH * self._sizes.remote + 2 * self._sizes.local))
        if plan.memory_budget is not None:
            window = min(window, plan.memory_budget // mood.largest if mood.largest else 1)
        return max(1, window)

    def _fill(self, starving: bool = False) -> None:
        schedule = self.schedule
        room = schedule.room
        if room and (starving or self._group == 1 or not self._plan.stretch or room >= self._group):
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
        self._settle()
        for queue in sorted(self._dirty):
            if self._issue_logical(queue, starving):
                self._dirty.discard(queue)

    def _issue_shared(self, starving: bool) -> None:
        schedule = self.schedule
        while (waiting := schedule.pending()) and self._lanes:
            lane = self._least_loaded()
            if lane is None or (waiting < self._group and not starving and schedule.ready):
                return
            tickets = schedule.take(min(waiting, self._message_size(lane)))
            if not lane.send(tickets, self._epoch):
                schedule.give_back(tickets)
                return
            self._load[lane.name] += len(tickets)
            for ticket in tickets:
                self._carrier[ticket.number] = lane.name
        if not schedule.pending():
            self._dirty.clear()

    def _message_size(self, lane: Lane) -> int:
        """Tickets per message: enough to be worth a message, few enough that no worker is left without."""
        hosts = max(1, len(lane.hosts()))
        share = max(1, self.schedule.window // (2 * hosts))
        group = self._group
        if lane.name == "remote" and self._mood.service_s < 0.02 and self._mood.seen:
            group = min(128, max(group, int(0.01 / max(1e-5, self._mood.service_s))))
        return max(1, min(group, share))

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
        if best is not None and not only and best_load >= max(2 * self._group, self.schedule.window / self._hosts()):
            return None
        return best

    def _hosts(self) -> int:
        return max(1, sum(len(lane.hosts()) for lane in self._lanes.values()))

    def _issue_logical(self, queue: int, starving: bool) -> bool:
        """Send what waits for one logical worker; True if nothing waits any longer."""
        schedule, place = self.schedule, self._homes.home[queue]
        if place is None or queue in self._homes.leaving:
            return False
        lane = self._lanes[place.lane]
        if queue in self._replaying and not self._replay(queue, lane, place.host):
            return False
        while waiting := schedule.pending(queue):
            if waiting < self._group and not starving and schedule.ready:
                return False
            tickets = schedule.take(min(waiting, self._group), queue)
            if not lane.send(tickets, self._epoch, place.host):
                schedule.give_back(tickets)
                return False
            self._started.add(queue)
        return True

    def _replay(self, logical: int, lane: Lane, host: int) -> bool:
        """Send again what a dead host had made since its last known state; True once all of it is sent."""
        waiting = self._replaying[logical]
        while waiting:
            group = [t for t in islice(waiting, LARGEST_GROUP) if t.epoch == waiting[0].epoch]
            if not lane.send(group, group[0].epoch, host):
                return False
            for _ in group:
                waiting.popleft()
        del self._replaying[logical]
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
                made = self._plan.make_inline(ticket.number, ticket.index, self._epoch)
            except BaseException:
                self.schedule.give_back([ticket])
                self.schedule.done(ticket.number, None)
                self.schedule.pop()
                raise
            self._mood.learn(monotonic() - began, 0)
            self.schedule.done(ticket.number, lambda made=made: made)

    # -- events --------------------------------------------------------------------------------------------------

    def _collect(self) -> bool:
        """Take in what the lanes have to say; True if there was anything."""
        self._collected_at = monotonic()
        heard = False
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
            if self._first_up_at is None:
                self._first_up_at = monotonic()
            self._rebalance()
        elif isinstance(event, Gone):
            self._gone(lane, event)
        elif isinstance(event, Released):
            self._released(event)
        elif isinstance(event, Snapshot):
            self._snapshot(event)
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
        self._mood.learn(event.service_s, event.nbytes)
        if not self._plan.logicals:
            carrier = self._carrier.pop(event.number, None)
            if carrier is not None:
                self._load[carrier] -= 1
        elif not self._plan.iterable:
            self._since[ticket.queue].append((self._epoch, event.number, ticket.index))
        if event.stream_end:
            self._started.discard(ticket.queue)
            schedule.end_queue(ticket.queue)
        else:
            schedule.done(event.number, event.value)

    def _learn(self) -> None:
        """Set message size and window by what is known of the work."""
        mood = self._mood
        if mood.seen < 8:
            if self._plan.memory_budget is not None:
                self.schedule.set_window(self._window())
            return
        if mood.service_s < TINY_S and self._plan.stretch and self._sizes.prefetch is None:
            most = max(1, int(STRETCH_BYTES // max(1.0, mood.nbytes) // (4 * self._hosts())))
            self._group = max(1, min(LARGEST_GROUP, int(MESSAGE_S / max(mood.service_s, 1e-6)), most))
        else:
            self._group = 1
        window = self._window()
        if window != self.schedule.window:
            self.schedule.set_window(window)

    def _gone(self, lane: Lane, event: Gone) -> None:
        self._vacating.discard(Place(lane.name, event.host))
        given_up = self.schedule.lost(event.lost, event.guilty)
        for number in event.lost:
            carrier = self._carrier.pop(number, None)
            if carrier is not None:
                self._load[carrier] -= 1
            ticket = self.schedule.ticket(number)
            if ticket is not None:
                self._dirty.add(ticket.queue)
        for ticket in given_up:
            error = _gave_up(ticket, event.why)
            self.schedule.done(ticket.number, lambda error=error: error)
        if not event.expected:
            self._deaths += 1
            self._remade += len(event.lost)
            if not given_up and not self._plan.iterable:
                self._warn_of_death(event)
        self._rehome(lane, event)
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

    # -- logical workers -----------------------------------------------------------------------------------------

    def _places(self) -> list[Place]:
        return [
            place
            for name, lane in self._lanes.items()
            for host in lane.hosts()
            if (place := Place(name, host)) not in self._vacating
        ]

    def _settle(self) -> None:
        """Give homeless logical workers a host."""
        homes = self._homes
        if None not in homes.home:
            return
        wanted = max(1, self._sizes.local + self._sizes.remote)
        late = self._first_up_at is not None and monotonic() - self._first_up_at > CROWD_AFTER_S
        for logical, place in homes.choose(self._places(), wanted, crowd=late):
            state = homes.settle(logical, place)
            lane = self._lanes[place.lane]
            lane.adopt(place.host, logical, state)
            self._dirty.add(logical)

    def _rebalance(self) -> None:
        """Move logical workers (never running streams) to where they are wanted."""
        if not self._plan.logicals:
            return
        if not self._plan.iterable:
            self._vacate_surplus()
            for place in list(self._vacating):
                for logical in self._homes.tenants(place) - self._homes.leaving:
                    self._ask_to_move(logical)
                self._dismiss_if_empty(place)
            spare = self._homes.spare(self._places())
            if spare is not None:
                self._ask_to_move(spare)
        self._dirty.update(range(self._plan.logicals))

    def _vacate_surplus(self) -> None:
        """Empty hosts that are not wanted any more, but no faster than others are there to take over."""
        places = self._places()
        spare = len(places) - sum(lane.counts.wanted for lane in self._lanes.values())
        for name, lane in self._lanes.items():
            here = [place for place in places if place.lane == name]
            surplus = min(spare, len(here) - lane.counts.wanted)
            for place in here[::-1][: max(0, surplus)]:
                self._vacating.add(place)
                spare -= 1

    def _ask_to_move(self, logical: int) -> None:
        place = self._homes.leave(logical)
        self._lanes[place.lane].release(place.host, logical)

    def _dismiss_if_empty(self, place: Place) -> None:
        if place in self._vacating and not self._homes.tenants(place):
            self._lanes[place.lane].dismiss(place.host)

    def _released(self, event: Released) -> None:
        place = self._homes.home[event.logical]
        self._homes.left(event.logical, event.state)
        self._snapshots[event.logical] = event.state
        self._since[event.logical].clear()
        if place is not None:
            self._dismiss_if_empty(place)
        self._rebalance()

    def _snapshot(self, event: Snapshot) -> None:
        self._snapshots[event.logical] = event.state
        since = self._since[event.logical]
        while since and since[0][:2] <= (event.epoch, event.number):
            since.popleft()

    def _rehome(self, lane: Lane, event: Gone) -> None:
        """The logical workers of a dead host: streams fail, others start again from their last known state."""
        for logical in self._homes.evicted(Place(lane.name, event.host)):
            if self._plan.iterable and logical in self._started:
                self._fail_stream(logical, event)
                continue
            self._homes.state[logical] = self._snapshots.get(logical)
            self._replaying[logical] = deque(_replay(logical, *made) for made in self._since[logical])
            self._dirty.add(logical)

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
        if not self._closed:
            os.eventfd_write(self._wake, 1)

    def _grant_wishes(self) -> None:
        while self._wishes:
            self._sizes = self._wishes.popleft()
            if self._plan.iterable:
                continue
            for name, count in (("local", self._sizes.local), ("remote", self._sizes.remote)):
                if count > 0 or name in self._lanes:
                    self._lane(name, count)
        self.schedule.set_window(self._window())
        self._rebalance()
        if self._lanes:
            self._fill()

    # -- looking in ----------------------------------------------------------------------------------------------

    def stats(self) -> LoaderStats:
        """A snapshot; see `LoaderStats`."""
        schedule = self.schedule
        return LoaderStats(
            epoch=max(0, self._epoch),
            batches=self._batches,
            prefetch=schedule.window,
            in_flight=schedule.in_flight,
            ready=schedule.ready,
            batch_bytes=self._mood.nbytes,
            ready_bytes=schedule.ready * self._mood.nbytes,
            wait_s=self._wait_s,
            work_s=self._work_s,
            first_batch_s=self._first_batch_s,
            deaths=self._deaths,
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

    def lane(self, name: str) -> Lane | None:
        """The lane of that name, if it was ever needed."""
        return self._lanes.get(name)


def _replay(logical: int, epoch: int, number: int, index: Any) -> Ticket:
    ticket = Ticket(number, index, logical)
    ticket.epoch = epoch
    return ticket


def _gave_up(ticket: Ticket, why: str) -> WorkerDiedError:
    return WorkerDiedError(
        f"{why}. Batch {ticket.number} (dataset indices {_shortened(ticket.index)}) killed {ticket.deaths} workers, "
        "one after the other, and is given up"
    )


def _shortened(index: Any, most: int = 200) -> str:
    text = repr(index)
    return text if len(text) <= most else f"{text[:most]}… ({len(text)} characters)"
