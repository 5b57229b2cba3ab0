"""Datasets with large states: no message of a worker has a limit, and snapshots do not take a worker's time."""

import gc
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from families import kill, worker_pids
from inspection import segments_of
from torch.utils.data import IterableDataset, get_worker_info
from workload import wait_as_work

from dpex import DpexDataLoader
from dpex.options import WorkerConfig
from dpex.worker.states import SnapshotPace

LARGE = 4 << 20
"""Bytes, of which a socket of packets takes a twentieth."""


class Buffer:
    """A map-style dataset that has a state for reasons of its own, as a module or a replay buffer has."""

    def __init__(self) -> None:
        self.storage = torch.zeros(LARGE, dtype=torch.uint8)

    def __len__(self) -> int:
        return 100

    def __getitem__(self, index: int) -> torch.Tensor:
        wait_as_work(0.001)
        return torch.tensor(index)

    def state_dict(self) -> dict[str, Any]:
        return {"storage": self.storage}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.storage = state["storage"]


class Shuffled(IterableDataset[torch.Tensor]):
    """A stream with a shuffle buffer, which is a part of its state."""

    def __init__(self) -> None:
        self.given = 0
        self.buffer = bytes(LARGE)

    def __iter__(self) -> Iterator[torch.Tensor]:
        info = get_worker_info()
        assert info is not None
        while self.given < 100:
            self.given += 1
            wait_as_work(0.001)
            yield torch.tensor(1000 * info.id + self.given)

    def state_dict(self) -> dict[str, Any]:
        return {"given": self.given, "buffer": self.buffer}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.given = state["given"]
        assert len(state["buffer"]) == LARGE


@pytest.mark.parametrize(
    "options", [{}, {"seeding": "batch"}, {"worker_config": WorkerConfig(snapshot_every_n_steps=1)}], ids=str
)
@pytest.mark.parametrize("kind", [Buffer, Shuffled])
def test_each_batch_comes_once(kind: Any, options: dict[str, Any]) -> None:
    with DpexDataLoader(kind(), batch_size=4, num_workers=2, **options) as loader:
        got = sorted(torch.cat(list(loader)).tolist())
        assert loader.stats().deaths == 0
    streams = sorted([*range(1, 101), *range(1001, 1101)])
    assert got == (list(range(100)) if kind is Buffer else streams)


@pytest.mark.filterwarnings("ignore:DataLoader worker:RuntimeWarning")
def test_a_large_stream_state_survives_a_death_and_a_new_run() -> None:
    with DpexDataLoader(
        Shuffled(), batch_size=4, num_workers=2, worker_config=WorkerConfig(snapshot_every_n_steps=1)
    ) as loader:
        iterator = iter(loader)
        got = [next(iterator) for _ in range(6)]
        kill(worker_pids(iterator, 2)[0])
        got += [next(iterator) for _ in range(6)]
        state = loader.state_dict()
        assert loader.stats().deaths == 1
    with DpexDataLoader(Shuffled(), batch_size=4, num_workers=2) as later:
        later.load_state_dict(state)
        got += list(later)
    assert sorted(torch.cat(got).tolist()) == sorted([*range(1, 101), *range(1001, 1101)])


def test_slots_of_states_are_given_back() -> None:
    with DpexDataLoader(
        Buffer(), batch_size=4, num_workers=1, worker_config=WorkerConfig(snapshot_every_n_steps=1)
    ) as loader:
        iterator = iter(loader)
        for _ in iterator:
            pass
        gc.collect()
        for _ in range(2):
            for _ in loader:
                pass
        largest = max(entry.size for entry in segments(loader))
        assert sum(entry.size for entry in segments(loader)) <= 4 * largest


def segments(loader: Any) -> list[Any]:
    iterator = iter(loader)
    next(iterator)
    return [segment.spec for segment in segments_of(iterator)]


def test_the_longer_a_snapshot_takes_the_less_often_it_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr("dpex.worker.states.monotonic", lambda: now[0])
    pace = SnapshotPace(None)
    taken = 0
    for _ in range(1000):
        now[0] += 0.1
        if pace.is_due(0, 1):
            taken += 1
            pace.took(0.2)
    assert taken == 10, "a snapshot of 0.2 s in each 10 s"
    pace = SnapshotPace(3)
    pace.took(100.0)
    assert [pace.is_due(0, 1) for _ in range(6)] == [False, False, True, False, False, True]
