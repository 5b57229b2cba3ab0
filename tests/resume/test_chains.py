"""Runs that are resumed again and again, at places drawn at random: together they are one run that nobody stopped."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

import numpy as np
import pytest
import torch
from checkpoints import kept
from torch.utils.data import Dataset, IterableDataset, get_worker_info

import dpex
from dpex import DpexDataLoader

SIZE = 22
BATCH = 3
EPOCHS = 2
END = "the end of an epoch"
pytestmark = pytest.mark.filterwarnings("ignore:.*resuming must reload and discard:RuntimeWarning")


class Augmented(Dataset[Any]):
    def __len__(self) -> int:
        return SIZE

    def __getitem__(self, index: int) -> Any:
        return index, random.random(), np.random.rand(), torch.rand(()).item()


class Numbered(Augmented):
    def __getitem__(self, index: int) -> Any:
        return index


class Asynchronous(Augmented):
    async def __getitem__(self, index: int) -> Any:
        return index


class Plain(IterableDataset[Any]):
    """Its first worker has more samples than the second one."""

    num_shards = 2

    def __init__(self) -> None:
        self.at = self.begin = 0

    def samples(self) -> Iterator[int]:
        worker = get_worker_info()
        which, of = (worker.id, worker.num_workers) if worker else (0, 1)
        yield from (number for number in range(SIZE) if of == 1 or (number % 3 == 0) == (which == 1))

    def __iter__(self) -> Iterator[Any]:
        begin, self.begin = self.begin, 0
        for at, number in enumerate(self.samples(), 1):
            self.at = at
            if at > begin:
                yield number
        self.at = 0


class Stateful(Plain):
    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.begin = state["at"]


class Place:
    """An iterator with a state, of a dataset that has none."""

    def __init__(self, numbers: list[int]) -> None:
        self.numbers, self.at = numbers, 0

    def __iter__(self) -> Place:
        return self

    def __next__(self) -> int:
        if self.at == len(self.numbers):
            raise StopIteration
        self.at += 1
        return self.numbers[self.at - 1]

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


class OfPlaces(Plain):
    def __iter__(self) -> Any:
        return Place(list(self.samples()))


def refusing(samples: list[int]) -> list[int]:
    if 7 in samples:
        raise ValueError("a batch that cannot be made")
    return samples


def decoded(sample: int) -> list[Any]:
    return [sample, random.random()]


MAPS: dict[str, Callable[[], Any]] = {
    "map": Augmented,
    "async": Asynchronous,
    "cached": lambda: dpex.cached(Numbered()),
}
STREAMS: dict[str, Callable[[], Any]] = {"plain": Plain, "stateful": Stateful, "of a stateful iterator": OfPlaces}
DECODED: dict[str, Callable[[], Any]] = {
    "decoded plain": lambda: dpex.decode_in_workers(Plain(), decoded),
    "decoded stateful": lambda: dpex.decode_in_workers(Stateful(), decoded),
}
FAILING: dict[str, Callable[[], Any]] = {"plain, fails": Plain, "stateful, fails": Stateful}
DATASETS = MAPS | STREAMS | DECODED | FAILING
PLACES: dict[str, dict[str, Any]] = {
    "0": {"num_workers": 0},
    "2": {"num_workers": 2},
    "2, persistent": {"num_workers": 2, "persistent_workers": True},
    "2, a state for each batch": {"num_workers": 2, "worker_config": dpex.WorkerConfig(snapshot_every_n_steps=1)},
    "2, in any order": {"num_workers": 2, "in_order": False},
    "auto": {"num_workers": "auto"},
}
CASES = [
    *((kind, place, None) for kind in STREAMS for place in PLACES),
    *((kind, place, None) for kind in FAILING for place in ("0", "2, persistent")),
    *((kind, place, "batch") for kind in MAPS for place in ("0", "2, persistent")),
    *((kind, place, "batch") for kind in DECODED for place in ("2", "2, persistent", "auto")),
    *(("map", place, "worker") for place in ("2", "2, persistent", "2, a state for each batch")),
    *(("map", place, "batch") for place in ("2, in any order", "auto")),
]


def loader_of(kind: str, place: str, seeding: Any) -> DpexDataLoader[Any]:
    options = {"seeding": seeding} if seeding else {}
    options |= {"shuffle": True} if kind in MAPS else {}
    return DpexDataLoader(
        DATASETS[kind](),
        batch_size=BATCH,
        collate_fn=refusing if kind in FAILING else list,
        generator=torch.Generator().manual_seed(3),
        **PLACES[place],
        **options,
    )


def steps_of(loader: DpexDataLoader[Any]) -> Iterator[Any]:
    """What each call of ``next()`` gives, over the ends of epochs, without an end."""
    while True:
        iterator = iter(loader)
        found = None
        while found != END:
            try:
                found = next(iterator)
            except StopIteration:
                found = END
            except ValueError as error:
                found = type(error)
            yield found


def undisturbed(kind: str, place: str, seeding: Any) -> list[Any]:
    """What a run that nobody stops returns; ``END`` stands for the end of an epoch."""
    found: list[Any] = []
    with loader_of(kind, place, seeding) as loader:
        steps = steps_of(loader)
        while found.count(END) < EPOCHS:
            found.append(next(steps))
    return found


def in_any_order(found: list[Any]) -> list[Any]:
    """Samples of each epoch, sorted."""
    epochs: list[list[Any]] = [[]]
    for each in found:
        if each == END:
            epochs.append([])
        else:
            epochs[-1] += each
    return [sorted(epoch) for epoch in epochs]


def cut(runs: Iterator[tuple[DpexDataLoader[Any], int]]) -> list[Any]:
    """What runs return of which each takes so many steps, and resumes from the state that the former one left."""
    found: list[Any] = []
    state = None
    for loader, count in runs:
        with loader:
            if state is not None:
                loader.load_state_dict(state)
            steps = steps_of(loader)
            found += islice(steps, count)
            state = kept(loader.state_dict())
    return found


@pytest.mark.parametrize(("kind", "place", "seeding"), CASES)
def test_any_chain_of_resumed_runs_is_one_run(kind: str, place: str, seeding: Any) -> None:
    whole = undisturbed(kind, place, seeding)
    draws, counts = random.Random(f"{kind}, {place}, {seeding}"), [0]
    while sum(counts) < len(whole):
        counts.append(min(draws.choice((0, 1, 2, 3, 5, 7)), len(whole) - sum(counts)))
    found = cut((loader_of(kind, place, seeding), count) for count in counts)
    if "any order" in place:
        found, whole = in_any_order(found), in_any_order(whole)
    assert found == whole, f"runs of {counts} steps"


def test_runs_with_other_numbers_of_workers_are_one_run() -> None:
    whole = undisturbed("map", "0", "batch")
    runs = (("2", 2), ("0", 3), ("auto", 4), ("2, persistent", 2), ("0", len(whole) - 11))
    assert cut((loader_of("map", place, "batch"), count) for place, count in runs) == whole
