"""The limits that configuration, loader, ``resize``, system, memory and cluster set to the settings. PURE."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from dpex.autotune.constants import CONSTANTS, MOST_WORKERS
from dpex.measure.reading import Reading
from dpex.measure.settings import LOCAL, REMOTE, Settings


@dataclass(frozen=True, kw_only=True)
class Limits:
    """The minimum and maximum of workers per pool and of prefetch, and the bytes that workers and batches may fill.

    Attributes:
        local, remote, prefetch: The maximum.
        least_local, least_remote, least_prefetch: The minimum. For a fixed value it equals the maximum.
        prefetch_factor: The maximum prefetch for each worker.
        batch_budget: The maximum bytes of batches in flight.
        memory: The maximum bytes of local workers and batches in flight together.
        worker_bytes, batch_bytes: Bytes of one worker, and of one batch.
    """

    local: int = MOST_WORKERS
    remote: int = MOST_WORKERS
    prefetch: int = MOST_WORKERS
    least_local: int = 0
    least_remote: int = 0
    least_prefetch: int = 1
    prefetch_factor: int = MOST_WORKERS
    batch_budget: float = math.inf
    memory: float = math.inf
    worker_bytes: float = 0.0
    batch_bytes: float = 0.0

    # -- narrower limits ----------------------------------------------------------------------------------------------

    def fixed(self, **values: int) -> Limits:
        """Return the limits that allow only these ``values``, by the names of settings."""
        least = {f"least_{name}": value for name, value in values.items()}
        factor = MOST_WORKERS if "prefetch" in values else self.prefetch_factor
        return replace(self, **values, **least, prefetch_factor=factor)

    def with_a_worker(self) -> Limits:
        """Return the limits with at least one worker, a local one where local workers are possible."""
        if self.least_local or self.least_remote:
            return self
        return replace(self, least_local=1) if self.local else replace(self, least_remote=1)

    def without_remote(self, local: int) -> Limits:
        """Return the limits without remote workers. If both numbers of workers are fixed, fix ``local`` local ones."""
        if (self.least_local, self.least_remote) == (self.local, self.remote):
            return self.fixed(**{LOCAL: local, REMOTE: 0})
        return replace(self, local=self.local or MOST_WORKERS, remote=0, least_remote=0).with_a_worker()

    def with_most_local(self, most: int) -> Limits:
        """Return the limits with at most ``most`` local workers."""
        return replace(self, local=min(self.local, most), least_local=min(self.least_local, most))

    def in_window(self, window: Reading) -> Limits:
        """Return the limits with the memory, the room on the cluster and the bytes that a window measured."""
        batch_bytes = window.batch_bytes
        memory, each, local, prefetch = math.inf, window.worker_bytes, self.local, self.prefetch
        if window.memory_free is not None:
            held = window.ready + min(window.in_flight, window.lanes * window.local.running)
            memory = window.memory_free + held * batch_bytes + window.local.requested * each
        if each > 0 and math.isfinite(memory):
            local = min(local, max(1, int((memory - batch_bytes) / each)))
        if batch_bytes > 0:
            prefetch = int(max(self.least_prefetch, min(prefetch, self.batch_budget / batch_bytes)))
        return replace(
            self,
            local=max(local, self.least_local),
            remote=max(self._places(window), self.least_remote),
            prefetch=prefetch,
            memory=memory,
            worker_bytes=each,
            batch_bytes=batch_bytes,
        )

    def _places(self, window: Reading) -> int:
        """Return the number of remote workers that the cluster has room for, within this loader's share."""
        there = window.remote
        held = min(there.requested, window.settings.remote)  # leaving workers cannot be kept
        room = held - there.unplaced + there.room if there.room is not None else 0
        return min(room, self._granted(window))

    def _granted(self, window: Reading) -> int:
        """Return the number of remote workers that these limits and other loaders on the cluster allow."""
        granted = window.remote.granted
        return self.remote if granted is None else min(self.remote, granted)

    # -- allowed settings ----------------------------------------------------------------------------------------------

    @property
    def is_fixed(self) -> bool:
        """True if there is only one setting."""
        lowest = (self.least_local, self.least_remote, self.least_prefetch)
        return lowest == (self.local, self.remote, self.prefetch)

    @property
    def _is_prefetch_limited(self) -> bool:
        return min(self.prefetch, self.prefetch_factor) < MOST_WORKERS

    def most_prefetch(self, local: int) -> int:
        """Return the batches in flight that fit into memory together with ``local`` workers, at least the minimum."""
        if math.isinf(self.memory) or self.batch_bytes <= 0:
            return self.prefetch
        room = (self.memory - local * self.worker_bytes) / self.batch_bytes
        return int(max(self.least_prefetch, min(self.prefetch, room)))

    def most_local(self, unevenness: float) -> int:
        """Return the number of local workers that fit into memory with their batches: one each, or more if the slowest
        batch takes ``unevenness`` times the mean, because other workers continue during a slow batch."""
        at_once = min(unevenness * self.batch_bytes, self.batch_bytes + CONSTANTS.uneven_room * self.worker_bytes)
        each = self.worker_bytes + at_once
        if math.isinf(self.memory) or not each:
            return self.local
        return int(max(1, min(self.local, self.memory / each)))

    def clip(self, settings: Settings) -> Settings:
        """Return the nearest setting inside the limits, with at least one worker."""
        local = max(self.least_local, min(settings.local, self.local))
        remote = max(self.least_remote, min(settings.remote, self.remote))
        local = max(local, int(not remote))
        most = min(self.most_prefetch(local), self.prefetch_factor * (local + remote))
        prefetch = max(self.least_prefetch, min(settings.prefetch, most))
        return Settings(local=local, remote=remote, prefetch=prefetch, is_prefetch_fixed=self._is_prefetch_limited)

    def clip_change(self, window: Reading, wanted: Settings) -> Settings:
        """Return the setting nearest to ``wanted`` that may follow the setting of a window.

        Running remote workers may stay even if the cluster has no room for more. Workers beyond this loader's share go
        back to other loaders. The memory of leaving workers and of batches in flight counts as used.
        """
        hard, now = self.in_window(window), window.settings
        if wanted.local > now.local and hard.worker_bytes > 0 and math.isfinite(hard.memory):
            beside = hard.memory - (window.ready + window.in_flight) * hard.batch_bytes
            most = max(now.local, hard.least_local, int(beside / hard.worker_bytes))
            hard = replace(hard, local=min(hard.local, most))
        hard = replace(hard, remote=max(hard.remote, min(now.remote, self._granted(window))))
        found = hard.clip(wanted)
        if found.prefetch <= now.prefetch:
            return found
        still = max(found.local, window.local.requested)
        return replace(found, prefetch=min(found.prefetch, max(now.prefetch, hard.most_prefetch(still))))

    def inside(self, window: Reading) -> Settings:
        """Return the setting of a window, clipped to the limits and to memory for one batch per local worker."""
        inside, now = self.clip_change(window, window.settings), window.settings
        if inside.prefetch >= inside.workers:
            is_near = (1.0 + CONSTANTS.memory_slack) * inside.prefetch >= now.prefetch
            return now if is_near and inside.workers == now.workers else inside
        hard = self.in_window(window)
        local = max(min(inside.local, hard.most_local(1.0), hard.prefetch), hard.least_local, int(not inside.remote))
        return replace(inside, local=local, prefetch=min(now.prefetch, hard.most_prefetch(local)))
