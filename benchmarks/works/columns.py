"""Columns in files mapped with `numpy.memmap`, read at random rows: what tabular training on one machine does."""

import numpy as np
import torch
from torch.utils.data import Dataset

from benchmarks.tables import Rows, Table, rows_beyond_cache
from benchmarks.works import ENDLESS

NUMBERS = 64
ROW_BYTES = 4 * (NUMBERS + 2)


class Columns(Dataset[dict[str, torch.Tensor]]):
    """Sample: "numbers", float32 of shape (64,), "weight" and "target", float32 of shape (1,), of a random row."""

    def __init__(self) -> None:
        rows = rows_beyond_cache(ROW_BYTES)
        widths = {"numbers": NUMBERS, "weight": 1, "target": 1}
        self.tables = {name: Table(name=f"column-{name}", rows=rows, shape=(width,)) for name, width in widths.items()}
        for table in self.tables.values():
            table.open()  # makes the file
        self._map()

    def _map(self) -> None:
        """Map the columns; they are never written to, but torch wants memory that could be."""
        self.columns = {
            name: np.memmap(table.path, np.float32, "c", shape=(table.rows, *table.shape))
            for name, table in self.tables.items()
        }

    def __getstate__(self) -> dict[str, Table]:
        return self.tables

    def __setstate__(self, tables: dict[str, Table]) -> None:
        self.tables = tables
        self._map()

    def __len__(self) -> int:
        return ENDLESS

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        row = index * Rows.STRIDE % self.tables["numbers"].rows
        return {name: torch.from_numpy(np.asarray(column[row])) for name, column in self.columns.items()}
