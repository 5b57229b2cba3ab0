"""What a worker is told of the loader it works for, and how its process is prepared."""

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
from dpex.transport.heap import learn
from dpex.worker.modes import Modes
from dpex.worker.own_generators import OwnGenerators, Registered, own_generators


@dataclass(frozen=True, kw_only=True)
class WorkerSetup:
    """Everything about the loader that a worker needs; the dataset and what belongs to it travel together."""

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
    """How many workers the user asked for, so that an error of ``worker_init_fn`` in one of them is the user's; further
    ones are dpex's, which does without them. None: all are the user's."""
    times_steps: bool = True
    """Whether transforms are timed now and then; see `dpex.profile.live_timer`."""
    snapshot_every: int | None = None
    """After how many batches a logical worker tells its state; None: it does so by time."""
    samples: SamplePolicy = AS_TORCH
    """What is done about samples that cannot be had."""
    modes: Modes | None = None
    """torch's modes in which batches are made; None: those that the worker has anyway, as torch's workers do."""

    registered: Registered = ()
    """What reseeds generators in the dataset that users have told of; see `dpex.worker.own_generators`."""

    @property
    def has_own_states(self) -> bool:
        """Whether logical workers take along the states of generators that lie in the dataset. A stream does not have
        its batches made elsewhere unless it tells its state."""
        return not (self.per_batch_seed or self.iterable)

    def own_generators(self) -> OwnGenerators | None:
        """Generators in the dataset that are reseeded for each batch, as they are now."""
        return own_generators(self.dataset, self.collate_fn, self.registered) if self.per_batch_seed else None

    def why_unfit(self, number: int, init_error: ExceptionWrapper | None) -> str:
        """See `WorkerCore.unfit`."""
        if init_error is None or self.own_workers is None or number < self.own_workers:
            return ""
        return f"worker_init_fn({number}) failed: {init_error.exc_msg.strip().splitlines()[-1]}"

    def enter_modes(self) -> None:
        """Have them from now on, in this thread."""
        if self.modes is not None:
            self.modes.stay()


def with_own_dataset(setup: WorkerSetup) -> WorkerSetup:
    """A setup with a dataset copy of its own, shallow so that large arrays stay shared; bound methods follow it."""
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
"""Bytes; the heap of a worker keeps twice as much of what samples free, and twice a batch more."""


def prepare_process() -> None:
    """Give torch one thread, and have the heap keep the pages that each sample would fault in anew."""
    torch.set_num_threads(1)
    keep_for(0)


def keep_for(batch_bytes: int) -> None:
    """Have the heap keep what samples of batches of that size free; see `dpex.transport.heap`."""
    learn(_LEAST_KEPT + batch_bytes)
