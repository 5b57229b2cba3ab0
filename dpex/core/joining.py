"""Lets the further streams of an iterable dataset join the first, or ends them. PURE.

Tickets of all streams are drawn in turn from the start, so that the batches are in torch's order whether the others
join or not. Those of the others wait, and are dropped where there is one stream. See `dpex.core.first_stream`.
"""

from __future__ import annotations

from dpex.core.events import SplittingKnown
from dpex.core.first_stream import ALL, ONE, UNKNOWN, Splitting
from dpex.core.instructions import Instruction, Say
from dpex.core.logical_workers import LogicalWorkers
from dpex.core.prefetch import Sizes
from dpex.core.resume_point import ResumePoint
from dpex.core.scaling import Scaling, one_worker
from dpex.core.schedule import Schedule


class Joining:
    """See the module.

    Args:
        splitting: what is known of the dataset; None: all logical workers take part in any case.
        count: how many logical workers there are.
        logicals: where they are placed; is told how many streams there are.
        scaling: how many workers there are; is told when it is one.
        dirty: queues with something to send.
        out: where instructions go.
    """

    def __init__(
        self,
        splitting: Splitting | None,
        count: int,
        logicals: LogicalWorkers,
        scaling: Scaling,
        dirty: set[int],
        out: list[Instruction],
    ) -> None:
        self._splitting = splitting
        self._count = count
        self._logicals = logicals
        self._scaling = scaling
        self._dirty = dirty
        self._out = out
        if splitting is not None:
            self._begin_with(splitting.streams, splitting)

    @property
    def has_one_stream(self) -> bool:
        """Whether the dataset turned out not to split itself."""
        return self._logicals.streams == ONE

    def sizes(self, sizes: Sizes) -> Sizes:
        """Those that are wanted where these are asked for."""
        return one_worker(sizes) if self.has_one_stream else sizes

    def begin_epoch(self, schedule: Schedule) -> None:
        """A new epoch has this schedule."""
        if self.has_one_stream:
            self._end_others(schedule)

    def go_on(self, point: ResumePoint, now: float) -> None:
        """The epoch goes on where another run stood, in as many streams."""
        splitting = self._splitting
        if splitting is None:
            return
        if point.streams == ALL and len(point.logicals) == self._count:
            self._let_all_join(splitting, now)
        else:
            self._begin_with(ONE if point.streams == ALL else point.streams, splitting)

    def known(self, schedule: Schedule, event: SplittingKnown, now: float) -> None:
        """The first stream has shown it; a second time nothing happens."""
        splitting = self._splitting
        if splitting is None or self._logicals.streams != UNKNOWN:
            return
        if event.is_split:
            self._let_all_join(splitting, now)
        else:
            self._out.append(Say(splitting.text, warning=False))
            self._end_others(schedule)
            self._begin_with(ONE, splitting)
        splitting.is_split = event.is_split

    def settle(self, schedule: Schedule, now: float) -> None:
        """Where the first stream has ended without having shown it, as its worker died, there are no others."""
        if self._logicals.streams == UNKNOWN and not schedule.is_active(0):
            self.known(schedule, SplittingKnown(is_split=False), now)

    def _begin_with(self, streams: int, splitting: Splitting) -> None:
        """There are so many streams from now on, for all that is known."""
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
        self._dirty.update(range(self._count))
        self._begin_with(ALL, splitting)  # last: an exception of a signal handler may have all of it done again

    def _end_others(self, schedule: Schedule) -> None:
        for queue in range(1, self._count):
            schedule.end_queue(queue)
