"""Makes pools when they are first needed. The factory has the loader's options, without keeping the loader alive."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dpex.errors import OptionError
from dpex.measure.settings import LOCAL
from dpex.pools.local.clean_server import starter_for, usable_context
from dpex.pools.local.pool import LocalPool
from dpex.pools.local.worker_process import WorkerPlan

if TYPE_CHECKING:
    from dpex.pools.base import MakesPool, WorkerPool
    from dpex.pools.share.opening import Share
    from dpex.worker.setup import WorkerSetup


@dataclass(frozen=True, kw_only=True)
class PoolFactory:
    """Starts the workers of a loader.

    ``own_pool``: `DpexDataLoader.local_pool`. ``counts_from_zero``: True if the sampler is one of torch's for map-style
    data, so that nodes can be probed with index 0.
    """

    multiprocessing_context: Any
    head_address: str
    ray_remote_args: Mapping[str, Any] | None
    share: Share | None
    own_pool: MakesPool | None
    counts_from_zero: bool

    def __call__(self, name: str, count: int, setup: WorkerSetup, shared_queue: bool) -> WorkerPool:
        """Return the pool ``name``. Raises OptionError if ``own_pool`` would need logical workers."""
        if name == LOCAL and self.own_pool is not None:
            if not shared_queue:
                raise OptionError(
                    "local_pool: any worker of the pool may make any batch, so give seeding='batch' and a map-style "
                    "dataset"
                )
            return self.own_pool(setup, count)
        if name == LOCAL:
            plan = WorkerPlan(setup, shared_queue)
            if self.share is not None:
                return self.share.open(plan, count, usable_context(self.multiprocessing_context))
            starter = starter_for(self.multiprocessing_context, plan)
            return LocalPool(starter, shared_queue=shared_queue, first_workers=count)
        from dpex.pools.ray.nodes import ray_pool

        return ray_pool(
            setup,
            self.head_address,
            self.ray_remote_args,
            shared_queue=shared_queue,
            first_workers=count,
            probes=self.counts_from_zero and len(setup.dataset) > 0,
        )
