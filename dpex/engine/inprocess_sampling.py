"""Stretches of tiny batches that are made in the training process without being measured one by one.

While step and ``next()`` together take less than `TURN_S` on average, and the samples of most batches are too quick to
be timed (see `dpex.measure.sampling.SAMPLE_S`), one batch in some `EVERY` is measured, which one being left to chance,
so that what is periodic is met as often as it comes. Of those in between only the clock is read as ``next()`` is
entered and left: their number and the time inside are exact, and what the inside was spent on is taken to be as it was
for the measured ones. Where several were made in one call, the others, which only hand them out, do not read it. A
stretch takes `LONGEST_S` at most, and ends at the next call after that: so a long step is seen as it is.

Written by the consumer's thread, read by any.
"""

from __future__ import annotations

from bisect import bisect_left
from random import Random
from typing import Any, NamedTuple

from dpex.measure.consumer_time import STEP_BUCKETS, WAIT_BUCKETS, Tally
from dpex.measure.sampling import SAMPLE_S
from dpex.measure.sums import StageSums
from dpex.measure.wait_causes import COLLATE, READ, SAMPLER, TRANSFORM, UNKNOWN
from dpex.pools.base import PoolTimes

TURN_S = 500e-6
"""What measuring one takes is a twentieth of that."""
EVERY = 1024
"""Measuring one takes 25 to 150 µs, as what it needs has left the CPU's caches; that is 0.1 µs of each."""
TRIED = 16
"""So many tiny batches are measured before the first is not."""
LONGEST_S = 0.01
"""A stretch takes no longer, so that a change of the work or of the step shows soon."""
_PART = 8.0
"""In a mean the latest turn counts for one in so many: an odd one does not decide, and a change shows soon."""
_MOST = 0.5
"""From this share of measured batches on that took no time worth timing, most did."""
_SPIKE = 8.0
"""How many times the mean one turn counts as, at most: on a busy machine one waits for a CPU now and then."""


class BatchParts(NamedTuple):
    """What time inside ``next()`` was spent on, seconds."""

    load_s: float = 0.0
    load_cpu_s: float = 0.0
    collate_s: float = 0.0
    collate_cpu_s: float = 0.0
    transfer_s: float = 0.0
    sampler_s: float = 0.0
    unknown_s: float = 0.0

    def caused(self) -> tuple[tuple[int, float], ...]:
        """What of it is waiting, by cause; see `dpex.measure.wait_causes`."""
        transform_s = min(self.load_s, self.load_cpu_s)
        return (
            (READ, self.load_s - transform_s),
            (TRANSFORM, transform_s),
            (COLLATE, self.collate_s),
            (SAMPLER, self.sampler_s),
            (UNKNOWN, self.unknown_s),
        )

    def made(self, batches: int) -> StageSums:
        """The same as what making that many batches took."""
        return StageSums(
            tickets=batches,
            load_s=self.load_s,
            load_cpu_s=self.load_cpu_s,
            collate_s=self.collate_s,
            collate_cpu_s=self.collate_cpu_s,
        )


class MeasuredBatch:
    """Sums over the calls that were measured. ``quick``: the part of them, the latest counting most, whose samples were
    too quick to be timed.
    """

    __slots__ = ("calls", "inside_s", "parts", "quick", "samples", "step_s", "step_squared", "steps")

    def __init__(self) -> None:
        self.quick = 0.0
        self.calls = self.samples = self.steps = 0
        self.inside_s = self.step_s = self.step_squared = 0.0
        self.parts = BatchParts()


