"""Counts what torch's own in-process iterator does, for a loader without workers whose metrics are exported.

Used by the consumer's thread; `InlineMeter.sums` may be called from any.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from time import thread_time
from typing import Any

from dpex.clock import monotonic
from dpex.gpu.stall import GpuStall
from dpex.lanes.base import LaneTimes
from dpex.meter import Sums, Tally, lane_sums


class InlineMeter:
    """Told of each call of ``next()`` what came when: `enter`, `drawn`, the collate function, `leave`."""

    def __init__(self, *, auto_collation: bool, gpu: GpuStall[Any] | None = None) -> None:
        self._gpu = gpu
        self._mark: Any = None
        self._entered = 0.0
        self._auto_collation = auto_collation
        self._tally = Tally(detailed=True)
        self._times = LaneTimes()
        self._errors: Counter[str] = Counter(batch=0)
        self._opened = self._drawn_at = self._cpu_drawn_at = 0.0

    def enter(self) -> None:
        """The consumer asks for a batch."""
        self._opened, self._entered = 0.0, monotonic()
        self._tally.enter(self._entered)
        if self._gpu is not None:
            self._mark = self._gpu.enter()

    def drawn(self) -> None:
        """The sampler said which one."""
        self._drawn_at, self._cpu_drawn_at = monotonic(), thread_time()

    def timed(self, collate_fn: Callable[[Any], Any]) -> Callable[[Any], Any]:
        """The collate function, which ends the making of a batch."""

        tally, count = self._tally, self._times.count

        def collate(data: Any) -> Any:
            began, cpu_began = monotonic(), thread_time()
            batch = collate_fn(data)
            self._opened, cpu_ended = monotonic(), thread_time()
            samples = len(data) if self._auto_collation and isinstance(data, list) else 1
            load_s, collate_s, load_cpu_s = began - self._drawn_at, self._opened - began, cpu_began - self._cpu_drawn_at
            count((load_s, collate_s, load_cpu_s, cpu_ended - cpu_began, samples), cpu_ended - self._cpu_drawn_at, 0.0)
            tally.made_here(load_s, load_cpu_s, collate_s)
            tally.batches += 1
            tally.samples += samples
            return batch

        return collate

    def leave(self, error: BaseException | None = None) -> None:
        """It has got one, or that error."""
        over = False
        if error is not None:
            over = isinstance(error, StopIteration)
            self._errors["batch"] += isinstance(error, Exception) and not over
        now = monotonic()
        if self._gpu is not None:
            self._gpu.leave(self._mark, now - self._entered, starting=self._tally.starting, over=over)
        self._tally.leave(self._opened, now, over=over)

    def sums(self) -> Sums:
        """The counts so far."""
        return self._tally.sums(
            monotonic(),
            errors=dict(self._errors),
            lanes={"inline": lane_sums(self._times)},
            moved_bytes={"h2d": 0},
            gpu_stall_s=self._gpu.total_s if self._gpu is not None else None,
        )
