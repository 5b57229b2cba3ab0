"""Streams whose dataset has a state: they survive the death of their worker, move, and end as they would have."""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from driver import Driver
from torch.utils.data import IterableDataset, get_worker_info

from dpex import DpexDataLoader, WorkerDiedError
from dpex.options import WorkerConfig

LENGTH = 60
pytestmark = pytest.mark.filterwarnings("ignore:.*The epoch goes on:RuntimeWarning")


class Plain(IterableDataset[Any]):
    """Every sample has a draw, so that one that is made with another random state is seen."""

    def __init__(self) -> None:
        self.at = self.begin = self.epoch = 0

    def __iter__(self) -> Iterator[Any]:
        worker = get_worker_info()
        begin, self.begin = self.begin, 0
        for at in range(begin, LENGTH):
            self.at = at + 1
            yield self.epoch, worker.id if worker else 0, at, random.random()
        self.at, self.epoch = 0, self.epoch + 1


class Stateful(Plain):
    def state_dict(self) -> dict[str, int]:
        return {"at": self.at, "epoch": self.epoch}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.begin, self.epoch = state["at"], state["epoch"]


class OwnIterator(IterableDataset[Any]):
    """It is its own iterator, as some datasets are."""

    def __init__(self) -> None:
        self.at = 0

    def __iter__(self) -> OwnIterator:
        return self

    def __next__(self) -> Any:
        if self.at >= LENGTH:
            raise StopIteration
        self.at += 1
        return self.at, random.random()

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


def loader_of(dataset: Any, seed: int = 0, **options: Any) -> DpexDataLoader[Any]:
    return DpexDataLoader(
        dataset,
        batch_size=4,
        num_workers=2,
        collate_fn=list,
        generator=torch.Generator().manual_seed(seed),
        **options,
    )


def kill_worker(iterator: Any, number: int) -> None:
    os.kill(iterator._workers[number].pid, signal.SIGKILL)


def drain(iterator: Any, into: list[Any]) -> None:
    for batch in iterator:
        into.append(batch)  # noqa: PERF402  (what came before an error stays)


@pytest.mark.parametrize("every", [None, 1])
@pytest.mark.parametrize("dataset", [Stateful, OwnIterator])
def test_a_stream_with_a_state_survives_the_death_of_its_worker(dataset: Any, every: int | None) -> None:
    with loader_of(dataset()) as loader:
        undisturbed = list(loader)
    with loader_of(dataset(), worker_config=WorkerConfig(snapshot_every_n_steps=every)) as loader:
        iterator = iter(loader)
        batches = [next(iterator) for _ in range(5)]
        kill_worker(iterator, 0)
        batches += [next(iterator) for _ in range(5)]
        kill_worker(iterator, 1)
        assert batches + list(iterator) == undisturbed
        assert loader.stats().deaths == 2


def test_a_stream_without_a_state_ends_with_its_worker() -> None:
    with loader_of(Plain(), prefetch_factor=1) as loader:
        iterator = iter(loader)
        batches = [next(iterator) for _ in range(4)]
        kill_worker(iterator, 0)
        with pytest.raises(WorkerDiedError, match="it has no state to restart from"):
            drain(iterator, batches)
        assert sum(batch[0][1] == 1 for batch in batches + list(iterator)) == LENGTH / 4


@pytest.mark.smoke
def test_a_stream_survives_in_the_second_epoch_of_persistent_workers() -> None:
    with loader_of(Stateful(), persistent_workers=True) as loader:
        undisturbed = [list(loader), list(loader)]
    assert undisturbed[1][0][0][0] == 1, "the dataset counts its epochs"
    with loader_of(Stateful(), persistent_workers=True) as loader:
        first, iterator = list(loader), iter(loader)
        batches = [next(iterator) for _ in range(3)]
        kill_worker(iterator, 1)
        assert [first, batches + list(iterator)] == undisturbed


def test_a_resumed_stream_survives_a_death_before_it_has_told_anything_new() -> None:
    with loader_of(Stateful()) as loader:
        undisturbed = list(loader)
    with loader_of(Stateful()) as loader:
        iterator = iter(loader)
        for _ in range(7):
            next(iterator)
        state = loader.state_dict()
    with loader_of(Stateful()) as loader:
        loader.load_state_dict(state)
        iterator = iter(loader)
        batches = [next(iterator), next(iterator)]
        kill_worker(iterator, 0)
        assert batches + list(iterator) == undisturbed[7:]


def _until_nine(work: Any) -> Any:
    if work.state >= 9:
        raise StopIteration
    return work


def test_streams_stay_where_they_are() -> None:
    driver = Driver(logicals=2, iterable=True, local=2, make=_until_nine)
    driver.begin(count=100)
    driver.work()
    driver.resize(local=0, remote=2)
    assert [(work.logical, work.state) for work in driver.finish()] == [(k % 2, k // 2) for k in range(18)]
    assert "remote" not in driver.pools
