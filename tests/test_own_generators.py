"""Random generators that a dataset has of its own: which are found, and what is drawn from them."""

from __future__ import annotations

import random
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from dpex import DpexDataLoader, decode_in_workers
from dpex.worker.own_generators import OwnGenerators


class Jitter:
    """A transform with generators that every copy has; one belongs to the class, as MONAI's does."""

    shared = np.random.RandomState(2)

    def __init__(self) -> None:
        self.rng = random.Random(1)
        self.more = [
            np.random.default_rng(3),
            np.random.Generator(np.random.MT19937(4)),
            np.random.RandomState(np.random.PCG64(5)),
        ]
        self.torch = torch.Generator().manual_seed(6)

    def __call__(self, value: float) -> list[float]:
        draws = [self.rng.gauss(0, 1), self.shared.randn(), torch.rand((), generator=self.torch).item()]
        return [value, *draws, *(one.standard_normal() for one in self.more)]


class Jittered:
    def __init__(self, transform: Any) -> None:
        self.transform = transform

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor(self.transform(float(index)), dtype=torch.float64)


def drawn(dataset: Any, workers: int) -> list[tuple[float, ...]]:
    torch.manual_seed(5)
    with DpexDataLoader(dataset, 3, num_workers=workers, seeding="batch") as loader:
        return [tuple(sample[1:].tolist()) for _ in range(2) for batch in loader for sample in batch]


def test_draws_are_distinct_and_the_same_wherever_batches_are_made() -> None:
    dataset = Jittered(Jitter())
    before = OwnGenerators(dataset, None).states()
    here, there = drawn(dataset, 0), drawn(dataset, 2)
    assert here == there
    assert all(len(set(column)) == 24 for column in zip(*here, strict=True))
    after = OwnGenerators(dataset, None).states()
    assert str(after) == str(before), "the training process has its generators back"


def test_what_decodes_a_stream_is_seeded_too() -> None:
    jitter = Jitter()
    dataset = decode_in_workers(range(12), lambda value: torch.tensor(jitter(value)))
    one, two = drawn(dataset, 1), drawn(dataset, 1)
    assert one == two
    assert len(set(one)) == 24
    assert not OwnGenerators(decode_in_workers([random.Random(1)], float), None), "a stream draws as it likes"


def test_with_the_random_state_of_workers_nothing_is_seeded() -> None:
    torchs = list(DataLoader(Jittered(Jitter()), 3, num_workers=2))
    with DpexDataLoader(Jittered(Jitter()), 3, num_workers=2) as loader:
        assert [batch.tolist() for batch in loader] == [batch.tolist() for batch in torchs]


def use(rng: random.Random) -> Any:
    return lambda value: rng.random() + value


@pytest.mark.parametrize(
    ("transform", "name"),
    [
        ([float, random.Random()], "Jittered.transform[1]"),
        ({"image": random.Random()}, "Jittered.transform['image']"),
        (partial(map, random.Random()), "Jittered.transform.args[0]"),
        (random.Random().random, None),
        (partial(use, rng=random.Random()), "Jittered.transform.keywords['rng']"),
        (use(random.Random()), "Jittered.transform.rng"),
        (torch.nn.Sequential(torch.nn.Linear(1, 1)), None),
        (list(range(100_000)), None),
        (np.random.mtrand._rand, None),  # type: ignore[attr-defined]
        (random.SystemRandom(), None),
    ],
    ids=lambda one: one if isinstance(one, str) else "",
)
def test_where_generators_are_found(transform: Any, name: str | None) -> None:
    assert list(OwnGenerators(Jittered(transform), None).states()) == ([] if name is None else [name])
