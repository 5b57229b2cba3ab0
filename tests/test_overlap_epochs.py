"""``overlap_epochs``: the first batches of the next epoch are made ahead, and all batches stay what they were."""

from __future__ import annotations

import gc
import mmap
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import numpy as np
import pytest
import torch
from families import descriptors, is_alive, seeded, worker_pids
from test_forked_trainer import in_a_child
from torch.utils.data import (
    BatchSampler,
    Dataset,
    DistributedSampler,
    RandomSampler,
    Sampler,
    SequentialSampler,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)
from waiting import until

from dpex import DpexDataLoader, WorkerConfig, cached
from dpex.engine.next_epoch import MISSES
from dpex.stats import LoaderStats

pytestmark = [pytest.mark.timeout(120), pytest.mark.filterwarnings("ignore:worker .* was killed:RuntimeWarning")]
SAMPLES = 24
EPOCHS = 4
Between = Callable[[Any, int], None]
"""What a training does to (loader, epoch) before each epoch but the first."""


class Noisy(Dataset[torch.Tensor]):
    """Index, a scale that a training may change, and a random number."""

    def __init__(self, samples: int = SAMPLES) -> None:
        self.samples = samples
        self.scale = 1.0

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor([float(np.sum(index)), self.scale, torch.rand(()).item()])


class EveryOther(Sampler[int]):
    """A sampler that counts how often it was iterated."""

    def __init__(self) -> None:
        self.begun = 0

    def __len__(self) -> int:
        return SAMPLES // 2

    def __iter__(self) -> Iterator[int]:
        self.begun += 1
        return iter(range(self.begun % 2, SAMPLES, 2))


def nothing(_: Any, __: int) -> None:
    """Do nothing between two epochs."""


def trained(
    overlap: bool,
    make_sampler: Callable[[Any], dict[str, Any]],
    between: Between = nothing,
    *,
    epochs: int = EPOCHS,
    **options: Any,
) -> tuple[list[torch.Tensor], LoaderStats]:
    """Return the batches of a training, the random numbers after it, and the loader's figures."""
    torch.manual_seed(3)
    dataset = Noisy()
    options = {"batch_size": 4, "num_workers": 2, "persistent_workers": True, **options, **make_sampler(dataset)}
    if "batch_sampler" in options:
        del options["batch_size"]
    with DpexDataLoader(dataset, seeding="batch", overlap_epochs=overlap, **options) as loader:
        batches: list[torch.Tensor] = []
        for epoch in range(epochs):
            if epoch:
                between(loader, epoch)
            batches += loader
        drawn = [torch.rand(1)]
        for source in (loader.generator, getattr(loader.sampler, "generator", None)):
            drawn += [torch.rand(1, generator=source)] if source is not None else []
        return batches + drawn, loader.stats()


def assert_exact(*arguments: Any, **options: Any) -> LoaderStats:
    """Compare a training with and without overlap. Return the figures of the one with it."""
    wanted, plain = trained(False, *arguments, **options)
    got, stats = trained(True, *arguments, **options)
    assert len(got) == len(wanted)
    assert all(map(torch.equal, got, wanted))
    assert (plain.overlapped_epochs, plain.used_ahead, plain.dropped_ahead) == (0, 0, 0)
    return stats


SAMPLERS: dict[str, Callable[[Any], dict[str, Any]]] = {
    "in order": lambda data: {},
    "shuffled": lambda data: {"shuffle": True},
    "shuffled by a generator": lambda data: {"shuffle": True, "generator": seeded()},
    "sampler with a generator": lambda data: {"sampler": RandomSampler(data, generator=seeded())},
    "with replacement": lambda data: {"sampler": RandomSampler(data, replacement=True, num_samples=30)},
    "replaced by a generator": lambda data: {"sampler": RandomSampler(data, replacement=True, generator=seeded())},
    "a subset": lambda data: {"sampler": SubsetRandomSampler(range(3, 20))},
    "weighted": lambda data: {"sampler": WeightedRandomSampler([0.1 + i for i in range(SAMPLES)], 22)},
    "a batch sampler": lambda data: {"batch_sampler": BatchSampler(SequentialSampler(data), 5, drop_last=True)},
    "unbatched": lambda data: {"batch_size": None, "shuffle": True},
}


