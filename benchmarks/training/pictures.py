"""What the small network is trained on: FashionMNIST's IDX files where they are, else scikit-learn's digits."""

import gzip
import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.utils.data import Dataset

SIDE = 28
MOST_SHIFT = 2
"""Pixels by which a picture is shifted at most, where it is."""
TEST_PART = 5
"""Every so many digits are a fifth, and the last fifth is for testing."""
UNSIGNED_BYTES = 8
"""The code of that type in an IDX file (http://yann.lecun.com/exdb/mnist)."""


class Pictures(Dataset[tuple[torch.Tensor, int]]):
    """Sample: float32 (1, 28, 28) in [0, 1], and its class.

    is_shifted: each is moved by up to 2 pixels down and right, which is drawn anew whenever it is loaded.
    """

    def __init__(self, images: torch.Tensor, labels: torch.Tensor, *, is_shifted: bool = False) -> None:
        self.images, self.labels, self.is_shifted = images, labels, is_shifted

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        image = self.images[index]
        if self.is_shifted:
            image = image.roll(torch.randint(-MOST_SHIFT, MOST_SHIFT + 1, (2,)).tolist(), (0, 1))
        return image[None].float().div(255), int(self.labels[index])


@dataclass(frozen=True, kw_only=True)
class Data:
    """What is trained and tested on, and its name."""

    name: str
    train: Pictures
    test: Pictures


def load(folder: Path | None, *, is_shifted: bool = False) -> Data:
    """FashionMNIST from the folder if its files are there, packed or not; else the digits.

    Raises:
        FileNotFoundError: a folder is given, and it lacks one of the files.
        ValueError: a file is not what its name says.
    """
    if folder is None:
        return _digits(is_shifted)
    train, test = (_part(folder, part) for part in ("train", "t10k"))
    return Data(name="FashionMNIST", train=Pictures(*train, is_shifted=is_shifted), test=Pictures(*test))


def _part(folder: Path, part: str) -> tuple[torch.Tensor, torch.Tensor]:
    images, labels = (_idx(folder, f"{part}-{kind}-ubyte") for kind in ("images-idx3", "labels-idx1"))
    if images.shape[1:] != (SIDE, SIDE) or len(images) != len(labels):
        raise ValueError(f"{folder}: {part} has images {tuple(images.shape)} and labels {tuple(labels.shape)}")
    return images, labels


def _idx(folder: Path, name: str) -> torch.Tensor:
    """An IDX file of unsigned bytes: two zeros, type, number of dimensions, each of them as 4 bytes, then the data."""
    packed = folder / f"{name}.gz"
    found = gzip.decompress(packed.read_bytes()) if packed.exists() else (folder / name).read_bytes()
    if found[:2] != b"\0\0" or found[2] != UNSIGNED_BYTES:
        raise ValueError(f"{folder / name} is no IDX file of unsigned bytes")
    start = 4 + 4 * found[3]
    shape = tuple(int(size) for size in np.frombuffer(found[4:start], ">i4"))
    if len(found) != start + math.prod(shape):
        raise ValueError(f"{folder / name} says that it holds {shape}, and has {len(found) - start} bytes")
    return torch.tensor(np.frombuffer(found[start:], np.uint8).reshape(shape))


def _digits(is_shifted: bool) -> Data:
    """8x8 pixels from 0 to 16, enlarged."""
    from sklearn.datasets import load_digits

    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32)[:, None]
    large = nn.functional.interpolate(images, size=(SIDE, SIDE), mode="bilinear")
    pixels = large.mul(255 / 16).round().to(torch.uint8)[:, 0]
    labels = torch.tensor(digits.target)
    split = len(labels) * (TEST_PART - 1) // TEST_PART
    return Data(
        name="scikit-learn's digits",
        train=Pictures(pixels[:split], labels[:split], is_shifted=is_shifted),
        test=Pictures(pixels[split:], labels[split:]),
    )
