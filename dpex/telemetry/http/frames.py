"""Frames: the activity of a loader in one second, for the page. PURE.

A frame is the difference of two readings. It holds seconds and counts, not shares, so that frames add up to any stretch
of time.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from dpex.measure.consumer_time import CAUSES, STAGE_CAUSES, by_stage
from dpex.measure.pool_reading import PoolReading
from dpex.measure.reading import Reading, wait_ratio
from dpex.measure.settings import REMOTE, WORKER_POOLS
from dpex.telemetry.catalog import STATES

LEVELS = ("wanted", "requested", "running", "in_flight")
STAGES = STAGE_CAUSES[:4]
"""Stages that workers spend time in; the way from them to the trainer is not among them."""
_NO_POOL = PoolReading()

Frame = Mapping[str, Any]
"""The activity since the previous frame, by column.

* ``number``: Number of the frame in this process.
* ``at``: Unix time of its end. ``seconds``: Wall time since the previous frame.
* ``wait_s``, ``transfer_s``, ``work_s``: Time of the training loop. ``wait_*_s``: Its wait by cause.
* ``gpu_stall_s``: Stall of the GPU's stream; None if it is not measured.
* ``network_bytes``: Bytes from machines of the cluster. ``network_sending_s``: Seconds of sending, summed over
  ``links`` machines.
* ``made``: Batches made by workers. ``make_*_s``: Seconds of making, by stage.
* ``cache_hits``, ``cache_misses``: Samples that a cache had, and did not have.
* ``ready``, ``prefetch``: The queue at the end of the frame.
* ``local_*``, ``remote_*``: Workers and their batches at the end of the frame, see `LEVELS`.
"""


def frame(number: int, at: float, seconds: float, before: Reading, after: Reading) -> Frame:
    """Return the frame between two readings."""
    new = after.since(before)
    pools = new.pools.values()
    made = [by_stage(pool) for pool in pools]
    return {
        "number": number,
        "at": round(at, 3),
        "seconds": round(seconds, 3),
        "batches": new.batches,
        "samples": new.samples,
        **{f"{state}_s": round(getattr(new, f"{state}_s"), 6) for state in STATES},
        "gpu_stall_s": None if new.gpu_stall_s is None else round(new.gpu_stall_s, 6),
        **{f"wait_{cause}_s": round(new.causes.get(cause, 0.0), 6) for cause in CAUSES},
        "network_bytes": sum(pool.sent_bytes for pool in pools),
        "network_sending_s": round(sum(pool.sending_s for pool in pools), 3),
        "links": sum(pool.links for pool in pools),
        "made": sum(pool.tickets for pool in pools),
        **{f"make_{stage}_s": round(sum(parts[index] for parts in made), 6) for index, stage in enumerate(STAGES)},
        "cache_hits": sum(pool.cache_hits for pool in pools),
        "cache_misses": sum(pool.cache_misses for pool in pools),
        "ready": new.ready,
        "prefetch": new.prefetch,
        **{f"{name}_{one}": getattr(new.pools.get(name, _NO_POOL), one) for name in WORKER_POOLS for one in LEVELS},
    }


COLUMNS = tuple(frame(0, 0.0, 0.0, Reading(), Reading()))


def machines(seconds: float, before: Reading, after: Reading) -> list[Mapping[str, Any]]:
    """Return the traffic from each machine that measures it, between two readings ``seconds`` apart.

    * ``bytes_per_s``: Bytes received per second.
    * ``bandwidth``: Bytes per second of sending, since the machine's first batch.
    * ``round_trip_s``: Round-trip time of a packet.
    * ``loss``: Share of the bytes that were sent again, 0 to 1.
    """
    then, now = (reading.pools.get(REMOTE, _NO_POOL).nodes for reading in (before, after))
    return [
        {
            "name": place,
            "bytes_per_s": round(one.since(then.get(place, _NO_POOL)).sent_bytes / seconds, 6),
            "bandwidth": round(one.bandwidth or 0.0, 6),
            "round_trip_s": round(one.round_trip_s, 6),
            "loss": round(one.loss, 6),
        }
        for place, one in now.items()
        if one.links and seconds > 0
    ]


def summary(frames: Sequence[Frame]) -> Mapping[str, Any]:
    """Return shares and rates over these frames; None where the denominator is 0."""
    seconds = _sum(frames, "seconds")
    work_s, total_s = _sum(frames, "work_s"), sum(_sum(frames, f"{state}_s") for state in STATES)
    stalls = [stall for one in frames if (stall := one["gpu_stall_s"]) is not None]
    linked_s = float(sum(one["links"] * one["seconds"] for one in frames))
    return {
        "seconds": round(seconds, 3),
        "wait_ratio": round(wait_ratio(total_s - work_s, work_s), 4) if total_s else None,
        "gpu_stall_ratio": _ratio(min(sum(stalls), total_s), total_s) if stalls else None,
        "batches_per_second": _ratio(_sum(frames, "batches"), seconds),
        "samples_per_second": _ratio(_sum(frames, "samples"), seconds),
        "network_bytes_per_second": _ratio(_sum(frames, "network_bytes"), seconds, digits=0),
        "network_ratio": _ratio(_sum(frames, "network_sending_s"), linked_s),
        "cache_hit_ratio": _ratio(hits := _sum(frames, "cache_hits"), hits + _sum(frames, "cache_misses")),
    }


def _sum(frames: Iterable[Frame], column: str) -> float:
    return float(sum(one[column] for one in frames))


def _ratio(part: float, whole: float, *, digits: int = 4) -> float | None:
    return round(part / whole, digits) if whole else None


def latest(frames: Sequence[Frame], seconds: float) -> Sequence[Frame]:
    """Return the last frames that together cover ``seconds``; all frames if they are shorter."""
    length = 0.0
    for index in range(len(frames) - 1, -1, -1):
        length += frames[index]["seconds"]
        if length >= seconds - 0.5:
            return frames[index:]
    return frames
