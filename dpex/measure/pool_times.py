"""Add up the times of the batches that a worker pool, or the training process, has made.

The thread that takes batches in counts them. Any thread may read: it sees all batches up to some moment.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Sequence
from typing import Any

from dpex.measure.batch_times import NO_TIMES, SUMMED, BatchTimes, StageSums, StepRow, StepSums
from dpex.measure.consumer_time import STEP_BUCKETS
from dpex.measure.sums import LinkSums, NodeStats, PoolStats

RECENT = 64
"""Batches whose wall seconds a window of the tuner has one by one, and records that are added up at once, which is
cheaper."""
KEPT = 256
"""Batches whose wall seconds are kept one by one: the latest. Their median is known to within three points of rank."""
_ADDED = (*SUMMED, "nbytes")
_PLACES = tuple(map(BatchTimes._fields.index, _ADDED))
_NOTHING = tuple(NO_TIMES[at] for at in _PLACES)
_NO_CALLS = StepSums()


class PoolTimes:
    """Sums over the batches of a pool.

    Attributes:
        tickets: Batches that were made.
        shared: Of these, batches that were made for another training.
        services_s: Wall seconds of each of the latest `KEPT` batches.
        services: Batches by wall seconds, in the buckets of `STEP_BUCKETS`.
        steps: Transforms and other steps, of the batches in which they were timed.
        nodes: Sums by machine of the cluster.
    """

    __slots__ = (*("_latest", "nodes", "services", "services_s", "shared", "steps", "tickets"),)

    def __init__(self) -> None:
        self.tickets = self.shared = 0
        self.services_s: deque[float] = deque(maxlen=KEPT)
        self.services = [0] * (len(STEP_BUCKETS) + 1)
        self.steps: dict[str, StepSums] = {}
        self.nodes: dict[str, NodeStats] = {}
        self._latest: tuple[tuple[Any, ...], list[BatchTimes]] = _NOTHING, []
        """Sums by `_ADDED`, and the records that are not in them yet; replaced together."""

    def count(self, times: BatchTimes) -> None:
        """Add one batch."""
        self.tickets += 1
        latest = self._latest[1]
        latest.append(times)
        if len(latest) >= RECENT:
            self._latest = self._added(), []
        service_s = times.busy_s
        self.services_s.append(service_s)
        self.services[bisect_left(STEP_BUCKETS, service_s)] += 1
        if times.steps:
            self._add_steps(times.steps)

    def _add_steps(self, steps: Sequence[StepRow]) -> None:
        for name, calls, wall_s, cpu_s in steps:
            known = self.steps.get(name, _NO_CALLS)
            self.steps[name] = known.plus(StepSums(calls=calls, wall_s=wall_s, cpu_s=cpu_s))

    def _added(self) -> tuple[Any, ...]:
        """Sums over all batches, by `_ADDED`."""
        sums, latest = self._latest
        columns = list(zip(*latest, strict=False))
        return tuple(total + sum(columns[at]) for total, at in zip(sums, _PLACES, strict=True)) if columns else sums

    @property
    def nbytes(self) -> int:
        """Bytes of all batches."""
        return int(self._added()[-1])

    def stages(self) -> StageSums:
        """Return what making these batches took."""
        found: dict[str, Any] = dict(zip(SUMMED, self._added(), strict=False))
        found["encode_cpu_s"] = max(0.0, found["encode_cpu_s"])
        return StageSums(tickets=self.tickets, **found)

    def link(self) -> LinkSums:
        """Return the sums over the links to all machines."""
        found = LinkSums()
        for node in list(self.nodes.values()):
            found = found.plus(node)
        return found

    def sums(self, **others: Any) -> PoolStats:
        """Return all that is counted here, with the fields that others count of the pool."""
        return self.stages().narrowed(
            PoolStats,
            **vars(self.link()),
            shared=self.shared,
            services=tuple(self.services),
            services_s=tuple(self.services_s),
            steps=dict(self.steps),
            nodes=dict(self.nodes),
            **others,
        )
