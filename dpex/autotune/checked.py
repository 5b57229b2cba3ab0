"""Turn whatever clocks, counters and the system reported into a sample that can be calculated with. PURE.

`dpex.autotune.types` says what a legal sample is: nearly anything. Here it is decided once what of it is a measurement,
so that nothing behind this module meets a number that is negative, not finite, or beyond what any machine has:

- A window whose own times are no times tells nothing, and is left out whole.
- A lane whose times are no times has no tickets in that window; how many workers it has is still known.
- A missing or impossible number of the machine is unknown, and the value that stands for "unknown" replaces it.
- Time never goes back: where the clock does, the window's own length is taken to have passed.
"""

from __future__ import annotations

import math
from dataclasses import replace

from dpex.autotune.types import Sample, Settings
from dpex.measure.samples import HostSample, LaneSample

LONGEST_S = 1e6
"""Eleven days: a sum of times in one window beyond it comes from a clock that jumped."""
SHORTEST_S = 1e-9
"""Clocks count nanoseconds: what is less is nothing."""
MOST_TICKETS = 10**9
MOST_WORKERS = 10**5
MOST_CPUS = 1e5
MOST_BYTES = 2**60
LEAST_CPUS = 0.01
"""The smallest share that a container is given."""
MOST_SPREAD = 100.0


class Checker:
    """Checks the samples of one run, in their order."""

    def __init__(self) -> None:
        self._cpus = 1.0
        self._at = self._offset = 0.0

    def check(self, sample: Sample) -> Sample | None:
        """What can be calculated with; None if the window measured nothing."""
        times = (sample.seconds, sample.wait_s, sample.own_s, sample.work_s)
        if not all(_is_time(value) for value in times) or sample.seconds < SHORTEST_S:
            return None
        wait_s = _time(sample.wait_s)
        return replace(
            sample,
            at=self._passed(sample),
            settings=_settings(sample.settings),
            batches=_count(sample.batches, MOST_TICKETS),
            wait_s=wait_s,
            own_s=_time(sample.own_s),
            work_s=_time(sample.work_s),
            head_s=min(wait_s, _time(sample.head_s)),
            step_spread=_known(sample.step_spread, MOST_SPREAD),
            ready=_count(sample.ready, MOST_TICKETS),
            in_flight=_count(sample.in_flight, MOST_TICKETS),
            batch_bytes=_bytes(sample.batch_bytes),
            made_here=_lane(sample.made_here),
            local=_lane(sample.local),
            remote=_lane(sample.remote),
            host=self._host(sample.host),
        )

    def _passed(self, sample: Sample) -> float:
        """When the window ended, on a clock that only goes forward."""
        at = sample.at + self._offset
        if not self._at <= at <= self._at + LONGEST_S:
            at = self._at + sample.seconds
            self._offset = at - sample.at if math.isfinite(sample.at) else self._offset
        self._at = at
        return at

    def _host(self, host: HostSample) -> HostSample:
        if math.isfinite(host.cpus) and host.cpus > 0:
            self._cpus = min(max(host.cpus, LEAST_CPUS), MOST_CPUS)
        budget = host.batch_budget
        return replace(
            host,
            cpus=self._cpus,
            others=_known(host.others, MOST_CPUS) or 0.0,
            trainer_cpu_s=_time(host.trainer_cpu_s),
            trainer_queued_s=_known(host.trainer_queued_s, LONGEST_S),
            memory_free=_free(host.memory_free),
            batch_budget=None if budget is None else _count(budget, MOST_BYTES),
            worker_bytes=_bytes(host.worker_bytes),
            runnable=_known(host.runnable, MOST_CPUS),
        )


def _is_time(value: float) -> bool:
    return 0.0 <= value <= LONGEST_S


def _time(value: float) -> float:
    """Seconds, 0 where they are none."""
    return value if _is_time(value) and value >= SHORTEST_S else 0.0


def _known(value: float | None, most: float) -> float | None:
    """A number from 0 to ``most``, None where it is none."""
    if value is None or not math.isfinite(value) or value < 0:
        return None
    return min(value, most) if value >= SHORTEST_S else 0.0


def _count(value: float, most: int) -> int:
    """A whole number from 0 to ``most``."""
    if not value > 0:
        return 0
    return most if value >= most else int(value)


def _bytes(value: float) -> float:
    """A size of at least a byte, 0 where it is unknown."""
    return min(value, float(MOST_BYTES)) if math.isfinite(value) and value >= 1.0 else 0.0


def _free(value: float | None) -> int | None:
    if value is None or not math.isfinite(value):
        return None
    return int(max(-MOST_BYTES, min(value, MOST_BYTES)))


def _settings(settings: Settings) -> Settings:
    return Settings(
        local=_count(settings.local, MOST_WORKERS),
        remote=_count(settings.remote, MOST_WORKERS),
        depth=max(1, _count(settings.depth, MOST_TICKETS)),
    )


def _lane(lane: LaneSample) -> LaneSample:
    stages = (lane.read_s, lane.collate_s, lane.encode_s, lane.cpu_s)
    known = replace(
        lane,
        requested=_count(lane.requested, MOST_WORKERS),
        running=_count(lane.running, MOST_WORKERS),
        room=None if lane.room is None else _count(lane.room, MOST_WORKERS),
        unplaced=_count(lane.unplaced, MOST_WORKERS),
    )
    if not all(_is_time(value) for value in stages):
        return replace(
            known, tickets=0, read_s=0.0, collate_s=0.0, encode_s=0.0, cpu_s=0.0, queued_s=None, services_s=()
        )
    return replace(
        known,
        tickets=_count(lane.tickets, MOST_TICKETS),
        read_s=_time(lane.read_s),
        collate_s=_time(lane.collate_s),
        encode_s=_time(lane.encode_s),
        cpu_s=_time(lane.cpu_s),
        queued_s=_known(lane.queued_s, LONGEST_S),
        services_s=tuple(value for value in lane.services_s if SHORTEST_S <= value <= LONGEST_S),
    )
