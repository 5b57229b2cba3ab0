"""`dpex.batch_seed`: the same wherever a batch is made, and an error where none is."""

import threading
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, get_worker_info

from dpex import DpexDataLoader, UsageError, batch_seed
from dpex.schedule.seeding import epoch_key, ticket_seed
from dpex.worker.batch_seeding import current

LENGTH = 6
MADE_BY: dict[str, dict[str, Any]] = {"the training process": {"num_workers": 0}, "processes": {"num_workers": 2}}


@pytest.fixture(autouse=True)
def no_batch_yet(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever other tests have made in this process."""
    monkeypatch.setattr(current, "seed", None)
    monkeypatch.setattr(current, "is_per_batch", False)


class Asks(Dataset[int]):
    """Sample: the seed, asked for in the collate function as well."""

    def __len__(self) -> int:
        return LENGTH

    def __getitem__(self, index: int) -> int:
        return batch_seed()


class Nested(Asks):
    """Seeds the global generators, asks in a thread, and has a loader within, whose batches have their own seeds."""

    def __getitem__(self, index: int) -> int:
        torch.manual_seed(42)
        before = batch_seed()
        thread = threading.Thread(target=lambda: found.append(batch_seed()))
        found: list[int] = []
        thread.start()
        thread.join()
        assert found == [before]
        within = [int(seed) for seed in seeds_of(Asks(), 0, seed=100 + index)]
        assert before not in within
        return before if batch_seed() == before else 0


def asked_again(batch: list[int]) -> torch.Tensor:
    assert batch == [batch_seed()] * len(batch)
    return torch.tensor(batch[0])


def seeds_of(dataset: Any, num_workers: int, *, seed: int = 3, **options: Any) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    options = {"seeding": "batch", "collate_fn": asked_again, **options}
    with DpexDataLoader(dataset, 2, num_workers=num_workers, generator=generator, **options) as loader:
        return [int(batch) for batch in loader]


def wanted(seed: int = 3) -> list[int]:
    base_seed = torch.empty((), dtype=torch.int64).random_(generator=torch.Generator().manual_seed(seed)).item()
    return [ticket_seed(epoch_key(int(base_seed), 0), number) for number in range(LENGTH // 2)]


@pytest.mark.parametrize("maker", MADE_BY)
def test_the_seed_is_a_function_of_base_seed_epoch_and_number(maker: str) -> None:
    assert seeds_of(Asks(), **MADE_BY[maker]) == wanted()
    with pytest.raises(UsageError):
        batch_seed()


@pytest.mark.parametrize("num_workers", [0, 1])
def test_whatever_the_dataset_does_the_seed_is_the_batchs(num_workers: int) -> None:
    assert seeds_of(Nested(), num_workers) == wanted()


def workers_seed(batch: list[int]) -> bool:
    return batch == [get_worker_info().seed] * len(batch)  # type: ignore[union-attr]


@pytest.mark.parametrize("loader_class", [DpexDataLoader, DataLoader])
def test_under_worker_seeds_it_is_the_workers(loader_class: Any) -> None:
    assert list(loader_class(Asks(), 2, num_workers=2, collate_fn=workers_seed)) == [True] * 3


def test_without_a_batch_it_is_an_error_that_says_where_to_ask() -> None:
    with pytest.raises(UsageError, match=r"thread 'MainThread'.*the collate function, and give .* seeding='batch'"):
        batch_seed()


def test_batches_without_a_seed_are_told() -> None:
    with pytest.raises(UsageError, match="give the loader seeding='batch', or workers if the dataset is iterable"):
        next(iter(DpexDataLoader(Asks(), num_workers=0)))


def ask_at_the_start(worker: int) -> None:
    batch_seed()


def test_a_worker_without_a_batch_has_none() -> None:
    with pytest.raises(UsageError, match="before its first batch, such as in worker_init_fn"):
        next(iter(DpexDataLoader(Asks(), num_workers=1, seeding="batch", worker_init_fn=ask_at_the_start)))


def test_a_batch_that_fails_leaves_no_seed_behind() -> None:
    def fail(batch: Any) -> None:
        raise ValueError(batch_seed())

    with pytest.raises(ValueError, match=str(wanted()[0])):
        seeds_of(Asks(), 0, collate_fn=fail)
    assert current.seed is None
