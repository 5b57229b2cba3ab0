"""Which calls of ``next()`` pass unmeasured while tiny batches are made in the training process, and how they count.

Used by the consumer's thread; `Passing.read` may be called from any.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from time import sleep
from typing import Any, NamedTuple, TypeVar

from dpex.engine.inprocess_sampling import Parts, Stretch
from dpex.measure.consumer_time import Spent, Sums, Tally
from dpex.pools.base import LaneTimes
from dpex.system.clock import monotonic
from dpex.system.gpu.stall import GpuStall

_TRIES = 50
_PAUSE_S = 0.0001
Found = TypeVar("Found")


class UnderWay(NamedTuple):
    """The stretch under way: what it made, how long that took, and when the latest was made.

    entered: when the present call began; 0: none is under way.
    """

    batches: int
    samples: int
    inside_s: float
    entered: float
    left_at: float
    parts: Parts


class Passing:
    """Stretches of one iterator, which end in its ``tally`` and ``times``; none begins while a GPU's stall is seen.

    A call that is measured tells `entered` and `left`. One that passes, while ``stretch.left``, writes into ``stretch``
    itself what is known of it, and tells `broke_off` of an error.
    """

    def __init__(self, tally: Tally, times: LaneTimes, gpu: GpuStall[Any] | None = None) -> None:
        self.stretch = Stretch()
        self._tally = tally
        self._times = times
        self._gpu = gpu
        self._changes = 0

    def entered(self, now: float) -> None:
        """A call that is measured begins."""
        passed = self.end()
        returned_at = self._tally.returned_at
        self.stretch.entered(now, now - returned_at if returned_at else None, passed)

    def left(self, now: float, entered: float, opened: float, stages: tuple[float, float, float, float, int]) -> None:
        """It is over, and was none that started a pass: stages as in `dpex.worker.core.Stages`, up to the samples."""
        inside_s, transfer_s = now - entered, now - opened
        load_s, collate_s, load_cpu_s, collate_cpu_s, samples = stages
        unknown_s = max(0.0, inside_s - load_s - collate_s - transfer_s)
        self.stretch.add(inside_s, Parts(load_s, load_cpu_s, collate_s, collate_cpu_s, transfer_s, unknown_s), samples)
        if self.stretch.may_begin and (self._gpu is None or self._gpu.total_s is None):
            self._changes += 1
            self.stretch.begin(now)
            self._changes += 1

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
        self._changes += 1
        passed = self.stretch.end(self._tally, self._times, now, error)
        self._changes += 1
        return passed

    def read(self, counts: Callable[[UnderWay | None], Found]) -> Found:
        """``counts(stretch)``, with what is not in ``tally`` and ``times`` yet, while none of that changes."""
        for _ in range(_TRIES):
            changes, spent = self._changes, self.stretch.spent
            if changes % 2 == 0:
                found = counts(self._under_way(spent))
                if changes == self._changes and spent is self.stretch.spent:
                    return found
            sleep(_PAUSE_S)
        return counts(self._under_way(self.stretch.spent))

    def _under_way(self, spent: tuple[float, float]) -> UnderWay | None:
        stretch, (inside_s, entered) = self.stretch, spent
        if not stretch.size:
            return None
        return UnderWay(stretch.passed, stretch.samples, inside_s, entered, stretch.left_at, stretch.parts(inside_s))


def work_s(stepped_s: float, under_way: UnderWay, now: float) -> float:
    """Seconds of steps, of which ``stepped_s`` were found by the clock alone: calls that passed are not among them."""
    entered = under_way.entered
    return stepped_s - under_way.inside_s - (max(0.0, now - entered) if entered else 0.0)


def with_stretch(found: Sums, under_way: UnderWay | None, now: float) -> Sums:
    """These sums, taken ``now``, with the stretch under way."""
    if under_way is None:
        return found
    parts, lane, whole = under_way.parts, found.lanes["inline"], found.spent
    lane = replace(
        lane,
        tickets=lane.tickets + under_way.batches,
        load_s=lane.load_s + parts.load_s,
        load_cpu_s=lane.load_cpu_s + parts.load_cpu_s,
        collate_s=lane.collate_s + parts.collate_s,
        collate_cpu_s=lane.collate_cpu_s + parts.collate_cpu_s,
    )
    causes = tuple(parts.caused(whole.causes))
    return replace(
        found,
        spent=Spent(causes, whole.transfer_s + parts.transfer_s, work_s(whole.work_s, under_way, now)),
        batches=found.batches + under_way.batches,
        samples=found.samples + under_way.samples,
        delivered_at=under_way.left_at,
        lanes={**found.lanes, "inline": lane},
    )
