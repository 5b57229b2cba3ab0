"""A pool of the user's own behind `DpexDataLoader.local_pool`: the example's, whose workers are threads."""

import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from families import Of
from torch.utils.data import DataLoader, RandomSampler

from dpex import OptionError, SamplePolicy

sys.path.insert(0, str(Path(__file__).parents[3] / "examples"))
from thread_pool import ThreadedLoader

pytestmark = pytest.mark.timeout(60)


def squares_at(index: int) -> Any:
    """Sample: float32 (1,) and float32 (1,): a number, and its square."""
    if index < 0:
        raise IndexError(index)
    return torch.tensor([index / 96]), torch.tensor([(index / 96) ** 2])


def seeded() -> torch.Generator:
    return torch.Generator().manual_seed(3)


def threaded(workers: int = 3, **options: Any) -> ThreadedLoader:
    options = {"batch_size": 8, "seeding": "batch", **options}
    return ThreadedLoader(options.pop("dataset", Of(squares_at, 96)), num_workers=workers, **options)


@pytest.mark.parametrize("persistent", [False, True])
def test_batches_are_torchs(persistent: bool) -> None:
    """The sampler has its own generator: a loader with persistent workers draws one base seed for all epochs."""
    torchs = DataLoader(Of(squares_at, 96), batch_size=8, sampler=RandomSampler(Of(squares_at, 96), generator=seeded()))
    sampler = RandomSampler(Of(squares_at, 96), generator=seeded())
    with threaded(sampler=sampler, persistent_workers=persistent) as loader:
        for _ in range(2):
            wanted, got = [torch.cat(pair, 1) for pair in torchs], [torch.cat(pair, 1) for pair in loader]
            assert len(wanted) == len(got) == 12
            assert all(map(torch.equal, wanted, got))
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("worker-")]


def test_resizing_within_an_epoch_loses_nothing() -> None:
    with threaded(batch_size=2) as loader:
        iterator = iter(loader)
        got = [next(iterator) for _ in range(5)]
        loader.resize(local=6)
        got += [next(iterator) for _ in range(5)]
        loader.resize(local=1)
        got += iterator
        assert loader.stats().batches == 48
    assert torch.cat([numbers for numbers, _ in got]).flatten().mul(96).round().tolist() == list(range(96))


def test_an_error_is_raised_at_its_place() -> None:
    with threaded(batch_sampler=[[0], [-1], [1]], batch_size=1) as loader:
        iterator = iter(loader)
        next(iterator)
        with pytest.raises(IndexError):
            next(iterator)
        assert float(next(iterator)[0]) == pytest.approx(1 / 96)


def test_logical_workers_are_refused() -> None:
    with pytest.raises(OptionError, match=r"local_pool: .* seeding='batch'"):
        list(threaded(seeding="worker"))


def test_a_limit_that_such_a_pool_does_not_watch_is_refused() -> None:
    with pytest.raises(OptionError, match=r"timeout_s=1.*a local_pool of your own .* does not watch its samples"):
        threaded(sample_policy=SamplePolicy(timeout_s=1))
