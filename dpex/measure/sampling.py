"""Keep the slowest samples and the latest waits, and choose the batches to time in detail. Pure except for random
numbers."""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import islice
from operator import index as as_int
from random import Random
from typing import Any, NamedTuple

SLOWEST = 8
"""Number of slowest samples that are kept."""
LONGEST_TEXT = 120
"""Maximum characters of an index; dpex cuts longer texts."""
SAMPLE_S = 50e-6
"""Samples are timed one by one only while they take longer than this, so that reading the clock (0.1 µs) is cheap."""
FIRST_S = 0.02
"""Seconds before the first detailed timing, which would cost too much in a pass of a few tiny batches."""
APART_S, MOST_APART_S = 0.25, 16.0
"""Seconds by which each further worker's first timing is delayed, and the maximum delay. Without a delay, workers that
start together record calls together, which took a second with 64 workers on 2 CPUs."""
REST = 200.0
"""After a timing that cost t seconds, time nothing for `REST` * t seconds."""
_PART = 8.0
"""A timing t seconds after the first batch delays the next one by t / `_PART`, at most `_LONGEST_S`."""
_LONGEST_S = 60.0
"""Maximum delay by `_PART`, in seconds."""
_BY = 16
"""Maximum batches skipped at random before a timing, so that timings do not follow a rhythm of the work."""
LATEST = 10_000
"""Number of the latest batches whose waits are kept: 120 KB for a loader."""


class SlowIndex(NamedTuple):
    """A dataset index (text ``shown``) with its slow loads: longest ``seconds``, number ``times``, sum ``total_s``."""

    seconds: float
    shown: str
    times: int = 1
    total_s: float = 0.0


class SlowestSamples:
    """The indices of the slowest samples, each once. One thread adds, and any thread may read."""

    __slots__ = ("_known", "least_s")

    def __init__(self) -> None:
        self.least_s: float = 0.0
        self._known: dict[str, SlowIndex] = {}

    def add(self, seconds: float, indices: Any, at: int) -> None:
        """Add a sample that took longer than ``least_s``. It is at position ``at`` of its batch's ``indices``."""
        for index in islice(indices, at, at + 1):
            text = as_text(index)
            found = merged([*self._known.values(), SlowIndex(seconds, text, 1, seconds)])
            self._known = {slow.shown: slow for slow in found}
            if len(found) == SLOWEST:
                self.least_s = found[-1].seconds

    def found(self) -> tuple[SlowIndex, ...]:
        """Return the indices that are kept, the slowest first."""
        return tuple(self._known.values())


class FailedSample(NamedTuple):
    """A sample that could not be loaded: the dataset index, and the error, as text."""

    shown: str
    error: str


def merged(slow: Iterable[SlowIndex]) -> tuple[SlowIndex, ...]:
    """Return the `SLOWEST` slowest indices, each once, the slowest first."""
    known: dict[str, SlowIndex] = {}
    for one in slow:
        other = known.get(one.shown)
        if other is not None:
            longest_s, total_s = max(one.seconds, other.seconds), one.total_s + other.total_s
            one = SlowIndex(longest_s, one.shown, one.times + other.times, total_s)
        known[one.shown] = one
    return tuple(sorted(known.values(), key=lambda one: -one.seconds)[:SLOWEST])


def as_text(index: Any) -> str:
    """Return a dataset index as text, or its type if it cannot be shown."""
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
    """Choose the batches of a sequence in which dpex times single calls, because timing costs time.

    No batch is chosen within `FIRST_S` + ``later_s`` after the first batch. The next timing is due after `REST` times
    the cost of the previous one, or an eighth of the time since the first batch (at most a minute) if that is longer.
    So a short run has dozens of timings, and a long run ever more. The choice among the next few batches is random, in
    case the work has a rhythm.

    ``due``: Time of the next timing. Call `is_chosen` only from then on.
    """

    __slots__ = ("_began", "_later_s", "_pass_by", "_random", "due", "timings")

    def __init__(self, later_s: float = 0.0) -> None:
        self._later_s = later_s
        self.due: float = 0.0
        self.timings: int = 0
        self._began: float | None = None
        self._pass_by = 0
        self._random = Random(0).random

    def is_chosen(self, now: float) -> bool:
        """Return True if the batch that begins now is to be timed; then call `end_timing` when it has ended."""
        if self._began is None:
            self._began = now
            self.due = now + FIRST_S + self._later_s
            return False
        if self._pass_by:
            self._pass_by -= 1
            return False
        return True

    def end_timing(self, now: float, extra_s: float) -> None:
        """End a timing, which cost ``extra_s`` seconds."""
        self.timings += 1
        since_s = now - (self._began or now)
        self.due = now + max(REST * extra_s, min(_LONGEST_S, since_s / _PART))
        self._pass_by = int(self._random() * min(_BY, self.timings + 1))


# -- waits -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Waits:
    """The waits for the batches ``first``, ``first + 1``, ... so that the ranks of a job can be compared.

    Attributes:
        first: The number of the first batch, from 0.
        seconds: The wait for each batch; 0 for the first batch of a pass.
        at: The monotonic time of each delivery.
    """

    first: int = 0
    seconds: array[float] = field(default_factory=lambda: array("f"))
    at: array[float] = field(default_factory=lambda: array("d"))

    @property
    def end(self) -> int:
        """The number of the batch after the last wait."""
        return self.first + len(self.seconds)

    def then(self, later: Waits) -> Waits:
        """Return these waits, followed by the waits of a later iterator."""
        if later.first:
            return Waits(self.end + later.first, later.seconds, later.at)
        return Waits(self.first, self.seconds + later.seconds, self.at + later.at).latest()

    def since(self, earlier: Waits) -> Waits:
        """Return the waits for the batches after those of ``earlier``, numbered from the end of ``earlier``."""
        skipped = max(0, earlier.end - self.first)
        return Waits(max(0, self.first - earlier.end), self.seconds[skipped:], self.at[skipped:])

    def counted(self) -> Waits:
        """Return a log that ends at the same batch and contains no wait, to pass to `since` as ``earlier``."""
        return Waits(self.end)

    def latest(self) -> Waits:
        first = max(self.first, self.end - LATEST)
        return Waits(first, self.seconds[first - self.first :], self.at[first - self.first :])


class WaitLog:
    __slots__ = ("_waits",)

    def __init__(self) -> None:
        self._waits = Waits()

    def add(self, waited_s: float, now: float) -> None:
        """Note a batch that was delivered."""
        waits = self._waits
        if len(waits.seconds) >= 2 * LATEST:
            self._waits = waits = waits.latest()
        waits.at.append(now)
        waits.seconds.append(waited_s)

    def read(self) -> Waits:
        return self._waits.latest()
