"""Makes lanes when they are first needed; knows the loader's options, but not the loader (no cycle keeps it alive)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from dpex.lanes.base import Lane
from dpex.worker import WorkerSetup


@dataclass(frozen=True, kw_only=True)
class LaneMaker:
    """How this loader starts workers."""

    multiprocessing_context: Any
    head_address: str
    worker_resources: Mapping[str, Any] | None
    runtime_env: Mapping[str, Any] | None
    counts_from_zero: bool
    """The sampler is one of torch's for map-style data, so that 0 is an index every node can be probed with."""

    def __call__(self, name: str, count: int, setup: WorkerSetup, shared_queue: bool) -> Lane:
        """The lane ``name`` ("local" or "remote") with ``count`` hosts on their way."""
        if name == "local":
            from dpex.lanes.local import LocalLane

            return LocalLane(setup, self.multiprocessing_context, shared_queue=shared_queue, first_hosts=count)
        from dpex.lanes.remote import RemoteLane

        return RemoteLane(
            setup,
            head_address=self.head_address,
            worker_resources=self.worker_resources,
            runtime_env=self.runtime_env,
            shared_queue=shared_queue,
            first_hosts=count,
            probe_index=0 if self.counts_from_zero and len(setup.dataset) else None,
        )
