"""Makes lanes when they are first needed; knows the loader's options, but not the loader (no cycle keeps it alive)."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from dpex.pools.base import Lane
from dpex.pools.local.packing import Packing
from dpex.system.clock import monotonic
from dpex.worker.core import WorkerSetup


@dataclass(frozen=True, kw_only=True)
class LaneMaker:
    """How this loader starts workers."""

    multiprocessing_context: Any
    head_address: str
    worker_resources: Mapping[str, Any] | None
    runtime_env: Mapping[str, Any] | None
    packing: Packing
    counts_from_zero: bool
    """The sampler is one of torch's for map-style data, so that 0 is an index every node can be probed with."""

    def __call__(self, name: str, count: int, setup: WorkerSetup, shared_queue: bool) -> Lane:
        """The lane ``name`` ("local" or "remote") with ``count`` hosts on their way."""
        if name == "local":
            from dpex.pools.local.pool import LocalLane

            return LocalLane(
                setup,
                self.multiprocessing_context,
                shared_queue=shared_queue,
                first_hosts=count,
                packing=self.packing,
            )
        from dpex.pools.ray.pool import RemoteLane

        return RemoteLane(
            setup,
            head_address=self.head_address,
            worker_resources=self.worker_resources,
            runtime_env=self.runtime_env,
            shared_queue=shared_queue,
            first_hosts=count,
            probe_index=0 if self.counts_from_zero and len(setup.dataset) else None,
        )


class RemoteRoom:
    """How many more remote workers a loader may ask for: what the cluster has free, up to this rank's share of it."""

    def __init__(self, worker_resources: Mapping[str, Any] | None, *, world_size: int, every_s: float) -> None:
        self._worker_resources = worker_resources
        self._world_size = max(1, world_size)
        self._every_s = every_s
        self._looked_at = -math.inf
        self._found: tuple[int, int] | None = None

    def __call__(self, requested: int, running: int) -> tuple[int, int] | None:
        """Beside the ``requested`` ones, and how many of these have no place (a node has gone).

        None while no cluster is connected. May take long.
        """
        now = monotonic()
        if now - self._looked_at >= self._every_s:
            self._looked_at = now
            self._found = self._look()
        if self._found is None:
            return None
        free, capacity = self._found
        share = capacity // self._world_size
        return max(0, min(free, share - requested)), max(0, min(requested - running, requested - share))

    def _look(self) -> tuple[int, int] | None:
        from dpex.pools.ray.actor import actor_options, needs_of
        from dpex.pools.ray.cluster import is_connected, slots

        with contextlib.suppress(Exception):
            return slots(needs_of(actor_options(self._worker_resources, None))) if is_connected() else None
        return None
