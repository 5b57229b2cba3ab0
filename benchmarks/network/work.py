"""A dataset whose samples wait as a remote file does: more workers make more batches, wherever they are.

All nodes share one machine here, so that work which needs a CPU would gain nothing from any of them. Batches are as
large as those of photographs, and their bytes are noise (which does not compress) or drawn from few values (which
does, as masks, tokens and sparse features do).
"""

import time

import numpy as np
import torch
from torch.utils.data import Dataset

ENDLESS = 10**8
KEPT = 61
"""Different samples; no batch is like another."""
FEW_VALUES = 4


class Photographs(Dataset[torch.Tensor]):
    """Sample: uint8 of shape (3, side, side), after `wait_s`."""

    def __init__(self, *, side: int, wait_s: float, compresses: bool) -> None:
        values = FEW_VALUES if compresses else 256
        self.pictures = np.random.default_rng(0).integers(0, values, (KEPT, 3, side, side), np.uint8)
        self.wait_s = wait_s

    def __len__(self) -> int:
        return ENDLESS

    def __getitem__(self, index: int) -> torch.Tensor:
        time.sleep(self.wait_s)
        picture = torch.from_numpy(self.pictures[index % KEPT].copy())
        picture.view(-1)[:8] = torch.frombuffer(bytearray(index.to_bytes(8, "little")), dtype=torch.uint8)
        return picture
