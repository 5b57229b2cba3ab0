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
    probe_index: Any
    """An index every node fetches once before it gets work, or None if none is known to be valid."""

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
            probe_index=self.probe_index,
        )
