"""Who draws which random numbers, when: this process's generators, the loader's, and those in the workers."""

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from inspection import base_seed_of
from torch.utils.data import (
    BatchSampler,
    RandomSampler,
    Sampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
    default_collate,
)

from .datasets import Counting, Of, Stream, augmented, augmented_element, epochs, take
from .harness import PASSES, WORKERS, Loader, drain, parity, random_state

MAP = Counting(8)


def sampler_of(kind: str) -> dict[str, Any]:
    kinds: dict[str, Callable[[], dict[str, Any]]] = {
        "sequential": dict,
        "shuffle": lambda: {"shuffle": True},
        "random with its own generator": lambda: {
            "sampler": RandomSampler(MAP, generator=torch.Generator().manual_seed(1))
        },
        "random with replacement": lambda: {"sampler": RandomSampler(MAP, replacement=True, num_samples=40)},
        "weighted": lambda: {"sampler": WeightedRandomSampler([1.0, 2.0, 3.0], 9)},
        "subset": lambda: {"sampler": SubsetRandomSampler([1, 3, 5])},
        "batches": lambda: {"batch_sampler": BatchSampler(RandomSampler(MAP), 3, False), "batch_size": 1},
        "single": lambda: {"batch_size": None, "shuffle": True},
        "own": lambda: {"sampler": Tossing()},
    }
    return {"batch_size": 2, **kinds[kind]()}


class Tossing(Sampler[int]):
    """Draws from all three global generators while it runs."""

    def __iter__(self) -> Any:
        for _ in range(6):
            yield (random.randrange(2) + int(np.random.randint(2)) + int(torch.randint(2, ()))) % 8

    def __len__(self) -> int:
        return 6


SAMPLERS = (
    "sequential",
    "shuffle",
    "random with its own generator",
    "random with replacement",
    "weighted",
    "subset",
    "batches",
    "single",
    "own",
)


HERE = [(kind, seeded, 0) for kind in SAMPLERS for seeded in (False, True)]
BESIDE_WORKERS = [(kind, number % 2 == 0, 2) for number, kind in enumerate(SAMPLERS)]


@pytest.mark.parametrize(("kind", "seeded", "workers"), [*HERE, *BESIDE_WORKERS])
@parity
def test_draws_in_this_process(cls: Loader, kind: str, seeded: bool, workers: int) -> Any:
    """The state of every generator after each step of two epochs."""
    generator = torch.Generator().manual_seed(5) if seeded else None
    seen: list[Any] = []

    def note(item: Any) -> None:
        seen.append((item, random_state(), generator and generator.get_state()))

    note("start")
    loader = cls(MAP, num_workers=workers, generator=generator, **sampler_of(kind))
    note("constructed")
    for _ in range(2):
        iterator = iter(loader)
        note("iter")
        for batch in iterator:
            note(batch)
        note("end")
    return seen


@parity
def test_draws_of_persistent_epochs(cls: Loader) -> Any:
    """One base seed for all epochs; the sampler draws for each."""
    generator = torch.Generator().manual_seed(5)
    loader = cls(MAP, num_workers=2, shuffle=True, generator=generator, persistent_workers=True)
    seen = []
    for _ in range(3):
        iterator = iter(loader)
        seen.append((base_seed_of(iterator), generator.get_state(), list(iterator), generator.get_state()))
    return seen


@WORKERS
@parity
def test_draws_of_a_stream(cls: Loader, workers: int) -> Any:
    generator = torch.Generator().manual_seed(5)
    plain, seeded = (cls(Stream(augmented_element, 3), num_workers=workers, generator=g) for g in (None, generator))
    return [epochs(plain, 2), random_state(), epochs(seeded, 2), generator, random_state()]


HOW: dict[str, dict[str, Any]] = {
    "batched": {"batch_size": 2},
    "shuffled": {"batch_size": 3, "shuffle": True},
    "persistent": {"batch_size": 2, "persistent_workers": True},
    "prefetch 1": {"batch_size": 2, "prefetch_factor": 1},
    "seeded": {"batch_size": 2, "shuffle": True, "generator": 11},
}


