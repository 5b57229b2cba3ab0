"""Where the consumer's time goes, counted as it goes by, and what one look at an engine shows.

The consumer's thread writes, any other may read: what `Tally.times` says is right to within the moment that passes
meanwhile. The first call of a pass is left out: the time it takes is the start's, not the work's.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from dpex.measure.batch_times import BatchTimes
from dpex.measure.record import Record, counter
from dpex.measure.samples import PoolSample
from dpex.measure.seqlock import Seqlock
from dpex.measure.sums import NodeStats, Sums
from dpex.measure.wait_causes import (
    CAUSES,
    COLLATE,
    NONE_YET,
    READ,
    STARTUP,
    STRAGGLER,
    TRANSFORM,
    UNKNOWN,
    split,
)

if TYPE_CHECKING:
    from dpex.schedule.prefetch import Sizes

LONG_S = 0.5
"""A wait that took so long without an end is put down by the batch before, so that what is counted keeps up."""
WAIT_BUCKETS = (0.00005, 0.0002, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 5.0)
"""Upper bounds of the histogram of waits, seconds."""
STEP_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0, 60.0)
"""The same for steps, and for batches in workers."""
QUEUE_ASKED_S = 0.005
"""Asking the kernel for the run queue takes up to 7 µs: it is asked in calls of ``next()`` after a step this long."""


@dataclass(frozen=True, kw_only=True)
class Times(Record):
    """The consumer's time so far, without the first batch of each pass."""

    batches: int = counter("Batches that it got.")
    wait_s: float = counter("Seconds in which it was blocked in ``next()``.", "seconds")
    own_s: float = counter("Seconds in which it was busy there.", "seconds")
    work_s: float = counter("Seconds between two calls.", "seconds")
    head_s: float = counter("What of the wait had later batches ready, and the next one in turn not.", "seconds")
    work_squared: float = counter("The squares of the steps, added up.", default=0.0)

    @property
    def seconds(self) -> float:
        """All of it but the time between passes."""
        return self.wait_s + self.own_s + self.work_s