@pytest.mark.parametrize("name", SAMPLERS)
def test_torchs_samplers(name: str) -> None:
    stats = assert_exact(SAMPLERS[name])
    assert (stats.overlapped_epochs, stats.dropped_ahead, stats.why_no_overlap) == (EPOCHS - 1, 0, "")
    assert stats.used_ahead >= EPOCHS - 1


def of_one_rank(data: Any) -> dict[str, Any]:
    return {"sampler": DistributedSampler(data, num_replicas=2, rank=1, seed=5)}


@pytest.mark.parametrize(("step", "overlapped"), [(1, EPOCHS - 1), (0, EPOCHS - 2), (3, EPOCHS - 2)])
def test_the_number_of_a_distributed_epoch_is_predicted(step: int, overlapped: int) -> None:
    stats = assert_exact(of_one_rank, lambda loader, epoch: loader.sampler.set_epoch(step * epoch))
    assert stats.overlapped_epochs == overlapped


@pytest.mark.parametrize(("persistent", "overlapped"), [(True, EPOCHS - 1), (False, 0)])
def test_a_dataset_that_changes_between_epochs(persistent: bool, overlapped: int) -> None:
    """Persistent workers keep what they began with; new ones have the change."""

    def rescale(loader: Any, epoch: int) -> None:
        loader.dataset.scale += epoch == 2

    stats = assert_exact(SAMPLERS["shuffled"], rescale, persistent_workers=persistent)
    assert stats.overlapped_epochs == overlapped


@pytest.mark.parametrize("persistent", [True, False])
def test_a_state_that_is_loaded_between_epochs(persistent: bool) -> None:
    states: list[Any] = []

    def go_back(loader: Any, epoch: int) -> None:
        if epoch == 1:
            iterator = iter(loader)
            next(iterator)
            states.append(loader.state_dict())
            list(iterator)
        if epoch == 3:
            loader.load_state_dict(states.pop())

    assert_exact(SAMPLERS["shuffled"], go_back, persistent_workers=persistent)


def test_a_training_that_forks_between_epochs() -> None:
    def forked(overlap: bool) -> list[torch.Tensor]:
        torch.manual_seed(3)
        options: Any = {"batch_size": 4, "shuffle": True, "num_workers": 2, "seeding": "batch"}
        options["persistent_workers"] = True
        with DpexDataLoader(Noisy(), overlap_epochs=overlap, **options) as loader:
            batches = list(loader)
            in_a_child(lambda: loader.stats())
            batches += loader
            in_a_child(loader.close)
            return batches + list(loader)

    assert all(map(torch.equal, forked(True), forked(False)))


def test_a_sampler_of_the_users_own_is_left_alone() -> None:
    stats = assert_exact(lambda data: {"sampler": EveryOther()})
    assert stats.used_ahead == stats.dropped_ahead == 0
    assert "EveryOther" in stats.why_no_overlap


def grow(loader: Any, epoch: int) -> None:
    loader.dataset.samples += epoch == 2


def reweigh(loader: Any, epoch: int) -> None:
    loader.sampler.weights[0] += 1000.0 * (epoch == 2)


def exchange(loader: Any, epoch: int) -> None:
    loader.sampler.indices[0] += epoch == 2


def validate(_: Any, __: int) -> None:
    list(DpexDataLoader(Noisy(8), batch_size=4))


CHANGES: dict[str, tuple[Callable[[Any], dict[str, Any]], Between, int]] = {
    "the dataset grows": (lambda data: {"sampler": SequentialSampler(data)}, grow, EPOCHS - 2),
    "weights change": (SAMPLERS["weighted"], reweigh, EPOCHS - 2),
    "indices that are arrays change": (
        lambda data: {"sampler": SubsetRandomSampler(np.arange(20).reshape(10, 2))},  # type: ignore[arg-type]
        exchange,
        EPOCHS - 2,
    ),
    "numbers are drawn": (SAMPLERS["shuffled"], lambda *_: torch.randn(5), 0),
    "numbers are drawn beside a generator": (
        SAMPLERS["shuffled by a generator"],
        lambda *_: torch.randn(5),
        EPOCHS - 1,
    ),
    "a validation, expected from the second time on": (SAMPLERS["shuffled"], validate, EPOCHS - 2),
    "more workers": (SAMPLERS["shuffled"], lambda loader, epoch: loader.resize(local=1 + epoch % 3), EPOCHS - 1),
}


