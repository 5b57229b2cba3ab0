"""Small datasets and samplers for the scripts; at module level, so that every start method can send them."""

import itertools
import os
import random
import tempfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from families import Of
from torch.utils.data import IterableDataset, Sampler, get_worker_info
from waiting import until

GATE_GIVE_UP_S = 60.0


class Counting(Of):
    """Map-style: item i is i."""

    def __init__(self, length: int) -> None:
        super().__init__(int, length)


class Bulk(Of):
    """Map-style with `__getitems__`: each item tells how many were fetched with it."""

    def __getitems__(self, indices: list[int]) -> list[Any]:
        return [(len(indices), self.make(i)) for i in indices]


class Stream(IterableDataset[Any]):
    """Iterable: worker w yields `make(w, k)` for k below sizes[w] (one size: the same for all)."""

    def __init__(self, make: Callable[[int, int], Any], *sizes: int) -> None:
        self.make = make
        self.sizes = sizes

    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info()
        worker = info.id if info else 0
        return (self.make(worker, k) for k in range(self.sizes[worker % len(self.sizes)]))


class SizedStream(Stream):
    def __init__(self, make: Callable[[int, int], Any], reported: int, *sizes: int) -> None:
        super().__init__(make, *sizes)
        self.reported = reported

    def __len__(self) -> int:
        return self.reported

    def __repr__(self) -> str:
        return f"SizedStream({self.reported})"


class Failing(Of):
    """Map-style: item i is i, but `fail()` is called for the indices `at`."""

    def __init__(self, fail: Callable[[], None], length: int, at: Iterable[int]) -> None:
        super().__init__(int, length)
        self.fail = fail
        self.at = frozenset(at)

    def __getitem__(self, index: Any) -> Any:
        if index in self.at:
            self.fail()
        return super().__getitem__(index)


class Recording(Sampler[Any]):
    """A (batch) sampler over `indices` that counts how often it was started and how much was drawn."""

    def __init__(self, indices: Iterable[Any]) -> None:
        self.indices = list(indices)
        self.started = 0
        self.drawn = 0

    def __iter__(self) -> Iterator[Any]:
        self.started += 1
        for index in self.indices:
            self.drawn += 1
            yield index

    def __len__(self) -> int:
        return len(self.indices)

    @property
    def seen(self) -> tuple[int, int]:
        return self.started, self.drawn


class Gate:
    """A door between processes, kept as a file: workers wait in front of it until the script opens it."""

    def __init__(self) -> None:
        handle, name = tempfile.mkstemp(prefix="parity-gate-")
        os.close(handle)
        self.path = Path(name)

    def open(self) -> None:
        self.path.unlink(missing_ok=True)

    def wait(self) -> None:
        until(lambda: not self.path.exists(), GATE_GIVE_UP_S, told=lambda: "the script to open the gate")


class Gated(Of):
    """Map-style: gives (worker id, index); the indices `at` wait until the gate is open."""

    def __init__(self, length: int, at: Iterable[int]) -> None:
        super().__init__(int, length)
        self.gate = Gate()
        self.at = frozenset(at)

    def __getitem__(self, index: Any) -> Any:
        if index in self.at:
            self.gate.wait()
        return worker_id(), index


class GatedStream(IterableDataset[Any]):
    """Iterable: two workers share range(length) in halves; worker 0 waits in front of the gate."""

    def __init__(self, length: int) -> None:
        self.length = length
        self.gate = Gate()

    def __iter__(self) -> Iterator[Any]:
        half = self.length // 2
        for k in range(half):
            if worker_id() == 0:
                self.gate.wait()
            yield worker_id(), worker_id() * half + k


def worker_id() -> int:
    info = get_worker_info()
    return -1 if info is None else info.id


def augmented(_: Any) -> dict[str, Any]:
    """One draw from each random source that torch seeds in a worker."""
    return {
        "random": random.random(),
        "numpy": np.random.rand(2),
        "torch": torch.rand(2),
        "torch seed": torch.initial_seed(),
    }


def augmented_element(worker: int, k: int) -> dict[str, Any]:
    return {"place": (worker, k), **augmented(k)}


def as_tensor(index: int) -> torch.Tensor:
    return torch.arange(6, dtype=torch.float32).reshape(2, 3) + 10 * index


def pair(worker: int, k: int) -> tuple[int, int]:
    return worker, k


def as_is(batch: Any) -> Any:
    """A collate function that leaves everything as it is."""
    return batch


def epochs(loader: Any, count: int) -> list[list[Any]]:
    return [list(loader) for _ in range(count)]


def take(iterator: Iterator[Any], count: int) -> list[Any]:
    return list(itertools.islice(iterator, count))
