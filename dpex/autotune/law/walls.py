"""The limits of settings by the configuration, the memory and the cluster. PURE."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from dpex.autotune.config import AutotuneConfig
from dpex.autotune.constants import CONSTANTS, MOST_WORKERS
from dpex.autotune.types import Sample, Settings


@dataclass(frozen=True, kw_only=True)
class Walls:
    """Limits of all decisions: workers by pool, batches in flight, and bytes for both."""

    local: int
    remote: int
    prefetch: int = MOST_WORKERS
    least_local: int = 0
    least_remote: int = 0
    memory: float = math.inf
    worker_bytes: float = 0.0
    batch_bytes: float = 0.0

    def most_prefetch(self, local: int) -> int:
        """Batches in flight that there is room for beside ``local`` workers, at least one."""
        if math.isinf(self.memory) or self.batch_bytes <= 0:
            return self.prefetch
        return int(max(1, min(self.prefetch, (self.memory - local * self.worker_bytes) / self.batch_bytes)))

    def most_local(self, unevenness: float) -> int:
        """Local workers that leave memory for the batches that keep them busy: one for each, more where some take
        ``unevenness`` times the mean, as the others go on meanwhile."""
        at_once = min(unevenness * self.batch_bytes, self.batch_bytes + CONSTANTS.uneven_room * self.worker_bytes)
        each = self.worker_bytes + at_once
        if math.isinf(self.memory) or not each:
            return self.local
        return int(max(1, min(self.local, self.memory / each)))

    def within(self, settings: Settings) -> Settings:
        """The nearest setting inside."""
        local = max(self.least_local, min(settings.local, self.local))
        remote = max(self.least_remote, min(settings.remote, self.remote))
        local = max(local, int(not remote))
        return Settings(local=local, remote=remote, prefetch=max(1, min(settings.prefetch, self.most_prefetch(local))))


def walls(config: AutotuneConfig, sample: Sample) -> Walls:
    """Return the limits of a window."""
    machine, batch_bytes = sample.machine, sample.batch_bytes
    memory, each = math.inf, machine.worker_bytes
    if machine.memory_free is not None:
        held = sample.ready + min(sample.in_flight, sample.lanes * sample.local.running)
        memory = machine.memory_free + held * batch_bytes + sample.local.requested * each
    local = MOST_WORKERS if config.max_local is None else config.max_local
    if each > 0 and math.isfinite(memory):
        local = min(local, max(1, int((memory - batch_bytes) / each)))
    prefetch = MOST_WORKERS if config.max_prefetch is None else config.max_prefetch
    if machine.batch_budget is not None and batch_bytes > 0:
        prefetch = int(max(1, min(prefetch, machine.batch_budget / batch_bytes)))
    return Walls(
        local=max(local, config.min_local),
        remote=max(_most_remote(config, sample), config.min_remote),
        prefetch=prefetch,
        least_local=config.min_local,
        least_remote=config.min_remote,
        memory=memory,
        worker_bytes=each,
        batch_bytes=batch_bytes,
    )


def _most_remote(config: AutotuneConfig, sample: Sample) -> int:
    there = sample.remote
    held = min(there.requested, sample.settings.remote)  # those that leave cannot be had again
    room = held - there.unplaced + there.room if there.room is not None else 0
    return min(room, _granted(config, sample))


def _granted(config: AutotuneConfig, sample: Sample) -> int:
    """Remote workers that the configuration and other loaders on the cluster leave to this one."""
    most = MOST_WORKERS if config.max_remote is None else config.max_remote
    return most if sample.remote.granted is None else min(most, sample.remote.granted)


def allowed(config: AutotuneConfig, sample: Sample, wanted: Settings) -> Settings:
    """The nearest settings within the walls.

    Remote workers that run may stay where there is no place for others: they are lost when they are lost. What other
    loaders have a right to is given back. Memory that leaving workers and drawn batches still have counts as taken.
    """
    hard, now = walls(config, sample), sample.settings
    if wanted.local > now.local and hard.worker_bytes > 0 and math.isfinite(hard.memory):
        beside = hard.memory - (sample.ready + sample.in_flight) * hard.batch_bytes
        hard = replace(hard, local=min(hard.local, max(now.local, hard.least_local, int(beside / hard.worker_bytes))))
    hard = replace(hard, remote=max(hard.remote, min(now.remote, _granted(config, sample))))
    found = hard.within(wanted)
    if found.prefetch <= now.prefetch:
        return found
    still = max(found.local, sample.local.requested)
    return replace(found, prefetch=min(found.prefetch, max(now.prefetch, hard.most_prefetch(still))))