@pytest.mark.parametrize(("how", "workers"), [*((how, 2) for how in HOW), ("shuffled", 1), ("persistent", 3)])
@parity
def test_augmentations_in_workers(cls: Loader, how: str, workers: int) -> Any:
    """random, numpy and torch in worker w go on from their seeds, bit for bit, over two epochs."""
    options = dict(HOW[how])
    if "generator" in options:
        options["generator"] = torch.Generator().manual_seed(options["generator"])
    return epochs(cls(Of(augmented, 9), num_workers=workers, **options), 2)


@pytest.mark.parametrize(("workers", "persistent"), [(1, False), (3, False), (2, True)])
@parity
def test_augmentations_of_streams(cls: Loader, workers: int, persistent: bool) -> Any:
    loader = cls(Stream(augmented_element, 5, 2, 7), 2, num_workers=workers, persistent_workers=persistent)
    return epochs(loader, 2)


@parity
def test_augmentations_in_this_process(cls: Loader) -> Any:
    loader = cls(Of(augmented, 5), batch_size=2, shuffle=True)
    return [epochs(loader, 2), random_state()]


@parity
def test_augmentations_of_a_persistent_epoch_that_was_broken_off(cls: Loader) -> Any:
    """The work in flight is done before the next epoch begins, and its draws count."""
    loader = cls(Of(augmented, 8), num_workers=1, prefetch_factor=2, persistent_workers=True)
    return [take(iter(loader), 2), list(loader), list(loader)]


def draw_once(worker: int) -> None:
    random.random(), np.random.rand(), torch.rand(1)


def reseed(worker: int) -> None:
    random.seed(worker)
    np.random.seed(worker)
    torch.manual_seed(100 + worker)


@pytest.mark.parametrize(("init", "persistent"), [(draw_once, True), (reseed, False)])
@parity
def test_draws_in_worker_init_fn(cls: Loader, init: Any, persistent: bool) -> Any:
    """Seeds are set before it is called, and what it leaves is what the dataset finds."""
    return epochs(cls(Of(augmented, 6), num_workers=2, worker_init_fn=init, persistent_workers=persistent), 2)


def noisy_collate(batch: list[Any]) -> Any:
    return {"batch": default_collate(batch), "noise": augmented(0)}


@WORKERS
@parity
def test_draws_in_the_collate_function(cls: Loader, workers: int) -> Any:
    return epochs(cls(Of(augmented, 7), 2, num_workers=workers, collate_fn=noisy_collate), 2)


def fail_sometimes(index: int) -> dict[str, Any]:
    drawn = augmented(index)
    if index % 3 == 1:
        raise ValueError(f"item {index}")
    return drawn


@WORKERS
@parity
def test_draws_before_an_error_count(cls: Loader, workers: int) -> Any:
    return drain(iter(cls(Of(fail_sometimes, 9), num_workers=workers)))


@WORKERS
@parity
def test_draws_in_the_training_process_do_not_affect_workers(cls: Loader, workers: int) -> Any:
    return [(batch, augmented(0)) for batch in cls(Of(augmented, 6), num_workers=workers)]


class NewStyle(Counting):
    """Generators of its own, made in the constructor: each worker gets a copy in the same state."""

    def __init__(self, length: int) -> None:
        super().__init__(length)
        self.rng = np.random.default_rng(3)
        self.torch_rng = torch.Generator().manual_seed(3)

    def __getitem__(self, index: int) -> Any:
        return self.rng.random(), torch.rand(1, generator=self.torch_rng)


@PASSES
@parity
def test_a_dataset_s_own_generators(cls: Loader, workers: int, persistent: bool) -> Any:
    return epochs(cls(NewStyle(6), num_workers=workers, persistent_workers=persistent), 2)


def distributions(index: int) -> Any:
    return (
        torch.randn(3),
        torch.randperm(5),
        torch.nn.functional.dropout(torch.ones(6)),
        np.random.randn(2),
        np.random.permutation(4),
        random.gauss(0, 1),
        random.sample(range(50), 3),
    )


@WORKERS
@parity
def test_all_kinds_of_draws(cls: Loader, workers: int) -> Any:
    """`random.gauss` and `numpy.random.randn` keep a second value in their state."""
    return epochs(cls(Of(distributions, 7), num_workers=workers, collate_fn=list), 2)
