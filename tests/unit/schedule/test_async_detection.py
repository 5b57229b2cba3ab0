"""Which datasets are asynchronous, and how many batches a worker of one makes at the same time."""

from typing import Any

import pytest
from torch.utils.data import ConcatDataset, Subset

from dpex import AsyncDataset
from dpex.measure.settings import Settings
from dpex.schedule.names import is_asynchronous, lanes
from dpex.schedule.prefetch import PrefetchRules


class Plain:
    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> Any:
        return index


class Async(Plain):
    async def __getitem__(self, index: int) -> Any:
        return index


class Bulk(Plain):
    async def __getitems__(self, indices: list[int]) -> Any:
        return indices


class Split(AsyncDataset):
    def __len__(self) -> int:
        return 4

    async def fetch(self, index: int) -> Any:
        return index


class Holds(Plain):
    def __init__(self, held: Any) -> None:
        self.held = held


def circle() -> Any:
    first = Holds(None)
    first.held = Holds(first)
    return first


@pytest.mark.parametrize(
    ("dataset", "is_async"),
    [
        (Plain(), False),
        ([1, 2], False),
        (Async(), True),
        (Bulk(), True),
        (Split(), True),
        (Subset(Async(), [0]), True),  # type: ignore[arg-type]
        (Subset(Subset(Split(), [0]), [0]), True),
        (ConcatDataset([Plain(), Async()]), True),  # type: ignore[list-item]
        (Holds(Async()), True),
        (Holds(Split()), False),
        (Holds([Async()]), False),
        (circle(), False),
    ],
    ids=lambda value: type(value).__name__,
)
def test_async_methods_are_found_through_wrappers(dataset: Any, is_async: bool) -> None:
    assert is_asynchronous(dataset) is is_async


@pytest.mark.parametrize(("batch_size", "expected"), [(1, 64), (16, 4), (60, 2), (64, 2), (1000, 2), (0, 64)])
def test_a_worker_makes_as_many_batches_as_fill_its_concurrency(batch_size: int, expected: int) -> None:
    assert lanes(batch_size, 64) == expected


def test_prefetch_is_larger_where_a_worker_makes_several_batches() -> None:
    rules, tuned = (
        PrefetchRules(logical=False, may_group=True, memory_budget=None, lanes=4, is_tuned=is_tuned)
        for is_tuned in (False, True)
    )
    assert rules.prefetch(Settings(local=2, prefetch=4)) == 16
    assert tuned.prefetch(Settings(local=2, prefetch=6)) == 6
    assert rules.prefetch(Settings(local=2, prefetch=5, is_prefetch_fixed=True)) == 5
