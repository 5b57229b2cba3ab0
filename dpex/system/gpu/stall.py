"""GPU stall: how long the training stream lay idle because ``next()`` had not returned yet.

The stream is marked as ``next()`` is entered and as it returns. The first mark is passed when all work queued before is
done, the second when it is submitted or, if the stream is still busy then, right after the first. So the time between
them is what the stream waited for the batch: nothing where queued work outlasts the wait. Marks are read at later
visits, oldest first, once they are passed; nothing ever waits for the GPU.

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

    def reuse(self, mark: Mark) -> None:
        """Nobody needs it any more."""


class _Visit(NamedTuple):
    entered: Any
    returned: Any
    inside_s: float
    starting: bool


class GpuStall(Generic[Mark]):
    """See the module. The first visit of a pass is summed separately: what it waits for is the start.

    ``stall_s``, ``start_s``: seconds so far, the visits still pending left out; None until a stream was marked.
    """

    def __init__(self, events: Events[Mark]) -> None:
        self._events = events
        self._pending: deque[_Visit] = deque()
        self._has_failed = False
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
                return None
            self._read(AT_ONCE)
            return self._events.record() if len(self._pending) < PENDING else None
        except Exception as error:
            self._fail(error)
            return None

    def leave(self, entered: Mark | None, inside_s: float, *, starting: bool, over: bool) -> None:
        """It returns after ``inside_s``; ``starting``: for the first time in this pass, ``over``: for the last."""
        if entered is None or self._has_failed:
            return
        try:
            self._pending.append(_Visit(entered, self._events.record(like=entered), inside_s, starting))
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
            stall_s = min(max(0.0, self._events.apart_s(visit.entered, visit.returned)), visit.inside_s)
            if visit.starting:
                self.start_s = (self.start_s or 0.0) + stall_s
            else:
                self.stall_s = (self.stall_s or 0.0) + stall_s
            self._events.reuse(visit.entered)
            self._events.reuse(visit.returned)

    def _fail(self, error: Exception) -> None:
        """An error of the user's own kernels shows here first; it comes again where it belongs, at their next call."""
        self._has_failed = True
        self._pending.clear()
        logger.debug("the GPU's stall is not measured any more: %s", error)
