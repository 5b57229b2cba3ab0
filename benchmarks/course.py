"""One consumer from the moment it asks for an iterator: how many batches it gets, and where its time goes.

The step is a wait (`time.sleep`): a GPU works while the training loop's thread has nothing to do, and the
processors stay free for loading. Without a step the consumer waits for batches, and reads them, all the time.
"""

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from itertools import pairwise
from math import inf
from typing import TYPE_CHECKING, Any

import psutil

from benchmarks.consumer import USES, Use

if TYPE_CHECKING:
    from dpex.autotune.types import Decision

MARK_EVERY_S = 0.1


@dataclass(frozen=True, kw_only=True)
class Drive:
    """What the consumer does: uses each batch, then waits `step_s`, until `count` batches or `window_s` are over."""

    step_s: float
    window_s: float
    count: int | None = None
    use: Use = "read"


@dataclass(frozen=True, kw_only=True)
class Course:
    """What a consumer got, from before `iter()` on.

    waited_s: part of `seconds` spent in `iter()` and `next()`. marks: (seconds since the start, batches until
    then) now and then. counted: everybody takes as many batches, instead of the same time. batch_cpu_s: seconds of
    processor time that a batch of the second half took, of the process and all those below it. settings, decisions:
    where a loader that tunes itself ended, and how it came there.
    """

    batches: int
    seconds: float
    waited_s: float
    marks: tuple[tuple[float, int], ...] = ()
    counted: bool = False
    batch_cpu_s: float | None = None
    settings: str | None = None
    decisions: tuple[dict[str, Any], ...] = ()

    @property
    def rate(self) -> float:
        """Batches per second over the whole course, start-up and learning included."""
        return self.batches / self.seconds

    @property
    def waiting(self) -> float:
        """Share of the time inside `iter()` and `next()`, 0 to 1."""
        return self.waited_s / self.seconds

    @property
    def first_batch_s(self) -> float:
        """Seconds until the first batch was there."""
        return self.marks[0][0] if self.marks else self.seconds

    @property
    def settled_rate(self) -> float:
        """Batches per second after learning: of the second half, of the time, or of the batches if they are counted."""
        if self.counted:
            half = self.batches // 2
            return (self.batches - half) / (self.seconds - self._taken_at(half))
        half_s = self.seconds / 2
        return (self.batches - self._taken_by(half_s)) / half_s

    @property
    def _points(self) -> tuple[tuple[float, int], ...]:
        return ((0.0, 0), *self.marks, (self.seconds, self.batches))

    def _taken_by(self, at_s: float) -> float:
        """Batches until then, interpolated between marks."""
        for (from_s, before), (to_s, after) in pairwise(self._points):
            if at_s <= to_s:
                return before + (after - before) * (at_s - from_s) / (to_s - from_s) if to_s > from_s else after
        return self.batches

    def _taken_at(self, batches: int) -> float:
        """Seconds until so many batches were taken, interpolated between marks."""
        for (from_s, before), (to_s, after) in pairwise(self._points):
            if batches <= after:
                return from_s + (to_s - from_s) * (batches - before) / (after - before) if after > before else to_s
        return self.seconds

    def as_dict(self) -> dict[str, Any]:
        """Its fields."""
        return asdict(self)

    @classmethod
    def from_dict(cls, fields: dict[str, Any]) -> "Course":
        """From what `as_dict` gave, also by way of JSON."""
        marks = tuple((at_s, batches) for at_s, batches in fields.get("marks", ()))
        return cls(**fields | {"marks": marks, "decisions": tuple(fields.get("decisions", ()))})


CpuTimes = Mapping[tuple[int, float], float]
"""Processor time in seconds by process, each known by its number and its start."""


def cpu_times() -> CpuTimes:
    """Of this process and of all those below it that run."""
    found = {}
    for process in (own := psutil.Process(), *own.children(recursive=True)):
        with suppress(psutil.NoSuchProcess):
            times = process.cpu_times()
            found[process.pid, process.create_time()] = times.user + times.system
    return found


def used_s(before: CpuTimes, after: CpuTimes) -> float:
    """Seconds used in between; those of a process that ended meanwhile are not known."""
    return sum(seconds - before.get(process, 0.0) for process, seconds in after.items())


def drive(loader: Iterable[Any], how: Drive, cpu: Callable[[], CpuTimes] = cpu_times) -> Course:
    """Consume `loader` as `how` says; ends with the pass at the latest."""
    clock, sleep, step_s, use = time.perf_counter, time.sleep, how.step_s, USES[how.use]
    limit, window_s = (inf, how.window_s) if how.count is None else (how.count, inf)
    asked_s = start_s = mark_s = clock()
    taken, waited_s, end_s = 0, 0.0, start_s + window_s
    marks = []
    half: tuple[int, CpuTimes] | None = None
    for batch in loader:
        now_s = clock()
        waited_s += now_s - asked_s
        taken += 1
        if now_s >= mark_s:
            marks.append((now_s - start_s, taken))
            mark_s = now_s + MARK_EVERY_S
        use(batch)
        if step_s:
            sleep(step_s)
        if half is None and (now_s - start_s >= window_s / 2 or 2 * taken >= limit):
            half = taken, cpu()
        asked_s = clock()
        if asked_s >= end_s or taken == limit:
            break
    later = taken - half[0] if half else 0
    return Course(
        batches=taken,
        seconds=asked_s - start_s,
        waited_s=waited_s,
        marks=tuple(marks),
        counted=how.count is not None,
        batch_cpu_s=used_s(half[1], cpu()) / later if half and later else None,
    )


def tuning(decisions: Sequence["Decision"]) -> dict[str, Any]:
    """Where a loader that tunes itself ended, and how it came there: the fields of a course."""
    return {
        "settings": str(decisions[-1].new) if decisions else None,
        "decisions": tuple({"at_s": one.at, "new": str(one.new), "text": one.text} for one in decisions),
    }
