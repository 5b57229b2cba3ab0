"""Drives one pass over the data: sampler → schedule → pools → consumer.

All work happens inside `Engine.next`, in the consumer's thread; where batches are pinned, a thread also takes results
in (`Engine.listen`). `Engine.resize` may be called from any thread: it is carried out at once when the engine is idle,
else at the next turn. The engine never refers to the iterator that owns it, so that dropping the iterator ends
everything.

`EngineState` decides and does not act. `Pools` acts on worker pools and takes in what they report, `Drawing` draws from
the sampler, `Delivery` opens the batch that is next in turn. All of them are called under the engine's lock, and none
refers to the engine. Other threads read `snapshots`.
"""

from __future__ import annotations

import logging
import math
import os
import select
import threading
import traceback
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial
from threading import get_native_id
from typing import TYPE_CHECKING, Any

from dpex.engine.delivery import ERRORS, OF_WORKERS, Delivery, raise_from
from dpex.engine.drawing import POINT_S, Drawing, ReadBatches
from dpex.engine.draws import Draws
from dpex.engine.pass_state import passing_over
from dpex.engine.pools import ANY, Pools
from dpex.engine.snapshots import EngineView
from dpex.errors import DpexError, InternalError, InterruptedStreamError, IteratorClosedError
from dpex.measure.consumer_time import DISPATCH, NONE_YET, SAMPLER, STARTUP, STRAGGLER, STREAM, EngineLook, Tally
from dpex.measure.sums import Sums
from dpex.measure.timeline import Timeline
from dpex.pools.base import WorkerPool
from dpex.schedule.engine_state import EngineState
from dpex.schedule.names import REMOTE
from dpex.schedule.placement import Place
from dpex.schedule.prefetch import PrefetchRules, Settings
from dpex.schedule.progress import START, ResumePoint
from dpex.schedule.sample_policy import AS_TORCH, SamplePolicy
from dpex.schedule.schedule import Schedule
from dpex.stats import LoaderStats
from dpex.system.clock import monotonic
from dpex.system.cpus import static_worker_count
from dpex.system.gpu.stall import GpuStall
from dpex.system.processes import watch
from dpex.system.run_queue import own_queue_s
from dpex.system.signals import is_from_handler, with_lock
from dpex.system.wakeup import Wakeup

if TYPE_CHECKING:
    from dpex.device.feed import Feed
    from dpex.device.pinning import Pinner

logger: logging.Logger = logging.getLogger("dpex")

COLLECT_EVERY_S = 0.001
"""Minimum seconds between polls of the pools while finished batches wait: each poll costs system calls."""
COLLECT_PINNED_EVERY_S = 0.01
"""Minimum seconds between polls while the pinning thread has more than half of its maximum of batches."""
TICK_S = 1.0
"""The longest sleep of the consumer, seconds: some changes wake no thread."""
TOLD_S = 1.0
"""At the end of a pass workers are idle, and report their states within milliseconds."""
FIRST_STATES_S = 5.0
"""Seconds that a state waits for workers that start late, on a machine with much other work."""
READ_AGAIN_S = 1.0
"""Maximum seconds of reading a stream without a state again after an exception. Beyond it, dpex raises an error that
advises a state for the dataset."""
_NO_STATE = (
    "an exception interrupted next(), so dpex ended the workers. This stream has no state from which new workers could "
    "continue, and reading its first {batches} batches again would take about {seconds:.1f} s. Begin a new epoch, or "
    "give the dataset or its iterator state_dict() and load_state_dict() to continue after such an exception"
)
_INHERITED = (
    "this iterator belongs to process {0._pid}, from which this one was forked: its workers answer to that "
    "process only. Call iter(loader) for an iterator of this process; with "
    "persistent_workers=True, which keeps the first iterator, "
    "make a new DpexDataLoader here"
)


