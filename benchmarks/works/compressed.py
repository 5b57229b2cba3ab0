"""Chunks compressed with Blosc, as Zarr stores arrays; the library has threads of its own. Needs `numcodecs`."""

from collections.abc import Iterator

import numpy as np
import torch
from numcodecs import Blosc
from torch.utils.data import Dataset

from benchmarks.tables import Blobs, rows_beyond_cache
from benchmarks.works import ENDLESS

SIDE = 512
"""Of a chunk: 512x512 float32, 1 MiB."""
CROP = 128
LEVELS = 64
"""Values of a chunk are rounded to so many, so that they compress about as measured fields do."""
COMPRESSED_BYTES = 200_000
"""Less than the average chunk takes, so that the chunks together are larger than the cache."""


def _chunks(count: int) -> Iterator[bytes]:
    rng, codec = np.random.default_rng(0), Blosc(cname="zstd", clevel=3, shuffle=Blosc.SHUFFLE)
    for _ in range(count):
        noise = rng.random((SIDE, SIDE), dtype=np.float32)
        yield codec.encode(np.round(noise * LEVELS) / LEVELS)


class Compressed(Dataset[torch.Tensor]):
    """Sample: a window of 128x128 float32 of a chunk, all of which must be unpacked for it."""

    def __init__(self) -> None:
        self.chunks = Blobs.made("chunks", rows_beyond_cache(COMPRESSED_BYTES), _chunks)

    def __len__(self) -> int:
        return ENDLESS

    def __getitem__(self, index: int) -> torch.Tensor:
        unpacked = Blosc().decode(self.chunks[index % len(self.chunks)].tobytes())
        chunk = np.frombuffer(unpacked, np.float32).reshape(SIDE, SIDE)
        top, left = index * 31 % (SIDE - CROP), index * 17 % (SIDE - CROP)
        return torch.from_numpy(chunk[top : top + CROP, left : left + CROP].copy())
