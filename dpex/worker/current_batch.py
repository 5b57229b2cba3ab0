"""The seed of the batch that is being made in this process, for datasets that ask: `batch_seed`.

A worker process and the training process make one batch at a time, so its seed is kept for the process, and threads of
the dataset's own may ask as well.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator

from torch.utils.data import get_worker_info

from dpex.errors import NoBatchError


class CurrentBatch:
    """The batch that is being made in this process.

    Attributes:
        seed: Its seed; None: no batch is being made, or it has no seed of its own.
        is_per_batch: True if this process is a worker of ``seeding="batch"``.
    """

    __slots__ = ("is_per_batch", "seed")

    def __init__(self) -> None:
        self.seed: int | None = None
        self.is_per_batch = False

    def begin_worker(self, *, is_per_batch: bool) -> None:
        """Note that this process is a worker that has made no batch yet."""
        self.seed = None
        self.is_per_batch = is_per_batch

    @contextlib.contextmanager
    def seeded(self, seed: int) -> Iterator[None]:
        """Have a dataset that asks for the seed get this one, where it is called without a loader."""
        outer, self.seed = self.seed, seed
        try:
            yield
        finally:
            self.seed = outer


current = CurrentBatch()


def batch_seed() -> int:
    """Return the seed of the batch that is being made, for random generators of a dataset's own.

    Call it in the dataset, its transforms or the collate function. Under ``seeding="batch"`` the seed is a function of
    the base seed, the epoch and the number of the batch alone: the same in any worker, on this machine or another. The
    samples of a batch share it, so the index of the sample belongs into the generator, too. Under ``seeding="worker"``,
    and in the workers of PyTorch's DataLoader, it is the seed of the worker, which all its batches of an epoch share
    (``get_worker_info().seed``).

    Returns:
        A non-negative integer of 63 bits.

    Raises:
        NoBatchError: No batch is being made here, or it is made in the training process without a seed of its own
            (``num_workers=0`` with ``seeding="worker"``). It is a RuntimeError.

    Examples:
        >>> import numpy as np
        >>> import torch
        >>> from dpex import DpexDataLoader, batch_seed
        >>> class Noise:
        ...     def __len__(self):
        ...         return 6
        ...     def __getitem__(self, index):
        ...         return np.random.default_rng((batch_seed(), index)).random()
        >>> def noise(num_workers):
        ...     torch.manual_seed(0)
        ...     with DpexDataLoader(Noise(), num_workers=num_workers, seeding="batch") as loader:
        ...         return [batch.item() for batch in loader]
        >>> noise(0) == noise(2)
        True
    """
    seed = current.seed
    if seed is None and not current.is_per_batch:
        worker = get_worker_info()
        seed = None if worker is None else worker.seed
    if seed is None:
        raise NoBatchError(_why_none())
    return seed


def _why_none() -> str:
    name = threading.current_thread().name
    if current.is_per_batch:
        return (
            f"batch_seed() was called in worker process {os.getpid()} before its first batch, such as in "
            "worker_init_fn: call it in the dataset, its transforms or the collate function"
        )
    return (
        f"batch_seed() was called in process {os.getpid()} (thread {name!r}) while no batch that has a seed was being "
        "made: call it in the dataset, its transforms or the collate function, and give the loader seeding='batch'; "
        "under seeding='worker' batches that are made without workers have no seed"
    )
