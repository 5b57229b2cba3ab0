"""Record the calls of some of the batches, without changing state, random numbers or batches.

A `TicketTimer` belongs to one thread. A batch that is not recorded costs one comparison with `TicketTimer.due`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from dpex.measure.batch_times import COLLATE, LOAD, BatchTimes
from dpex.measure.sampling import APART_S, MOST_APART_S, REST, SamplingSchedule
from dpex.profile.call_rows import rows_of
from dpex.profile.call_tree import CallNode, CallRecorder, Draws
from dpex.system.clock import monotonic

SWITCH = "DPEX_TIME_CALLS"  # environment variable; "0": calls are never timed
COST_RATIO = 0.08  # recording ends when it has cost this share of the loading time, the first sample aside
_COMPARED = frozenset((0, *(4**power for power in range(16))))  # numbers of timings that compare generators (ms each)


def is_switched_on(environ: Any) -> bool:
    """Return True if calls may be timed."""
    return bool(environ.get(SWITCH, "") != "0")


class TicketTimer:
    """Records the calls of chosen batches; see the module.

    For a batch that begins at ``due`` or later, call `start_batch`, `timed_collate` and, in any case, `stop_batch`.

    ``worker``: the number of the worker. Each worker takes its first timing later than the worker before it.
    """

    def __init__(self, *, is_on: bool = True, draws_of: Callable[[Any], Draws] | None = None, worker: int = 0) -> None:
        self._draws_of, self._occasions = draws_of, SamplingSchedule(min(MOST_APART_S, APART_S * worker))
        self._recorder: CallRecorder | None = None
        self._roots = CallNode(LOAD), CallNode(COLLATE)
        self._began_s = self._load_cost_s = self._collate_cost_s = 0.0
        self._is_whole = False
        self.due: float = 0.0 if is_on else math.inf

    def start_batch(self, now: float, dataset: Any, load_s: float) -> bool:
        """Begin to time a batch if a timing is due; return True if it is timed.

        ``load_s``: Seconds that loading the previous batch took.
        """
        if not self._occasions.is_chosen(now):
            self.due = self._occasions.due
            return False
        draws_of = self._draws_of if self._occasions.timings in _COMPARED else None
        self._recorder = recorder = CallRecorder(None if draws_of is None else draws_of(dataset))
        self._roots = CallNode(LOAD), CallNode(COLLATE)
        self._load_cost_s = self._collate_cost_s = 0.0
        self.due, self._began_s = math.inf, monotonic() - now
        is_started = recorder.start(self._roots[0], COST_RATIO * load_s)
        if not is_started:
            self.stop_batch()
        return is_started

    def timed_collate(self, collate_fn: Callable[[Any], Any], data: Any) -> Any:
        """Return ``collate_fn(data)``, with its calls in a tree of its own."""
        recorder, began = self._recorder, monotonic()
        assert recorder is not None
        recorder.stop()
        self._load_cost_s = recorder.cost_s
        recorder.start(self._roots[1])
        try:
            return collate_fn(data)
        finally:
            recorder.stop()
            self._collate_cost_s = monotonic() - began - sum(node.wall_s for node in self._roots[1].below())

    def stop_batch(self) -> None:
        """End the timing of a batch that was made or has failed; idempotent."""
        recorder, self._recorder = self._recorder, None
        if recorder is not None:
            recorder.stop()
            self._is_whole = recorder.is_whole
            self._occasions.end_timing(monotonic(), self._began_s + recorder.cost_s)
            self.due = self._occasions.due

    def with_calls(self, times: BatchTimes) -> BatchTimes:
        """Return the times of the batch that was timed last, without the cost of recording, and with its calls.

        ``encode_cpu_s`` is the negated CPU time of recording, which `encoded_times` subtracts from that of the batch.
        """
        began, load_cost_s, collate_cost_s = monotonic(), self._load_cost_s, self._collate_cost_s
        times = times._replace(
            load_s=max(0.0, times.load_s - load_cost_s),
            load_cpu_s=max(0.0, times.load_cpu_s - load_cost_s),
            collate_s=max(0.0, times.collate_s - collate_cost_s),
            collate_cpu_s=max(0.0, times.collate_cpu_s - collate_cost_s),
        )
        load_ratio = times.load_s / max(1e-12, times.load_s + times.collate_s)
        load, collate = self._roots
        load.calls, collate.calls = times.samples, 1
        rows = (*rows_of(load, load_ratio), *rows_of(collate, 1.0 - load_ratio)) if self._is_whole else ()
        own_s = monotonic() - began
        self.due = self._occasions.due = self.due + REST * own_s
        return times._replace(calls=rows, encode_cpu_s=-(self._began_s + load_cost_s + collate_cost_s + own_s))
