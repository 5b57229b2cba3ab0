"""Loaders in a process that may not have children: of a pool, or a worker of torch's."""

import multiprocessing
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from families import Of
from torch.utils.data import DataLoader, IterableDataset

from dpex import AutotuneConfig, DpexDataLoader

NUMBERS = range(12)


class Stream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        yield from range(12)


def passes(data: Any, **options: Any) -> list[list[int]]:
    """Two, as lists of their samples."""
    with DpexDataLoader(data, 4, **options) as loader:
        return [torch.cat(list(loader)).tolist() for _ in range(2)]


def in_daemon(work: Callable[..., Any], *args: Any, **options: Any) -> Any:
    with multiprocessing.get_context("fork").Pool(1) as pool:
        return pool.apply_async(work, args, options).get(60)


OPTIONS: list[dict[str, Any]] = [
    {},
    {"persistent_workers": True, "prefetch_factor": 3, "timeout": 5, "multiprocessing_context": "fork"},
    {"autotune": AutotuneConfig(min_local=1)},
    {"autotune": False},
    {"autotune": False, "seeding": "worker"},
]


CASES = [(data, options) for data in (NUMBERS, Stream()) for options in OPTIONS]


@pytest.mark.parametrize(
    ("data", "options"), CASES, ids=[f"{type(data).__name__} {options}" for data, options in CASES]
)
def test_auto_stays_in_the_process(data: Any, options: dict[str, Any]) -> None:
    assert in_daemon(passes, data, num_workers="auto", **options) == [list(range(12))] * 2


def outer_at(index: int) -> Any:
    """Sample: all of a loader's."""
    return torch.tensor(passes(NUMBERS, num_workers="auto"))


@pytest.mark.parametrize("kind", [DataLoader, DpexDataLoader])
def test_a_loader_within_a_dataset_within_a_worker(kind: Any) -> None:
    assert next(iter(kind(Of(outer_at, 1), None, num_workers=1))).tolist() == [list(range(12))] * 2


def refused(kind: Any, **options: Any) -> str:
    with pytest.raises(AssertionError) as caught:
        next(iter(kind(NUMBERS, 4, num_workers=2, **options)))
    return str(caught.value)


@pytest.mark.parametrize("options", [{}, {"seeding": "batch"}, {"autotune": AutotuneConfig()}], ids=str)
def test_a_number_of_workers_is_refused_as_torch_refuses_it(options: dict[str, Any]) -> None:
    said = in_daemon(refused, DpexDataLoader, **options)
    assert said.startswith(in_daemon(refused, DataLoader))
    assert "Give num_workers=0 here, or num_workers='auto'" in said
