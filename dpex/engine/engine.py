"""Drives one pass over the data: sampler → schedule → pools → consumer.

All work happens inside `Engine.next`, in the consumer's thread. If batches are pinned, the pinning thread also takes in
results (`Engine.listen`). Any thread may call `Engine.resize`, which takes effect at once if the engine is idle, else
in the consumer's next step. The engine holds no reference to the iterator that owns it, so the engine is closed when
the iterator is garbage-collected.

`EngineState` decides and does not act. `Pools` acts on worker pools and takes in their reports, `Drawing` draws from
the sampler, `Delivery` opens the batch that is next in turn. All of them are called under the engine's lock, and none
refers to the engine. Other threads read `snapshots`.
"""

from __future__ import annotations

import logging
import math
import os
import select
import threading
from collections.abc import Callable
from dataclasses import replace
from functools import cached_property, partial
from threading import get_ident, get_native_id
from typing import Any

from dpex.engine.delivery import OF_WORKERS, Delivery
from dpex.engine.drawing import Drawing
from dpex.engine.index_source import IndexSource
from dpex.engine.plan import EnginePlan
from dpex.engine.pools import ANY, Pools
from dpex.engine.snapshots import EngineView
from dpex.errors import DpexError, IteratorClosedError, IteratorInterruptedError
from dpex.measure.causes import DISPATCH, SAMPLER, STARTUP, STRAGGLER, STREAM
from dpex.measure.consumer_time import NONE_YET, Tally
from dpex.measure.reading import EngineReport, Reading
from dpex.measure.settings import REMOTE, Settings
from dpex.measure.timeline import Timeline
from dpex.pools.base import WorkerPool
from dpex.schedule.engine_state import EngineState
from dpex.schedule.placement import Place
from dpex.schedule.progress import START, ResumePoint
from dpex.schedule.schedule import Schedule
from dpex.stats import LoaderStats, StreamStats
from dpex.system.clock import monotonic
from dpex.system.cpus import static_worker_count
from dpex.system.meter import own_queue_s
from dpex.system.processes import notify_in_forks
from dpex.system.wakeup import Wakeup

logger: logging.Logger = logging.getLogger("dpex")

COLLECT_EVERY_S = 0.001
"""Minimum seconds between polls of the pools while finished batches wait, because each poll costs system calls."""
COLLECT_PINNED_EVERY_S = 0.01
"""Minimum seconds between polls while the pinning thread has more than half of its maximum of batches."""
TICK_S = 1.0
"""Maximum seconds of one sleep of the consumer, because some changes wake no thread."""
POINT_S = 1.0
"""Maximum seconds that `Engine.point` waits for the thread in ``next()``. `ReadBatches` waits up to the same time for
a reading engine that has restarted."""
TOLD_S = 1.0
"""Maximum seconds of waiting for states at the end of a pass. Workers are idle then, and report within milliseconds."""
FIRST_STATES_S = 5.0
"""Maximum seconds that ``state_dict()`` waits for workers that start slowly, as on a busy machine."""
GRACE_S = 5.0
"""Seconds in which workers may complete a sample when an iterator ends, as in torch."""
GRACE_AT_EXIT_S = 0.5
"""Seconds in which workers may complete a sample when the program has ended. torch ends its workers at once then."""
_INHERITED = (
    "this iterator belongs to process {0._pid}, from which this one was forked: its workers answer to that "
    "process only. Call iter(loader) for an iterator of this process; with "
    "persistent_workers=True, which keeps the first iterator, "
    "make a new DpexDataLoader here"
)


