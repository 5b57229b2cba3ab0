"""Frames: the activity of a loader in one second, for the page and ``dpex top``. PURE.

A frame is the difference of two readings. It holds seconds and counts, not shares, so that frames add up to any stretch
of time.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from dpex.measure.sums import NodeStats, PoolStats, Sums
from dpex.measure.wait_causes import CAUSES, STAGE_CAUSES, by_stage
from dpex.schedule.names import REMOTE, WORKER_POOLS
from dpex.telemetry.catalog import STATES

LEVELS = ("wanted", "requested", "running", "in_flight")
STAGES = STAGE_CAUSES[:4]
"""Stages that workers spend time in; the way from them to the trainer is not among them."""
_NO_POOL = PoolStats()

Frame = Mapping[str, Any]
"""The activity since the frame before, by column.

* ``number``: Number of the frame in this process.
* ``at``: Unix time of its end. ``seconds``: Wall time since the frame before.
* ``wait_s``, ``transfer_s``, ``work_s``: Time of the training loop. ``wait_*_s``: Its wait by cause.
* ``gpu_stall_s``: Stall of the GPU's stream; None if it is not measured.
* ``network_bytes``: Bytes from machines of the cluster. ``network_sending_s``: Seconds in which a machine was sending,
  added up over ``links`` machines.
* ``made``: Batches made by workers. ``make_*_s``: Seconds that these took, by stage.
* ``cache_hits``, ``cache_misses``: Samples that a cache of samples had, and had not.
* ``ready``, ``prefetch``: The queue at the end of the frame.
* ``local_*``, ``remote_*``: Workers and their batches at the end of the frame, see `LEVELS`.
"""


class NodeLink(NamedTuple):
    """The network from a node to this machine.

    Attributes:
        bytes_per_s: Bytes per second that arrive now.
        bandwidth: Bytes per second while something was under way, since the node's first batch.
        round_trip_s: Seconds for a packet there and back.
        loss: The part of the bytes that was sent again, 0 to 1.
    """

    bytes_per_s: float
    bandwidth: float
    round_trip_s: float
    loss: float


def node_links(before: Mapping[str, NodeStats], after: Mapping[str, NodeStats], seconds: float) -> dict[str, NodeLink]:
    """Return the network from each node that measures it, between two readings ``seconds`` apart."""
    return {
        place: NodeLink(
            (now.sent_bytes - before[place].sent_bytes if place in before else now.sent_bytes) / seconds,
            now.bandwidth or 0.0,
            now.round_trip_s,
            now.loss,
        )
        for place, now in after.items()
        if now.links and seconds > 0
    }


def frame(number: int, at: float, seconds: float, before: Sums, after: Sums) -> Frame:
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


COLUMNS = tuple(frame(0, 0.0, 0.0, Sums(), Sums()))


def machines(seconds: float, before: Sums, after: Sums) -> list[Mapping[str, Any]]:
    """Return the network traffic of each machine of the cluster between two readings."""
    links = node_links(before.pools.get(REMOTE, _NO_POOL).nodes, after.pools.get(REMOTE, _NO_POOL).nodes, seconds)
    return [
        {"name": place, **{name: round(value, 6) for name, value in link._asdict().items()}}
        for place, link in links.items()
    ]


def summary(frames: Sequence[Frame]) -> Mapping[str, Any]:
    """Return shares and rates over these frames; None where the denominator is 0."""
    seconds, made = _sum(frames, "seconds"), _sum(frames, "made")
    spent_s = {state: _sum(frames, f"{state}_s") for state in STATES}
    total_s = sum(spent_s.values())
    stalls = [stall for one in frames if (stall := one["gpu_stall_s"]) is not None]
    linked_s = float(sum(one["links"] * one["seconds"] for one in frames))
    return {
        "seconds": round(seconds, 3),
        **{f"{state}_ratio": _ratio(spent_s[state], total_s) for state in STATES},
        "gpu_stall_ratio": _ratio(min(sum(stalls), total_s), total_s) if stalls else None,
        "batches_per_second": _ratio(_sum(frames, "batches"), seconds),
        "samples_per_second": _ratio(_sum(frames, "samples"), seconds),
        "network_bytes_per_second": _ratio(_sum(frames, "network_bytes"), seconds, digits=0),
        "network_ratio": _ratio(_sum(frames, "network_sending_s"), linked_s),
        "cache_hit_ratio": _ratio(hits := _sum(frames, "cache_hits"), hits + _sum(frames, "cache_misses")),
        "stages_s": {stage: _ratio(_sum(frames, f"make_{stage}_s"), made, digits=6) for stage in STAGES},
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
