"""One consumer from the moment it asks for an iterator: how many batches it gets, and where its time goes.

The step is a wait (`time.sleep`): a GPU works while the training loop's thread has nothing to do, and the
processors stay free for loading. Without a step the consumer is inside `next()` all the time.
"""

import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from math import inf
from typing import TYPE_CHECKING, Any

from benchmarks.consumer import USES, Use

if TYPE_CHECKING:
    from dpex.autotune.types import Decision

MARK_EVERY_S = 0.1
WARM_UP_WINDOWS = 3.0
NEAR = 0.95
"""A rate of that share of the settled one counts as settled."""
STRETCH = 0.1
"""Share of the course over which a rate is taken when asking since when it is settled."""


@dataclass(frozen=True, kw_only=True)
class Drive:
    """What the consumer does: uses each batch, then waits `step_s`, until `count` batches or `window_s` are over.

    warm_up: batches before the clock starts, but not for longer than `WARM_UP_WINDOWS` windows; 0: it starts
    before `iter()`.
    """

    step_s: float
    window_s: float
    count: int | None = None
    warm_up: int = 0
    use: Use = "read"


@dataclass(frozen=True, kw_only=True)
class Course:
    """What a consumer got.

    inside_s: part of `seconds` spent in `iter()` and `next()`. marks: (seconds since the start, batches until
    then) now and then. settings, decisions: where a loader that tunes itself ended, and how it came there.
    """

    batches: int
    seconds: float
    inside_s: float
    marks: tuple[tuple[float, int], ...] = ()
    settings: str | None = None
    decisions: tuple[dict[str, Any], ...] = ()

    @property
    def rate(self) -> float:
        """Batches per second over the whole course, start-up and learning included."""
        return self.batches / self.seconds

    @property
    def stall(self) -> float:
        """Share of the time inside `iter()` and `next()`, 0 to 1."""
        return self.inside_s / self.seconds

    @property
    def settled_rate(self) -> float:
        """Batches per second of the second half."""
        half_s = self.seconds / 2
        return (self.batches - self._taken_by(half_s)) / half_s

    @property
    def settled_after_s(self) -> float:
        """Seconds until the rate first came within 5 % of the settled one, or above it, for a tenth of the course."""
        stretch_s, goal = STRETCH * self.seconds, NEAR * self.settled_rate
        for at_s, batches in ((0.0, 0), *self.marks):
            if at_s + stretch_s <= self.seconds and self._taken_by(at_s + stretch_s) - batches >= goal * stretch_s:
                return at_s
        return self.seconds

    def _taken_by(self, at_s: float) -> float:
        """Batches until then, interpolated between marks."""
        points = ((0.0, 0), *self.marks, (self.seconds, self.batches))
        for (from_s, before), (to_s, after) in pairwise(points):
            if at_s <= to_s:
                return before + (after - before) * (at_s - from_s) / (to_s - from_s) if to_s > from_s else after
        return self.batches

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, fields: dict[str, Any]) -> "Course":
        """From what `as_dict` gave, also by way of JSON."""
        marks = tuple((at_s, batches) for at_s, batches in fields["marks"])
        return cls(**fields | {"marks": marks, "decisions": tuple(fields["decisions"])})


def drive(loader: Iterable[Any], how: Drive) -> Course:
    """Consume `loader` as `how` says; ends with the pass at the latest."""
    use = USES[how.use]
    clock, sleep, step_s = time.perf_counter, time.sleep, how.step_s
    limit, window_s = (inf, how.window_s) if how.count is None else (how.count, inf)
    asked_s = start_s = clock()
    batches = iter(loader)
    for _ in range(how.warm_up):
        use(next(batches))
        sleep(step_s)
        asked_s = clock()
        if asked_s - start_s > WARM_UP_WINDOWS * how.window_s:
            break
    start_s = asked_s if how.warm_up else start_s
    taken, inside_s, mark_s, end_s = 0, 0.0, start_s, start_s + window_s
    marks = []
    for batch in batches:
        now_s = clock()
        inside_s += now_s - asked_s
        taken += 1
        if now_s >= mark_s:
            marks.append((now_s - start_s, taken))
            mark_s = now_s + MARK_EVERY_S
        use(batch)
        if step_s:
            sleep(step_s)
        asked_s = clock()
        if asked_s >= end_s or taken == limit:
            break
    seconds = asked_s - start_s
    return Course(batches=taken, seconds=seconds, inside_s=inside_s, marks=tuple(marks))


def tuning(decisions: Sequence["Decision"]) -> dict[str, Any]:
    """Where a loader that tunes itself ended, and how it came there: the fields of a course."""
    return {
        "settings": str(decisions[-1].new) if decisions else None,
        "decisions": tuple({"at_s": one.at, "new": str(one.new), "text": one.text} for one in decisions),
    }
