"""One consumer from the moment it asks for an iterator: how many batches it gets, and where its time goes.

The step is a wait (`time.sleep`): a GPU works while the training loop's thread has nothing to do, and the
processors stay free for loading. Without a step the consumer waits for batches, and reads them, all the time.
"""

import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from itertools import pairwise
from math import inf
from typing import Any

import psutil

from benchmarks.machine import process_tree, tree_bytes

MARKS = 32
"""So many marks a course has, and one where its second half begins."""


@dataclass(frozen=True, kw_only=True)
class Course:
    """What a consumer got, from before `iter()` on.

    waited_s: part of `seconds` spent in `iter()` and `next()`. marks: (seconds since the start, batches until
    then) now and then. counted: everybody takes as many batches, instead of the same time. batch_cpu_s: seconds of
    processor time that a batch of the second half took, of the process and all those below it. memory_bytes: the
    proportional set size of these at the end. gpu_stall_s: of ``seconds``, the GPU's stream waited for data.
    """

    batches: int
    seconds: float
    waited_s: float
    marks: tuple[tuple[float, int], ...] = ()
    counted: bool = False
    batch_cpu_s: float | None = None
    memory_bytes: int | None = None
    gpu_stall_s: float | None = None

    @property
    def rate(self) -> float:
        """Batches per second over the whole course, start-up and learning included."""
        return self.batches / self.seconds

    @property
    def waiting(self) -> float:
        """Share of the time inside `iter()` and `next()`, 0 to 1."""
        return self.waited_s / self.seconds

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
        """From what `as_dict` gave, also by way of JSON; what courses had before 2026-11-26 is left out."""
        known = {name: value for name, value in fields.items() if name not in ("settings", "decisions")}
        return cls(**known | {"marks": tuple((at_s, batches) for at_s, batches in fields.get("marks", ()))})


CpuTimes = Mapping[tuple[int, float], float]
"""Processor time in seconds by process, each known by its number and its start."""


def cpu_times() -> CpuTimes:
    """Of this process and of all those below it that run."""
    found = {}
    for process in process_tree():
        with suppress(psutil.NoSuchProcess):
            times = process.cpu_times()
            found[process.pid, process.create_time()] = times.user + times.system
    return found


def used_s(before: CpuTimes, after: CpuTimes) -> float:
    """Seconds used in between; those of a process that ended meanwhile are not known."""
    return sum(seconds - before.get(process, 0.0) for process, seconds in after.items())


def drive(
    loader: Iterable[Any],
    use: Callable[[Any], None],
    *,
    window_s: float,
    step_s: float = 0.0,
    count: int | None = None,
    finish: Callable[[], None] | None = None,
) -> Course:
    """Consume `loader`: use each batch, then wait `step_s`, until `count` batches, or `window_s`, or the pass are over.

    finish: waits for what the uses have launched, before the clock is read for the last time.
    """
    clock, sleep, mark_every_s = time.perf_counter, time.sleep, window_s / MARKS
    limit, longest_s = (inf, window_s) if count is None else (count, inf)
    asked_s = start_s = mark_s = clock()
    taken, waited_s, end_s, memory_bytes = 0, 0.0, start_s + longest_s, None
    marks = []
    half: tuple[int, CpuTimes] | None = None
    used: CpuTimes | None = None
    for batch in loader:
        now_s = clock()
        waited_s += now_s - asked_s
        taken += 1
        is_half = half is None and (now_s - start_s >= longest_s / 2 or 2 * taken >= limit)
        if now_s >= mark_s or is_half:
            marks.append((now_s - start_s, taken))
            mark_s = now_s + mark_every_s
        use(batch)
        if step_s:
            sleep(step_s)
        if is_half:
            half = taken, cpu_times()
        asked_s = clock()
        if asked_s >= end_s or taken == limit:
            if finish is not None:
                finish()
                asked_s = clock()
            used = cpu_times()
            memory_bytes = tree_bytes()  # the loader is at work still
            break
    later = taken - half[0] if half else 0
    return Course(
        batches=taken,
        seconds=asked_s - start_s,
        waited_s=waited_s,
        marks=tuple(marks),
        counted=count is not None,
        batch_cpu_s=used_s(half[1], used) / later if half and used and later else None,
        memory_bytes=memory_bytes,
    )
