"""Which calls of ``next()`` pass unmeasured while tiny batches are made in the training process, and how they count.

Used by the consumer's thread; `UnmeasuredBatches.read` may be called from any.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple, TypeVar

from dpex.core.names import INLINE
from dpex.engine.inprocess_sampling import BatchParts, UnmeasuredRun
from dpex.measure.consumer_time import Tally, Times
from dpex.measure.seqlock import Seqlock
from dpex.measure.sums import PoolSums, StageSums, Sums
from dpex.measure.wait_causes import CAUSES, SAMPLER
from dpex.pools.base import PoolTimes
from dpex.system.clock import monotonic
from dpex.system.gpu.stall import GpuStall

Found = TypeVar("Found")


class RunInProgress(NamedTuple):
    """The stretch under way: what it made, how long that took, and when the latest was made.

    entered: when the present call began; 0: none is under way.
    """

    batches: int
    samples: int
    inside_s: float
    entered: float
    left_at: float
    parts: BatchParts

    @property
    def made(self) -> StageSums:
        """Its batches."""
        return self.parts.made(self.batches)

    def away_s(self, now: float) -> float:
        """How long the present step has taken so far; 0 inside ``next()``."""
        return 0.0 if self.entered else max(0.0, now - self.left_at)

    def spent_s(self, now: float) -> float:
        """Seconds inside ``next()``, the present call included."""
        return self.inside_s + (max(0.0, now - self.entered) if self.entered else 0.0)


class UnmeasuredBatches:
    """Stretches of one iterator, which end in its ``tally`` and ``times``; none begins while a GPU's stall is seen.

    A call that is measured tells `entered` and `left`. One that passes, while ``stretch.left``, writes into ``stretch``
    itself what is known of it, and tells `broke_off` of an error.
    """

    def __init__(self, tally: Tally, times: PoolTimes, gpu: GpuStall[Any] | None = None) -> None:
        self.stretch = UnmeasuredRun()
        self._tally = tally
        self._times = times
        self._gpu = gpu
        self._counts = Seqlock()
        self._drawn_s = 0.0

    def entered(self, now: float) -> None:
        """A call that is measured begins."""
        passed = self.end()
        self._drawn_s = self._tally.causes[SAMPLER]
        returned_at = self._tally.returned_at
        self.stretch.entered(now, now - returned_at if returned_at else None, passed)

    def left(
        self,
        now: float,
        entered: float,
        opened: float,
        stages: tuple[float, float, float, float, int],
        dataset_s: float,
    ) -> None:
        """It is over, and was none that started a pass.

        stages: as in `dpex.worker.outcome.Stages`, up to the samples. dataset_s: what of them the dataset took.
        """
        inside_s, transfer_s = now - entered, now - opened
        load_s, collate_s, load_cpu_s, collate_cpu_s, samples = stages
        sampler_s = self._tally.causes[SAMPLER] - self._drawn_s
        unknown_s = max(0.0, inside_s - load_s - collate_s - transfer_s - sampler_s)
        self.stretch.add(
            inside_s,
            BatchParts(load_s, load_cpu_s, collate_s, collate_cpu_s, transfer_s, sampler_s, unknown_s),
            samples,
            dataset_s,
        )
        if self.stretch.may_begin and (self._gpu is None or self._gpu.total_s is None):
            self._counts.begin()
            self.stretch.begin(now)
            self._counts.end()

    def broke_off(self, error: BaseException) -> None:
        """A call that was to pass has raised that."""
        stretch, now = self.stretch, monotonic()
        inside_s, entered = stretch.spent
        stretch.spent = inside_s + now - entered, 0.0
        self._end(now, error)
        if isinstance(error, StopIteration):
            self._tally.returned_at = 0.0

    def end(self) -> int:
        """Count the stretch under way, if there is one; returns how many batches it made."""
        return self._end(self.stretch.left_at, None) if self.stretch.size else 0

    def _end(self, now: float, error: BaseException | None) -> int:
        self._counts.begin()
        passed = self.stretch.end(self._tally, self._times, now, error)
        self._counts.end()
        return passed

    def read(self, counts: Callable[[RunInProgress | None], Found]) -> Found:
        """``counts(stretch)``, with what is not in ``tally`` and ``times`` yet, while none of that changes."""
        stretch = self.stretch
        return self._counts.read(lambda: counts(self._under_way(stretch.spent)), lambda: stretch.spent)

    def _under_way(self, spent: tuple[float, float]) -> RunInProgress | None:
        stretch, (inside_s, entered) = self.stretch, spent
        if not stretch.size:
            return None
        return RunInProgress(
            stretch.passed, stretch.samples, inside_s, entered, stretch.left_at, stretch.parts(inside_s)
        )


def times_with(found: Times, under_way: RunInProgress, now: float) -> Times:
    """These times, taken ``now``, with the stretch under way. Its steps are not squared: it lasts `LONGEST_S` at most.

    Calls that passed are not among the steps, whose seconds are found by the clock alone.
    """
    inside_s = under_way.spent_s(now)
    return replace(
        found,
        batches=found.batches + under_way.batches,
        own_s=found.own_s + inside_s,
        work_s=found.work_s - inside_s,
    )


def with_stretch(found: Sums, under_way: RunInProgress | None, now: float) -> Sums:
    """These sums, taken ``now``, with the stretch under way."""
    if under_way is None:
        return found
    parts = under_way.parts
    more = Sums(
        batches=under_way.batches,
        samples=under_way.samples,
        step_count=under_way.batches,
        causes={CAUSES[cause]: seconds for cause, seconds in parts.caused()},
        transfer_s=parts.transfer_s,
        delivered_at=under_way.left_at,
        pools={INLINE: under_way.made.narrowed(PoolSums)},
    )
    return replace(found.plus(more), work_s=found.work_s - under_way.spent_s(now))
