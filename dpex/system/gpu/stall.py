"""GPU stall: how long the training stream lay idle because ``next()`` had not returned yet.

A *visit* is one call of ``next()``. Its two *marks* are CUDA events on the stream, at its entry and at its return. The
first event completes after all work queued before. The second completes when it is submitted or, if the stream is still
busy then, right after the first. So the time between both is the stream's wait for the batch, and 0 if queued work
outlasts the wait. Later visits read completed events, oldest first; no call waits for the GPU.

The marks also measure the stream's time for a step, between two visits. It determines the rate at which the loop needs
batches. A host clock cannot distinguish a loop that runs ahead of the GPU from a loop with short steps.

The result is an upper limit of the GPU's stall, because other streams may be busy meanwhile. It is clipped to the
duration of the visit, because a second thread may feed the same stream during ``next()``.

Marking a visit takes 25 to 100 µs, which is expensive for steps of 1 ms. With a ``share``, marks take about this share
of the loop's time.

* After a marked visit, visits are skipped until the cost of its marks is at most ``share`` of the time since. A loop
  with long steps has every visit marked.
* A visit that waits for its batch differs from one that does not, and costs the GPU more. It is marked at the start of
  the wait (`block`), with a separate budget of the same ``share``.
* The time inside ``next()`` of skipped visits is known. Its stalled part is estimated from marked visits of the same
  kind, waiting or not. The rest of the stream's time between two marked visits belongs to the steps between them, which
  yields their mean.

All methods are for the consumer's thread: a query from another thread would invalidate a CUDA graph that the consumer
is capturing. Any thread may read the sums.
"""

from __future__ import annotations

import logging
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

import torch

from dpex._torch import has_cuda_context
from dpex.system.clock import monotonic

logger: logging.Logger = logging.getLogger("dpex")

PENDING = 64
"""Maximum visits that wait to be read. Further visits are not marked, because a GPU that is so many steps behind does
not stall."""
AT_ONCE = 4
"""Maximum visits that are read per call."""
ABSENCE_S = 1.0
ABSENCE_STEPS = 10.0
"""A longer time than both `ABSENCE_S` and `ABSENCE_STEPS` mean steps is an evaluation or a checkpoint, not a step."""
ABSENCES_APART = 10
"""Minimum steps between two absences. A long time that follows sooner is a step, because steps have become slow."""

SHARE = 0.006
"""Part of the loop's time that marks may take, for loops whose batches are mostly ready."""
MOST_COST_S = 5e-4
"""Maximum seconds that count as the cost of marks. Longer marks were delayed by other work, or were the first."""
SPREAD = 0.618
"""Pauses between marks vary by the multiples of this, modulo 1, so that they match no rhythm of the loop."""
FADING = 0.9
"""Factor by which each new marked visit reduces the weight of earlier marked visits in `_Part`."""

Mark = TypeVar("Mark")


class Events(Protocol[Mark]):
    """Marks on a stream, such as `CudaEvents`."""

    def is_open(self) -> bool:
        """Return True if the stream may be marked now, and marks may be queried."""

    def record(self, like: Mark | None = None) -> Mark:
        """Mark the stream that this thread feeds, or the stream of ``like``."""

    def is_passed(self, mark: Mark) -> bool:
        """Return True if the stream has passed this mark; do not wait."""

    def apart_s(self, first: Mark, second: Mark) -> float:
        """Return the seconds of the stream between two marks that are passed."""

    def share_stream(self, first: Mark, second: Mark) -> bool:
        """Return True if both marks are on the same stream."""

    def reuse(self, mark: Mark) -> None:
        """Take back a mark that is not used any more."""


class GpuSteps(NamedTuple):
    """Steps of the stream so far: how many, and their seconds."""

    number: int = 0
    seconds: float = 0.0

    def with_more(self, count: int, step_s: float) -> GpuSteps:
        return GpuSteps(self.number + count, self.seconds + count * step_s)

    @property
    def mean_s(self) -> float:
        """Mean seconds of a step; 0 without steps."""
        return self.seconds / self.number if self.number else 0.0


