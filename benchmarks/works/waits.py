"""Samples that wait as a remote file does, and need no processor."""

import asyncio
import time
from math import log

import numpy as np
import torch
from torch.utils.data import Dataset

from benchmarks.works import ENDLESS

VALUES = 16


class Waits(Dataset[torch.Tensor]):
    """Sample: float32 of shape (16,).

    `waits_s` is one wait in seconds per row of a table; sample i waits `waits_s[i // run % len(waits_s)]`, so that
    `run` neighbours wait alike.
    """

    def __init__(self, waits_s: np.ndarray, run: int = 1) -> None:
        self.waits_s = waits_s
        self.run = run

    def __len__(self) -> int:
        return ENDLESS

    def __getitem__(self, index: int) -> torch.Tensor:
        time.sleep(float(self.waits_s[index // self.run % len(self.waits_s)]))
        return torch.full((VALUES,), float(index))


class AsyncWaits(Waits):
    """As `Waits`, read by coroutines."""

    async def __getitem__(self, index: int) -> torch.Tensor:  # type: ignore[override]
        await asyncio.sleep(float(self.waits_s[index // self.run % len(self.waits_s)]))
        return torch.full((VALUES,), float(index))


def log_normal(mean_s: float, sigma: float, size: int) -> np.ndarray:
    """Waits drawn from a log-normal law: its mean is exp(mu + sigma^2 / 2), hence mu."""
    return np.random.default_rng(0).lognormal(log(mean_s) - sigma**2 / 2, sigma, size)


def steady(wait_s: float = 0.005) -> Waits:
    """Every sample waits as long."""
    return Waits(np.array([wait_s]))


def skewed() -> Waits:
    """Log-normal waits of 3 ms on average.

    With sigma 1.7 the slowest hundredth of the samples takes a quarter of all the time, as cold files do.
    """
    return Waits(log_normal(0.003, 1.7, 100_003))


def async_steady(wait_s: float = 0.005) -> AsyncWaits:
    """As `steady`, read by coroutines."""
    return AsyncWaits(np.array([wait_s]))


def async_skewed() -> AsyncWaits:
    """As `skewed`, read by coroutines."""
    return AsyncWaits(skewed().waits_s)


class Pictures(Dataset[tuple[torch.Tensor, int]]):
    """Sample: uint8 (3, 32, 32) and a class, after a wait of 4 ms, about what a photograph takes on one CPU."""

    def __len__(self) -> int:
        return ENDLESS

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        time.sleep(0.004)
        return torch.full((3, 32, 32), index % 256, dtype=torch.uint8), index % 1000


SHARD_BATCHES, SHARD_BATCH = 50, 16


def shards() -> Waits:
    """Shards of 50 batches whose waits are alike within: 4 ms on average, log-normal with sigma 1 between shards."""
    return Waits(log_normal(0.004, 1.0, 1009), run=SHARD_BATCHES * SHARD_BATCH)


SHIFTING_BATCH = 16
SHIFTING_WAITS_S = (0.001, 0.008, 0.002)


class Shifting(Dataset[torch.Tensor]):
    """Waits of 1 ms, then of 8 ms, then of 2 ms per sample, a third of the `batches` each. Sample: float32 (16,)."""

    def __init__(self, batches: int) -> None:
        self.length = batches * SHIFTING_BATCH

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> torch.Tensor:
        time.sleep(SHIFTING_WAITS_S[index * len(SHIFTING_WAITS_S) // self.length])
        return torch.full((VALUES,), float(index))
