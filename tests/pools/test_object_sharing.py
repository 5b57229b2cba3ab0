"""Loaders whose workers share the objects of the dataset."""

import os
import random
import sys
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset

from dpex import DpexDataLoader, WorkerConfig
from dpex.engine import with_workers
from dpex.pools.local import object_sharing
from dpex.pools.local.object_sharing import SWITCHED_OFF
from dpex.pools.local.shared_objects import LEAST_BYTES

HAS_IMMORTAL_OBJECTS = (3, 12) <= sys.version_info < (3, 15)


class Rows(Dataset[torch.Tensor]):
    """Has a large pickle, and enough objects to share."""

    def __init__(self, count: int = 40_000) -> None:
        self.rows = [{"path": f"/data/pictures/{n:080d}.jpg", "label": n, "box": (n, n + 0.5)} for n in range(count)]

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> torch.Tensor:
        row = self.rows[index]
        return torch.tensor([len(row["path"]), row["label"], *row["box"], torch.rand(()).item()])


class ByConstructor:
    """Sample: the facts about its process that its constructor has read; the rows make its pickle large."""

    def __init__(self, rows: Any) -> None:
        self.rows, self.first = rows, rows[0]
        self.facts = [os.getpid(), random.getrandbits(40), int(np.random.randint(1 << 40))]

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.rows,)

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> list[int]:
        assert self.first is self.rows[0]
        return self.facts


class ByState(ByConstructor):
    def __reduce__(self) -> Any:
        return object.__reduce__(self)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return object.__reduce_ex__(self, protocol)

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(state["rows"])  # type: ignore[misc]


class ByFunction(ByConstructor):
    def __reduce__(self) -> tuple[Any, ...]:
        return made_by_function, (type(self), self.rows, self.first)


def made_by_function(kind: type[ByConstructor], rows: Any, first: Any) -> ByConstructor:
    made = kind(rows)
    made.first = first
    return made


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


@pytest.mark.parametrize("method", ["fork", "forkserver", pytest.param("spawn", marks=pytest.mark.long)])
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


@pytest.mark.parametrize(
    ("kind", "method", "share_objects"),
    [
        (ByConstructor, "spawn", True),
        (ByConstructor, "forkserver", False),
        (ByState, "forkserver", True),
        (ByFunction, "forkserver", True),
    ],
)
def test_each_spawned_worker_constructs_its_dataset(kind: Any, method: str, share_objects: bool) -> None:
    data = kind(Rows().rows)
    config = WorkerConfig(share_objects=share_objects)
    options: Any = {"multiprocessing_context": method, "worker_config": config, "collate_fn": list}
    with DpexDataLoader(data, batch_size=2, num_workers=2, **options) as loader:
        facts = [tuple(fact) for batch in loader for fact in batch]
        found = loader.stats().pools["local"]
    assert [len(set(column)) for column in zip(*facts, strict=True)] == [2, 2, 2]
    assert data.facts[0] not in {pid for pid, *_ in facts}
    assert (found.shared_objects > len(data.rows)) is (share_objects and HAS_IMMORTAL_OBJECTS)
