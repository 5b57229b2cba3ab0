"""Lets the further streams of an iterable dataset join the first, or ends them. PURE.

Tickets of all streams are drawn in turn from the start, so that the batches are in PyTorch's order whether the others
join or not. Those of the others wait, and are dropped if there is one stream. See `dpex.schedule.streams`.
"""

from __future__ import annotations

from dpex.schedule.events import SplittingKnown
from dpex.schedule.instructions import Say
from dpex.schedule.logical_workers import LogicalWorkers
from dpex.schedule.placement import Placement
from dpex.schedule.progress import ResumePoint
from dpex.schedule.scaling import Scaling, one_worker
from dpex.schedule.schedule import Schedule
from dpex.schedule.streams import ALL, ONE, UNKNOWN, Splitting


class Joining:
    """See the module.

    Args:
        splitting: Whether the dataset splits itself, as far as is known; None: all logical workers take part.
        placement: The pools, and what they are asked for.
        logicals: Receives the number of streams.
        scaling: Receives whether a single worker is enough.
    """

    def __init__(
        self, splitting: Splitting | None, placement: Placement, logicals: LogicalWorkers, scaling: Scaling
    ) -> None:
        self._splitting = splitting
        self._placement = placement
        self._logicals = logicals
        self._scaling = scaling
        if splitting is not None:
            self._begin_with(splitting.streams, splitting)

    @property
    def has_one_stream(self) -> bool:
        """Return True if the dataset turned out not to split itself."""
        return self._logicals.streams == ONE

    def begin_epoch(self, schedule: Schedule) -> None:
        """Begin an epoch with this schedule."""
        if self.has_one_stream:
            self._end_others(schedule)

    def go_on(self, point: ResumePoint, now: float) -> None:
        """Have the epoch go on where another run stood, in the same number of streams."""
        splitting = self._splitting
        if splitting is None:
            return
        if point.streams == ALL and len(point.logicals) == self._logicals.count:
            self._let_all_join(splitting, now)
        else:
            self._begin_with(ONE if point.streams == ALL else point.streams, splitting)

    def known(self, schedule: Schedule, event: SplittingKnown, now: float) -> None:
        """Take in what the first stream has shown. A second call does nothing."""
        splitting = self._splitting
        if splitting is None or self._logicals.streams != UNKNOWN:
            return
        if event.is_split:
            self._let_all_join(splitting, now)
        else:
            self._placement.instructions.append(Say(splitting.text, warning=False))
            self._end_others(schedule)
            self._begin_with(ONE, splitting)
        splitting.is_split = event.is_split

    def settle(self, schedule: Schedule, now: float) -> None:
        """End the other streams if the first one has ended without having shown anything, as its worker died."""
        if self._logicals.streams == UNKNOWN and not schedule.is_active(0):
            self.known(schedule, SplittingKnown(is_split=False), now)

    def _begin_with(self, streams: int, splitting: Splitting) -> None:
        """Read the dataset in ``streams`` streams from now on."""
        scaling = self._scaling
        scaling.has_one_stream = streams == ONE or (streams == UNKNOWN and not splitting.is_split)
        if streams == ONE:
            scaling.sizes = one_worker(scaling.sizes)
        self._logicals.streams = streams

    def _let_all_join(self, splitting: Splitting, now: float) -> None:
        scaling = self._scaling
        scaling.has_one_stream = False
        scaling.open()
        self._logicals.wait_anew(now)
        self._placement.dirty.update(range(self._logicals.count))
        self._begin_with(ALL, splitting)  # last: an exception of a signal handler may have all of it done again

    def _end_others(self, schedule: Schedule) -> None:
        for queue in range(1, self._logicals.count):
            schedule.end_queue(queue)
