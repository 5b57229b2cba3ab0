"""The datasets of the benchmark rows, by name: each is the cost of one sample and little else.

Invariants: a dataset is made the same way in every measurement (fixed seeds), its `__getitem__` depends on
the index alone (and on the random state where it augments), and it pickles.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset, DistributedSampler, Sampler

from benchmarks.jpeg import JpegPhotographs
from benchmarks.tables import Rows, Table

ENDLESS = 1_000_000
"""Length, in samples, of datasets whose pass should outlast any measuring window."""
FOREVER = 1_000_000_000
"""The same where batches are so cheap that a window of many seconds takes millions of them."""


class FiveFloats(Dataset[torch.Tensor]):
    """Random rows of 5 floats: the work of the DDP example. Sample: float32 of shape (5,)."""

    def __init__(self, rows: int = 90_000) -> None:
        self.rows = torch.randn(rows, 5, generator=torch.Generator().manual_seed(0))

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> torch.Tensor:
        return self.rows[index]


FLOATS = 5
CLASSES = 10
LEAST_SMALL_IMAGES = 60_000
"""As many as the usual data set of that size has."""


class ManyFloats(Rows):
    """Rows of 5 floats from a table larger than the last-level cache. Sample: float32 of shape (5,)."""

    def __getitem__(self, index: int) -> torch.Tensor:
        return self.row(index)


class Images(Rows):
    """Images from a table larger than the last-level cache. Sample: float32 of the table's shape, class."""

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return self.row(index), index % CLASSES


def many_floats(length: int = FOREVER) -> ManyFloats:
    """`length` samples of 5 floats."""
    return ManyFloats(Table.beyond_cache("floats", (FLOATS,)), length)


def small_images(length: int = FOREVER) -> Images:
    """`length` images of 28x28, as peers are compared on."""
    return Images(Table.beyond_cache("small-images", (1, 28, 28), LEAST_SMALL_IMAGES), length)


def large_images(length: int = FOREVER) -> Images:
    """`length` images of 3x224x224 (602,112 bytes each): the sample is free, moving it is not."""
    return Images(Table.beyond_cache("large-images", (3, 224, 224)), length)


class Waits(Dataset[torch.Tensor]):
    """Samples that wait as a remote file does and need no processor. Sample: float32 of shape (16,).

    `waits_s` is one wait in seconds per row of a table; sample i waits `waits_s[i % len(waits_s)]`.
    """

    def __init__(self, waits_s: np.ndarray, length: int = ENDLESS) -> None:
        self.waits_s = waits_s
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> torch.Tensor:
        time.sleep(float(self.waits_s[index % len(self.waits_s)]))
        return torch.full((16,), float(index))


def steady_waits(wait_s: float = 0.005) -> Waits:
    """Every sample waits `wait_s` seconds."""
    return Waits(np.array([wait_s]))


def skewed_waits(mean_s: float = 0.003, sigma: float = 1.7) -> Waits:
    """Waits drawn from a log-normal law with the given mean in seconds and shape `sigma`.

    The mean of a log-normal law is exp(mu + sigma^2 / 2), hence mu. With sigma 1.7 the slowest hundredth of
    the samples takes a quarter of all the time, as cold files do.
    """
    mu = np.log(mean_s) - sigma**2 / 2
    return Waits(np.random.default_rng(0).lognormal(mu, sigma, size=100_003))


SHIFTING_BATCH = 16
SHIFTING_WAITS_S = (0.001, 0.008, 0.002)


class ShiftingWaits(Dataset[torch.Tensor]):
    """Waits of 1 ms, then of 8 ms, then of 2 ms per sample, a third of the `batches` each. Sample: float32 (16,).

    They are waits and not work: under a 20 ms step and in batches of 16 that is what gives the rates of torch's
    loader in the comparison of peers (2 workers on 2 cores 27.6 batches/s, 8 workers 46.5 of 50 possible).
    """

    def __init__(self, batches: int) -> None:
        self.length = batches * SHIFTING_BATCH

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> torch.Tensor:
        time.sleep(SHIFTING_WAITS_S[index * len(SHIFTING_WAITS_S) // self.length])
        return torch.full((16,), float(index))


@dataclass(frozen=True, kw_only=True)
class Work:
    """A dataset and how it is batched. `sampler`, when given, makes the sampler from the dataset.

    counted: `dataset` takes the number of batches of the measurement, as its samples depend on it.
    """

    dataset: Callable[..., Dataset[Any]]
    batch_size: int
    sampler: Callable[[Dataset[Any]], Sampler[int]] | None = None
    counted: bool = False


def one_rank(dataset: Dataset[Any]) -> Sampler[int]:
    """The DDP example's sampler, as rank 0 of 1 has it."""
    return DistributedSampler(dataset, num_replicas=1, rank=0)


WORKS: dict[str, Work] = {
    "floats": Work(dataset=FiveFloats, batch_size=1, sampler=one_rank),
    "small-images": Work(dataset=partial(small_images, ENDLESS), batch_size=100),
    "large-batches": Work(dataset=partial(large_images, ENDLESS), batch_size=64),
    "jpeg": Work(dataset=JpegPhotographs, batch_size=64),
    "wait": Work(dataset=steady_waits, batch_size=16),
    "skewed-wait": Work(dataset=skewed_waits, batch_size=16),
    "endless-floats": Work(dataset=many_floats, batch_size=1),
    "endless-small-images": Work(dataset=small_images, batch_size=100),
    "endless-large-batches": Work(dataset=large_images, batch_size=64),
    "shifting-wait": Work(dataset=ShiftingWaits, batch_size=SHIFTING_BATCH, counted=True),
    "few-floats": Work(dataset=lambda: FiveFloats(rows=512), batch_size=16),
}
