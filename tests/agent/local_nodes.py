"""Agents on this machine, for tests: real processes and real connections, without Ray."""

from __future__ import annotations

from benchmarks.network.nodes import ProcessNodes
from dpex.pools.agent.pool import RemotePool
from dpex.worker.setup import WorkerSetup


def make_pool(
    setup: WorkerSetup,
    shared_queue: bool,
    count: int,
    rooms: list[int],
    compression: str | None = None,
) -> RemotePool:
    return RemotePool(
        ProcessNodes(setup, rooms),
        shared_queue=shared_queue,
        first_workers=count,
        probe_index=0,
        compression=compression,
    )