@pytest.mark.parametrize("what", CHANGES)
def test_what_happens_between_epochs(what: str) -> None:
    make_sampler, between, overlapped = CHANGES[what]
    stats = assert_exact(make_sampler, between)
    assert stats.overlapped_epochs == overlapped
    assert overlapped or (stats.used_ahead == 0 and stats.dropped_ahead >= EPOCHS - 1)


def test_predictions_that_are_always_wrong_are_given_up() -> None:
    stats = assert_exact(SAMPLERS["shuffled"], lambda *_: torch.randn(5), epochs=MISSES + 3)
    assert stats.overlapped_epochs == 0
    assert stats.dropped_ahead <= MISSES * SAMPLES // 4
    assert "in another way than predicted" in stats.why_no_overlap


def test_two_loaders_in_turn() -> None:
    """Each draws seeds from the global generator that the other one expects."""

    def alternated(overlap: bool) -> tuple[list[torch.Tensor], list[LoaderStats]]:
        torch.manual_seed(3)
        options: Any = {"batch_size": 4, "num_workers": 1, "seeding": "batch", "shuffle": True}
        options |= {"persistent_workers": True, "overlap_epochs": overlap}
        with DpexDataLoader(Noisy(), **options) as train, DpexDataLoader(Noisy(12), **options) as held_out:
            batches = [batch for _ in range(5) for loader in (train, held_out) for batch in loader]
            return batches, [train.stats(), held_out.stats()]

    wanted, _ = alternated(False)
    got, stats = alternated(True)
    assert all(map(torch.equal, got, wanted))
    assert [each.overlapped_epochs for each in stats] == [2, 3]


def test_a_budget_bounds_both_epochs_together() -> None:
    config = WorkerConfig(memory_budget=300)  # a batch has 48 bytes
    stats = assert_exact(SAMPLERS["shuffled"], worker_config=config)
    assert stats.overlapped_epochs == EPOCHS - 1
    assert stats.used_ahead <= 6 * (EPOCHS - 1)


def test_an_epoch_that_is_broken_off() -> None:
    """In the middle, nothing was made ahead yet; behind the last batch, it was, and it is used."""

    def broken_off(overlap: bool, after: int) -> tuple[list[torch.Tensor], LoaderStats]:
        torch.manual_seed(3)
        options: Any = {"batch_size": 4, "num_workers": 2, "persistent_workers": True, "prefetch_factor": 1}
        with DpexDataLoader(Noisy(40), shuffle=True, seeding="batch", overlap_epochs=overlap, **options) as loader:
            batches: list[torch.Tensor] = []
            for _ in range(3):
                for number, batch in enumerate(loader, 1):
                    batches.append(batch)
                    if number == after:
                        break
            return batches, loader.stats()

    for after, overlapped in ((2, 0), (10, 2)):
        wanted, _ = broken_off(False, after)
        got, stats = broken_off(True, after)
        assert all(map(torch.equal, got, wanted))
        assert stats.overlapped_epochs == overlapped