@dataclass(frozen=True, kw_only=True)
class EnginePlan:
    logicals: int
    iterable: bool
    in_order: bool
    timeout_s: float
    may_group: bool
    memory_budget: int | None
    make_pool: Callable[[str, int], WorkerPool]
    """Makes the pool of a name, with a number of workers."""
    samples: SamplePolicy = AS_TORCH
    """The policy for samples that cannot be loaded."""
    pinner: Pinner | None = None
    feed: Feed | None = None
    gpu: GpuStall[Any] | None = None
    metered: bool = False
    pass_batches: int = 0
    """Batches of a whole pass, 0 if unknown."""
    lanes: int = 1
    """Batches that a worker makes at the same time."""
    is_tuned: bool = False
    """A tuner chooses the settings."""
    starts_anew: bool = False
    """Each pass starts workers of its own."""

    def state(self, settings: Settings, rules: PrefetchRules | None = None) -> EngineState:
        """Return the state of an engine that begins with ``settings``. ``rules``: What another state has learned."""
        rules = rules or PrefetchRules(
            logical=self.logicals > 0,
            may_group=self.may_group,
            memory_budget=self.memory_budget,
            lanes=self.lanes,
            is_tuned=self.is_tuned,
        )
        return EngineState(
            logicals=self.logicals,
            iterable=self.iterable,
            in_order=self.in_order,
            rules=rules,
            settings=settings,
            tolerates=self.samples.tolerates,
        )


