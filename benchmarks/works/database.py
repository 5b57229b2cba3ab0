"""Rows of an SQLite file: the latest events of a user, about 0.1 ms a sample."""

import os
import sqlite3
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from torch.utils.data import Dataset

from benchmarks.tables import data_file, rows_beyond_cache
from benchmarks.works import ENDLESS

EVENTS = 32
"""Of each user."""
EVENT_BYTES = 40
"""Less than an event takes in the file and its index, so that the file is larger than the cache."""
STRIDE = 1_000_003
QUERY = "SELECT kind, value, seen FROM events WHERE user = ? ORDER BY seen DESC"


class Histories(Dataset[torch.Tensor]):
    """Sample: float32 of shape (32, 3): kind, value and time of a user's events, the latest first."""

    def __init__(self) -> None:
        self.users = rows_beyond_cache(EVENTS * EVENT_BYTES)
        self.path = data_file(f"events-{self.users}.sqlite")
        if not self.path.exists():
            _write(self.path, self.users)
        self._forget()

    def _forget(self) -> None:
        self.local, self.pid = threading.local(), os.getpid()

    def __getstate__(self) -> tuple[int, Path]:
        return self.users, self.path

    def __setstate__(self, state: tuple[int, Path]) -> None:
        self.users, self.path = state
        self._forget()

    def __len__(self) -> int:
        return ENDLESS

    def _database(self) -> sqlite3.Connection:
        if self.pid != os.getpid():
            self._forget()  # SQLite's connections must not cross a fork
        if not hasattr(self.local, "database"):
            self.local.database = sqlite3.connect(f"file:{self.path}?mode=ro", uri=True)
        database: sqlite3.Connection = self.local.database
        return database

    def __getitem__(self, index: int) -> torch.Tensor:
        rows = self._database().execute(QUERY, (index * STRIDE % self.users,)).fetchall()
        return torch.tensor(rows, dtype=torch.float32)


def _write(path: Path, users: int) -> None:
    unfinished = path.with_suffix(f".{os.getpid()}")
    database = sqlite3.connect(unfinished)
    database.execute("PRAGMA journal_mode = OFF")
    database.execute("CREATE TABLE events (user INTEGER, seen INTEGER, kind INTEGER, value REAL)")
    database.executemany("INSERT INTO events VALUES (?, ?, ?, ?)", _events(users))
    database.execute("CREATE INDEX by_user ON events (user)")
    database.commit()
    database.close()
    unfinished.replace(path)


def _events(users: int) -> Iterator[tuple[int, int, int, float]]:
    """In the order of time, so that the events of one user lie scattered over the file."""
    rng = np.random.default_rng(0)
    for seen in range(EVENTS):
        kinds, values = rng.integers(0, 50, users).tolist(), rng.random(users).tolist()
        yield from zip(range(users), [seen] * users, kinds, values, strict=True)