class Tally:
    """Sums of the consumer's seconds, and what its waits are put down to (see `causes`).

    ``entered_at``, ``blocked_at``, ``returned_at``: when the present stay inside ``next()``, the wait in it, or the
    step after it began; 0: there is none. ``starting``: the present call is the first of a pass. ``cause``: of the
    present wait. ``named_s``: what of the present call has its cause, or will have it (``pending_s``) once the batch is
    here. ``causes``: seconds by cause. ``waits``, ``steps``: histograms, kept where ``detailed``. ``errors``: those
    that came out of ``next()``, by kind. ``idle_ratio``: part of the workers without anything to do as the present wait
    began; ``head_idle_s``, ``other_idle_s``: waits times that, the first where later batches were ready. ``queue``: how
    long the consumer's thread has been on run queues, None if unknown; ``queued_s``: of that, the seconds inside
    ``next()``, after steps of `QUEUE_ASKED_S` or more. ``seqlock``: keeps readers out while seconds are on their way
    from what is under way to the sums. `enter` and `leave` begin and end their change without a call, as they run for
    each batch.
    """

    __slots__ = (
        *("batches", "blocked_at", "blocked_s", "cause", "causes", "delivered_at", "detailed", "entered_at", "errors"),
        *("first_batch_s", "first_blocked_s", "head_idle_s", "head_s", "idle_ratio", "inside_s", "named_s"),
        *("other_idle_s", "pending_s", "pinned_bytes", "queue", "queued_s"),
        *("returned_at", "samples", "seqlock", "start_s", "starting", "starts", "steps", "transfer_s", "waited_s"),
        *("waits", "work_s", "work_squared", "_before", "_latest", "_queued_before_s"),
    )

    def __init__(self, *, detailed: bool = False, queue: Callable[[], float | None] = lambda: None) -> None:
        self.seqlock = Seqlock()
        self.batches = self.starts = self.samples = self.pinned_bytes = 0
        self.entered_at = self.blocked_at = self.returned_at = self.delivered_at = 0.0
        self.inside_s = self.blocked_s = self.head_s = self.work_s = self.start_s = self.first_batch_s = 0.0
        self.first_blocked_s = self.named_s = self.pending_s = self.transfer_s = self.waited_s = 0.0
        self.idle_ratio = self.head_idle_s = self.other_idle_s = 0.0
        self.errors: Counter[str] = Counter()
        self.cause = NONE_YET
        self.causes = [0.0] * len(CAUSES)
        self.detailed = detailed
        self.waits = [0] * (len(WAIT_BUCKETS) + 1)
        self.steps = [0] * (len(STEP_BUCKETS) + 1)
        self.starting = False
        self.work_squared = 0.0
        self._before = (0.0, 0.0)
        self._latest: BatchTimes | None = None
        self.queue = queue
        self.queued_s = 0.0
        self._queued_before_s: float | None = None

    # -- calls of next() ---------------------------------------------------------------------------------------------

    def enter(self, now: float) -> None:
        """The consumer asks for a batch."""
        seqlock = self.seqlock
        seqlock.changes |= 1
        self.entered_at = now
        if self.returned_at:
            step_s = now - self.returned_at
            self.work_s += step_s
            self.work_squared += step_s * step_s
            if self.detailed:
                self.steps[bisect_left(STEP_BUCKETS, step_s)] += 1
            if step_s > QUEUE_ASKED_S:
                self._queued_before_s = self.queue()
        else:
            self.starting = True
            self._before = (self.blocked_s, self.head_s)
        seqlock.changes = (seqlock.changes | 1) + 1

    def leave(self, opened: float, now: float, *, over: bool) -> None:
        """It has got one, which it began to take in at ``opened`` (0: there was none), or the pass is ``over``."""
        seqlock = self.seqlock
        seqlock.changes |= 1
        entered = self.entered_at
        self.entered_at = 0.0
        self.inside_s += now - entered
        if self._queued_before_s is not None:
            self._leave_queue(self._queued_before_s)
        if self.starting:
            self._started(now - entered, got_one=not over)
        else:
            if self.pending_s:
                self.explain(None)
            waited_s = (opened or now) - entered
            if waited_s > self.named_s:  # else parts that were clocked apart add up to more than all
                self.causes[UNKNOWN] += waited_s - self.named_s
            self.named_s = 0.0
            if opened:
                self.transfer_s += now - opened
                if self.detailed:
                    self.waited_s += waited_s
                    self.waits[bisect_left(WAIT_BUCKETS, waited_s)] += 1
        self.returned_at = 0.0 if over else now
        if opened:
            self.delivered_at = now
        seqlock.changes = (seqlock.changes | 1) + 1

    def _leave_queue(self, before_s: float) -> None:
        now_s, self._queued_before_s = self.queue(), None
        if now_s is not None:
            self.queued_s += max(0.0, now_s - before_s)

    def _started(self, inside_s: float, got_one: bool) -> None:
        self.first_blocked_s += self.blocked_s - self._before[0]
        self.blocked_s, self.head_s = self._before
        self.start_s += inside_s
        self.starts += got_one
        if self.batches == 1:
            self.first_batch_s = inside_s
        self.pending_s = self.named_s = 0.0
        self.causes[STARTUP] += inside_s
        self.starting = False

    # -- waits in them -----------------------------------------------------------------------------------------------

    def block(self, now: float, cause: int, idle_ratio: float = 0.0) -> None:
        """The consumer begins to wait, while this part of the workers has nothing to do."""
        self.idle_ratio = idle_ratio
        if self.pending_s > LONG_S:
            self.explain(self._latest)
        self.cause = cause
        self.blocked_at = now

    def unblock(self, now: float) -> None:
        """It waits no longer."""
        self.seqlock.begin()
        self._unblock(now)
        self.seqlock.end()

    def _unblock(self, now: float) -> None:
        waited = now - self.blocked_at
        self.blocked_at = 0.0
        self.blocked_s += waited
        cause = self.cause
        if cause == STRAGGLER:
            self.head_s += waited
        if self.starting:
            return
        self.named_s += waited
        if cause == STRAGGLER:
            self.head_idle_s += waited * self.idle_ratio
        else:
            self.other_idle_s += waited * self.idle_ratio
        if cause >= 0:
            self.causes[cause] += waited
        else:
            self.pending_s += waited

    def explain(self, times: BatchTimes | None) -> None:
        """Put down what is pending to the stages of that batch."""
        self._latest = times or self._latest
        pending_s, self.pending_s = self.pending_s, 0.0
        for cause, seconds in split(pending_s, times):
            self.causes[cause] += seconds

    def busy(self, cause: int, began: float, ended: float) -> None:
        """The consumer has drawn, or handed out work, and nothing else meanwhile.

        Another thread may have done so: what it did while the consumer was not in ``next()``, or waited there, took
        none of the consumer's time.
        """
        if 0.0 < self.entered_at <= began and not self.blocked_at and not self.starting:
            self.causes[cause] += ended - began
            self.named_s += ended - began

    def made_here(self, load_s: float, load_cpu_s: float, collate_s: float) -> None:
        """The consumer has made a batch itself."""
        if not self.starting:
            causes = self.causes
            transform_s = load_cpu_s if load_cpu_s < load_s else load_s
            causes[READ] += load_s - transform_s
            causes[TRANSFORM] += transform_s
            causes[COLLATE] += collate_s
            self.named_s += load_s + collate_s

    # -- reading -----------------------------------------------------------------------------------------------------

    def away_s(self, now: float) -> float:
        """How long the present step has taken so far."""
        returned_at = self.returned_at
        return 0.0 if self.entered_at or not returned_at else max(0.0, now - returned_at)

    def times(self, now: float) -> Times:
        """So far, what is under way included."""
        return self.seqlock.read(lambda: self._times(now))

    def _times(self, now: float) -> Times:
        batches, inside_s, work_s = self.batches - self.starts, self.inside_s - self.start_s, self.work_s
        if self.starting:
            blocked_s, head_s = self._before
        else:
            blocked_s, head_s = self.blocked_s, self.head_s
            entered_at, blocked_at, returned_at = self.entered_at, self.blocked_at, self.returned_at
            if entered_at:
                inside_s += max(0.0, now - entered_at)
            elif returned_at:
                work_s += max(0.0, now - returned_at)
            if blocked_at:
                blocked_s += max(0.0, now - blocked_at)
                head_s += max(0.0, now - blocked_at) if self.cause == STRAGGLER else 0.0
        return Times(
            batches=batches,
            wait_s=blocked_s,
            own_s=max(0.0, inside_s - blocked_s),
            work_s=work_s,
            head_s=head_s,
            work_squared=self.work_squared,
        )

    def sums(self, now: float, **others: Any) -> Sums:
        """All that is counted here, and those fields of `Sums` that others count.

        Of what is under way, only what has its cause already is in it: so no part of it ever shrinks.
        """
        return self.seqlock.read(lambda: self._sums(now, others))

    def _sums(self, now: float, others: dict[str, Any]) -> Sums:
        causes, work_s = list(self.causes), self.work_s
        entered_at, blocked_at, cause, returned_at = self.entered_at, self.blocked_at, self.cause, self.returned_at
        if entered_at and self.starting:
            causes[STARTUP] += max(0.0, now - entered_at)
        elif entered_at and blocked_at and cause >= 0:
            causes[cause] += max(0.0, now - blocked_at)
        elif not entered_at and returned_at:
            work_s += max(0.0, now - returned_at)
        return Sums(
            batches=self.batches,
            samples=self.samples,
            causes=dict(zip(CAUSES, causes, strict=True)),
            transfer_s=self.transfer_s,
            work_s=work_s,
            waits=tuple(self.waits),
            waited_s=self.waited_s,
            steps=tuple(self.steps),
            stepped_s=self.work_s,
            stepped_squared=self.work_squared,
            step_count=max(0, self.batches - 1),
            delivered_at=self.delivered_at,
            head_idle_s=self.head_idle_s,
            other_idle_s=self.other_idle_s,
            loop_queued_s=self.queued_s,
            **others,
        )


