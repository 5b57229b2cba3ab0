"""The settings that a loader allows, the start of its tuning, and its limit where passes are short."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from dpex.autotune.config import AutotuneConfig
from dpex.autotune.law.constants import CONSTANTS
from dpex.autotune.law.law import start
from dpex.autotune.measured import LONGEST_S
from dpex.autotune.types import Sample, Settings
from dpex.schedule.names import LOCAL, REMOTE, WORKER_POOLS
from dpex.system.cpus import local_ranks, usable_cpus
from dpex.system.machine import free_memory

_EACH = 0.3
"""Part of a start without workers that each worker for each CPU adds. Measured on two cores: the first batch came after
0.09 s with one worker, 0.11 with two, 0.15 with four and 0.25 with 14. `Start` assumes more, which the simulator's
worlds need: with this figure their mean regret was 0.84 % instead of 0.49 %."""
_FELT = 0.05
"""A start that takes a smaller part of the shortest pass is left to the law."""
MOST = 64
"""Numbers of workers that are looked at."""


def cold_start(cpus: float | None = None, ranks: int | None = None, memory: float | None = None) -> Settings:
    """Return the law's start, on this rank's part of the CPUs and of the memory.

    Args:
        cpus: CPUs of the machine that the job may use; None: as the system tells.
        ranks: Ranks of the job on this machine; None: as the environment tells.
        memory: Free bytes of the machine; None: as the system tells.
    """
    config = AutotuneConfig()
    cpus = usable_cpus() if cpus is None else cpus
    ranks = local_ranks(os.environ) if ranks is None else ranks
    memory = free_memory() if memory is None else memory
    return start(config, cpus / ranks, memory=None if memory is None else config.memory_share * memory / ranks)


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Limits of the loader, beside those of the configuration.

    Attributes:
        streams: Why workers keep their number, where each reads a stream of its own; else "".
        reading: How many workers read for those that are tuned, where that is so; else "".
        memory_budget: Bytes in flight at most.
        prefetch_factor: Batches in flight per worker at most.
        pins: Sizes that the user fixed with ``resize``, by name (see `KNOBS`).
        most_local: Local workers that the system allows, once it refused one.
        quickest_local: Local workers that make a short pass the quickest, where each pass starts its own.
    """

    streams: str = ""
    reading: str = ""
    memory_budget: int | None = None
    prefetch_factor: int | None = None
    pins: Mapping[str, int] | None = None
    most_local: int | None = None
    quickest_local: int | None = None


def within(config: AutotuneConfig, limits: Limits, now: Settings, *, remote: bool) -> AutotuneConfig:
    """The configuration, narrowed to what this loader can do; it leaves at least one worker."""
    pins = dict(limits.pins or {})
    if limits.streams:
        pins |= {LOCAL: now.local, REMOTE: now.remote}
    changes: dict[str, Any] = {}
    if not config.min_local and not config.min_remote:
        changes["min_remote" if config.max_local == 0 and remote else "min_local"] = 1
    if not remote:
        changes |= {"min_remote": 0, "max_remote": 0, "max_local": config.max_local or None}
    if any(known is not None for known in (limits.most_local, limits.quickest_local)):
        most = min(n for n in (limits.most_local, limits.quickest_local, config.max_local) if n is not None)
        changes |= {"max_local": most, "min_local": min(config.min_local, most)}
    for pool in WORKER_POOLS:
        if pool in pins:
            changes |= {f"min_{pool}": pins[pool], f"max_{pool}": pins[pool]}
    if "prefetch" in pins:
        changes["max_prefetch"] = pins["prefetch"]
    return replace(config, **changes)


def brought_inside(settings: Settings, config: AutotuneConfig) -> Settings:
    """The nearest setting that the configuration allows."""

    def clip(value: int, low: int, high: int | None) -> int:
        return max(low, value if high is None else min(value, high))

    return Settings(
        local=clip(settings.local, config.min_local, config.max_local),
        remote=clip(settings.remote, config.min_remote, config.max_remote),
        prefetch=clip(settings.prefetch, 1, config.max_prefetch),
    )


def quickest(sample: Sample) -> int | None:
    """Return the fewest local workers that make a pass the quickest, by what the window measured.

    None if passes do not start workers anew, if too little is known, or if passes are so long that their start does not
    count.

    A pass takes its start and its batches: ``start(W) + batches / min(W / s, C / c, 1 / t)``, with W workers, s seconds
    and c CPU seconds of a worker for a batch, C CPUs, and a step of t seconds.
    """
    made, batches, cpus = sample.local, sample.pass_batches, max(1.0, sample.machine.cpus)
    if not (sample.starts_anew and batches and made.tickets and sample.batches):
        return None
    if not 0.0 < sample.start_s + made.busy_s + made.cpu_s + sample.work_s < LONGEST_S or not sample.start_s > 0.0:
        return None
    service_s = max(1e-9, made.busy_s / made.tickets)
    cpu_s = max(1e-9, made.cpu_s / made.tickets)
    step_s = max(1e-9, sample.work_s / sample.batches)
    shortest_s = batches / min(MOST / service_s, cpus / cpu_s, 1.0 / step_s)
    if sample.start_s < _FELT * shortest_s:
        return None
    bare_s = sample.start_s / (1.0 + _EACH * max(1, sample.settings.local) / cpus)

    def pass_s(workers: int) -> float:
        rate = min(workers / service_s, cpus / cpu_s, 1.0 / step_s)
        return bare_s * (1.0 + _EACH * workers / cpus) + batches / rate

    seconds = {workers: pass_s(workers) for workers in range(1, min(MOST, batches) + 1)}
    least_s = min(seconds.values())
    return min(workers for workers, each_s in seconds.items() if each_s <= (1.0 + CONSTANTS.same) * least_s)
