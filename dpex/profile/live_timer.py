"""Time the transforms of a dataset in some of the batches.

`dpex.profile.discover` finds them and `dpex.profile.call_timer` times them without changing them. State, random numbers
and batches are those of an untimed batch.

A `TicketTimer` belongs to one thread. A batch that is not timed costs one comparison with `TicketTimer.due`.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable
from typing import Any

from torch.utils.data import IterableDataset

from dpex.measure.batch_times import BatchTimes, StepRow
from dpex.measure.sampling import SamplingSchedule
from dpex.profile.call_timer import StepSeconds, StepWatch
from dpex.profile.discover import label, watch_of

COLLATE = "collate"
MOST_ROWS = 64
"""The most steps of a batch that are reported, the costliest. The time of others counts as the dataset's own."""
SWITCH = "DPEX_TIME_TRANSFORMS"
"""Environment variable; "0": transforms are never timed."""
_COLLATE_HERE = "\0collate"


def is_switched_on(environ: Any) -> bool:
    """Return True if transforms may be timed."""
    return bool(environ.get(SWITCH, "") != "0")


class TicketTimer:
    """See the module. Around a batch that began at ``due`` or later: `begin`, `collating` and, in any case, `end`."""

    def __init__(
        self,
        *,
        is_on: bool = True,
        clock: Callable[[], float] = time.perf_counter,
        cpu: Callable[[], float] = time.thread_time,
    ) -> None:
        self._cpu = cpu
        self._occasions = SamplingSchedule()
        self._clock = clock
        self._watch: StepWatch | None = None
        self._began_s = 0.0
        self._costs_s = (0.0, 0.0)
        self._steps: dict[tuple[str, ...], StepSeconds] | None = None
        self.due = 0.0 if is_on else math.inf

    @property
    def taken(self) -> int:
        """Batches timed so far."""
        return self._occasions.taken

    def begin(self, now: float, dataset: Any) -> bool:
        """Return True if the batch that begins now is timed."""
        occasions = self._occasions
        if not occasions.comes(now):
            self.due = occasions.due
            return False
        watch = watch_of(dataset, self._cpu) if sys.getprofile() is None else None
        if watch is None or not watch.start():
            occasions.took(now, self._clock() - now)
            self.due = occasions.due
            return False
        self._watch = watch
        self.due = math.inf
        self._steps, self._costs_s = None, (0.0, 0.0)
        self._began_s = self._clock() - now
        return True

    def collating(self, collate_fn: Callable[[Any], Any], data: Any) -> Any:
        """Return ``collate_fn(data)``, timed as a step of its own."""
        watch = self._watch
        assert watch is not None
        load_cost_s = watch.cost_s
        try:
            return watch.call(_COLLATE_HERE, collate_fn, data)
        finally:
            self._costs_s = load_cost_s, watch.cost_s - load_cost_s

    def end(self) -> None:
        """End a batch that was made or has failed; idempotent."""
        watch, self._watch = self._watch, None
        if watch is None:
            return
        began = self._clock()
        watch.stop()
        self._steps = watch.steps if watch.is_whole else None
        now = self._clock()
        self._occasions.took(now, self._began_s + now - began + watch.cost_s)
        self.due = self._occasions.due

    def finished(self, dataset: Any, times: BatchTimes) -> BatchTimes:
        """Return the times of the batch that was timed last: without what timing took, and with its steps."""
        load_cost_s, collate_cost_s = self._costs_s
        times = times._replace(
            load_s=max(0.0, times.load_s - load_cost_s),
            load_cpu_s=max(0.0, times.load_cpu_s - load_cost_s),
            collate_s=max(0.0, times.collate_s - collate_cost_s),
            collate_cpu_s=max(0.0, times.collate_cpu_s - collate_cost_s),
        )
        return times._replace(steps=self.rows(dataset, times))

    def rows(self, dataset: Any, times: BatchTimes) -> tuple[StepRow, ...]:
        """Return what the steps of the batch that was timed last took; nothing if not all of its calls were seen.

        The cost of timing is an estimate, so the steps of a stage may add up to more than the stage.
        """
        if self._steps is None:
            return ()
        own = _method(dataset)
        loading: list[StepRow] = []
        collating: list[StepRow] = []
        for path, (calls, wall_s, cpu_s) in self._steps.items():
            is_collate = path[0] == _COLLATE_HERE
            names = (COLLATE, *path[1:]) if is_collate else (own, *path)
            row = (" > ".join(names), calls, max(0.0, wall_s), max(0.0, cpu_s))
            (collating if is_collate else loading).append(row)
        loading = sorted(loading, key=lambda row: -row[2])[:MOST_ROWS]
        rest_s = max(0.0, times.load_s - sum(row[2] for row in loading))
        rest_cpu_s = max(0.0, times.load_cpu_s - sum(row[3] for row in loading))
        if not collating:
            collating = [(COLLATE, 1, times.collate_s, times.collate_cpu_s)]
        return (own, times.samples, rest_s, rest_cpu_s), *loading, *collating[:MOST_ROWS]


def _method(dataset: Any) -> str:
    if isinstance(dataset, IterableDataset):
        return f"{label(dataset)}.__iter__"
    return f"{label(dataset)}.__getitem{'s' if callable(getattr(dataset, '__getitems__', None)) else ''}__"
