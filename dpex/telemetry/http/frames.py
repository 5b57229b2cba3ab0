"""One second of a loader as the page and ``dpex top`` show it: the difference of two readings, and sums of those. Pure.

A frame holds seconds and counts, not shares, so that frames add up to any stretch of time.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from dpex.measure.stall_causes import CAUSES
from dpex.telemetry.loader_metrics import Readings

LANES = ("local", "remote")
LEVELS = ("wanted", "requested", "running")
STAGES = ("read", "transform", "collate", "serialize")


class Frame(NamedTuple):
    """What happened since the frame before, and the queue and the workers at its end.

    number: counts the process's frames. at: Unix time of its end. seconds: wall time since the frame before.
    wait_s, transfer_s, work_s: the training loop's time; wait_*_s: the first of them by cause. gpu_stall_s: None where
    nobody measures it. made: batches made by workers; make_*_s: seconds they took by stage, over all workers.
    """

    number: int
    at: float
    seconds: float
    batches: int
    samples: int
    wait_s: float
    transfer_s: float
    work_s: float
    gpu_stall_s: float | None
    wait_read_s: float
    wait_transform_s: float
    wait_collate_s: float
    wait_serialize_s: float
    wait_fetch_s: float
    wait_h2d_s: float
    wait_straggler_s: float
    wait_startup_s: float
    wait_unknown_s: float
    made: int
    make_read_s: float
    make_transform_s: float
    make_collate_s: float
    make_serialize_s: float
    ready: int
    limit: int
    local_wanted: int
    local_requested: int
    local_running: int
    local_in_flight: int
    remote_wanted: int
    remote_requested: int
    remote_running: int
    remote_in_flight: int


def frame(number: int, at: float, seconds: float, before: Readings, after: Readings) -> Frame:
    """What lies between two readings; a count that shrank is a new loader's, and begins at 0."""

    def grown(*key: str) -> float:
        now, then = after.counters.get(key, 0.0), before.counters.get(key, 0.0)
        return now - then if now >= then else now

    def level(*key: str) -> int:
        return int(after.gauges.get(key, 0))

    known = ("dpex_gpu_stall_seconds_total",) in after.counters
    values: dict[str, Any] = {
        "number": number,
        "at": round(at, 3),
        "seconds": round(seconds, 3),
        "batches": int(grown("dpex_batches_total")),
        "samples": int(grown("dpex_samples_total")),
        "gpu_stall_s": round(grown("dpex_gpu_stall_seconds_total"), 6) if known else None,
        "made": made(after) - made(before) if made(after) >= made(before) else made(after),
        "ready": level("dpex_ready_batches"),
        "limit": level("dpex_prefetch_limit_batches"),
    }
    for state in ("wait", "transfer", "work"):
        values[f"{state}_s"] = round(grown("dpex_consumer_seconds_total", state), 6)
    for cause in CAUSES:
        values[f"wait_{cause}_s"] = round(grown("dpex_stall_seconds_total", cause), 6)
    for lane in LANES:
        values[f"{lane}_in_flight"] = level("dpex_in_flight_batches", lane)
        for one in LEVELS:
            values[f"{lane}_{one}"] = level(f"dpex_workers_{one}", lane)
    for stage, spent_s in _stages(grown).items():
        values[f"make_{stage}_s"] = round(spent_s, 6)
    return Frame(**values)


def _stages(grown: Any) -> dict[str, float]:
    """Seconds of all workers by stage; of getting samples, what was no CPU time is reading, as in
    `dpex.measure.stall_causes`."""
    lanes = ("inline", *LANES)
    load_s = sum(grown("dpex_worker_seconds_total", lane, "load") for lane in lanes)
    cpu_s = sum(grown("dpex_worker_cpu_seconds_total", lane, "load") for lane in lanes)
    others = {
        stage: sum(grown("dpex_worker_seconds_total", lane, stage) for lane in lanes)
        for stage in ("collate", "serialize")
    }
    return {"read": max(0.0, load_s - cpu_s), "transform": min(load_s, cpu_s), **others}


def made(readings: Readings) -> int:
    """Batches that workers of all lanes have made."""
    return sum(sum(counts) for key, (counts, _) in readings.histograms.items() if key[0] == "dpex_worker_batch_seconds")


def summary(frames: Sequence[Frame]) -> Mapping[str, Any]:
    """Shares and rates over these frames; None where nothing was spent or made."""
    seconds = _sum(frames, "seconds")
    spent_s = {state: _sum(frames, f"{state}_s") for state in ("wait", "transfer", "work")}
    total_s = sum(spent_s.values())
    stalls = [one.gpu_stall_s for one in frames if one.gpu_stall_s is not None]
    count = _sum(frames, "made")
    return {
        "seconds": round(seconds, 3),
        "stall_ratio": _ratio(spent_s["wait"], total_s),
        "transfer_ratio": _ratio(spent_s["transfer"], total_s),
        "work_ratio": _ratio(spent_s["work"], total_s),
        "gpu_stall_ratio": _ratio(min(sum(stalls), total_s), total_s) if stalls else None,
        "batches_per_second": _ratio(_sum(frames, "batches"), seconds),
        "samples_per_second": _ratio(_sum(frames, "samples"), seconds),
        "stages_s": {stage: _ratio(_sum(frames, f"make_{stage}_s"), count, digits=6) for stage in STAGES},
    }


def _sum(frames: Iterable[Frame], column: str) -> float:
    return float(sum(getattr(one, column) for one in frames))


def _ratio(part: float, whole: float, *, digits: int = 4) -> float | None:
    return round(part / whole, digits) if whole else None


def latest(frames: Sequence[Frame], seconds: float) -> Sequence[Frame]:
    """The shortest end of these that is that long; all of them if there is none."""
    length = 0.0
    for index in range(len(frames) - 1, -1, -1):
        length += frames[index].seconds
        if length >= seconds - 0.5:
            return frames[index:]
    return frames
