"""Asynchronous datasets of the tests, and how their samples wait without a clock."""

import os
import random
import types
from collections.abc import Generator
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset, default_collate

from dpex import AsyncDataset, DpexDataLoader


@types.coroutine
def turn() -> Generator[None, None, None]:
    """Let the other samples have a turn."""
    yield


async def nap() -> None:
    """Wait for a number of turns that no seed determines, so that samples end in another order in each run."""
    for _ in range(os.urandom(1)[0] % 6):
        await turn()


class Indices(Dataset[Any]):
    """Sample: its index, after a nap."""

    def __init__(self, count: int = 48) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    async def __getitem__(self, index: int) -> Any:
        await nap()
        return index


class Draws(AsyncDataset):
    """Sample: its index, fetched after a nap, and numbers of all generators, from sample ``first`` on."""

    def __init__(self, count: int = 48, first: int = 0, own: bool = False) -> None:
        self.count = count
        self.first = first
        self.own = (np.random.RandomState(3), random.Random(1), torch.Generator()) if own else ()

    def __len__(self) -> int:
        return self.count

    async def fetch(self, index: int) -> float:
        await nap()
        random.random()  # as clients do
        return float(index)

    def decode(self, index: int, raw: float) -> float:
        if index < self.first:
            return raw
        drawn = [np.random.randn(), random.gauss(0, 1), torch.randn(()).item()] * (1 + index % 3)
        for one in self.own:
            drawn.append(torch.rand((), generator=one).item() if isinstance(one, torch.Generator) else one.random())
        return sum((place + 1) * each for place, each in enumerate([raw, *drawn]))


def collate(samples: list[Any]) -> Any:
    """Collate, and draw."""
    return default_collate(samples), np.random.randn(), random.random(), torch.rand(()).item()


def batches(dataset: Any, kind: Any = DpexDataLoader, **options: Any) -> list[Any]:
    """Return the batches of an epoch as plain values."""
    torch.manual_seed(1)
    np.random.seed(1)
    random.seed(1)
    seeding = {"seeding": "batch"} if kind is DpexDataLoader else {}
    loader = kind(dataset, **{"batch_size": 8, "collate_fn": collate, **seeding, **options})
    return [(batch[0].tolist(), *batch[1:]) for batch in loader]


def indices(dataset: Any, **options: Any) -> list[Any]:
    """Return the samples of an epoch, in order."""
    with DpexDataLoader(dataset, **{"batch_size": 8, "collate_fn": list, **options}) as loader:
        return [sample for batch in loader for sample in batch]
