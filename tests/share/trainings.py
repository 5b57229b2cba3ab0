"""Trainings that share batches, each a process of its own that does what it is told, and the data that they read."""

import contextlib
import multiprocessing
import os
import traceback
import warnings
from collections.abc import Mapping
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.utils.data import Dataset
from waiting import PATIENCE_S

from dpex import DpexDataLoader
from dpex.measure.pool_reading import PoolReading
from dpex.options import WorkerConfig

LARGE = 3000
"""Numbers in a sample: too many for a message, so that batches lie in slots."""
SHARE = f"sweep {os.getpid()}"
"""No other run of these tests shares with this one."""
SAMPLES = 48
BATCH = 4


class Noted(Dataset[torch.Tensor]):
    """Sample ``index``: float64 (``extent``,): the index and random numbers. Each call is noted in a file: the index,
    the worker and its parent."""

    def __init__(self, notes: Path, length: int = SAMPLES, extent: int = LARGE, *, fails_at: int = -1) -> None:
        self.notes = notes
        self.length = length
        self.extent = extent
        self.fails_at = fails_at

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> torch.Tensor:
        with self.notes.open("a") as file:
            file.write(f"{index} {os.getpid()} {os.getppid()}\n")
        if index == self.fails_at:
            raise LookupError(f"no sample {index}")
        sample = torch.rand(self.extent, dtype=torch.float64)
        sample[0] = index
        return sample


class Note(NamedTuple):
    """A call of a dataset."""

    index: int
    worker: int
    template: int


def notes_in(path: Path) -> list[Note]:
    """All calls so far."""
    return [Note(*map(int, line.split())) for line in path.read_text().splitlines()] if path.exists() else []


class Seen(NamedTuple):
    """A batch: which samples, and all of their numbers together."""

    indices: tuple[int, ...]
    total: float


def seen(batch: torch.Tensor) -> Seen:
    """What is remembered of a batch, which is written over, as training might."""
    found = Seen(tuple(int(index) for index in batch[:, 0]), float(batch.sum()))
    batch.fill_(-1.0)
    return found


def loader_of(dataset: Dataset[Any], seed: int = 1, **options: Any) -> DpexDataLoader[Any]:
    """A shuffled loader whose order and random numbers depend on the seed."""
    torch.manual_seed(seed)
    options = {
        "num_workers": 2,
        "worker_config": WorkerConfig(share=SHARE),
        "shuffle": True,
        "seeding": "batch",
        **options,
    }
    return DpexDataLoader(dataset, batch_size=BATCH, **options)


def alone(dataset: Dataset[Any], epochs: int = 1, **options: Any) -> list[Seen]:
    """What a training gets that shares with nobody."""
    with loader_of(dataset, **{**options, "worker_config": WorkerConfig(share=None), "num_workers": 0}) as loader:
        return [seen(batch) for _ in range(epochs) for batch in loader]


class Training:
    """A training in a process of its own. ``environ``: what a launcher sets."""

    def __init__(
        self, dataset: Dataset[Any], epochs: int = 1, environ: Mapping[str, str] | None = None, **options: Any
    ) -> None:
        context = multiprocessing.get_context("fork")
        self._ours, theirs = context.Pipe()
        self.process = context.Process(
            target=_train, args=(theirs, self._ours, dataset, epochs, environ or {}, options)
        )
        self.process.start()
        theirs.close()
        self._said: list[str] = []

    def begin(self, count: int = -1) -> None:
        """Let it take that many batches; -1: all that are left, after which it ends."""
        self._ours.send(count)

    def end(self) -> list[Seen]:
        """What it got since it was told to begin. Raises what it raised."""
        assert self._ours.poll(4 * PATIENCE_S), "the training does not get on"
        got, self._said, self.shared, self.sharing_ranks, error = self._ours.recv()
        if error is not None:
            raise error
        return got

    @property
    def said_of_share(self) -> list[str]:
        """Its warnings about what it shares."""
        return [text for text in self._said if text.startswith("share=")]

    def take(self, count: int = -1) -> list[Seen]:
        """Both."""
        self.begin(count)
        return self.end()

    def kill(self) -> None:
        """SIGKILL."""
        self.process.kill()
        self.process.join(PATIENCE_S)

    def close(self) -> None:
        """End it, if it has not ended."""
        with contextlib.suppress(OSError):  # it was killed
            self._ours.send(None)
        self.process.join(PATIENCE_S)
        if self.process.is_alive():
            self.kill()


def _train(
    conn: Connection, other: Connection, dataset: Any, epochs: int, environ: Mapping[str, str], options: dict[str, Any]
) -> None:
    other.close()
    os.environ |= environ
    with warnings.catch_warnings(record=True) as caught, loader_of(dataset, **options) as loader:
        warnings.simplefilter("always")
        batches = (batch for _ in range(epochs) for batch in loader)
        pool, sharing_ranks = PoolReading(), 0  # the most that any batch saw: a rank that has ended is counted no more
        while True:
            count = conn.recv()
            if count is None:
                return
            got: list[Seen] = []
            error: Exception | None = None
            try:
                for batch in batches:
                    got.append(seen(batch))
                    pool = loader.stats().pools.get("local", pool)
                    sharing_ranks = max(sharing_ranks, pool.sharing_ranks)
                    if len(got) == count:
                        break
            except Exception as raised:
                error = raised
                error.__cause__ = None
                traceback.clear_frames(raised.__traceback__)
            pool = loader.stats().pools.get("local", PoolReading())
            said = [str(warning.message) for warning in caught]
            conn.send((got, said, pool.shared, sharing_ranks, error))
