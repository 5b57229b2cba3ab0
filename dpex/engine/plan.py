"""The plan of an engine: the loader's settings and the helper objects that stay the same for all its passes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dpex.schedule.engine_state import EngineState
from dpex.schedule.prefetch import PrefetchRules
from dpex.schedule.sample_policy import AS_TORCH, SamplePolicy

if TYPE_CHECKING:
    from dpex.device.feed import Feed
    from dpex.device.pinning import Pinner
    from dpex.measure.settings import Settings
    from dpex.pools.base import WorkerPool
    from dpex.system.gpu.stall import GpuStall


@dataclass(frozen=True, kw_only=True)
class EnginePlan:
    logicals: int
    iterable: bool
    in_order: bool
    timeout_s: float
    may_group: bool
    memory_budget: int | None
    make_pool: Callable[[str, int], WorkerPool]
    """Makes a pool, given its name and number of workers."""
    samples: SamplePolicy = AS_TORCH
    """The policy for samples that cannot be loaded."""
    pinner: Pinner | None = None
    feed: Feed | None = None
    gpu: GpuStall[Any] | None = None
    metered: bool = False
    pass_batches: int = 0
    """Number of batches of a whole pass; 0 if it is unknown."""
    lanes: int = 1
    """Number of batches that a worker makes at the same time."""
    is_tuned: bool = False
    """True if a tuner chooses the settings."""
    starts_anew: bool = False
    """True if each pass starts workers of its own."""

    def state(self, settings: Settings) -> EngineState:
        """Return the state of an engine that begins with ``settings``."""
        rules = PrefetchRules(
            logical=self.logicals > 0,
            may_group=self.may_group,
            memory_budget=self.memory_budget,
            lanes=self.lanes,
            is_tuned=self.is_tuned,
        )
        return EngineState(
            logicals=self.logicals,
            iterable=self.iterable,
            in_order=self.in_order,
            rules=rules,
            settings=settings,
            tolerates=self.samples.tolerates,
        )
