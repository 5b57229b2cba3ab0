"""Figures for the live page from a window, which is the difference of two readings of a loader. PURE.

A frame holds the figures of a window of one second. They are seconds and counts, not shares, so that the page can sum
frames over any period.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dpex.measure.causes import STAGE_CAUSES, TIMED, by_stage
from dpex.measure.pool_reading import PoolReading
from dpex.measure.reading import Reading
from dpex.measure.settings import REMOTE, WORKER_POOLS
from dpex.telemetry.catalog import STATES

LEVELS = ("wanted", "requested", "running", "in_flight")
STAGES = STAGE_CAUSES[:4]
"""Stages in which workers spend time. Transit to the training process is left out."""
_NO_POOL = PoolReading()

Frame = Mapping[str, Any]
"""The activity since the previous frame, by column.

* ``number``: Number of the frame in this process.
* ``at``: Unix time of the frame's end. ``seconds``: Wall time since the previous frame.
* ``wait_s``, ``transfer_s``, ``work_s``: Time of the training loop. ``wait_*_s``: Its wait by cause.
* ``gpu_stall_s``: Stall of the GPU's stream; None if it is not measured.
* ``network_bytes``: Bytes from machines of the cluster. ``network_sending_s``: Seconds of sending, summed over
  ``links`` machines.
* ``made``: Batches made by workers. ``make_*_s``: Seconds of making, by stage.
* ``cache_hits``, ``cache_misses``: Samples that were in a cache, and samples that were not.
* ``ready``, ``prefetch``: The queue at the end of the frame.
* ``local_*``, ``remote_*``: Workers and their batches at the end of the frame, see `LEVELS`.
"""


def of_pools(reading: Reading, name: str) -> Any:
    """Return the sum of a field over all pools."""
    return sum(getattr(pool, name) for pool in reading.pools.values())


def frame(number: int, at: float, seconds: float, new: Reading) -> Frame:
    """Return the frame of a window that lasted ``seconds``."""
    made = [by_stage(pool) for pool in new.pools.values()]
    return {
        "number": number,
        "at": round(at, 3),
        "seconds": round(seconds, 3),
        "batches": new.batches,
        "samples": new.samples,
        **{f"{state}_s": round(getattr(new, f"{state}_s"), 6) for state in STATES},
        "gpu_stall_s": None if new.gpu_stall_s is None else round(new.gpu_stall_s, 6),
        **{f"wait_{cause}_s": round(new.causes.get(cause, 0.0), 6) for cause in TIMED},
        "network_bytes": of_pools(new, "sent_bytes"),
        "network_sending_s": round(of_pools(new, "sending_s"), 3),
        "links": of_pools(new, "links"),
        "made": of_pools(new, "tickets"),
        **{f"make_{stage}_s": round(sum(parts[index] for parts in made), 6) for index, stage in enumerate(STAGES)},
        "cache_hits": of_pools(new, "cache_hits"),
        "cache_misses": of_pools(new, "cache_misses"),
        "ready": new.ready,
        "prefetch": new.prefetch,
        **{f"{name}_{one}": getattr(new.pools.get(name, _NO_POOL), one) for name in WORKER_POOLS for one in LEVELS},
    }


COLUMNS = tuple(frame(0, 0.0, 0.0, Reading()))


def summary(seconds: float, new: Reading) -> Mapping[str, Any]:
    """Return shares and rates in a window; None where the denominator is 0."""
    total_s = new.wall_s
    hits, misses = of_pools(new, "cache_hits"), of_pools(new, "cache_misses")
    stall_s = new.gpu_stall_s
    return {
        "seconds": round(seconds, 3),
        "wait_ratio": round(new.wait_ratio, 4) if total_s else None,
        "gpu_stall_ratio": None if stall_s is None else _ratio(min(stall_s, total_s), total_s),
        "batches_per_second": _ratio(new.batches, seconds),
        "samples_per_second": _ratio(new.samples, seconds),
        "network_bytes_per_second": _ratio(of_pools(new, "sent_bytes"), seconds, digits=0),
        "network_ratio": _ratio(of_pools(new, "sending_s"), of_pools(new, "links") * seconds),
        "cache_hit_ratio": _ratio(hits, hits + misses),
    }


def _ratio(part: float, whole: float, *, digits: int = 4) -> float | None:
    return round(part / whole, digits) if whole else None


def machines(seconds: float, new: Reading, reading: Reading) -> list[Mapping[str, Any]]:
    """Return the traffic from each machine that measures its traffic, in a window that ended with ``reading``.

    * ``bytes_per_s``: Bytes received per second of the window.
    * ``bandwidth``: Bytes per second of sending, since the machine's first batch.
    * ``round_trip_s``: Round-trip time of a packet.
    * ``loss``: Share of the bytes that were sent again, 0 to 1.
    """
    received = new.pools.get(REMOTE, _NO_POOL).nodes
    return [
        {
            "name": place,
            "bytes_per_s": round(received[place].sent_bytes / seconds, 6),
            "bandwidth": round(one.bandwidth or 0.0, 6),
            "round_trip_s": round(one.round_trip_s, 6),
            "loss": round(one.loss, 6),
        }
        for place, one in reading.pools.get(REMOTE, _NO_POOL).nodes.items()
        if one.links and seconds > 0
    ]
