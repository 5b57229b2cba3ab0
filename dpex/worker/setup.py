"""The facts about a loader that its workers need, and the preparation of a worker's process."""

from __future__ import annotations

import copy
import types
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from dpex._torch import ExceptionWrapper
from dpex.schedule.sample_policy import AS_TORCH, SamplePolicy
from dpex.system.user_warnings import warn
from dpex.transport.memory import learn
from dpex.worker.modes import Modes


@dataclass(frozen=True, kw_only=True)
class WorkerSetup:
    """The facts about a loader that a worker needs. They travel in one pickle, so that shared objects stay shared.

    Attributes:
        own_workers: The number of workers that the user asked for. An error of ``worker_init_fn`` in one of them is the
            user's; dpex does without a further one that fails. None: all are the user's.
        times_steps: Transforms are timed now and then; see `dpex.profile.live_timer`.
        snapshot_every: Batches between two reports of a logical worker's state; None: reports come by time.
        samples: The treatment of samples that fail.
        modes: torch's modes in which batches are made; None: the worker keeps its own, as torch's workers do.
    """

    dataset: Any
    collate_fn: Callable[[Any], Any]
    worker_init_fn: Callable[[int], None] | None
    iterable: bool
    auto_collation: bool
    drop_last: bool
    num_workers: int
    base_seed: int
    per_batch_seed: bool
    own_workers: int | None = None
    times_steps: bool = True
    snapshot_every: int | None = None
    samples: SamplePolicy = AS_TORCH
    modes: Modes | None = None

    def why_unfit(self, number: int, init_error: ExceptionWrapper | None) -> str:
        """See `WorkerCore.unfit`."""
        if init_error is None or self.own_workers is None or number < self.own_workers:
            return ""
        return f"worker_init_fn({number}) failed: {init_error.exc_msg.strip().splitlines()[-1]}"

    def enter_modes(self) -> None:
        """Set `modes` in this thread, without an end."""
        if self.modes is not None:
            self.modes.stay()


def with_own_dataset(setup: WorkerSetup) -> WorkerSetup:
    """Return a setup with a shallow copy of the dataset, so that large arrays stay shared. Bound methods follow it."""
    try:
        dataset = copy.copy(setup.dataset)
    except Exception as error:
        warn(f"two logical workers share one dataset object, as it cannot be copied: {error!r}")
        return setup
    return replace(
        setup,
        dataset=dataset,
        worker_init_fn=_rebound(setup.worker_init_fn, setup.dataset, dataset),
        collate_fn=_rebound(setup.collate_fn, setup.dataset, dataset),
    )


def _rebound(function: Any, old: Any, new: Any) -> Any:
    if isinstance(function, types.MethodType) and function.__self__ is old:
        return types.MethodType(function.__func__, new)
    return function


_LEAST_KEPT = 4 << 20
"""Bytes. The heap of a worker keeps twice as much freed memory, and twice the size of a batch more."""


def prepare_process() -> None:
    """Give torch one thread, and have the heap keep the pages that samples free."""
    torch.set_num_threads(1)
    keep_for(0)


def keep_for(batch_bytes: int) -> None:
    """Have the heap keep the pages that samples of batches of that size free; see `dpex.transport.memory`."""
    learn(_LEAST_KEPT + batch_bytes)
