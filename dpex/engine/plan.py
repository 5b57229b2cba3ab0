"""The plan of an engine: what it is made from."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dpex.pools.base import WorkerPool
from dpex.schedule.engine_state import EngineState
from dpex.schedule.prefetch import PrefetchRules, Sizes
from dpex.schedule.sample_policy import AS_TORCH, SamplePolicy
from dpex.schedule.streams import Splitting
from dpex.system.gpu.stall import GpuStall

if TYPE_CHECKING:
    from dpex.device.feed import Feed
    from dpex.device.pinning import Pinner
    from dpex.engine.next_epoch import NextEpoch, OverlapRecord


@dataclass(frozen=True, kw_only=True)
class EnginePlan:
    """Options of an engine, which do not change while it lives."""

    logicals: int
    iterable: bool
    in_order: bool
    timeout_s: float
    base_prefetch: int
    may_read_ahead: bool
    memory_budget: int | None
    make_pool: Callable[[str, int], WorkerPool]
    """Makes the pool of a name, with a number of workers."""
    samples: SamplePolicy = AS_TORCH
    """The policy for samples that cannot be loaded."""
    splitting: Splitting | None = None
    """Receives the finding of the first stream; None: all logical workers take part."""
    pinner: Pinner | None = None
    feed: Feed | None = None
    gpu: GpuStall[Any] | None = None
    metered: bool = False
    pass_batches: int = 0
    """Batches of a whole pass, 0 if unknown."""
    next_epoch: NextEpoch | None = None
    """Predicts the next epoch, so that its first batches are made ahead; None: they are not."""
    overlap: OverlapRecord | None = None
    """Outcomes of the loader's predictions."""
    starts_anew: bool = False
    """Each pass starts workers of its own."""

    def state(self, sizes: Sizes) -> EngineState:
        """Return the state of an engine that begins with ``sizes``."""
        rules = PrefetchRules(
            base_prefetch=self.base_prefetch,
            logical=self.logicals > 0,
            may_read_ahead=self.may_read_ahead,
            memory_budget=self.memory_budget,
        )
        return EngineState(
            logicals=self.logicals,
            iterable=self.iterable,
            in_order=self.in_order,
            rules=rules,
            sizes=sizes,
            tolerates=self.samples.tolerates,
            splitting=self.splitting,
        )
