"""What an engine shows of itself: to the user (`stats`), to the tuner (`look`), to whoever exports metrics (`sums`).

Any thread may ask; nothing here waits for the consumer or takes its lock, so a value may be from the middle of a
change, right to within the moment that passes meanwhile.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from dpex.core.prefetch import Pace, Sizes
from dpex.core.schedule import Schedule
from dpex.engine.dispatch import Dispatch
from dpex.engine.failures import Casualties
from dpex.engine.unmeasured import Passing, UnderWay, with_stretch
from dpex.measure.consumer_time import LaneSums, Look, Sums, Tally, lane_sums
from dpex.measure.samples import LaneSample
from dpex.measure.sampling import Slowest, SlowestSamples
from dpex.pools.base import Lane, LaneTimes
from dpex.stats import LaneStats, LoaderStats
from dpex.system.clock import monotonic
from dpex.system.gpu.stall import GpuStall


class EngineView:
    """All of it is the engine's own, and read only. ``here``: batches made in this process. ``errors``: by kind."""

    def __init__(
        self,
        *,
        tally: Tally,
        here: LaneTimes,
        errors: Counter[str],
        pace: Pace,
        lanes: Mapping[str, Lane],
        dispatch: Dispatch,
        casualties: Casualties,
        slowest: Slowest,
        slow_samples: SlowestSamples,
        gpu: GpuStall[Any] | None,
        passing: Passing,
    ) -> None:
        self._passing = passing
        self._tally = tally
        self._here = here
        self._errors = errors
        self._pace = pace
        self._lanes = lanes
        self._dispatch = dispatch
        self._casualties = casualties
        self._slowest = slowest
        self._slow_samples = slow_samples
        self._gpu = gpu

    def stats(self, schedule: Schedule, epoch: int) -> LoaderStats:
        """A snapshot; see `LoaderStats`."""
        return self._passing.read(lambda under_way: self._stats(schedule, epoch, under_way))

    def _stats(self, schedule: Schedule, epoch: int, under_way: UnderWay | None) -> LoaderStats:
        found = self._measured_stats(schedule, epoch)
        if under_way is None:
            return found
        here, parts = found.lanes["inline"], under_way.parts
        here = replace(
            here,
            tickets=here.tickets + under_way.batches,
            fetch_s=here.fetch_s + parts.load_s,
            collate_s=here.collate_s + parts.collate_s,
            cpu_s=here.cpu_s + parts.load_cpu_s + parts.collate_cpu_s,
        )
        return replace(
            found,
            batches=found.batches + under_way.batches,
            wait_s=found.wait_s + under_way.inside_s,
            own_s=found.own_s + under_way.inside_s,
            work_s=found.work_s + max(0.0, under_way.left_at - self._tally.returned_at - under_way.inside_s),
            lanes={**found.lanes, "inline": here},
        )

    def _measured_stats(self, schedule: Schedule, epoch: int) -> LoaderStats:
        tally = self._tally
        return LoaderStats(
            epoch=max(0, epoch),
            batches=tally.batches,
            prefetch=schedule.window,
            in_flight=schedule.in_flight,
            ready=schedule.ready,
            batch_bytes=self._pace.nbytes,
            ready_bytes=schedule.ready * self._pace.nbytes,
            wait_s=tally.inside_s,
            own_s=max(0.0, tally.inside_s - tally.blocked_s - tally.first_blocked_s),
            head_s=tally.head_s,
            work_s=tally.work_s,
            first_batch_s=tally.first_batch_s,
            gpu_stall_s=self._gpu.stall_s if self._gpu is not None else None,
            deaths=self._casualties.deaths.total(),
            remade=self._casualties.remade,
            lanes={**self._here_stats(), **{name: self._lane_stats(lane) for name, lane in self._lanes.items()}},
        )

    def _here_stats(self) -> dict[str, LaneStats]:
        """The batches that the training process made, if it made any."""
        return {"inline": LaneStats(**_stage_times(self._here))} if self._here.tickets else {}

    def _lane_stats(self, lane: Lane) -> LaneStats:
        counts = lane.counts
        return LaneStats(
            wanted=counts.wanted,
            requested=counts.requested,
            running=counts.running,
            in_flight=self._dispatch.load.get(lane.name, 0),
            **_stage_times(lane.times),
        )

    def look(
        self, schedule: Schedule, epoch: int, sizes: Sizes, *, unwilling: bool, refused: str | None, thread: int
    ) -> Look:
        """See `Look`."""
        now, lanes = monotonic(), dict(self._lanes)
        return Look(
            at=now,
            epoch=max(0, epoch),
            times=self._tally.times(now),
            sizes=sizes,
            unwilling=unwilling,
            refused=refused,
            away_s=self._tally.away_s(now),
            ready=schedule.ready,
            in_flight=schedule.in_flight,
            batch_bytes=self._pace.nbytes,
            gpu_stall_s=self._gpu.stall_s if self._gpu is not None else None,
            thread=thread,
            made_here=_lane_sample(self._here),
            local=_lane_sample(lanes["local"].times, lanes["local"]) if "local" in lanes else LaneSample(),
            remote=_lane_sample(lanes["remote"].times, lanes["remote"]) if "remote" in lanes else LaneSample(),
            pids=tuple(h.pid for h in getattr(lanes.get("local"), "handles", ()) if h.pid and h.exitcode is None),
            most_local=_most(lanes.get("local")),
        )

    def sums(self, schedule: Schedule) -> Sums:
        """See `Sums`."""
        return self._passing.read(lambda under_way: self._sums(schedule, under_way))

    def _sums(self, schedule: Schedule, under_way: UnderWay | None) -> Sums:
        now = monotonic()
        return with_stretch(self._measured_sums(schedule, now), under_way, now)

    def _measured_sums(self, schedule: Schedule, now: float) -> Sums:
        tally, lanes = self._tally, dict(self._lanes)
        local, remote = (lanes[name].times if name in lanes else LaneTimes() for name in ("local", "remote"))
        moved = {"shm": local.nbytes, "network": remote.streamed_bytes, "h2d": tally.pinned_bytes}
        return tally.sums(
            now,
            errors=dict(self._errors),
            remade=self._casualties.remade,
            moved_bytes={**moved, "object_store": remote.nbytes - remote.streamed_bytes},
            lanes={"inline": lane_sums(self._here), **{name: self._lane_sums(lane) for name, lane in lanes.items()}},
            ready=schedule.ready,
            window=schedule.window,
            gpu_stall_s=self._gpu.total_s if self._gpu is not None else None,
            is_capped=self._pace.is_capped,
            slowest=self._slowest.found(),
            slow_samples=self._slow_samples.found(),
        )

    def _lane_sums(self, lane: Lane) -> LaneSums:
        return replace(
            lane_sums(lane.times),
            deaths=self._casualties.deaths[lane.name],
            wanted=lane.counts.wanted,
            requested=lane.counts.requested,
            running=lane.counts.running,
            in_flight=self._dispatch.load.get(lane.name, 0),
        )


def _most(lane: Lane | None) -> tuple[int, str] | None:
    return None if lane is None or lane.counts.most is None else (lane.counts.most, lane.counts.why_most)


def _stage_times(times: LaneTimes) -> dict[str, Any]:
    names = ("tickets", "fetch_s", "collate_s", "encode_s", "cpu_s")
    return {name: getattr(times, name) for name in names}


def _lane_sample(times: LaneTimes, lane: Lane | None = None) -> LaneSample:
    return LaneSample(
        requested=lane.counts.requested if lane is not None else 0,
        running=lane.counts.running if lane is not None else 0,
        tickets=times.tickets,
        read_s=times.fetch_s,
        collate_s=times.collate_s,
        encode_s=times.encode_s,
        cpu_s=times.cpu_s,
        services_s=tuple(times.services_s),
    )