class Engine:
    """See the module.

    Attributes:
        state: Everything that the pass decides; a renewal replaces it.
    """

    def __init__(self, plan: EnginePlan, settings: Settings) -> None:
        began = monotonic()
        self._plan = plan
        self._pid = os.getpid()
        self._turn = threading.RLock()
        """Held by the consumer in ``next()``; ``_lock`` guards what threads share, and is free during waits."""
        self._lock = threading.RLock()
        self._wakeup = Wakeup()
        self._closed = False
        self._is_changing = self._is_active = False
        """A change of the state has begun and not ended. If no call is active, an exception has broken it off."""
        self._broken_by = logging.INFO, ""
        """The level at which the exception that broke off a change is logged, and its traceback as text: the frames of
        the exception itself would keep the iterator."""
        self._has_logged_renewal = False
        self._consumer = 0
        self._collected_at = 0.0
        """Time of the latest poll of the pools, in seconds."""
        self._requests: deque[Settings] = deque(maxlen=1)
        """The latest request for other settings, until it is carried out."""
        self._is_granting = False
        self._drawing = Drawing()
        self._tally = Tally(detailed=plan.metered, queue=own_queue_s)
        state = plan.state(settings)
        self._use(state, Pools(state, plan.make_pool, plan.samples))
        watch(self)
        self._placement.open()
        self._pools.perform()
        self._tally.causes[STARTUP] += monotonic() - began

    def _use(self, state: EngineState, pools: Pools) -> None:
        self._pools = pools
        self._delivery = Delivery(self._plan, state, pools, self._tally)
        self._view = EngineView(self._plan, state, pools, self._tally)
        self.state: EngineState = state
        self._placement = state.placement

    @property
    def schedule(self) -> Schedule:
        return self.state.schedule

    # -- life ----------------------------------------------------------------------------------------------------

    def begin_epoch(self, source: Draws | ReadBatches, resume: ResumePoint | None = None) -> None:
        """Start a pass: tickets are drawn from ``source``, up to the prefetch at once.

        ``resume``: where it goes on if another run began it; ``source`` begins there, too. Raises IteratorClosedError
        if it was closed, or this process is a forked child of its owner.
        """
        with self._lock:
            if self._closed:
                raise self._why_closed()
            began = monotonic()
            if self._is_changing:
                next_point = self._renew(begins_epoch=True)
                resume = resume or next_point
            self._is_changing = True
            self.state.begin_epoch(resume, began)
            self._pools.perform()
            if self._plan.pinner is not None:
                self._plan.pinner.begin_epoch()
            self._drawing.begin(source)
            if resume is not None and resume.ahead:
                self._drawing.pass_over(self.state, resume.ahead)
            self._tally.begin_pass(began)
            self._consumer = get_native_id()
            self._fill()
            self._is_changing = False
            self._tally.causes[STARTUP] += monotonic() - began

    def close(self, grace_s: float = 5.0) -> None:
        """End all pools; idempotent, and harmless in a process that was forked from the owner.

        From any thread: a consumer that waits in `next` meanwhile gets an `IteratorClosedError`.
        """
        if self._closed or os.getpid() != self._pid:
            return
        self._closed = True
        self._wakeup.ring()
        with_lock(self._lock, lambda _: self._end_pools(grace_s), grace_s)

    def _end_pools(self, grace_s: float) -> None:
        for pool in self._pools.by_name.values():
            pool.close(grace_s)
        self._wakeup.close()

    def inherited(self) -> None:
        """Mark the engine as closed in a forked process (`dpex.system.processes`). The workers belong to the parent."""
        self._closed = True
        self._lock, self._turn = threading.RLock(), threading.RLock()

    def _why_closed(self) -> IteratorClosedError:
        closed = "this iterator was closed: call iter(loader) for a new one"
        return IteratorClosedError(closed if os.getpid() == self._pid else _INHERITED.format(self))

    @property
    def closed(self) -> bool:
        """True once `close` has been called, and in a process that was forked from the owner."""
        return self._closed

    # -- the consumer --------------------------------------------------------------------------------------------

    def next(self, out: list[Any]) -> None:
        """Put the next batch into ``out``, which is empty.

        Consumers in several threads take turns, and each batch goes to one consumer. After any exception that is not
        listed here, the caller puts the contents of ``out`` into `Schedule.undelivered`. The next call then resumes the
        pass.

        Raises:
            StopIteration: at the end.
            Exception: the batch's own, in its place.
            BatchTimeoutError: no batch came in time.
            IteratorClosedError: it was closed.
        """
        with self._turn:
            tally, over, entered = self._tally, False, monotonic()
            gpu, mark, delivery = self._plan.gpu, None, self._delivery
            delivery.opened_s = None
            tally.enter(entered)
            try:
                if gpu is not None:
                    mark = gpu.enter(starting=tally.starting)
                while (wait := self._step(out, entered)) is not None:
                    if gpu is not None:
                        mark = gpu.block(mark)
                    wait()
                if type(out[0]) in ERRORS:
                    raise_from(out, self._tally.errors)
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
                tally.leave(delivery.opened_s, now, over=over)
                if self._pools.timeline is not None:
                    self._pools.timeline.call(entered, now, over)

    def read_ahead(self) -> Callable[[], Any] | None:
        """Deliver the next batch, or its error, into `Schedule.undelivered`, or return the wait for it.

        Nothing of it is measured: the caller measures its own wait.
        """
        with self._turn:
            return self._step(None, monotonic())

    def descriptors(self) -> list[int]:
        return self._pools.descriptors()

    def _note(self, error: Exception) -> None:
        """Count an error that comes out of `next`. Raises IteratorClosedError where it may come of being closed."""
        if isinstance(error, OF_WORKERS):
            self._tally.errors["worker"] += 1
        if self._closed and not isinstance(error, IteratorClosedError):
            raise self._why_closed() from error  # a handler, or another thread, has closed it just now

    def _step(self, out: list[Any] | None, entered: float) -> Callable[[], Any] | None:
        """Attend to the next batch; after a change that an exception broke off, with a new state and new workers."""
        with self._lock:
            if self._is_changing:
                if self._is_active:
                    raise InternalError("next() was called by a signal handler that interrupted next() of its iterator")
                if not self._closed:
                    self._renew()
            self._is_changing = self._is_active = True
            try:
                wait = self._attend(out, entered)
            except (StopIteration, DpexError):
                self._is_changing = False
                raise
            except BaseException as error:
                if not self._has_logged_renewal:
                    level = logging.INFO if is_from_handler(error) else logging.WARNING
                    self._broken_by = level, "".join(traceback.format_exception(error))
                raise
            finally:
                self._is_active = False
            self._is_changing = False
            return wait

    def _attend(self, out: list[Any] | None, entered: float) -> Callable[[], Any] | None:
        """Attend to what happened since the last call, then to the next batch: returns what to wait for first."""
        if self._tally.blocked_at:
            self._tally.unblock(monotonic())
            if not self._closed:
                self._wakeup.clear()
        schedule = self.schedule
        if self._closed:
            raise StopIteration if schedule.finished else self._why_closed()
        if out is None:
            out = schedule.undelivered
        elif schedule.deliver_again(out):
            return None
        if self._placement.instructions:
            self._pools.perform()
            self._pools.raise_fatal()
        if self._requests:
            self._grant()
        pinner = self._plan.pinner
        every_s = COLLECT_EVERY_S if pinner is None or pinner.is_low else COLLECT_PINNED_EVERY_S
        if entered - self._collected_at > every_s:
            self._collect()
        return self._seek(out, entered)

    def _seek(self, out: list[Any], entered: float) -> Callable[[], Any] | None:
        """Hand out the next batch in turn, or return the wait for it."""
        schedule, delivery, pinner = self.state.schedule, self._delivery, self._plan.pinner
        while True:
            if pinner is not None and (wait := delivery.wait_for_pinning(pinner, entered)) is not None:
                return wait
            batch = schedule.peek()
            if batch is not None:
                delivery.hand_out(batch, out)
                self._fill()
                return None
            if schedule.finished:
                raise StopIteration
            self._fill(starving=True)
            if not self._collect():
                if schedule.finished:
                    raise StopIteration
                self._prepare_to_wait()
                return self._wait_for_results(entered)

    # -- tickets to workers, results back ------------------------------------------------------------------------

    def _fill(self, starving: bool = False) -> None:
        """Draw all tickets that the prefetch allows, and send what waits; if ``starving``, all of it now."""
        state = self.state
        room = state.room(starving)
        if room:
            began = monotonic()
            self._drawing.draw(state, room)
            self._tally.busy(SAMPLER, began, monotonic())
            state.placement.incomplete.clear()
        if state.has_to_send(starving):
            began = monotonic()
            try:
                state.issue(self._collected_at, starving=starving)
                self._pools.perform()
            except OSError:  # no descriptor is left: an error once the consumer lacks a batch
                if starving:
                    raise
            self._tally.busy(DISPATCH, began, monotonic())

    def _collect(self) -> bool:
        self._collected_at = now = monotonic()
        has_events = self._pools.collect(now)
        if has_events:
            state = self.state
            if state.rules.is_due:
                state.learn()
            if state.placement.dirty:
                state.issue(now, starving=not state.schedule.ready)
                self._pools.perform()
            self._tally.busy(DISPATCH, now, monotonic())
        return has_events

    # -- waits ---------------------------------------------------------------------------------------------------

    def _prepare_to_wait(self) -> None:
        """Start what must precede a wait for workers, and use the time of the wait.

        Raises:
            WorkerDiedError: The wait would not end: no worker is left, and no pool can start one.
        """
        state, settings = self.state, self._placement.settings
        state.consumer_waits(self._cpus if REMOTE in self._pools.by_name else 1, monotonic())
        self._pools.perform()
        self._pools.raise_fatal()
        if self._placement.settings is not settings:  # others take over
            self._fill(starving=True)

    @cached_property
    def _cpus(self) -> int:
        return static_worker_count()

    def _wait_for_results(self, entered: float) -> Callable[[], Any]:
        """Return the wait for workers of a call that began at ``entered``. It lasts `TICK_S` at the most.

        Raises:
            BatchTimeoutError: The call has taken too long already.
        """
        limit = TICK_S
        if math.isfinite(self.state.late.due_at):
            limit = min(limit, max(0.0, self.state.late.due_at - monotonic()))
        if self._plan.timeout_s > 0:
            left = entered + self._plan.timeout_s - monotonic()
            if left <= 0:
                raise self._delivery.timed_out()
            limit = min(limit, left)
        reading = self._drawing.descriptors()
        watched = self._pools.descriptors()
        self._wakeup.watch(watched + reading if reading and self.state.room(starving=True) else watched)
        self._tally.block(monotonic(), self._cause(), self._idle_ratio())
        return partial(self._wakeup.sleep, limit)

    def _cause(self) -> int:
        """Return the cause of the wait that is about to begin. It may be known only once the batch is here."""
        schedule = self.state.schedule
        if schedule.ready:
            return STRAGGLER
        if not self._placement.running():
            return STARTUP
        if self._drawing.awaits_reading(schedule):
            return STREAM
        self._pools.awaited = schedule.next_number if self._plan.in_order else ANY
        return NONE_YET

    def _idle_ratio(self) -> float:
        """Return the part of the batches that the workers could be making, but are not."""
        schedule, lanes = self.state.schedule, self._plan.lanes
        most = lanes * self._placement.running()
        if self._plan.logicals:
            at_work = schedule.at_work
        else:
            load = self._placement.load
            at_work = schedule.pending() + sum(
                min(load[name], lanes * pool.at_work()) for name, pool in self._pools.by_name.items()
            )
        return max(0.0, 1.0 - at_work / most) if most else 0.0

    # -- renewal -------------------------------------------------------------------------------------------------

    def _renew(self, *, begins_epoch: bool = False) -> ResumePoint | None:
        """Resume the pass behind what was delivered, as a later run does, with a new state and new workers.

        This may be broken off as well, and is then done again. Whatever was not delivered is made again. With
        ``begins_epoch`` the pass is given up, and the point at which another begins is returned. Raises
        InterruptedStreamError if a stream without a state would have to be read again for long.
        """
        plan, former = self._plan, self.state
        point = former.point()
        if begins_epoch:
            point = point.next_epoch()
        elif plan.iterable:
            point = self._reading_again(point)
        settings = self._requests[-1] if self._requests else former.placement.settings
        state = plan.state(settings, former.rules)
        pools = Pools(state, plan.make_pool, plan.samples)
        pools.succeed(self._pools)
        if plan.pinner is not None:
            plan.pinner.renew()
        if former.epoch >= 0 and not begins_epoch:
            state.begin_epoch(point, monotonic())
            if point.ahead:
                self._drawing.pass_over(state, point.ahead)
        state.succeed(former)
        self._use(state, pools)
        self._log_renewal()
        state.placement.open()
        pools.perform()
        pools.end_former()
        self._requests.clear()
        return point if former.epoch >= 0 else None

    def _reading_again(self, point: ResumePoint) -> ResumePoint:
        """Return ``point`` with states for the streams that have none: what they have delivered is read and dropped."""
        most = max((logical.batches for logical in point.logicals if logical.state is None), default=0)
        if not most:
            return point
        times = [pool.times.stages() for pool in self._pools.every()]
        load_s, tickets = sum(each.load_s for each in times), sum(each.tickets for each in times)
        again_s = most * load_s / max(1, tickets)
        if again_s > READ_AGAIN_S:
            raise InterruptedStreamError(_NO_STATE.format(seconds=again_s, batches=point.first))
        return passing_over(point, self._drawing.any_index)

    def _log_renewal(self) -> None:
        level, text = self._broken_by
        if text and not self._has_logged_renewal:
            self._has_logged_renewal = True
            logger.log(level, "the epoch continues with new workers after an exception in next():\n%s", text)

    # -- the thread that pins --------------------------------------------------------------------------------------

    def listen(self) -> list[int]:
        """Take a few finished batches and hand them over, in the pinning thread. Return the descriptors to watch.

        Any other event, and all events after it, wait for the consumer.
        """
        with self._lock:
            pinner = self._plan.pinner
            if self._closed or pinner is None or self._is_changing:
                return []
            if self._delivery.take_results(pinner):
                self._wakeup.ring()
            return self._pools.descriptors() if self._delivery.may_take_results(pinner) else []

    # -- resizing ------------------------------------------------------------------------------------------------

    def resize(self, settings: Settings) -> None:
        """Change workers and prefetch, from any thread; at once if the engine is idle, else within its next turn.

        Raises:
            ValueError: No worker is asked for.
        """
        self.request(settings)
        with_lock(self._lock, self._grant_if)

    def request(self, settings: Settings) -> None:
        """Request a resize, which the consumer's thread carries out within its next turn."""
        if self._closed:
            return
        if settings.workers < 1:  # batches in flight would never be made
            raise ValueError(
                f"local={settings.local}, remote={settings.remote}: an epoch with workers needs at least one"
            )
        self._requests.append(settings)
        self._wakeup.ring()

    def _grant_if(self, is_idle: bool) -> None:
        if is_idle and not self._closed and not self._is_changing:
            self._change(self._grant)

    def _change(self, act: Callable[[], None]) -> None:
        """Call ``act``, which changes the state, outside of `next`."""
        self._is_changing = True
        try:
            act()
        except DpexError:
            self._is_changing = False
            raise
        self._is_changing = False

    def _grant(self) -> None:
        """Carry out the latest request. Called under the lock."""
        if self._placement.instructions:
            self._pools.perform()
        if self._requests:
            self._is_granting = True
            try:
                request = self._requests[-1]
                self.state.resize(request)
                self._pools.perform()
            finally:
                self._is_granting = False
            if self._requests[-1] is request:
                self._requests.pop()
        self.state.settle_prefetch()
        if self._pools.by_name:
            self._fill()

    # -- looking in ----------------------------------------------------------------------------------------------

    def stats(self) -> LoaderStats:
        return self._view.stats()

    def point(self) -> ResumePoint | None:
        """Return where the pass is, by the batches that were handed out. Any thread may call it.

        None: the engine has been busy for `POINT_S`, which only a slow sampler can cause.
        """
        points: list[ResumePoint | None] = [None]

        def note(is_idle: bool) -> None:
            if is_idle:
                points[0] = self._drawing.with_reading(self.state.point())

        with_lock(self._lock, note, POINT_S)
        return points[0]

    def ask_states(self, wait_s: float = 0.0) -> None:
        """Have workers report the states of datasets from now on.

        Args:
            wait_s: Seconds to wait for the present states, in the thread that iterates.
        """

        def ask() -> None:
            self.state.logicals.ask_states()
            self._pools.perform()
            self._await(lambda: not self.state.logicals.untold, wait_s)

        with self._lock:
            if self._is_changing:
                self.state.logicals.asks_states = True  # the next call renews the workers, which are asked then
            elif not self._closed:
                self._change(ask)

    def unreported(self, wait_s: float = 0.0) -> int:
        """Wait until each logical worker has reported a state; return how many have not within ``wait_s`` seconds.

        Only the thread that iterates may call it.
        """
        with self._lock:
            if self._closed:
                return 0
            if not self._is_changing:
                self._change(lambda: self._await(lambda: not self.state.logicals.unreported(), wait_s))
            return self.state.logicals.unreported()

    def begin_with(self, state: bytes) -> None:
        """Start each logical worker from ``state``, before the first batch."""
        with self._lock:
            for log in self.state.logicals.logs:
                log.told(*START, state)

    def _await(self, is_done: Callable[[], bool], wait_s: float) -> None:
        deadline = monotonic() + wait_s
        while (left_s := deadline - monotonic()) > 0 and not is_done():
            select.select(self._pools.descriptors(), (), (), left_s)
            if self._pools.take_results():
                self._wakeup.ring()

    def look(self) -> EngineLook:
        """For the tuner, from its thread: does not wait for the consumer."""
        return self._view.look(resizing=self._is_granting or bool(self._requests), thread=self._consumer)

    def sums(self) -> Sums:
        """Return the counts for metrics. Any thread may call it; it does not wait for the consumer."""
        return self._view.sums(self._consumer, self._drawing.reading())

    def record(self, timeline: Timeline | None) -> None:
        """Record batches and calls of `next` there from now on; None: no longer."""
        self._pools.timeline = timeline

    def first_logical_worker(self, place: Place) -> int:
        """The lowest number of the logical workers that live there, or a number above all of them."""
        return min(self.state.logicals.placed_on(place), default=self._plan.logicals)

    def pool(self, name: str) -> WorkerPool | None:
        return self._pools.by_name.get(name)
