"""Streams in a later run or after the death of their worker: they go on as they would have."""

from __future__ import annotations

import os
import random
import re
import signal
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from checkpoints import loaded, saved
from families import is_alive
from inspection import iterator_of, reader_of, template_pid, workers_of
from torch.utils.data import IterableDataset, get_worker_info
from waiting import until

from dpex import DpexDataLoader, WorkerDiedError, decode_in_workers
from dpex.options import WorkerConfig

LENGTH = 60
TEMPLATE_ENDED = "the process that starts dpex's local workers ended, and they with it; starting anew"
WORKER_KILLED = (
    "DataLoader worker (pid N) is killed by signal: Killed (the kernel's out-of-memory killer sends this signal too). "
    "Its N batches will be made again. Training continues."
)
pytestmark = pytest.mark.filterwarnings("ignore:.*Training continues:RuntimeWarning")


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
        dataset, batch_size=4, num_workers=2, collate_fn=list, generator=torch.Generator().manual_seed(seed), **options
    )


def kill_worker(iterator: Any, number: int) -> None:
    os.kill(workers_of(iterator)[number].pid, signal.SIGKILL)


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


@pytest.mark.parametrize("killed", ["workers", "all"])
def test_a_persistent_stream_begins_anew_after_all_were_killed(killed: str) -> None:
    with loader_of(Plain(), persistent_workers=True) as loader:
        first = list(loader)
        iterator = iterator_of(loader)
        pids = [worker.pid for worker in workers_of(iterator)]
        for pid in [*([template_pid(iterator)] if killed == "all" else []), *pids]:
            os.kill(pid, signal.SIGKILL)
        until(lambda: not any(is_alive(pid) for pid in pids))
        with pytest.warns(RuntimeWarning) as said:
            second = list(loader)
    assert [[sample[:3] for sample in batch] for batch in second] == [[s[:3] for s in batch] for batch in first]
    texts = {re.sub(r"[0-9]+", "N", str(one.message)) for one in said}
    assert texts == {TEMPLATE_ENDED if killed == "all" else WORKER_KILLED}


@pytest.mark.smoke
def test_a_stream_survives_a_death_in_a_second_persistent_epoch() -> None:
    with loader_of(Stateful(), persistent_workers=True) as loader:
        undisturbed = [list(loader), list(loader)]
    assert undisturbed[1][0][0][0] == 1, "the dataset counts its epochs"
    with loader_of(Stateful(), persistent_workers=True) as loader:
        first, iterator = list(loader), iter(loader)
        batches = [next(iterator) for _ in range(3)]
        kill_worker(iterator, 1)
        assert [first, batches + list(iterator)] == undisturbed


def test_a_resumed_stream_survives_a_death_before_a_new_state() -> None:
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


# -- streams that some workers read and others decode ------------------------------------------------------------------


EACH = 9


class Shards(IterableDataset[Any]):
    """Two shards, the second one longer; every sample has a draw of the worker that reads it."""

    num_shards = 2

    def __init__(self) -> None:
        self.at = self.begin = 0

    def __iter__(self) -> Iterator[Any]:
        worker = get_worker_info()
        assert worker is not None
        begin, self.begin = self.begin, 0
        for self.at in range(begin + 1, EACH + 4 * worker.id + 1):
            yield worker.id, self.at, random.random()
        self.at = 0


class StatefulShards(Shards):
    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.begin = state["at"]


def decoded(sample: Any) -> Any:
    """It has a draw of the batch, too."""
    return [*sample, random.random()]


def split_loader(dataset: Any, decoders: int = 1, **options: Any) -> DpexDataLoader[Any]:
    given = {"seeding": "batch", "generator": torch.Generator().manual_seed(3), "collate_fn": list} | options
    loader = DpexDataLoader(decode_in_workers(dataset, decoded), batch_size=2, num_workers=2, **given)
    loader.resize(local=decoders)
    return loader


def recorded(loader: Any) -> tuple[list[Any], list[bytes]]:
    """Batches, the state before each and after the last, and that at the end of the epoch."""
    batches, states = [], [saved(loader.state_dict())]
    for batch in loader:
        batches.append(batch)
        states.append(saved(loader.state_dict()))
    return batches, [*states, saved(loader.state_dict())]


@pytest.mark.parametrize("dataset", [Shards, StatefulShards])
def test_the_rest_comes_once_whoever_decodes(dataset: Any) -> None:
    with split_loader(dataset(), worker_config=WorkerConfig(snapshot_every_n_steps=2)) as loader:
        batches, states = recorded(loader)
    assert len(batches) == 5 + 7
    for at, decoders in ((0, 2), (3, 3), (11, 2)):  # 11: the shorter shard has ended
        with split_loader(dataset(), decoders) as loader:
            loader.load_state_dict(loaded(states[at]))
            assert list(loader) == batches[at:]
    with split_loader(dataset()) as loader:
        loader.load_state_dict(loaded(states[-1]))
        following = list(loader)
    assert len(following) == 12
    assert following != batches, "the next epoch has draws of its own"


@pytest.mark.filterwarnings("ignore:.*Training continues:RuntimeWarning")
def test_a_stream_with_state_survives_its_readers_death() -> None:
    with split_loader(StatefulShards()) as loader:
        undisturbed = list(loader)
    with split_loader(StatefulShards(), prefetch_factor=1) as loader:
        iterator = iter(loader)
        batches = [next(iterator), next(iterator)]
        os.kill(workers_of(reader_of(iterator))[0].pid, signal.SIGKILL)
        assert batches + list(iterator) == undisturbed


def test_out_of_order_there_is_no_position() -> None:
    with split_loader(Shards(), in_order=False) as loader:
        next(iter(loader))
        state = loader.state_dict()
    with pytest.warns(RuntimeWarning, match=r"begins anew: with in_order=False .* give in_order=True"):
        split_loader(Shards(), in_order=False).load_state_dict(state)
