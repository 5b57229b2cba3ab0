"""How far settings may go: what the configuration, the memory and the cluster allow. PURE.

There are two kinds of limits. *Walls* are hard: no decision goes beyond them. *Bounds* are what is worth a look within
the walls: more local workers than the CPUs can serve would only be in each other's way.
"""

from __future__ import annotations

import math
from dataclasses import replace

from dpex.autotune.checked import MOST_WORKERS
from dpex.autotune.config import AutotuneConfig
from dpex.autotune.constants.planning import LIMITS
from dpex.autotune.planner import Bounds
from dpex.autotune.types import Sample, Settings

_LEAST_CPU_SHARE = 0.02
"""Work that waits for all of its time would have any number of workers; `AutotuneConfig.max_waiting` says how many."""


def bounds(config: AutotuneConfig, sample: Sample, batch_bytes: float, waiting: float) -> Bounds:
    """What is worth a look. ``waiting``: share of a local worker's time that is not CPU, 0 to 1."""
    hard = walls(config, sample, batch_bytes)
    if config.max_local is not None:
        return hard
    at_once = 1.0 + LIMITS.beside * waiting
    by_cpu = math.ceil(at_once * sample.machine.cpus / max(_LEAST_CPU_SHARE, 1.0 - waiting)) + 1
    return replace(hard, local=max(min(by_cpu, config.max_waiting, hard.local), config.min_local))


def walls(config: AutotuneConfig, sample: Sample, batch_bytes: float) -> Bounds:
    """What no decision goes beyond."""
    memory = _memory(sample, batch_bytes)
    return Bounds(
        local=max(_most_local(config, sample, batch_bytes, memory), config.min_local),
        remote=max(_most_remote(config, sample), config.min_remote),
        prefetch=_most_prefetch(config, sample, batch_bytes),
        memory=memory,
        worker_bytes=sample.machine.worker_bytes,
        batch_bytes=batch_bytes,
        least_local=config.min_local,
        least_remote=config.min_remote,
    )


def _memory(sample: Sample, batch_bytes: float) -> float:
    """Bytes for workers and batches: what they have now, and what is free beside it."""
    machine = sample.machine
    if machine.memory_free is None:
        return math.inf
    return machine.memory_free + sample.held * batch_bytes + sample.local.requested * machine.worker_bytes


def _most_local(config: AutotuneConfig, sample: Sample, batch_bytes: float, memory: float) -> int:
    """One worker may always be there."""
    most, each = MOST_WORKERS if config.max_local is None else config.max_local, sample.machine.worker_bytes
    fits = each > 0 and math.isfinite(memory)
    return min(most, max(1, int((memory - batch_bytes) / each))) if fits else most


def _most_remote(config: AutotuneConfig, sample: Sample) -> int:
    there = sample.remote
    room = there.requested - there.unplaced + there.room if there.room is not None else 0
    return min(room, _allowed_remote(config, sample))


def _allowed_remote(config: AutotuneConfig, sample: Sample) -> int:
    """Remote workers that the configuration and others on the cluster leave to this loader, wherever they had place."""
    most = MOST_WORKERS if config.max_remote is None else config.max_remote
    return most if sample.remote.granted is None else min(most, sample.remote.granted)


def _most_prefetch(config: AutotuneConfig, sample: Sample, batch_bytes: float) -> int:
    most = LIMITS.most_prefetch if config.max_prefetch is None else config.max_prefetch
    budget = sample.machine.batch_budget
    if budget is None or batch_bytes <= 0:
        return most
    return max(1, min(most, int(budget / batch_bytes)))


def allowed(config: AutotuneConfig, sample: Sample, batch_bytes: float, wanted: Settings) -> Settings:
    """The nearest settings within the walls. Remote workers that run may stay where there is no place for others: they
    are lost when they are lost. What is another loader's by right is given back."""
    hard, now = walls(config, sample, batch_bytes), sample.settings
    if wanted.local > now.local:
        hard = replace(hard, local=min(hard.local, max(now.local, _fit_beside_batches(hard, sample))))
    remote = max(hard.remote, min(now.remote, _allowed_remote(config, sample)))
    found = replace(hard, remote=remote).within(wanted)
    if found.prefetch <= now.prefetch:
        return found
    still = max(found.local, sample.local.requested)  # a worker that goes has its memory until its batch is made
    return replace(found, prefetch=min(found.prefetch, max(now.prefetch, hard.most_prefetch(still))))


def _fit_beside_batches(hard: Bounds, sample: Sample) -> int:
    """Local workers that there is memory for beside the batches that are drawn now, as all of these will be made."""
    beside = hard.memory - (sample.ready + sample.in_flight) * hard.batch_bytes
    return int(beside / hard.worker_bytes) if hard.worker_bytes > 0 and math.isfinite(beside) else hard.local
