"""A dataset whose samples wait as a remote file does: more workers make more batches, wherever they are.

All nodes share one machine here, so that work which needs a CPU would gain nothing from any of them. Samples are as
large as a photograph of that side, whatever they hold: bytes that are noise (which does not compress) or drawn from few
values (which does, as masks and sparse features do), photographs, floats that are noise, or token numbers with zeros
behind them.
"""

import time
from collections.abc import Callable

import numpy as np
import torch
from torch.utils.data import Dataset

ENDLESS = 10**8
KEPT = 61
"""Different samples; no batch is like another."""
FEW_VALUES = 4
PHOTOGRAPHS = ("astronaut", "coffee", "chelsea")
"""Names in scikit-image, which has these files with it."""
TOKENS, SHORTEST, LONGEST = 30_000, 0.1, 0.6
"""The vocabulary, and how much of a row is text."""


def _bytes(rng: np.random.Generator, side: int, values: int) -> np.ndarray:
    return rng.integers(0, values, (KEPT, 3, side, side), np.uint8)


def _photographs(rng: np.random.Generator, side: int) -> np.ndarray:
    """Random windows of photographs, resized, as random resized crops are."""
    import cv2
    from skimage import data

    found = []
    for number in range(KEPT):
        picture = getattr(data, PHOTOGRAPHS[number % len(PHOTOGRAPHS)])()
        shortest = min(picture.shape[:2])
        window = int(rng.integers(shortest // 3, shortest + 1))
        top, left = (int(rng.integers(0, extent - window + 1)) for extent in picture.shape[:2])
        crop = cv2.resize(picture[top : top + window, left : left + window], (side, side))
        found.append(crop.transpose(2, 0, 1))
    return np.ascontiguousarray(np.stack(found))


def _floats(rng: np.random.Generator, side: int) -> np.ndarray:
    return rng.standard_normal((KEPT, 3 * side * side // 4), np.float32)


def _tokens(rng: np.random.Generator, side: int) -> np.ndarray:
    """Rows of 1024 token numbers, the frequent ones as frequent as words are, with zeros behind them."""
    found = np.zeros((KEPT, max(1, 3 * side * side // 8192), 1024), np.int64)
    for row in found.reshape(-1, 1024):
        length = int(rng.uniform(SHORTEST, LONGEST) * row.size)
        row[:length] = rng.zipf(1.3, length) % TOKENS
    return found


CONTENTS: dict[str, Callable[[np.random.Generator, int], np.ndarray]] = {
    "noise": lambda rng, side: _bytes(rng, side, 256),
    "few values": lambda rng, side: _bytes(rng, side, FEW_VALUES),
    "photographs": _photographs,
    "floats": _floats,
    "tokens": _tokens,
}
"""What samples hold, by name."""


class WaitingSamples(Dataset[torch.Tensor]):
    """Samples of as many bytes as (3, side, side) uint8, after `wait_s`."""

    def __init__(self, *, side: int, wait_s: float, content: str) -> None:
        self.kept = CONTENTS[content](np.random.default_rng(0), side)
        self.wait_s = wait_s

    def __len__(self) -> int:
        return ENDLESS

    def __getitem__(self, index: int) -> torch.Tensor:
        time.sleep(self.wait_s)
        return self.made(index)

    def made(self, index: int) -> torch.Tensor:
        """The sample, without waiting."""
        sample = torch.from_numpy(self.kept[index % KEPT].copy())
        sample.view(torch.uint8).view(-1)[:8] = torch.frombuffer(
            bytearray(index.to_bytes(8, "little")), dtype=torch.uint8
        )
        return sample
