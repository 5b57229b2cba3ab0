"""One second of a loader as the page and ``dpex top`` show it: the difference of two readings, and sums of those. Pure.

A frame holds seconds and counts, not shares, so that frames add up to any stretch of time.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from dpex.core.names import REMOTE, WORKER_POOLS
from dpex.measure.node_links import node_links
from dpex.measure.sums import PoolSums, Sums
from dpex.measure.wait_causes import CAUSES, STAGE_CAUSES, by_stage
from dpex.telemetry.labels import STATES

LEVELS = ("wanted", "requested", "running", "in_flight")
STAGES = STAGE_CAUSES[:4]
"""What workers do; the way from them is nobody's work."""
_NO_POOL = PoolSums()


Frame = Mapping[str, Any]
"""What happened since the frame before, and the queue and the workers at its end, by column.

number: counts the process's frames. at: Unix time of its end. seconds: wall time since the frame before. wait_s,
transfer_s, work_s: the training loop's time; wait_*_s: the first of them by cause. gpu_stall_s: None where nobody
measures it. network_bytes, network_sending_s: what came from machines of the cluster, and for how long something was on
its way, added up over ``links`` machines. made: batches made by workers; make_*_s: seconds they took by stage, over all
workers. ready, prefetch: the queue at the end. local_*, remote_*: workers and their batches, see `PoolLevels`.
"""


def frame(number: int, at: float, seconds: float, before: Sums, after: Sums) -> Frame:
    """What lies between two readings."""
    new = after.since(before)
    made = [by_stage(pool) for pool in new.pools.values()]
    return {
        "number": number,
        "at": round(at, 3),
        "seconds": round(seconds, 3),
        "batches": new.batches,
        "samples": new.samples,
        **{f"{state}_s": round(getattr(new, f"{state}_s"), 6) for state in STATES},
        "gpu_stall_s": None if new.gpu_stall_s is None else round(new.gpu_stall_s, 6),
        **{f"wait_{cause}_s": round(new.causes.get(cause, 0.0), 6) for cause in CAUSES},
        "network_bytes": sum(pool.sent_bytes for pool in new.pools.values()),
        "network_sending_s": round(sum(pool.sending_s for pool in new.pools.values()), 3),
        "links": sum(pool.links for pool in new.pools.values()),
        "made": sum(pool.tickets for pool in new.pools.values()),
        **{f"make_{stage}_s": round(sum(parts[index] for parts in made), 6) for index, stage in enumerate(STAGES)},
        "ready": new.ready,
        "prefetch": new.prefetch,
        **{f"{name}_{one}": getattr(new.pools.get(name, _NO_POOL), one) for name in WORKER_POOLS for one in LEVELS},
    }


def machines(seconds: float, before: Sums, after: Sums) -> list[Mapping[str, Any]]:
    """The way from each machine of the cluster that measures it: what came since, and what is known of the way."""
    earlier = before.pools.get(REMOTE, _NO_POOL).nodes
    links = node_links(earlier, after.pools.get(REMOTE, _NO_POOL).nodes, seconds)
    return [
        {"name": place, **{name: round(value, 6) for name, value in link._asdict().items()}}
        for place, link in links.items()
    ]


COLUMNS = tuple(frame(0, 0.0, 0.0, Sums(), Sums()))


def summary(frames: Sequence[Frame]) -> Mapping[str, Any]:
    """Shares and rates over these frames; None where nothing was spent or made."""
    seconds = _sum(frames, "seconds")
    spent_s = {state: _sum(frames, f"{state}_s") for state in STATES}
    total_s = sum(spent_s.values())
    stalls = [stall for one in frames if (stall := one["gpu_stall_s"]) is not None]
    count, linked_s = _sum(frames, "made"), float(sum(one["links"] * one["seconds"] for one in frames))
    return {
        "seconds": round(seconds, 3),
        "wait_ratio": _ratio(spent_s["wait"], total_s),
        "transfer_ratio": _ratio(spent_s["transfer"], total_s),
        "work_ratio": _ratio(spent_s["work"], total_s),
        "gpu_stall_ratio": _ratio(min(sum(stalls), total_s), total_s) if stalls else None,
        "batches_per_second": _ratio(_sum(frames, "batches"), seconds),
        "samples_per_second": _ratio(_sum(frames, "samples"), seconds),
        "network_bytes_per_second": _ratio(_sum(frames, "network_bytes"), seconds, digits=0),
        "network_ratio": _ratio(_sum(frames, "network_sending_s"), linked_s),
        "stages_s": {stage: _ratio(_sum(frames, f"make_{stage}_s"), count, digits=6) for stage in STAGES},
    }


def _sum(frames: Iterable[Frame], column: str) -> float:
    return float(sum(one[column] for one in frames))


def _ratio(part: float, whole: float, *, digits: int = 4) -> float | None:
    return round(part / whole, digits) if whole else None


def latest(frames: Sequence[Frame], seconds: float) -> Sequence[Frame]:
    """The shortest end of these that is that long; all of them if there is none."""
    length = 0.0
    for index in range(len(frames) - 1, -1, -1):
        length += frames[index]["seconds"]
        if length >= seconds - 0.5:
            return frames[index:]
    return frames
