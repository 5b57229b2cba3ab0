"""Data that is larger than the last-level cache: made once, kept in files, mapped into every process that reads it.

The files lie in `benchmarks/data/` (or below `DPEX_BENCH_DATA`); making them is no part of any measurement. Their
contents depend on their names and sizes alone (fixed seeds), so a file that is there is right.
"""

import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from math import ceil, prod
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.machine import last_level_cache_bytes

CACHES = 4
"""How many times the last-level cache a table holds at least, so that its rows come from memory."""
CHUNK_ROWS_BYTES = 2**24
READ_BYTES = 2**24


def folder() -> Path:
    """Where the files lie, made if it is missing."""
    path = Path(os.environ.get("DPEX_BENCH_DATA") or Path(__file__).resolve().parent / "data")
    path.mkdir(parents=True, exist_ok=True)
    return path


_in_use: dict[Path, None] = {}


def data_file(name: str) -> Path:
    """The path of a file of data, which this process uses from now on (`read_files_in_use`)."""
    path = folder() / name
    _in_use[path] = None
    return path


def read_files_in_use() -> None:
    """Read them once, so that they are in the page cache."""
    for path in _in_use:
        with path.open("rb", buffering=0) as file:
            while file.read(READ_BYTES):
                pass


def rows_beyond_cache(row_bytes: int, least: int = 1) -> int:
    """How many rows of that size fill `CACHES` last-level caches, and `least` in any case."""
    return max(least, ceil(CACHES * last_level_cache_bytes() / row_bytes))


@dataclass(frozen=True, kw_only=True)
class Table:
    """`rows` float32 arrays of one shape, uniform in [0, 1), in a file."""

    name: str
    rows: int
    shape: tuple[int, ...]

    @classmethod
    def beyond_cache(cls, name: str, shape: tuple[int, ...], least: int = 1) -> "Table":
        """A table larger than the last-level cache."""
        return cls(name=name, rows=rows_beyond_cache(4 * prod(shape), least), shape=shape)

    @property
    def path(self) -> Path:
        return data_file(f"{self.name}-{self.rows}x{'x'.join(map(str, self.shape))}.f32")

    def open(self) -> torch.Tensor:
        """The file's rows, mapped: a float32 tensor of shape (rows, *shape). Makes the file if it is missing."""
        if not self.path.exists():
            write_whole(self.path, self._chunks())
        size = self.rows * prod(self.shape)
        return torch.from_file(str(self.path), shared=True, size=size, dtype=torch.float32).view(self.rows, *self.shape)

    def _chunks(self) -> Iterable[bytes]:
        rng, row = np.random.default_rng(0), prod(self.shape)
        at_once = max(1, CHUNK_ROWS_BYTES // (4 * row))
        for start in range(0, self.rows, at_once):
            yield rng.random(min(at_once, self.rows - start) * row, dtype=np.float32).tobytes()


@dataclass(frozen=True)
class Blobs:
    """Byte strings of different lengths in one file, mapped: `blobs[i]` is a uint8 array. It pickles as its name."""

    name: str
    count: int

    @classmethod
    def made(cls, name: str, count: int, make: Callable[[int], Iterable[bytes]]) -> "Blobs":
        """Those in the file; `make(count)` gives them if it is missing."""
        blobs = cls(name, count)
        if not blobs.ends_path.exists():
            ends: list[int] = []
            write_whole(blobs.path, _noting_ends(make(count), ends))
            write_whole(blobs.ends_path, [np.array([0, *ends], np.int64).tobytes()])
        return blobs

    @property
    def path(self) -> Path:
        return data_file(f"{self.name}-{self.count}.blobs")

    @property
    def ends_path(self) -> Path:
        """Where each blob ends; written last, so that it vouches for the other file."""
        return self.path.with_suffix(".ends")

    @cached_property
    def _mapped(self) -> tuple[np.ndarray, np.ndarray]:
        return np.memmap(self.path, np.uint8, "r"), np.fromfile(self.ends_path, np.int64)

    def __reduce__(self) -> Any:
        return type(self), (self.name, self.count)

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, number: int) -> np.ndarray:
        data, ends = self._mapped
        return np.asarray(data[ends[number] : ends[number + 1]])


def _noting_ends(blobs: Iterable[bytes], ends: list[int]) -> Iterator[bytes]:
    for blob in blobs:
        ends.append((ends[-1] if ends else 0) + len(blob))
        yield blob


def write_whole(path: Path, chunks: Iterable[bytes]) -> None:
    """Write a file under another name and then rename it: nobody ever sees half of it."""
    unfinished = path.with_name(f"{path.name}.{os.getpid()}")
    with unfinished.open("wb") as file:
        file.writelines(chunks)
    unfinished.replace(path)


class Rows(torch.utils.data.Dataset[Any]):
    """Rows of a table in a scattered order, as shuffling would ask for them, over and over.

    It pickles as the table's description: another process maps the same file.
    """

    STRIDE = 1_000_003
    """A prime, so that neighbouring indices lie far apart in the table and every row has its turn."""

    def __init__(self, table: Table, length: int) -> None:
        self.table = table
        self.length = length
        self.rows = table.open()

    def __reduce__(self) -> Any:
        return type(self), (self.table, self.length)

    def __len__(self) -> int:
        return self.length

    def row(self, index: int) -> torch.Tensor:
        """The row at which `index` lies."""
        return self.rows[index * self.STRIDE % self.table.rows]
