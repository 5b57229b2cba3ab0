"""The settings that a loader allows, and the start of its tuning."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from dpex.autotune.config import AutotuneConfig
from dpex.autotune.law.law import start
from dpex.autotune.types import Settings
from dpex.schedule.names import LOCAL, REMOTE, WORKER_POOLS
from dpex.system.cpus import local_ranks, usable_cpus
from dpex.system.machine import free_memory


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
    """

    streams: str = ""
    reading: str = ""
    memory_budget: int | None = None
    prefetch_factor: int | None = None
    pins: Mapping[str, int] | None = None
    most_local: int | None = None


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
    if limits.most_local is not None:
        most = min(n for n in (limits.most_local, config.max_local) if n is not None)
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
