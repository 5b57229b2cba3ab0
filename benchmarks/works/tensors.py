"""Rows that are there already: what is measured is the loader, and memory."""

from typing import Any

import torch

from benchmarks.tables import Rows, Table
from benchmarks.works import ENDLESS

FLOATS = 5
CLASSES = 10
LEAST_SMALL_IMAGES = 60_000
"""As many as the usual data set of that size has."""


class Floats(Rows):
    """Sample: float32 of shape (5,)."""

    def __getitem__(self, index: int) -> torch.Tensor:
        return self.row(index)


class Images(Rows):
    """Sample: float32 of the table's shape, and a class."""

    def __getitem__(self, index: int) -> tuple[Any, int]:
        return self.row(index), index % CLASSES


def floats(length: int = ENDLESS) -> Floats:
    """Rows of 5 floats: the work of the DDP example."""
    return Floats(Table.beyond_cache("floats", (FLOATS,)), length)


def small_images(length: int = ENDLESS) -> Images:
    """Images of 28x28, as peers are compared on."""
    return Images(Table.beyond_cache("small-images", (1, 28, 28), LEAST_SMALL_IMAGES), length)


def large_images(length: int = ENDLESS) -> Images:
    """Images of 3x224x224 (602,112 bytes each): the sample is free, moving it is not."""
    return Images(Table.beyond_cache("large-images", (3, 224, 224)), length)