class _Visit(NamedTuple):
    """A marked visit.

    ``follows``: True if all visits since the previous marked visit were skipped and of the same pass.
    ``waited``: See `GpuStall.block`.
    ``steps``: Count of steps since the previous marked visit.
    ``skipped_s``: Seconds inside ``next()`` of skipped visits that did not wait, and of skipped visits that waited.
    ``entry_s``, ``exit_s``: Cost of the two marks, in seconds.
    """

    entered: Any
    returned: Any
    inside_s: float
    starting: bool
    follows: bool
    waited: bool
    steps: int
    skipped_s: tuple[float, float]
    entry_s: float
    exit_s: float


class _MarkBudget:
    """Decides which visits to mark, so that marks take ``share`` of the time. None: Every visit is marked."""

    __slots__ = ("_cost_s", "_share", "_spread", "due_at")

    def __init__(self, share: float | None) -> None:
        self._share = share
        self._cost_s = 0.0
        self._spread = 0.0
        self.due_at = 0.0

    def add_cost(self, cost_s: float) -> None:
        """Count ``cost_s`` seconds that marks took."""
        self._cost_s += cost_s

    def rest_after_cost(self, now: float) -> None:
        """Mark no visit until the cost since the last rest is at most the share of the time."""
        if self._share is not None:
            self._spread = (self._spread + SPREAD) % 1.0
            self.due_at = now + min(self._cost_s, MOST_COST_S) / self._share * (0.5 + self._spread)
            self._cost_s = 0.0


class _Part:
    """Estimates the stalled part of the time inside ``next()``, from the latest marked visits of one kind."""

    __slots__ = ("_inside_s", "_stall_s")

    def __init__(self) -> None:
        self._inside_s = self._stall_s = 0.0

    def add(self, stall_s: float, inside_s: float) -> None:
        """Add a marked visit that was read."""
        self._stall_s = FADING * self._stall_s + stall_s
        self._inside_s = FADING * self._inside_s + inside_s

    def of(self, seconds: float) -> float:
        """Return the stalled part of ``seconds`` inside ``next()``, estimated from the marked visits."""
        return seconds * min(1.0, self._stall_s / self._inside_s) if self._inside_s > 0 else 0.0


