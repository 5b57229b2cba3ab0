"""``overlap_epochs``: whether a loader's workers make the first batches of its next epoch ahead, and if not, why."""

from __future__ import annotations

import ctypes
import mmap
import sys
from multiprocessing import connection, managers, queues, shared_memory, sharedctypes, synchronize
from pathlib import Path
from typing import Any

import numpy as np
import torch

from dpex._torch import DatasetKind
from dpex.engine.next_epoch import OverlapRecord, why_unpredictable
from dpex.loader.checks import is_forking
from dpex.schedule.names import is_a
from dpex.system.interrupts import is_interrupt
from dpex.worker.own_generators import objects_within

_SHARED = (
    *(connection.Connection, managers.BaseProxy, queues.Queue, queues.SimpleQueue, shared_memory.SharedMemory),
    *(sharedctypes.SynchronizedBase, synchronize.Condition, synchronize.Event, synchronize.SemLock),
)
"""Objects through which a training process changes what a running worker has."""
_OF_CTYPES = (ctypes.Array, ctypes.Structure, ctypes._SimpleCData)
"""Such as RawArray and RawValue."""
_WITH_MEMORY = (torch.Tensor, np.ndarray, mmap.mmap, *_OF_CTYPES)
"""Objects through which a training process changes what a worker has, if their memory is shared."""


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
    try:
        areas = _shared_areas(Path("/proc/self/maps").read_text("utf-8", "replace"))
        for name, one in objects_within(loader.dataset, loader.collate_fn):
            if (
                is_a(one, _SHARED)
                or (becomes_shared and is_a(one, torch.Tensor))
                or (is_a(one, _WITH_MEMORY) and _lies_in(areas, _address_of(one)))
            ):
                return f"workers share {name} with the training, which may change it between epochs"
    except Exception as error:  # of an object that stands for another, and cannot load it here
        if is_interrupt(error):
            raise
        return f"the dataset cannot be searched for memory that workers share with the training: {error!r}"
    return ""


def _shared_areas(maps: str) -> list[range]:
    """Return the addresses that other processes may change, of the text of ``/proc/self/maps``.

    A sample in a cache of dpex's never changes.
    """
    store = sys.modules.get("dpex.cache.memory_store")
    unchanging = None if store is None else str(store.memory_folder())
    found = []
    for line in maps.splitlines():
        addresses, access, *_, path = (line + " ").split(" ", 5)
        if access[1] == "w" and access[3] == "s" and (unchanging is None or not path.strip().startswith(unchanging)):
            first, end = addresses.split("-")
            found.append(range(int(first, 16), int(end, 16)))
    return found


def _lies_in(areas: list[range], address: int) -> bool:
    return any(address in area for area in areas)


def _address_of(one: Any) -> int:
    """Return where the memory of an object begins; 0 if it has none of its own, as a sparse tensor."""
    try:
        if isinstance(one, torch.Tensor):
            return one.data_ptr() if one.device.type == "cpu" else 0
        if isinstance(one, _OF_CTYPES):
            return ctypes.addressof(one)
        return int(np.frombuffer(one, np.uint8).ctypes.data if isinstance(one, mmap.mmap) else one.ctypes.data)
    except Exception:  # such as a map that was closed
        return 0
