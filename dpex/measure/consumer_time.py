"""Count the time of the consumer (the training loop): in ``next()`` by cause, and between two calls of ``next()``.

The consumer's thread writes and any thread may read. The first call of a pass is counted apart, because its time
belongs to the start and not to the work. Every second of waiting gets one cause, by these rules:

1. The first call of a pass, and any wait while no worker runs: `STARTUP`.
2. Blocked while later batches are ready and the next batch in order is not: `STRAGGLER`.
3. Blocked until a batch is in page-locked memory: `H2D`. Blocked until readers have the samples of a batch that other
   workers decode: `STREAM`.
4. Blocked otherwise: split among the stages of the awaited batch, in proportion to their times. While workers are never
   idle, batches come at ``workers / service time`` (the utilisation law: Denning and Buzen, "The Operational Analysis
   of Queueing Network Models", 1978). So each stage costs the consumer its share of the service time, whichever stage
   overlapped the wait.
5. A batch made in the training process: its stages, as long as they took.
6. Busy in ``next()`` drawing from the sampler: `SAMPLER`. Busy handing out work, and receiving reports of workers:
   `DISPATCH`.
7. All other seconds, such as the time of errors: `UNKNOWN`.

Getting the samples, ``dataset[i]``, is one stage to dpex. Its CPU seconds count as `TRANSFORM` and the rest as `READ`,
because reading waits and computing does not. So a dataset that decodes as it reads shows both, and a machine with more
workers than processors shows some of its transform as read.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable
from time import sleep
from typing import Any, TypeVar

from dpex.measure.batch_times import BatchTimes
from dpex.measure.causes import (
    COLLATE,
    READ,
    STARTUP,
    STRAGGLER,
    TIMED,
    TRANSFORM,
    UNKNOWN,
    by_stage,
)
from dpex.measure.pool_reading import STEP_BUCKETS
from dpex.measure.reading import WAIT_BUCKETS
from dpex.measure.sampling import WaitLog

NONE_YET = -1
"""The cause of a wait whose batch has not arrived yet. The times of that batch will determine the cause."""
LONG_S = 0.5
"""Maximum seconds of waits without a cause. Longer waits get the causes of the latest batch, so that the counts keep
up."""
UNENDED_S, UNENDED_STEPS = 1.0, 10.0
"""A step that has not ended counts for at most `UNENDED_S` seconds, or `UNENDED_STEPS` mean steps if that is longer,
because a loop that has broken off a pass may be doing something else, such as a validation."""
QUEUE_ASKED_S = 0.005
"""Minimum seconds of a step after which ``next()`` reads the run-queue time, because reading takes up to 10 µs."""
PAUSE_S = 0.0001
"""Seconds between two tries of a reader. A writer that was preempted during a change needs the CPU to finish it."""
MOST_TRIES = 4000
"""Maximum tries of a reader, about half a second. A busy machine may suspend the writer for tens of milliseconds. If a
change takes longer, an exception in a signal handler has ended it, or the reader is a signal handler that interrupted
it. Tries are counted and not seconds, because users' tests may stop the clock."""

T = TypeVar("T")


def split(waited_s: float, times: BatchTimes | None) -> list[tuple[int, float]]:
    """Split the wait for a batch by cause, in proportion to the times of the batch's stages.

    The parts add up to the wait. If the times are missing or 0, the whole wait is `UNKNOWN`.
    """
    stages = by_stage(times) if times is not None else ()
    total = sum(stages)
    if total <= 0.0:
        return [(UNKNOWN, waited_s)]
    return [(cause, waited_s * seconds / total) for cause, seconds in enumerate(stages) if seconds > 0.0]