class GpuStall(Generic[Mark]):
    """See the module. The first visit of a pass is summed separately, because it waits for the start.

    ``stall_s``, ``start_s``: Seconds so far, without pending visits; None until a stream was marked.
    ``steps``: See `GpuSteps`. The first step, which compiles and allocates, and absences of the training loop are left
    out. The number and the seconds of one `GpuSteps` are of one moment.
    """

    def __init__(
        self, events: Events[Mark], share: float | None = None, clock: Callable[[], float] = monotonic
    ) -> None:
        self._events = events
        self._clock = clock
        self._budget, self._waiting_budget = _MarkBudget(share), _MarkBudget(share)
        self._parts = (_Part(), _Part())
        self._skipped_s = [0.0, 0.0]
        self._skipped_visits = 0
        self._entry_s = 0.0
        self._is_skipping = self._is_late = self._has_waited = False
        self._pending: deque[_Visit] = deque()
        self._left: Any = None
        self._is_in_row = self._is_warm = False
        self._since_absence = ABSENCES_APART
        self._has_failed = False
        self.steps: GpuSteps = GpuSteps()
        self.stall_s: float | None = None
        self.start_s: float | None = None

    @property
    def total_s(self) -> float | None:
        """The sum of ``stall_s`` and ``start_s``. It never shrinks. Any thread may read it."""
        stall_s, start_s = self.stall_s, self.start_s
        return None if stall_s is None else stall_s + (start_s or 0.0)

    def counts(self) -> dict[str, Any]:
        """Return the fields of `Reading` about the stream. Any thread may call it."""
        steps = self.steps
        return {
            "gpu_stall_s": self.total_s,
            "gpu_running_stall_s": self.stall_s,
            "gpu_steps": steps.number,
            "gpu_steps_s": steps.seconds,
        }

    def enter(self, *, starting: bool = False) -> Mark | None:
        """Begin a visit. Return the mark for `leave`, or None. ``starting``: True for the first visit of a pass."""
        if self._has_failed:
            return None
        entered = self._clock()
        self._is_late = self._has_waited = False
        self._is_skipping = entered < self._budget.due_at and not starting
        if self._is_skipping:
            return None
        mark = self._marked()
        self._entry_s = self._clock() - entered
        self._budget.add_cost(self._entry_s)
        return mark

    def block(self, mark: Mark | None) -> Mark | None:
        """Begin a wait, because the batch has not arrived. Return the mark for `leave`, which may be a new mark.

        A visit may wait repeatedly, for a worker and for the thread that pins. It is marked at the first of its waits
        or not at all, because a mark at a later wait would count only the rest of the visit as stall.
        """
        is_first, self._has_waited = not self._has_waited, True
        if not (is_first and self._is_skipping) or self._has_failed:
            return mark
        began = self._clock()
        if began < self._waiting_budget.due_at:
            return None
        mark = self._marked()
        ended = self._clock()
        self._entry_s = ended - began
        self._is_skipping, self._is_late = mark is None, True
        self._waiting_budget.add_cost(2 * self._entry_s)  # there will be another mark, at the return
        self._waiting_budget.rest_after_cost(ended)
        return mark

    def _marked(self) -> Mark | None:
        try:
            if self._events.is_open():
                self._read(AT_ONCE)
                if len(self._pending) < PENDING:
                    return self._events.record()
        except Exception as error:
            self._stop_marking(error)
        self._is_in_row = False
        return None

    def leave(self, entered: Mark | None, inside_s: float, *, starting: bool, over: bool) -> None:
        """End a visit that took ``inside_s``. ``starting``, ``over``: True for the first, and the last, of a pass."""
        if self._has_failed:
            return
        if self._is_skipping:
            self._skipped_s[self._has_waited] += inside_s
            self._skipped_visits += 1
        if entered is None and not (over and self._is_skipping):
            return
        try:
            if entered is not None:
                self._leave(entered, inside_s, starting=starting)
            elif not self._events.is_open():
                return
            self._is_in_row = self._is_in_row and not over
            if over:
                self._read(PENDING)
                self._add_skipped()
        except Exception as error:
            self._stop_marking(error)

    def _leave(self, entered: Mark, inside_s: float, *, starting: bool) -> None:
        began = self._clock()
        follows = self._is_in_row and not starting
        between = 1 + self._skipped_visits, (self._skipped_s[0], self._skipped_s[1])
        self._skipped_visits, self._skipped_s = 0, [0.0, 0.0]
        returned = self._events.record(like=entered)
        ended = self._clock()
        marks = self._entry_s, ended - began
        self._pending.append(_Visit(entered, returned, inside_s, starting, follows, self._has_waited, *between, *marks))
        self.stall_s, self.start_s = self.stall_s or 0.0, self.start_s or 0.0
        self._is_in_row = True
        if not self._is_late:
            self._budget.add_cost(ended - began)
            if not starting:  # the first visit is not typical, so visits are not skipped after it
                self._budget.rest_after_cost(ended)

    def _read(self, most: int) -> None:
        for _ in range(min(most, len(self._pending))):
            visit = self._pending[0]
            if not self._events.is_passed(visit.returned):
                return
            self._pending.popleft()
            stall_s = min(max(0.0, self._events.apart_s(visit.entered, visit.returned)), visit.inside_s)
            if visit.starting:
                self.start_s = (self.start_s or 0.0) + stall_s
                stall_s = 0.0
            else:
                part = self._parts[visit.waited]
                part.add(max(0.0, stall_s - visit.exit_s), max(0.0, visit.inside_s - visit.entry_s))
            skipped_s = self._stall_of(visit.skipped_s)
            self.stall_s = (self.stall_s or 0.0) + stall_s + skipped_s
            self._count_steps(visit, skipped_s)
            self._events.reuse(visit.entered)

    def _stall_of(self, skipped_s: Sequence[float]) -> float:
        return sum(part.of(seconds) for part, seconds in zip(self._parts, skipped_s, strict=True))

    def _add_skipped(self) -> None:
        """Count the visits that were skipped at the end of a pass, because no marked visit comes after them."""
        if self.stall_s is not None:
            self.stall_s += self._stall_of(self._skipped_s)
        self._skipped_visits, self._skipped_s = 0, [0.0, 0.0]

    def _count_steps(self, visit: _Visit, skipped_s: float) -> None:
        """Count the steps from the previous marked return to this entry, without the stall of skipped visits."""
        left, self._left = self._left, visit.returned
        if left is None:
            return
        if visit.follows and self._events.share_stream(left, visit.entered):
            steps_s = max(0.0, self._events.apart_s(left, visit.entered) - skipped_s)
            self._add_steps(visit.steps, steps_s / visit.steps)
        self._events.reuse(left)

    def _add_steps(self, count: int, mean_s: float) -> None:
        self._since_absence += 1
        if self._is_absence(mean_s):
            self._since_absence = 0
        elif self._is_warm:
            self.steps = self.steps.with_more(count, mean_s)
        self._is_warm = True

    def _is_absence(self, step_s: float) -> bool:
        seldom = self._since_absence > ABSENCES_APART
        return seldom and self.steps.number > 0 and step_s > max(ABSENCE_S, ABSENCE_STEPS * self.steps.mean_s)

    def _stop_marking(self, error: Exception) -> None:
        """Stop because of an error, which may be of the user's own kernels. CUDA raises it again in the user's code."""
        self._has_failed = True
        self._pending.clear()
        self._left = None
        logger.debug("the GPU's stall is not measured any more: %s", error)