class UnmeasuredRun:
    """``left``: calls that are still to pass; ``until``: none passes from then on; 0: another thread wants
    something. ``spent``: seconds inside so far and when the present call began, 0 if none is under way: one value, so
    that others see it whole. ``index``, ``left_at``: what the latest call handed out, and when the latest that made
    something was over. ``size``: all calls, 0 between stretches.
    """

    __slots__ = ("_measured", "_random", "_turn_at", "_turn_s", "index", "left", "left_at", "size", "spent", "until")

    def __init__(self) -> None:
        self.size = self.left = 0
        self.until = self.left_at = 0.0
        self.spent = (0.0, 0.0)
        self.index: Any = ()
        self._measured = MeasuredBatch()
        self._turn_at = self._turn_s = 0.0
        self._random = Random(0).random

    @property
    def passed(self) -> int:
        """Batches of the present stretch so far."""
        return self.size - self.left

    @property
    def samples(self) -> int:
        """Of these, the latest left out, which may be smaller."""
        return round(max(0, self.passed - 1) * self._measured.samples / max(1, self._measured.calls))

    # -- measured calls ----------------------------------------------------------------------------------------------

    def entered(self, now: float, step_s: float | None, passed: int) -> None:
        """A call that is measured begins, after that step, if there was one, and so many that were not measured."""
        if step_s is None:
            self._turn_at = now
            return
        turn_s, self._turn_at = (now - self._turn_at) / (passed + 1), now
        self._turn_s += (min(turn_s, _SPIKE * self._turn_s) - self._turn_s) / _PART if self._turn_s else turn_s
        measured = self._measured
        if self._turn_s >= TURN_S and measured.calls:
            self._measured = measured = MeasuredBatch()
        measured.steps += 1
        measured.step_s += step_s
        measured.step_squared += step_s * step_s

    def add(self, inside_s: float, parts: BatchParts, samples: int, dataset_s: float) -> None:
        """It took that, and so much of it the dataset."""
        measured = self._measured
        measured.quick += ((dataset_s <= SAMPLE_S * samples) - measured.quick) / _PART
        measured.calls += 1
        measured.inside_s += inside_s
        measured.samples += samples
        measured.parts = BatchParts._make(map(float.__add__, measured.parts, parts))

    @property
    def may_begin(self) -> bool:
        """Whether calls may pass now."""
        measured = self._measured
        return measured.calls >= TRIED and 0.0 < self._turn_s < TURN_S and measured.quick > _MOST

    def begin(self, now: float) -> None:
        """Let a number of calls pass from now on, maybe none."""
        self.size = int(self._random() * 2 * EVERY)
        self.spent, self.left_at, self.until = (0.0, 0.0), now, now + LONGEST_S
        self.left = self.size

    # -- stretches ---------------------------------------------------------------------------------------------------

    def parts(self, inside_s: float) -> BatchParts:
        """What so much of the stretch was spent on: as the measured calls; far more than theirs is the dataset's."""
        measured = self._measured
        usual_s = min(inside_s, self.size * measured.inside_s / measured.calls)
        found = BatchParts._make(part * usual_s / measured.inside_s for part in measured.parts)
        load_s = inside_s - usual_s
        load_cpu_s = load_s * min(1.0, measured.parts.load_cpu_s / max(1e-12, measured.parts.load_s))
        return found._replace(load_s=found.load_s + load_s, load_cpu_s=found.load_cpu_s + load_cpu_s)

    def end(self, tally: Tally, times: PoolTimes, now: float, error: BaseException | None = None) -> int:
        """Add the stretch to the counts, up to ``now``, when its latest call was over; returns how many made a batch.

        error: what the latest has raised instead.
        """
        batches, (inside_s, _) = self.passed, self.spent
        if error is None or isinstance(error, StopIteration):
            samples = self.samples + (length(self.index) if batches else 0)
        else:  # the index is of a batch that was not made
            samples = round(batches * self._measured.samples / self._measured.calls)
        steps = batches + (error is not None)
        if steps:
            self._count(tally, times, now, (steps, batches, samples), inside_s)
        self.size = self.left = 0
        self.index = ()
        return batches

    def _count(self, tally: Tally, times: PoolTimes, now: float, counts: tuple[int, int, int], inside_s: float) -> None:
        steps, batches, samples = counts
        parts = self.parts(inside_s)
        work_s = now - tally.returned_at - inside_s
        for cause, seconds in parts.caused():
            tally.causes[cause] += seconds
        tally.inside_s += inside_s
        tally.transfer_s += parts.transfer_s
        tally.waited_s += inside_s - parts.transfer_s
        tally.work_s += work_s
        tally.batches += batches
        tally.samples += samples
        tally.delivered_at, tally.returned_at = self.left_at, now
        times.tickets += batches
        times.load_s += parts.load_s
        times.collate_s += parts.collate_s
        times.load_cpu_s += parts.load_cpu_s
        times.collate_cpu_s += parts.collate_cpu_s
        times.cpu_s += parts.load_cpu_s + parts.collate_cpu_s
        tally.work_squared += work_s * work_s / steps * self._spread
        tally.steps[bisect_left(STEP_BUCKETS, work_s / steps)] += steps
        if batches:
            each = 1.0 / batches
            tally.waits[bisect_left(WAIT_BUCKETS, (inside_s - parts.transfer_s) * each)] += batches
            times.services[bisect_left(STEP_BUCKETS, (parts.load_s + parts.collate_s) * each)] += batches

    @property
    def _spread(self) -> float:
        """Mean square of the measured steps over the square of their mean."""
        measured = self._measured
        squared = measured.step_s * measured.step_s
        return max(1.0, measured.steps * measured.step_squared / squared) if squared else 1.0


def length(index: Any) -> int:
    """How many samples the batch of this index has."""
    try:
        return len(index)
    except TypeError:
        return 1
