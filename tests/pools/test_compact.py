"""`dpex.compact` in workers of dpex's and of PyTorch's loader."""

import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from torch.utils.data import DataLoader

from dpex import DpexDataLoader, compact

COUNT = 30_000


class Compacted:
    """Yields labels, and whether the buffer is a mapping of the memory that the training process made."""

    def __init__(self) -> None:
        self.rows: Sequence[Any] = compact([{"label": n, "path": f"{n:0100d}"} for n in range(COUNT)])
        self.places: Mapping[str, int] = compact({f"{n}": n for n in range(COUNT)})
        self.files = self.inodes()

    def inodes(self) -> set[str]:
        maps = Path("/proc/self/maps").read_text().splitlines()
        return {line.split()[4] for line in maps if "dpex-compact" in line}

    def __len__(self) -> int:
        return COUNT

    def __getitem__(self, index: int) -> tuple[int, int, bool]:
        is_mapped = self.inodes() <= self.files if index % 1000 == 0 else True
        return self.rows[index]["label"], self.places[str(index)], is_mapped


@pytest.mark.parametrize(
    ("loader", "method"),
    [
        (DataLoader, "fork"),
        (DpexDataLoader, "fork"),
        (DpexDataLoader, "spawn"),
        *(pytest.param(loader, "forkserver", marks=pytest.mark.long) for loader in (DataLoader, DpexDataLoader)),
    ],
)
def test_workers_map_the_buffer(loader: Any, method: str) -> None:
    data = Compacted()
    batches = list(loader(data, batch_size=500, num_workers=2, multiprocessing_context=method))
    assert [int(n) for labels, _, _ in batches for n in labels] == list(range(COUNT))
    assert [int(n) for _, places, _ in batches for n in places] == list(range(COUNT))
    assert all(bool(mapped.all()) for _, _, mapped in batches)


def test_one_that_lives_to_the_end_of_the_program_ends_quietly() -> None:
    script = "import dpex\nrows = dpex.compact([{'a': n} for n in range(1000)])\nread = lambda: rows[3]\n"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stderr == ""