def test_a_state_of_the_middle_of_an_epoch_is_resumed() -> None:
    def loader(**options: Any) -> DpexDataLoader[torch.Tensor]:
        return DpexDataLoader(
            Noisy(), batch_size=4, shuffle=True, num_workers=2, seeding="batch", persistent_workers=True, **options
        )

    torch.manual_seed(3)
    with loader(overlap_epochs=True) as first:
        list(first)
        iterator = iter(first)
        head = [next(iterator) for _ in range(SAMPLES // 4 - 1)]  # the next epoch is begun by now
        state = first.state_dict()
        rest = [*iterator, *first]
        assert first.stats().overlapped_epochs == 2
    torch.manual_seed(99)
    with loader(overlap_epochs=True) as second:
        second.load_state_dict(state)
        resumed = list(second)
    assert len(head) == SAMPLES // 4 - 1
    assert torch.equal(resumed[0], rest[0])
    assert len(resumed) == 1


def test_workers_that_die_with_batches_of_the_next_epoch() -> None:
    def kill_all(loader: Any, epoch: int) -> None:
        if epoch == 2:
            pids = worker_pids(loader._iterator, 2)
            for pid in pids:
                os.kill(pid, signal.SIGKILL)
            until(lambda: not any(map(is_alive, pids)))

    stats = assert_exact(SAMPLERS["shuffled"], kill_all)
    assert (stats.deaths, stats.overlapped_epochs) == (2, EPOCHS - 1)


def test_an_error_of_a_batch_that_was_made_ahead_comes_in_its_place() -> None:
    class Bad(Noisy):
        def __getitem__(self, index: int) -> torch.Tensor:
            if index == 3:
                raise LookupError("sample 3")
            return super().__getitem__(index)

    with DpexDataLoader(
        Bad(), batch_size=4, num_workers=2, seeding="batch", persistent_workers=True, overlap_epochs=True
    ) as loader:
        for _ in range(3):
            iterator, got = iter(loader), []
            with pytest.raises(LookupError, match="sample 3"):
                next(iterator)
            with suppress(StopIteration):
                while True:
                    got.append(next(iterator))
            assert len(got) == SAMPLES // 4 - 1
        assert loader.stats().overlapped_epochs == 2


def test_nothing_is_left_of_batches_made_ahead() -> None:
    before = descriptors()
    loader = DpexDataLoader(
        Noisy(), batch_size=4, num_workers=2, seeding="batch", persistent_workers=True, overlap_epochs=True
    )
    iterator = iter(loader)
    pids = worker_pids(iterator, 2)
    assert len(list(iterator)) == SAMPLES // 4
    loader.close()
    until(lambda: not any(map(is_alive, pids)))
    assert len(list(loader)) == SAMPLES // 4
    loader.close()
    del iterator, loader
    gc.collect()
    assert descriptors() <= before


class WithState(Noisy):
    """A dataset with something in it, such as a number of the epoch that workers and training share."""

    def __init__(self, state: Any) -> None:
        super().__init__()
        self.state = state


class NamelessKey:
    def __repr__(self) -> str:
        raise LookupError("no name")


@pytest.mark.parametrize(
    ("dataset", "options", "why"),
    [
        (Noisy(), {"seeding": "worker"}, "seeding='worker'"),
        (Noisy(), {"sampler": EveryOther()}, "EveryOther"),
        (Noisy(), {"persistent_workers": False}, "persistent_workers=True"),
        (Noisy(), {"device": "cpu"}, ""),
        (TensorDataset(torch.zeros(8)), {}, ""),
        (TensorDataset(torch.zeros(8)), {"multiprocessing_context": "spawn"}, "TensorDataset.tensors[0]"),
        (WithState(threading.Lock()), {}, ""),
        (WithState(multiprocessing.Value("i")), {}, "WithState.state"),
        (WithState([{"number": multiprocessing.RawValue("i")}]), {}, "WithState.state[0]['number']"),
        (WithState(torch.zeros(1).share_memory_()), {}, "WithState.state"),
        (WithState(torch.eye(2).to_sparse()), {}, ""),
        (WithState(np.zeros(2)), {}, ""),
        (WithState(np.ctypeslib.as_array(multiprocessing.RawArray("d", 2))), {}, "WithState.state"),
        (WithState(torch.from_numpy(np.frombuffer(mmap.mmap(-1, 8), np.uint8))), {}, "WithState.state"),
        (WithState(mmap.mmap(-1, 8)), {}, "WithState.state"),
        (WithState({NamelessKey(): 1}), {}, "cannot be searched"),
        (cached(Noisy(), on_random="skip"), {}, ""),
    ],
)
def test_the_reason_why_nothing_is_made_ahead(dataset: Any, options: dict[str, Any], why: str) -> None:
    options = {"seeding": "batch", "num_workers": 1, "persistent_workers": True, **options}
    with DpexDataLoader(dataset, batch_size=4, overlap_epochs=True, **options) as loader:
        for _ in range(2):
            list(loader)
        stats = loader.stats()
        assert why in stats.why_no_overlap
        assert bool(why) == bool(stats.why_no_overlap)
        assert bool(why) == (stats.overlapped_epochs == 0)


def test_it_is_on_with_auto() -> None:
    with DpexDataLoader(Noisy(), batch_size=4, num_workers="auto", persistent_workers=True) as loader:
        for _ in range(2):
            list(loader)
        assert loader.stats().overlapped_epochs == 1