# -- the marks of CUDA -------------------------------------------------------------------------------------------------


class CudaMark(NamedTuple):
    """An event, and the stream it was recorded on."""

    event: torch.cuda.Event
    stream: torch.cuda.Stream


class CudaEvents:
    """`Events` of CUDA, on the current stream of the calling thread. Events are reused, each on its own device. No
    device is initialised.

    The device is the current device, if this process has used it. Otherwise it is the only used device (as in a script
    that says ``"cuda:1"`` everywhere). An event on an unused device would cost hundreds of megabytes.
    """

    def __init__(self) -> None:
        self._idle: defaultdict[int, list[torch.cuda.Event]] = defaultdict(list)
        self._used: set[int] = set()
        self._device: int | None = None

    def is_open(self) -> bool:
        """Return True if a device is in use, and this thread does not capture a graph."""
        if not torch.cuda.is_initialized() or torch.cuda.is_current_stream_capturing():
            return False
        self._device = self._device_in_use()
        return self._device is not None

    def _device_in_use(self) -> int | None:
        current = torch.cuda.current_device()
        if self._is_used(current):
            return current
        used = [device for device in range(torch.cuda.device_count()) if self._is_used(device)]
        return used[0] if len(used) == 1 else None

    def _is_used(self, device: int) -> bool:
        if device not in self._used and has_cuda_context(device):
            self._used.add(device)
        return device in self._used

    def record(self, like: CudaMark | None = None) -> CudaMark:
        stream = torch.cuda.current_stream(self._device) if like is None else like.stream
        idle = self._idle[stream.device_index]
        event = idle.pop() if idle else torch.cuda.Event(enable_timing=True)
        event.record(stream)
        return CudaMark(event, stream)

    def is_passed(self, mark: CudaMark) -> bool:
        return bool(mark.event.query())

    def apart_s(self, first: CudaMark, second: CudaMark) -> float:
        return float(first.event.elapsed_time(second.event)) / 1e3

    def share_stream(self, first: CudaMark, second: CudaMark) -> bool:
        return bool(first.stream == second.stream)

    def reuse(self, mark: CudaMark) -> None:
        self._idle[mark.stream.device_index].append(mark.event)


def cuda_stall(share: float | None = None) -> GpuStall[Any] | None:
    """Return the measurement of one iterator; None if torch was built without CUDA. It may begin before a GPU is used.

    ``share``: part of the loop's time that marks may take, see `GpuStall`; None: every visit is marked.
    """
    return GpuStall(CudaEvents(), share) if torch.backends.cuda.is_built() else None
