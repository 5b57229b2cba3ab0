"""``overlap_epochs``: whether a loader's workers make the first batches of its next epoch ahead, and if not, why."""

from __future__ import annotations

import ctypes
from multiprocessing import connection, managers, queues, shared_memory, sharedctypes, synchronize
from typing import Any

import numpy as np
import torch

from dpex._torch import DatasetKind
from dpex.engine.next_epoch import OverlapRecord, why_unpredictable
from dpex.loader.checks import is_forking
from dpex.schedule.names import is_a
from dpex.worker.own_generators import objects_within

_SHARED = (
    *(connection.Connection, managers.BaseProxy, queues.Queue, queues.SimpleQueue, shared_memory.SharedMemory),
    *(sharedctypes.SynchronizedBase, synchronize.Condition, synchronize.Event, synchronize.SemLock),
    *(ctypes.Array, ctypes.Structure, ctypes._SimpleCData),  # of RawArray and RawValue
)
"""Objects through which a training process changes what a running worker has."""


def overlap_of(loader: Any) -> OverlapRecord:
    """Return the record of a new iterator's predictions, with the reason if there can be none."""
    return OverlapRecord(why_not=_why_not(loader))


def _why_not(loader: Any) -> str:
    if loader._dataset_kind == DatasetKind.Iterable:
        return "an iterable dataset decides itself what its next epoch is"
    if loader.seeding != "batch":
        return "under seeding='worker' the random numbers of an epoch continue those of the one before"
    if loader.worker_config.share is not None:
        return "batches are shared with other trainings, which may be in other epochs"
    if type(loader).local_pool is not None:
        return f"{type(loader).__name__}.local_pool makes its workers"
    if loader.sample_policy.is_on:
        return "samples that fail in batches made ahead would count although they may be dropped"
    if not loader.persistent_workers:
        return "each epoch has new workers: give persistent_workers=True"
    return why_unpredictable(loader._index_sampler) or _what_is_shared(loader)


def _what_is_shared(loader: Any) -> str:
    """Return why a training may change what its workers have while they run, or "".

    With persistent workers, a change of the dataset reaches them through shared memory alone.
    """
    becomes_shared = not is_forking(loader)  # torch pickles each tensor into shared memory
    for name, one in objects_within(loader.dataset, loader.collate_fn):
        if is_a(one, torch.Tensor):
            is_shared = becomes_shared or (one.device.type == "cpu" and one.is_shared())
        elif is_a(one, np.memmap):
            is_shared = one.mode in ("r+", "w+")
        else:
            is_shared = is_a(one, _SHARED)
        if is_shared:
            return f"workers share {name} with the training, which may change it between epochs"
    return ""