class Seqlock:
    """A sequence lock: a single thread writes several values, and any thread reads a consistent set of them.

    The writer never waits. It calls `begin_change` and `end_change` around each change. `read` repeats until no change
    overlaps the reading.

    ``changes`` is odd during a change. A writer that cannot afford the two calls makes their assignments itself.
    """

    __slots__ = ("_given_up", "changes")

    def __init__(self) -> None:
        self.changes: int = 0
        self._given_up = -1

    def begin_change(self) -> None:
        """Begin a change, or begin an abandoned change again."""
        self.changes |= 1

    def end_change(self) -> None:
        self.changes = (self.changes | 1) + 1

    def read(self, values: Callable[[], T]) -> T:
        """Return ``values()`` from between two changes, or the present values if a change was abandoned."""
        for _ in range(MOST_TRIES):
            changes = self.changes
            if changes % 2 == 0:
                found = values()
                if changes == self.changes:
                    return found
            elif changes == self._given_up:
                return values()
            sleep(PAUSE_S)
        self._given_up = changes
        return values()


class Tally:
    """Sums of the consumer's seconds, and the causes of its waits.

    `enter` and `leave` run for each batch, so they set ``seqlock.changes`` themselves instead of calling its methods.

    Attributes:
        entered_at, blocked_at, returned_at: Start of the present call of ``next()``, wait, and step; 0 if none.
        starting: True in the first call of a pass.
        stepped: Count of ended steps; ``work_s`` holds their seconds.
        cause: Cause of the present wait.
        named_s: Seconds of the present call that have a cause.
        pending_s: Part of ``named_s`` whose cause follows from the awaited batch.
        causes: Seconds by cause.
        waits, steps: Histograms of waits and of steps, counted only if ``detailed``.
        idle_ratio: Share of the workers that were idle when the present wait began. A worker that makes several batches
            at the same time counts by its free lanes.
        head_idle_s, other_idle_s: See `Reading`.
        queue: Returns the seconds of the consumer's thread on run queues, or None.
        queued_s: Seconds on run queues inside ``next()``, after steps of `QUEUE_ASKED_S` or more.
        unended_s: Counted seconds of the last step of each interrupted pass.
    """

    __slots__ = (
        *("batches", "blocked_at", "blocked_s", "cause", "causes", "delivered_at", "detailed", "entered_at", "errors"),
        *("first_batch_s", "first_blocked_s", "head_idle_s", "straggler_s", "idle_ratio", "inside_s", "log", "named_s"),
        *("other_idle_s", "pending_s", "queue", "queued_s"),
        *("returned_at", "samples", "seqlock", "start_s", "starting", "starts", "stepped", "steps", "transfer_s"),
        *("unended_s", "waited_s", "waits", "work_s", "_before", "_latest", "_queued_before_s"),
    )

    def __init__(self, *, detailed: bool = False, queue: Callable[[], float | None] = lambda: None) -> None:
        self.seqlock: Seqlock = Seqlock()
        self.starts: int = 0
        self.stepped: int = 0
        self.batches = self.samples = 0
        self.entered_at: float = 0.0
        self.blocked_at: float = 0.0
        self.returned_at: float = 0.0
        self.delivered_at: float = 0.0
        self.inside_s: float = 0.0
        self.blocked_s: float = 0.0
        self.straggler_s: float = 0.0
        self.work_s: float = 0.0
        self.start_s: float = 0.0
        self.first_batch_s: float = 0.0
        self.first_blocked_s: float = 0.0
        self.named_s: float = 0.0
        self.pending_s: float = 0.0
        self.transfer_s: float = 0.0
        self.waited_s: float = 0.0
        self.idle_ratio: float = 0.0
        self.head_idle_s: float = 0.0
        self.other_idle_s: float = 0.0
        self.unended_s: float = 0.0
        self.errors: Counter[str] = Counter()
        self.cause: int = NONE_YET
        self.causes: list[float] = [0.0] * len(TIMED)
        self.detailed = detailed
        self.waits: list[int] = [0] * (len(WAIT_BUCKETS) + 1)
        self.steps: list[int] = [0] * (len(STEP_BUCKETS) + 1)
        self.starting: bool = False
        self._before = (0.0, 0.0)
        self._latest: BatchTimes | None = None
        self.queue = queue
        self.log: WaitLog = WaitLog()
        self.queued_s: float = 0.0
        self._queued_before_s: float | None = None

    # -- calls of next() ---------------------------------------------------------------------------------------------

    def begin_pass(self, now: float) -> None:
        """Begin a pass at ``now``. A previous pass that was broken off keeps all its counts."""
        unended_s = self._unended_s(now)
        seqlock = self.seqlock
        seqlock.changes |= 1
        self.unended_s += unended_s
        self.returned_at = 0.0
        seqlock.changes = (seqlock.changes | 1) + 1

    def enter(self, now: float) -> None:
        """Begin a call of ``next()`` at ``now``."""
        seqlock = self.seqlock
        seqlock.changes |= 1
        self.entered_at = now
        if self.returned_at:
            step_s = now - self.returned_at
            self.work_s += step_s
            self.stepped += 1
            if self.detailed:
                self.steps[bisect_left(STEP_BUCKETS, step_s)] += 1
            if step_s > QUEUE_ASKED_S:
                self._queued_before_s = self.queue()
        else:
            self.starting = True
            self._before = (self.blocked_s, self.straggler_s)
        seqlock.changes = (seqlock.changes | 1) + 1

    def leave(self, opened_s: float | None, now: float, *, over: bool) -> None:
        """End the call at ``now``; ``over``: and the pass. ``opened_s``: Seconds to open its batch; None: no batch."""
        seqlock = self.seqlock
        seqlock.changes |= 1
        inside_s, waited_s = now - self.entered_at, 0.0
        self.entered_at = 0.0
        self.inside_s += inside_s
        if self._queued_before_s is not None:
            self._leave_queue(self._queued_before_s)
        if self.starting:
            self._started(inside_s, got_one=not over)
        else:
            if self.pending_s:
                self.explain(None)
            waited_s = inside_s - (opened_s or 0.0)
            unnamed_s = waited_s - self.named_s
            if unnamed_s > 0.0:  # the parts, timed separately, may exceed the whole
                self.causes[UNKNOWN] += unnamed_s
            self.named_s = 0.0
            if opened_s is not None:
                self.transfer_s += opened_s
                if self.detailed:
                    self.waited_s += waited_s
                    self.waits[bisect_left(WAIT_BUCKETS, waited_s)] += 1
        self.returned_at = 0.0 if over else now
        if opened_s is not None:
            self.delivered_at = now
            self.log.add(waited_s, now)
        seqlock.changes = (seqlock.changes | 1) + 1

    def _leave_queue(self, before_s: float) -> None:
        now_s, self._queued_before_s = self.queue(), None
        if now_s is not None:
            self.queued_s += max(0.0, now_s - before_s)

    def _started(self, inside_s: float, got_one: bool) -> None:
        self.first_blocked_s += self.blocked_s - self._before[0]
        self.blocked_s, self.straggler_s = self._before
        self.start_s += inside_s
        self.starts += got_one
        if self.batches == 1:
            self.first_batch_s = inside_s
        self.pending_s = self.named_s = 0.0
        self.causes[STARTUP] += inside_s
        self.starting = False

    # -- waits in next() ---------------------------------------------------------------------------------------------

    def block(self, now: float, cause: int, idle_ratio: float = 0.0) -> None:
        """Begin a wait, while the share ``idle_ratio`` of the workers is idle."""
        self.idle_ratio = idle_ratio
        if self.pending_s > LONG_S:
            self.explain(self._latest)
        self.cause = cause
        self.blocked_at = now

    def unblock(self, now: float) -> None:
        self.seqlock.begin_change()
        self._unblock(now)
        self.seqlock.end_change()

    def _unblock(self, now: float) -> None:
        waited = now - self.blocked_at
        self.blocked_at = 0.0
        self.blocked_s += waited
        cause = self.cause
        if cause == STRAGGLER:
            self.straggler_s += waited
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
        """Attribute the pending seconds to causes by the stages of the awaited batch; None: unknown."""
        self._latest = times or self._latest
        pending_s, self.pending_s = self.pending_s, 0.0
        for cause, seconds in split(pending_s, times):
            self.causes[cause] += seconds

    def busy(self, cause: int, began: float, ended: float) -> None:
        """Count seconds in which the consumer drew from the sampler or handed out work.

        Another thread may have done that work. Work while the consumer was outside ``next()``, or waited there, is not
        counted, because such work took none of the consumer's time.
        """
        if 0.0 < self.entered_at <= began and not self.blocked_at and not self.starting:
            seconds = ended - began
            self.causes[cause] += seconds
            self.named_s += seconds

    def made_here(self, load_s: float, load_cpu_s: float, collate_s: float) -> None:
        """Count a batch that the consumer has made itself."""
        if not self.starting:
            causes = self.causes
            transform_s = load_cpu_s if load_cpu_s < load_s else load_s
            causes[READ] += load_s - transform_s
            causes[TRANSFORM] += transform_s
            causes[COLLATE] += collate_s
            self.named_s += load_s + collate_s

    # -- reading -----------------------------------------------------------------------------------------------------

    def away_s(self, now: float) -> float:
        """Return the seconds of the present step so far."""
        returned_at = self.returned_at
        return 0.0 if self.entered_at or not returned_at else max(0.0, now - returned_at)

    def _unended_s(self, now: float) -> float:
        """Return the seconds of the present step that count before the step has ended."""
        return min(self.away_s(now), max(UNENDED_S, UNENDED_STEPS * self.work_s / max(1, self.batches)))

    def counts(self, now: float) -> dict[str, Any]:
        """Return the fields of `Reading` that a tally counts, as of ``now``."""
        return self.seqlock.read(lambda: self._counts(now))

    def _counts(self, now: float) -> dict[str, Any]:
        causes, work_s = list(self.causes), self.work_s
        inside_s, blocked_s, straggler_s = self.inside_s - self.start_s, self.blocked_s, self.straggler_s
        entered_at, blocked_at, cause = self.entered_at, self.blocked_at, self.cause
        blocked_since_s = max(0.0, now - blocked_at) if entered_at and blocked_at else 0.0
        away_s = self.away_s(now)
        if self.starting:
            blocked_s, straggler_s = self._before
            causes[STARTUP] += max(0.0, now - entered_at) if entered_at else 0.0
        else:
            inside_s += max(0.0, now - entered_at) if entered_at else 0.0
            blocked_s += blocked_since_s
            straggler_s += blocked_since_s if cause == STRAGGLER else 0.0
            if cause >= 0:
                causes[cause] += blocked_since_s
        next_busy_s, stepping_s = max(0.0, inside_s - blocked_s), work_s + away_s
        return {
            "batches": self.batches,
            "samples": self.samples,
            "seconds": blocked_s + next_busy_s + stepping_s,
            "later_batches": self.batches - self.starts,
            "causes": dict(zip(TIMED, causes, strict=True)),
            "transfer_s": self.transfer_s,
            "work_s": work_s + self.unended_s + self._unended_s(now),
            "blocked_s": blocked_s,
            "next_busy_s": next_busy_s,
            "stepping_s": stepping_s,
            "step_count": self.stepped,
            "stepped_s": work_s,
            "straggler_s": straggler_s,
            "away_s": away_s,
            "waits": tuple(self.waits),
            "waited_s": self.waited_s,
            "steps": tuple(self.steps),
            "delivered_at": self.delivered_at,
            "batch_waits": self.log.read(),
            "head_idle_s": self.head_idle_s,
            "other_idle_s": self.other_idle_s,
            "loop_queued_s": self.queued_s,
        }