class Engine:
    """See the module.

    Attributes:
        state: The state of the pass, which makes all decisions.
    """

    def __init__(self, plan: EnginePlan, settings: Settings) -> None:
        began = monotonic()
        self._plan = plan
        self._pid = os.getpid()
        self._turn = threading.RLock()
        """Held by the consumer in ``next()``. ``_lock`` guards the state that threads share, and is free during
        waits."""
        self._lock = threading.RLock()
        self._wakeup = Wakeup()
        self._closed = False
        self._is_changing = False
        """True during a change of the state. If a thread takes the lock and finds True, the change was interrupted."""
        self._why_broken = "unknown"
        self._consumer = 0
        self._collected_at = 0.0
        """Time of the latest poll of the pools, in seconds."""
        self._requested: Settings | None = None
        self._granted: Settings | None = None
        """The latest request for other settings, written by any thread, and the latest that was carried out, written by
        the consumer. They are different objects while a request waits."""
        self._drawing = Drawing()
        self._tally = Tally(detailed=plan.metered, queue=own_queue_s)
        self.state: EngineState = plan.state(settings)
        self._placement = self.state.placement
        self._pools = pools = Pools(self.state, plan.make_pool, plan.samples)
        self._delivery = Delivery(plan, self.state, pools, self._tally)
        self._view = EngineView(plan, self.state, pools, self._tally)
        notify_in_forks(self)
        self._pools.open()
        self._tally.causes[STARTUP] += monotonic() - began

    @property
    def schedule(self) -> Schedule:
        return self.state.schedule

    # -- life ----------------------------------------------------------------------------------------------------

    def begin_epoch(self, source: IndexSource, resume: ResumePoint | None = None) -> None:
        """Start a pass, and draw tickets from ``source`` up to the prefetch.

        ``resume``: the position at which the pass continues if another run began it; ``source`` begins at the same
            position. Raises IteratorClosedError if the engine was closed, or this process is a forked child of its
            owner.
        """
        with self._lock:
            if self._closed:
                raise self._why_closed()
            began = monotonic()
            self._is_changing = True
            self.state.begin_epoch(resume, began)
            self._pools.perform()
            if self._plan.pinner is not None:
                self._plan.pinner.begin_epoch(self.state.epoch)
            self._drawing.source = source
            if resume is not None and resume.ahead:
                self._drawing.pass_over(self.state, resume.ahead)
            self._tally.begin_pass(began)
            self._consumer = get_native_id()
            self._fill()
            self._is_changing = False
            self._tally.causes[STARTUP] += monotonic() - began

    def close(self) -> None:
        """End all pools; idempotent, and harmless in a process that was forked from the owner.

        Any thread may call it. A consumer that waits in `next` then gets an `IteratorClosedError`.
        """
        if self._closed or os.getpid() != self._pid:
            return
        self._closed = True
        self._wakeup.ring()
        grace_s = GRACE_S if threading.main_thread().is_alive() else GRACE_AT_EXIT_S
        got = self._lock.acquire(timeout=grace_s)
        try:
            for pool in self._pools.by_name.values():
                pool.close(grace_s)
            self._wakeup.close()
        finally:
            if got:
                self._lock.release()

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

    @property
    def is_broken(self) -> bool:
        """True if an exception has interrupted an earlier call. Only valid outside of ``next()``."""
        return self._is_changing or get_ident() in self.schedule.in_hand

    def next(self) -> Any:
        """Return the next batch, or the error in its place. The caller then removes this thread from `in_hand`.

        Consumers in several threads take turns, and each batch goes to one consumer.

        Raises:
            StopIteration: at the end.
            BatchTimeoutError: no batch came in time.
            IteratorClosedError: the engine was closed.
            IteratorInterruptedError: an exception has interrupted an earlier call.
        """
        with self._turn:
            tally, over, entered = self._tally, False, monotonic()
            gpu, mark, delivery = self._plan.gpu, None, self._delivery
            delivery.opened_s = None
            tally.enter(entered)
            try:
                if gpu is not None:
                    mark = gpu.enter(starting=tally.starting)
                while (wait := self._step(entered)) is not None:
                    if gpu is not None:
                        mark = gpu.block(mark)
                    wait()
                value, delivery.value = delivery.value, None
                return value
            except StopIteration:
                over = True
                raise
            except Exception as error:
                if isinstance(error, OF_WORKERS):
                    tally.errors["worker"] += 1
                if self._closed and not isinstance(error, IteratorClosedError):
                    raise self._why_closed() from error
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
        """Move the next batch, or its error, to `Schedule.held`. If it is not made yet, return a function that waits.

        This is not timed as a call of the consumer, because the decoding engine times its own wait for the stream.
        """
        with self._turn:
            return self._step(monotonic(), holds=True)

    def descriptors(self) -> list[int]:
        return self._pools.descriptors()

    def _step(self, entered: float, *, holds: bool = False) -> Callable[[], Any] | None:
        """Call `_attend` under the lock. Any exception but StopIteration, DpexError or Warning breaks the engine."""
        with self._lock:
            if self._is_changing or get_ident() in self.schedule.in_hand:
                raise IteratorInterruptedError.of(self._why_broken, is_counted=self._is_counted)
            self._is_changing = True
            try:
                wait = self._attend(entered, holds)
            except (StopIteration, DpexError, Warning):  # a warning filter may raise warnings as errors
                self._is_changing = False
                raise
            except BaseException as error:
                self._why_broken = repr(error)
                raise
            self._is_changing = False
            return wait

    def _attend(self, entered: float, holds: bool) -> Callable[[], Any] | None:
        """Perform instructions and a requested resize, take in events, then hand out the next batch. Return None, or a
        function that waits if no batch is ready."""
        if self._tally.blocked_at:
            self._tally.unblock(monotonic())
            if not self._closed:
                self._wakeup.clear()
        if self._closed:
            raise StopIteration if self.schedule.finished else self._why_closed()
        if self._placement.instructions:
            self._pools.perform()
            self._pools.raise_fatal()
        if self._requested is not self._granted:
            self._grant()
        pinner = self._plan.pinner
        every_s = COLLECT_EVERY_S if pinner is None or pinner.is_low else COLLECT_PINNED_EVERY_S
        if entered - self._collected_at > every_s:
            self._collect()
        return self._seek(entered, holds)

    def _seek(self, entered: float, holds: bool) -> Callable[[], Any] | None:
        """Hand out the next batch in turn and return None, or return a function that waits for it."""
        schedule, delivery, pinner = self.state.schedule, self._delivery, self._plan.pinner
        while True:
            if pinner is not None and (wait := delivery.wait_for_pinning(pinner, entered)) is not None:
                return wait
            batch = schedule.peek()
            if batch is not None:
                delivery.hand_out(batch, holds)
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
        """Draw all tickets that the prefetch allows, and send waiting tickets; if ``starving``, incomplete messages as
        well."""
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
            except OSError:  # no file descriptor is left; raise only if the consumer has no batch
                if starving:
                    raise
            self._tally.busy(DISPATCH, began, monotonic())

    def _collect(self) -> bool:
        self._collected_at = now = monotonic()
        has_events = self._pools.collect(now)
        if has_events:
            state = self.state
            if state.rules.is_due:
                state.apply_averages()
            if state.placement.dirty:
                state.issue(now, starving=not state.schedule.ready)
                self._pools.perform()
            self._tally.busy(DISPATCH, now, monotonic())
        return has_events

    # -- waits ---------------------------------------------------------------------------------------------------

    def _prepare_to_wait(self) -> None:
        """Before a wait for workers, have local workers take over from a failed cluster and make late tickets again.

        Raises:
            WorkerDiedError: No worker is left and no pool can start one, so the wait would never end.
        """
        state, settings = self.state, self._placement.settings
        state.consumer_waits(self._cpus if REMOTE in self._pools.by_name else 1, monotonic())
        self._pools.perform()
        self._pools.raise_fatal()
        if self._placement.settings is not settings:  # local workers take over
            self._fill(starving=True)

    @cached_property
    def _cpus(self) -> int:
        return static_worker_count()

    def _wait_for_results(self, entered: float) -> Callable[[], Any]:
        """Return a function that waits up to `TICK_S` seconds for workers. ``entered``: time at which the call began.

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
        reading = self._drawing.source.descriptors()
        watched = self._pools.descriptors()
        self._wakeup.set_descriptors(watched + reading if reading and self.state.room(starving=True) else watched)
        self._tally.block(monotonic(), self._cause(), self._idle_ratio())
        return partial(self._wakeup.sleep, limit)

    def _cause(self) -> int:
        """Return the cause of the wait about to begin, or `NONE_YET` if it is known only once the batch has arrived."""
        schedule = self.state.schedule
        if schedule.ready:
            return STRAGGLER
        if not self._placement.running():
            return STARTUP
        if self._drawing.source.awaits_reading(schedule):
            return STREAM
        self._pools.awaited = schedule.next_number if self._plan.in_order else ANY
        return NONE_YET

    def _idle_ratio(self) -> float:
        """Return the idle share of the workers: 1 - batches being made / batches that they can make at a time."""
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

    # -- the thread that pins --------------------------------------------------------------------------------------

    def listen(self) -> list[int]:
        """Take in a few finished batches, and queue them for pinning. Return the descriptors to watch.

        The pinning thread calls it. Events of other kinds, and all events after them, wait for the consumer.
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
        """Change workers and prefetch from any thread: at once if the engine is idle, else in the consumer's next step.

        Raises:
            ValueError: No worker is asked for.
        """
        self.request(settings)
        if self._lock.acquire(blocking=False):
            try:
                if not self._closed and not self._is_changing:
                    self._change(self._grant)
            finally:
                self._lock.release()

    def request(self, settings: Settings) -> None:
        """Request a resize, which the consumer's thread carries out in its next step."""
        if self._closed:
            return
        if settings.workers < 1:  # batches in flight would never be made
            raise ValueError(
                f"local={settings.local}, remote={settings.remote}: an epoch with workers needs at least one"
            )
        self._requested = replace(settings)  # a new object, because `_attend` compares identity
        self._wakeup.ring()

    def _change(self, act: Callable[[], None]) -> None:
        """Call ``act``, which changes the state, outside of `next`."""
        self._is_changing = True
        try:
            act()
        except (DpexError, Warning):
            self._is_changing = False
            raise
        self._is_changing = False

    def _grant(self) -> None:
        """Carry out the latest request. Called under the lock."""
        if self._placement.instructions:
            self._pools.perform()
        request = self._requested
        if request is not None and request is not self._granted:
            self.state.resize(request)
            self._pools.perform()
            self._granted = request
        self.state.settle_prefetch()
        if self._pools.by_name:
            self._fill()

    # -- looking in ----------------------------------------------------------------------------------------------

    def stats(self) -> LoaderStats:
        """Return a snapshot. Any thread may call it; it does not wait for the consumer."""
        return replace(self._view.stats(), streams=self._drawing.source.streams() or self._streams())

    def _streams(self) -> tuple[StreamStats, ...]:
        """Return the counts of each stream, without the number of its shards."""
        counts = self.state.schedule.queue_counts() if self._plan.iterable else ()
        return tuple(StreamStats(0, batches, has_ended) for batches, has_ended in counts)

    @property
    def _is_counted(self) -> bool:
        """True if the number of batches handed out gives the position, even after an exception broke the engine."""
        return self._plan.in_order and not self._plan.iterable

    def point(self) -> ResumePoint | None:
        """Return the position in the pass, by the batches that were handed out. Any thread may call it.

        None: the engine has been busy for `POINT_S`, which only a slow sampler can cause, or an exception has
        interrupted a change and a count of batches is not enough to give the position.
        """
        if not self._lock.acquire(timeout=POINT_S):
            return None
        try:
            if self._is_changing and not self._is_counted:
                return None
            return self._drawing.source.with_reading(self.state.point())
        finally:
            self._lock.release()

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
            if not self._closed and not self._is_changing:
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
                log.add_state(*START, state)

    def _await(self, is_done: Callable[[], bool], wait_s: float) -> None:
        deadline = monotonic() + wait_s
        while (left_s := deadline - monotonic()) > 0 and not is_done() and self._pools.fatal is None:
            poll = select.poll()
            for fd in self._pools.descriptors():
                poll.register(fd, select.POLLIN)
            poll.poll(1e3 * left_s)
            if self._pools.take_results():
                self._wakeup.ring()
            if self._pools.must_wait_for_the_consumer:  # which is this thread
                try:
                    self._collect()
                except Exception as error:  # `next` raises it
                    self._pools.fatal = error

    def report(self) -> EngineReport:
        """Return the counts for the tuner, from its thread, without waiting for the consumer."""
        return self._view.report(self.reading(), resizing=self._requested is not self._granted)

    def reading(self) -> Reading:
        """Return all counts. Any thread may call it; it does not wait for the consumer."""
        return self._view.reading(self._consumer, self._drawing.source.reading())

    def record(self, timeline: Timeline | None) -> None:
        """Record batches and calls of `next` in ``timeline`` from now on. None: Stop recording."""
        self._pools.timeline = timeline

    def first_logical_worker(self, place: Place) -> int:
        """Return the lowest logical worker on ``place``, or the count of all logical workers if it has none."""
        return min(self.state.logicals.placed_on(place), default=self._plan.logicals)

    def pool(self, name: str) -> WorkerPool | None:
        return self._pools.by_name.get(name)
