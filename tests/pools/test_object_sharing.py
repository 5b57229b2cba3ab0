"""Loaders whose workers share the objects of the dataset."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import Dataset

from dpex import DpexDataLoader, WorkerConfig
from dpex.engine import with_workers
from dpex.pools.local import object_sharing
from dpex.pools.local.object_sharing import SWITCHED_OFF
from dpex.pools.local.unpickling import LEAST_BYTES

HAS_IMMORTAL_OBJECTS = (3, 12) <= sys.version_info < (3, 15)
METHODS = ("fork", "spawn", "forkserver")


class Rows(Dataset[torch.Tensor]):
    """Has a large pickle, and enough objects to share."""

    def __init__(self, count: int = 40_000) -> None:
        self.rows = [{"path": f"/data/pictures/{n:080d}.jpg", "label": n, "box": (n, n + 0.5)} for n in range(count)]

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> torch.Tensor:
        row = self.rows[index]
        return torch.tensor([len(row["path"]), row["label"], *row["box"], torch.rand(()).item()])


class Unpickled:
    """Knows the process that made it."""

    def __init__(self, padding: str) -> None:
        self.padding, self.pid = padding, os.getpid()

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.padding,)

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> int:
        return self.pid


class WithFile(Unpickled):
    def __init__(self, padding: str) -> None:
        super().__init__(padding)
        self.file = Path(os.devnull).open()  # noqa: SIM115


class Restoring(Unpickled):
    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.padding,), {}

    def __setstate__(self, state: Any) -> None:
        self.pid = os.getpid()


def batches_of(dataset: Any, method: str, **options: Any) -> tuple[list[torch.Tensor], Any]:
    """Return all batches of an epoch, and what the local pool has counted."""
    generator = torch.Generator().manual_seed(7)
    with DpexDataLoader(
        dataset,
        batch_size=500,
        num_workers=2,
        shuffle=True,
        generator=generator,
        multiprocessing_context=method,
        **options,
    ) as loader:
        return list(loader), loader.stats().pools["local"]


@pytest.mark.parametrize("method", METHODS)
def test_batches_are_the_same_bit_for_bit(method: str) -> None:
    data = Rows()
    with_it, found = batches_of(data, method)
    without, others = batches_of(data, method, worker_config=WorkerConfig(share_objects=False))
    assert all(torch.equal(one, other) for one, other in zip(with_it, without, strict=True))
    assert others.why_not_shared == SWITCHED_OFF
    assert others.shared_objects == 0
    if HAS_IMMORTAL_OBJECTS:
        assert found.why_not_shared == ""
        assert found.shared_objects > len(data)
        assert found.shared_bytes > LEAST_BYTES
    else:
        assert found.shared_objects == found.shared_bytes == 0
        assert "Python 3.12" in found.why_not_shared


def test_few_objects_are_not_shared() -> None:
    _, found = batches_of(Rows(1000), "fork")
    assert found.shared_objects == 0
    assert found.why_not_shared


@pytest.mark.skipif(not HAS_IMMORTAL_OBJECTS, reason="needs Python 3.12")
def test_each_epoch_shares_the_dataset_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(object_sharing, "FIRST_S", 600.0)
    monkeypatch.setattr(with_workers, "SEARCH_RATIO", 1000.0)
    data = Rows()
    loader = DpexDataLoader(data, batch_size=500, num_workers=2)
    list(loader)
    before = loader.stats().pools["local"].shared_objects
    data.rows = [*data.rows, *Rows(20_000).rows]
    assert sum(map(len, loader)) == len(data)
    assert loader.stats().pools["local"].shared_objects > before


def pids_of(make: Callable[[str], Any], padding: int = 2 * LEAST_BYTES, **options: Any) -> int:
    """Return the number of processes that unpickled the dataset for the workers."""
    with DpexDataLoader(
        make("x" * padding), batch_size=2, num_workers=2, multiprocessing_context="spawn", **options
    ) as loader:
        return len(set(torch.cat(list(loader)).tolist()))


def test_large_pickle_is_unpickled_once() -> None:
    assert pids_of(Unpickled) == 1
    assert pids_of(Unpickled, worker_config=WorkerConfig(share_objects=False)) == 2


def test_small_pickle_is_unpickled_by_each_worker() -> None:
    assert pids_of(Unpickled, padding=1) == 2


@pytest.mark.parametrize("make", [WithFile, Restoring])
def test_unpickling_with_effects_is_done_by_each(make: Callable[[str], Any]) -> None:
    assert pids_of(make) == 2
