"""A few of many: a fair choice of values, the slowest samples, when to look closely. Pure but for random
numbers."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice
from math import log, log1p
from operator import index as as_int
from random import Random
from typing import Any, NamedTuple

KEPT = 512
"""Values that are kept of many: their median is then known to within two points of rank."""
SLOWEST = 8
"""How many are kept of what took longest."""
LONGEST_TEXT = 120
"""Characters of an index: longer ones are cut."""
SAMPLE_S = 50e-6
"""Single samples are timed while they take longer than that: reading the clock, 0.1 µs, is nothing beside it."""
FIRST_S = 0.02
"""Nothing is looked at closely before that: a pass of a few tiny batches would pay more than it is worth."""
DEAR = 200.0
"""Looking closely is paid for by as many times that long without."""
_PART = 8.0
"""The longer nothing was looked at, the longer the next look may wait: by this part of that time."""
_LONGEST_S = 60.0
"""A look at least once in that time."""
_BY = 16
"""Up to so many batches are passed by before a look, by chance, so that looks do not keep step with the work."""


class Reservoir:
    """Each value that comes by is among the kept with the same chance. Of periodic values every so-manyth would be no
    fair choice. How many pass by until the next is kept is drawn at once (Li, "Reservoir-Sampling Algorithms of Time
    Complexity O(n(1 + log(N/n)))", 1994, algorithm L), so that most cost a comparison.

    due: the number, counted from 1, of the next value to `keep`.
    """

    __slots__ = ("_random", "_weight", "due", "kept")

    def __init__(self) -> None:
        self.kept: list[float] = []
        self.due = 1
        self._random = Random(0).random
        self._weight = 1.0

    def keep(self, value: float) -> None:
        """The value that is due."""
        if len(self.kept) < KEPT:
            self.kept.append(value)
        else:
            self.kept[int(self._random() * KEPT)] = value
        if len(self.kept) < KEPT:
            self.due += 1
            return
        self._weight *= self._drawn() ** (1.0 / KEPT)
        self.due += 1 + int(log(self._drawn()) / log1p(-self._weight))

    def _drawn(self) -> float:
        """Between 0 and 1, and neither."""
        return self._random() or 0.5


class SlowIndex(NamedTuple):
    """A dataset index, as text, of which a sample took long: seconds at the worst, of all ``times`` that it was among
    the slowest together, and how often that was."""

    seconds: float
    shown: str
    times: int = 1
    total_s: float = 0.0


class SlowestSamples:
    """The indices of the samples that took longest, each once. Told by one thread, read by any."""

    __slots__ = ("_known", "least_s")

    def __init__(self) -> None:
        self.least_s = 0.0
        self._known: dict[str, SlowIndex] = {}

    def add(self, seconds: float, indices: Any, at: int) -> None:
        """One that took longer than ``least_s``, and is the one at that place of its batch's ``indices``."""
        for index in islice(indices, at, at + 1):
            text = as_text(index)
            found = merged([*self._known.values(), SlowIndex(seconds, text, 1, seconds)])
            self._known = {slow.shown: slow for slow in found}
            if len(found) == SLOWEST:
                self.least_s = found[-1].seconds

    def found(self) -> tuple[SlowIndex, ...]:
        """Slowest first."""
        return tuple(self._known.values())


class FailedSample(NamedTuple):
    """A sample that could not be had: the dataset index, and the error, as text."""

    shown: str
    error: str


def merged(slow: Iterable[SlowIndex]) -> tuple[SlowIndex, ...]:
    """Each index once, the `SLOWEST` of them, slowest first."""
    known: dict[str, SlowIndex] = {}
    for one in slow:
        other = known.get(one.shown)
        if other is not None:
            longest_s, total_s = max(one.seconds, other.seconds), one.total_s + other.total_s
            one = SlowIndex(longest_s, one.shown, one.times + other.times, total_s)
        known[one.shown] = one
    return tuple(sorted(known.values(), key=lambda one: -one.seconds)[:SLOWEST])


def as_text(index: Any) -> str:
    """What a dataset was asked for, for people; of what cannot be shown, its type."""
    try:
        return str(as_int(index))
    except Exception:
        pass  # no integer
    try:
        text = repr(index)
    except Exception:
        text = f"<{type(index).__name__}>"
    return text if len(text) <= LONGEST_TEXT else f"{text[:LONGEST_TEXT]}…"


class SamplingSchedule:
    """When to look closely at one of many things that follow each other, as looking costs time.

    The first is left out, and all that begins within `FIRST_S` of it. Then one is looked at whenever the time since the
    last is `DEAR` times what looking at that one cost, and an eighth of the time since the first, a minute at most: so
    there are dozens in a short run, and no end of them in a long one. Which of the next few it is then is left to
    chance, so that what comes at regular intervals is met as often as it comes.

    due: nothing is looked at before; compare it, and ask `comes` only from then on.
    """

    __slots__ = ("_began", "_pass_by", "_random", "due", "taken")

    def __init__(self) -> None:
        self.due = 0.0
        self.taken = 0
        self._began: float | None = None
        self._pass_by = 0
        self._random = Random(0).random

    def comes(self, now: float) -> bool:
        """Whether what begins now is to be looked at; `took` must follow."""
        if self._began is None:
            self._began = now
            self.due = now + FIRST_S
            return False
        if self._pass_by:
            self._pass_by -= 1
            return False
        return True

    def took(self, now: float, extra_s: float) -> None:
        """It was, and that cost so much."""
        self.taken += 1
        since_s = now - (self._began or now)
        self.due = now + max(DEAR * extra_s, min(_LONGEST_S, since_s / _PART))
        self._pass_by = int(self._random() * min(_BY, self.taken + 1))
