"""A recorded run becomes a world: `python -m benchmarks.simulation.recorded TRACE NAME "WHY"` prints a scenario.

A trace (`AutotuneConfig(trace=...)` or ``DPEX_TRACE``) holds, window by window, what was measured. Batches are made
again with the service times that were seen, in their order and divided into CPU and waiting as in their window; time in
which a worker had no CPU is left out, as the simulator adds it anew. Steps last as long as they did, and other programs
take the CPUs that they took. What a trace does not tell keeps its default: thrashing, storage, the link.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from itertools import cycle, islice
from statistics import fmean
from typing import Any

from dpex.autotune.types import Sample
from dpex.cli.replay.again import load
from dpex.cli.replay.reading import Trace
from dpex.measure.samples import PoolSample

SECONDS = 60.0
_MOST_BATCHES = 2000
_MOST_SERVICE_S = 60.0
_OTHERS_EVERY_S = 5.0
_MEMORY = 8e9


def described(trace: Trace, name: str, why: str) -> dict[str, Any]:
    """The world of a trace, as an object of a scenario file.

    Raises:
        ValueError: no batch was made in it.
    """
    samples = [sample for sample in trace.samples if sample.seconds > 0]
    made = [work for sample in samples for work in _batches(sample)][:_MOST_BATCHES]
    if not made:
        raise ValueError(f"{name}: no batch was made in this run, so there is nothing to make a world of")
    steps = [step for sample in samples for step in _steps(sample)][:_MOST_BATCHES]
    pools = [pool for sample in samples for pool in (sample.local, sample.remote)]
    sizes = [sample.batch_bytes for sample in samples if sample.batch_bytes > 0]
    work = {
        "recorded": made,
        "encode_s": _rounded(_ratio(pools, "encode_s")),
        "batch_bytes": round(fmean(sizes)) if sizes else 1e6,
    }
    first: dict[str, Any] = {"at": 0, "work": work, "step": {"recorded": steps or [0.0]}, **_cluster(samples)}
    phases = [first, *_others(samples)]
    phases[0]["others"] = _rounded(samples[0].machine.others)
    entry = {"name": name, "why": why, "seconds": SECONDS, "world": _world(samples), "phases": phases}
    return entry | {"judged_at": [0.0]}


def _batches(sample: Sample) -> Iterator[tuple[float, float]]:
    """Waiting and CPU of each batch of a window; of many the measured ones stand for the others."""
    for pool in (sample.local, sample.remote):
        services = [service for service in pool.services_s if 0 < service < _MOST_SERVICE_S]
        if pool.tickets and services and pool.busy_s > 0:
            cpu, waiting = _parts(pool)
            yield from ((_rounded(s * waiting), _rounded(s * cpu)) for s in islice(cycle(services), pool.tickets))


def _parts(pool: PoolSample) -> tuple[float, float]:
    """Which parts of a batch's time are CPU, without handing it over, and waiting."""
    cpu = min(1.0, max(0.0, pool.cpu_s - pool.encode_s) / pool.busy_s)
    elsewhere = (pool.encode_s + (pool.queued_s or 0.0)) / pool.busy_s
    return cpu, max(0.0, 1.0 - cpu - elsewhere)


def _steps(sample: Sample) -> Iterator[float]:
    if sample.batches:
        yield from [_rounded(sample.work_s / sample.batches)] * sample.batches


def _ratio(pools: Sequence[PoolSample], name: str) -> float:
    """Per ticket."""
    return float(sum(getattr(pool, name) for pool in pools)) / max(1, sum(pool.tickets for pool in pools))


def _world(samples: Sequence[Sample]) -> dict[str, Any]:
    handed = [sample for sample in samples if sample.settings.workers and sample.batches]
    own_s = sum(sample.own_s for sample in handed) / max(1, sum(sample.batches for sample in handed))
    machine = samples[-1].machine
    sizes = [sample.machine.worker_bytes for sample in samples if sample.machine.worker_bytes > 0]
    knows = any(sample.local.queued_s is not None for sample in samples)
    world: dict[str, Any] = {
        "cpus": machine.cpus,
        "worker_bytes": sizes[-1] if sizes else 5e7,
        "memory": _memory(samples),
    }
    return world | {"knows_queue": knows, **({"own_s": _rounded(own_s)} if own_s else {})}


def _memory(samples: Sequence[Sample]) -> float:
    """What there was for workers and batches together."""
    known = [s for s in samples if s.machine.memory_free is not None]
    if not known:
        return _MEMORY
    last = known[-1]
    held = last.local.requested * last.machine.worker_bytes + last.held * last.batch_bytes
    return float(max(_MEMORY / 8, (last.machine.memory_free or 0) + held))


def _cluster(samples: Sequence[Sample]) -> dict[str, Any]:
    nodes = max(s.remote.requested - s.remote.unplaced + (s.remote.room or 0) for s in samples)
    return {"nodes": nodes, "link": 1e9} if nodes else {}


def _others(samples: Sequence[Sample]) -> Iterator[dict[str, Any]]:
    """What other programs took, every few seconds."""
    due = _OTHERS_EVERY_S
    for sample in samples:
        if due <= sample.at < SECONDS:
            due = sample.at + _OTHERS_EVERY_S
            yield {"at": round(sample.at, 3), "others": _rounded(sample.machine.others)}


def _rounded(value: float) -> float:
    return float(f"{value:.3g}")


def main(arguments: Sequence[str]) -> int:
    """The command."""
    path, name, why = arguments
    print(json.dumps(described(load(path), name, why)))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
