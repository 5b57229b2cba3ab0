"""GPU stall: how long the training stream lay idle because ``next()`` had not returned yet.

The stream is marked as ``next()`` is entered and as it returns. The first mark is passed when all work queued before is
done, the second when it is submitted or, if the stream is still busy then, right after the first. So the time between
them is what the stream waited for the batch: nothing where queued work outlasts the wait. Marks are read at later
visits, oldest first, once they are passed; nothing ever waits for the GPU.

The same marks tell how long the stream takes for a step: from the mark of one ``next()``'s return to that of the next
one's entry. This is the slower of the GPU's work and the launching of it, so it says what is demanded of the loader. A
loop that runs ahead of the GPU, which a clock of the host cannot tell from one whose steps are short, takes on the
stream what it takes on the GPU.

What this cannot see: work on other streams (the GPU may be busy while this stream is idle, so this is the stream's
stall and the most that the GPU's can be), the copy to the device that comes after, and a thread that feeds the same
stream while another is inside ``next()``. That would lengthen the time between the marks, so no stall is counted as
longer than the stay.

All methods are for the consumer's thread: to ask about a mark from another one would spoil a CUDA graph that the
consumer is capturing. The sums may be read from any thread.
"""

from __future__ import annotations

import logging
from collections import deque
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

logger = logging.getLogger("dpex")

PENDING = 64
"""Visits that may wait to be read. Is the GPU so many steps behind, then it does not stall, and none is added."""
AT_ONCE = 4
"""Visits read per call, at most."""
ABSENCE_S = 1.0
ABSENCE_STEPS = 10.0
"""What takes so long, and so many times what steps took so far, is no step: an evaluation, a checkpoint."""
ABSENCES_APART = 10
"""Steps there must be between two absences: else steps have become that slow."""

Mark = TypeVar("Mark")


class Events(Protocol[Mark]):
    """Marks on a stream; `dpex.system.gpu.events` has the real ones."""

    def is_open(self) -> bool:
        """Whether there is a stream that may be marked, and marks that may be asked about, at this moment."""

    def record(self, like: Mark | None = None) -> Mark:
        """Mark the stream that this thread feeds, or the one that ``like`` is on."""

    def is_passed(self, mark: Mark) -> bool:
        """Whether the stream has come to this mark; does not wait."""

    def apart_s(self, first: Mark, second: Mark) -> float:
        """Seconds of the stream between two marks that are passed."""

    def share_stream(self, first: Mark, second: Mark) -> bool:
        """Whether both are on the same stream."""

    def reuse(self, mark: Mark) -> None:
        """Nobody needs it any more."""


class GpuSteps(NamedTuple):
    """Steps of the stream so far: how many, and their seconds."""

    number: int = 0
    seconds: float = 0.0

    def with_one(self, step_s: float) -> GpuSteps:
        """One more."""
        return GpuSteps(self.number + 1, self.seconds + step_s)

    @property
    def mean_s(self) -> float:
        """0 if there was none."""
        return self.seconds / self.number if self.number else 0.0


class _Visit(NamedTuple):
    """follows: whether the visit just before was marked too, and was of the same pass."""

    entered: Any
    returned: Any
    inside_s: float
    starting: bool
    follows: bool


class GpuStall(Generic[Mark]):
    """See the module. The first visit of a pass is summed separately: what it waits for is the start.

    ``stall_s``, ``start_s``: seconds so far, the visits still pending left out; None until a stream was marked.
    ``steps``: see `GpuSteps`; the first, which compiles and allocates, and absences of the training loop are left out.
    Read once, it is of one moment.
    """

    def __init__(self, events: Events[Mark]) -> None:
        self._events = events
        self._pending: deque[_Visit] = deque()
        self._left: Any = None
        self._is_in_row = self._is_warm = False
        self._since_absence = ABSENCES_APART
        self._has_failed = False
        self.steps = GpuSteps()
        self.stall_s: float | None = None
        self.start_s: float | None = None

    @property
    def total_s(self) -> float | None:
        """Both together; may be read from any thread, and never shrinks."""
        stall_s, start_s = self.stall_s, self.start_s
        return None if stall_s is None else stall_s + (start_s or 0.0)

    def enter(self) -> Mark | None:
        """``next()`` is entered; what this returns is for `leave`."""
        if self._has_failed:
            return None
        try:
            if not self._events.is_open():
                self._is_in_row = False
                return None
            self._read(AT_ONCE)
            if len(self._pending) < PENDING:
                return self._events.record()
            self._is_in_row = False
            return None
        except Exception as error:
            self._fail(error)
            return None

    def leave(self, entered: Mark | None, inside_s: float, *, starting: bool, over: bool) -> None:
        """It returns after ``inside_s``; ``starting``: for the first time in this pass, ``over``: for the last."""
        if entered is None or self._has_failed:
            return
        try:
            follows = self._is_in_row and not starting
            self._pending.append(_Visit(entered, self._events.record(like=entered), inside_s, starting, follows))
            self._is_in_row = not over
            self.stall_s, self.start_s = self.stall_s or 0.0, self.start_s or 0.0
            if over:
                self._read(PENDING)
        except Exception as error:
            self._fail(error)

    def _read(self, most: int) -> None:
        for _ in range(min(most, len(self._pending))):
            visit = self._pending[0]
            if not self._events.is_passed(visit.returned):
                return
            self._pending.popleft()
            self._count_step(visit)
            stall_s = min(max(0.0, self._events.apart_s(visit.entered, visit.returned)), visit.inside_s)
            if visit.starting:
                self.start_s = (self.start_s or 0.0) + stall_s
            else:
                self.stall_s = (self.stall_s or 0.0) + stall_s
            self._events.reuse(visit.entered)

    def _count_step(self, visit: _Visit) -> None:
        """What the stream took from the return before to this entry."""
        left, self._left = self._left, visit.returned
        if left is None:
            return
        if visit.follows and self._events.share_stream(left, visit.entered):
            step_s = max(0.0, self._events.apart_s(left, visit.entered))
            self._take_step(step_s)
        self._events.reuse(left)

    def _take_step(self, step_s: float) -> None:
        self._since_absence += 1
        if self._is_absence(step_s):
            self._since_absence = 0
        elif self._is_warm:
            self.steps = self.steps.with_one(step_s)
        self._is_warm = True

    def _is_absence(self, step_s: float) -> bool:
        seldom = self._since_absence > ABSENCES_APART
        return seldom and self.steps.number > 0 and step_s > max(ABSENCE_S, ABSENCE_STEPS * self.steps.mean_s)

    def _fail(self, error: Exception) -> None:
        """An error of the user's own kernels shows here first; it comes again where it belongs, at their next call."""
        self._has_failed = True
        self._pending.clear()
        self._left = None
        logger.debug("the GPU's stall is not measured any more: %s", error)
