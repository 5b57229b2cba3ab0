"""Workers on a Ray cluster: a pool of agents (see `dpex.pools.agent.pool`) on nodes that Ray gives (see `nodes`)."""

from __future__ import annotations

import importlib
import json
from collections.abc import Mapping
from typing import Any

import numpy as np

from dpex.pools.agent.pool import RemotePool
from dpex.pools.agent.shipped import ShippedContents
from dpex.pools.ray.cluster import connect, release
from dpex.pools.ray.nodes import RayNodes
from dpex.pools.ray.reservations import actor_options
from dpex.transport.pickling import changed_collate_entries, pack
from dpex.worker.setup import WorkerSetup


class RayPool(RemotePool):
    """See the module; implements `dpex.pools.base.WorkerPool`.

    Raises `ClusterError` where the cluster cannot be reached and `ShippingError` where the dataset cannot travel.
    """

    def __init__(
        self,
        setup: WorkerSetup,
        *,
        head_address: str,
        ray_remote_args: Mapping[str, Any] | None,
        shared_queue: bool,
        first_workers: int,
        probe_index: Any = None,
        compression: str | None = None,
    ) -> None:
        packed = pack(ShippedContents(setup=setup, collate_entries=changed_collate_entries()))
        self._cluster = connect(head_address)
        try:
            options = actor_options(ray_remote_args)
            key = json.dumps(options, sort_keys=True, default=repr)
            nodes = self._cluster.parked.take(key) or RayNodes(self._cluster, key, options)
            header = np.frombuffer(packed.header, np.uint8)
            kind = f"{type(setup.dataset).__module__}.{type(setup.dataset).__qualname__}"
            nodes.ship(kind, [importlib.import_module("ray").put([header, *packed.buffers])])
            super().__init__(
                nodes,
                shared_queue=shared_queue,
                first_workers=first_workers,
                probe_index=probe_index,
                compression=compression,
            )
        except BaseException:
            release(self._cluster)
            raise

    def close(self, grace_s: float = 5.0) -> None:
        """See `WorkerPool.close`. Agents are parked for the next pool while the cluster has any share."""
        if self._closed:
            return
        super().close(grace_s)
        if self.is_own:
            release(self._cluster)
