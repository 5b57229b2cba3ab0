"""The facts about a loader that its workers need, with torch's modes, and the preparation of a worker's process."""

from __future__ import annotations

import copy
import threading
import types
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch

from dpex._torch import is_any_autocast_enabled
from dpex.schedule.sample_policy import AS_TORCH, SamplePolicy
from dpex.system.user_warnings import warn
from dpex.transport.memory import keep_heap

# These functions are called for each batch. The names save the attribute look-up, which is half of the time.
_has_grad, _is_inference = torch.is_grad_enabled, torch.is_inference_mode_enabled
_default_dtype, _is_autocast = torch.get_default_dtype, torch.is_autocast_enabled


class Modes(NamedTuple):
    """Modes of a thread that torch's results depend on: gradients, inference, autocast, default dtype.

    Without this class, a worker would have the modes of the thread that started it, and a batch that the training
    process makes would have the modes of that moment. Instead, every batch of ``seeding="batch"`` is made in the modes
    at the call of ``iter()``, in any process and at any time.

    Settings that a program makes permanently are left out: ``torch.use_deterministic_algorithms``,
    ``torch.set_float32_matmul_precision``, ``torch.set_flush_denormal``. Workers have these as they were when the
    worker's parent was started.

    ``autocast``: the dtype of autocast on the CPU, or None if it is off.
    """

    grad: bool
    inference: bool
    autocast: torch.dtype | None
    default_dtype: torch.dtype

    def hold(self) -> bool:
        """Return True if this thread has these modes."""
        grad, inference, autocast, default_dtype = self
        return (
            _has_grad() is grad
            and _is_inference() is inference
            and _default_dtype() is default_dtype
            and (is_any_autocast_enabled() and _is_autocast("cpu")) is (autocast is not None)
            and (autocast is None or torch.get_autocast_dtype("cpu") is autocast)
        )

    def enter(self) -> ExitStack:
        """Set these modes in this thread, until the returned stack is closed."""
        stack = ExitStack()
        stack.callback(torch.set_default_dtype, torch.get_default_dtype())
        torch.set_default_dtype(self.default_dtype)
        stack.enter_context(torch.inference_mode(self.inference))
        stack.enter_context(torch.set_grad_enabled(self.grad))
        is_on = self.autocast is not None
        stack.enter_context(torch.autocast("cpu", dtype=self.autocast, enabled=is_on))
        return stack

    def stay(self) -> None:
        """Set these modes in this thread for good."""
        _kept.modes = self.enter()  # kept, because torch leaves inference mode when its guard is deleted


_kept = threading.local()


def modes_here() -> Modes:
    autocast = torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else None
    return Modes(torch.is_grad_enabled(), torch.is_inference_mode_enabled(), autocast, torch.get_default_dtype())


@dataclass(frozen=True, kw_only=True)
class WorkerSetup:
    """The facts about a loader that a worker needs. They travel in one pickle, so that shared objects stay shared."""

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
    """The number of workers that the user asked for. An error of ``worker_init_fn`` in one of them ends the epoch. A
    failure of a worker beyond this number only removes that worker. None: no worker is beyond it."""
    times_calls: bool = True
    """True if a worker times calls now and then; see `dpex.profile.live_timer`."""
    snapshot_every: int | None = None
    """Batches between two reports of a logical worker's state; None: by time."""
    samples: SamplePolicy = AS_TORCH
    """The policy for samples that fail."""
    modes: Modes | None = None
    """torch's modes for making batches; None: the worker's own, as in torch."""
    concurrency: int = 64
    """The maximum number of samples of an asynchronous dataset that a worker loads at the same time."""
    shares_objects: bool = False
    """True if forked workers read the plain objects of the dataset without copying them."""


def with_own_dataset(setup: WorkerSetup) -> WorkerSetup:
    """Return a setup with a shallow copy of the dataset, so that large arrays stay shared. Its methods are rebound."""
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
"""In bytes. A worker's heap keeps up to 2 * (`_LEAST_KEPT` + size of a batch) of freed memory."""


def prepare_process() -> None:
    """Give torch one thread, and have the heap keep the pages that samples free."""
    torch.set_num_threads(1)
    keep_for(0)


def keep_for(batch_bytes: int) -> None:
    """Have the heap keep the pages that the samples of a batch of ``batch_bytes`` free; see `dpex.transport.memory`."""
    keep_heap(_LEAST_KEPT + batch_bytes)
