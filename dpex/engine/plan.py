"""What an engine is made of and for."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dpex.core.engine_state import EngineState
from dpex.core.prefetch import PrefetchRules, Sizes
from dpex.core.sample_policy import AS_TORCH, SamplePolicy
from dpex.pools.base import WorkerPool
from dpex.system.gpu.stall import GpuStall
from dpex.worker.in_process import Run
from dpex.worker.outcome import Stages

if TYPE_CHECKING:
    from dpex.engine.pin_memory import Pinner
    from dpex.feed.feed import Feed

MakeRun = Callable[[deque[Any], int, tuple[int, int], Run], None]
"""Takes indices, how many tickets to make at most, the first one's number and the epoch, and where batches go."""


def _nothing() -> None:
    pass


@dataclass(frozen=True, kw_only=True)
class EnginePlan:
    """What does not change while the engine lives.

    make_run: makes a few tickets in a row, without stage times, once ``make_inline`` has made one (see
    `dpex.worker.in_process.InProcessMaker.make_run`); None: every batch made in this process is measured.
    may_make_ahead: several tiny ones may be made in one call of ``next()``, as workers would have made them, too.
    make_stand_in: makes a logical worker's ticket in this process (see `dpex.worker.stand_in`); stop_standing_in: it is
    not needed any more. may_stand_in: this process may make batches while workers are seconds away. samples: what is
    done about those that cannot be had.
    """

    logicals: int
    iterable: bool
    in_order: bool
    timeout_s: float
    base_prefetch: int
    may_read_ahead: bool
    memory_budget: int | None
    make_pool: Callable[[str, int], WorkerPool]
    make_inline: Callable[[int, Any, int], tuple[Any, Stages]]
    make_stand_in: Callable[[int, int, Any, int], tuple[Any, Stages]] | None = None
    make_run: MakeRun | None = None
    may_make_ahead: bool = False
    stop_standing_in: Callable[[], None] = _nothing
    may_stand_in: bool = False
    samples: SamplePolicy = AS_TORCH
    pinner: Pinner | None = None
    feed: Feed | None = None
    gpu: GpuStall[Any] | None = None
    metered: bool = False

    def state(self, sizes: Sizes) -> EngineState:
        """The state of an engine that begins with ``sizes``."""
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
            may_stand_in=self.may_stand_in,
            tolerates=self.samples.tolerates,
        )