@dataclass(frozen=True, kw_only=True)
class EngineLook:
    """An engine at one moment: sums since it was made, and what there is now.

    resizing: a request for other sizes was not granted yet. refused: why there can be no remote worker, if so.
    most_local: how many local workers the system allows, and why, once it refused one. away_s: how long the consumer
    has been between two calls, 0 inside ``next()`` and between passes. pids: local workers. thread: the consumer's
    native id, 0 if unknown. gpu_stall_s: see `dpex.system.gpu.stall`; None: no GPU. gpu_steps,
    gpu_step_s: steps of its stream, and their seconds. feed_wait_s: the stream
    waited for batches that were made and not on the device yet. nodes: machines of the cluster. pass_batches: batches
    of a whole pass, 0 if unknown. start_s: seconds from the beginning of the latest pass to its first batch, 0 before
    that. starts_anew: each pass starts workers of its own. has_one_stream: an iterable dataset turned out to have a
    single stream.
    """

    at: float
    epoch: int
    times: Times
    sizes: Sizes
    resizing: bool
    refused: str | None
    away_s: float
    ready: int
    in_flight: int
    batch_bytes: float
    local: PoolSample
    remote: PoolSample
    pids: tuple[int, ...]
    thread: int = 0
    gpu_stall_s: float | None = None
    gpu_steps: int = 0
    gpu_step_s: float = 0.0
    feed_wait_s: float = 0.0
    most_local: tuple[int, str] | None = None
    pass_batches: int = 0
    start_s: float = 0.0
    starts_anew: bool = False
    nodes: Mapping[str, NodeStats] = field(default_factory=dict)
    has_one_stream: bool = False
