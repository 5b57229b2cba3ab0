"""Asynchronous datasets: order, errors, cancellation, policies, the samples at the same time, and the loop's life."""

import asyncio
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import ConcatDataset, DataLoader, Dataset, IterableDataset, StackDataset, Subset

from dpex import (
    AsyncDataset,
    DpexDataLoader,
    OptionError,
    SamplePolicy,
    SampleTimeoutError,
    UsageError,
    WorkerConfig,
    cached,
    decode_in_workers,
)
from tests.asynchronous.works import Indices, indices, nap, turn

PLACES: list[dict[str, Any]] = [{"num_workers": 0}, {"num_workers": 2}, {"num_workers": 1, "seeding": "worker"}]
IN = pytest.mark.parametrize("options", PLACES, ids=["here", "workers", "worker seeding"])


class Wrapper(Dataset[Any]):
    """A wrapper that dpex does not know: the first batch shows what it hands on."""

    def __init__(self, base: Any) -> None:
        self.base = base

    def __len__(self) -> int:
        return len(self.base)

    def __getitem__(self, index: int) -> Any:
        return self.base[index]


@IN
@pytest.mark.parametrize(
    "wrapped",
    [Indices, lambda: Subset(Indices(64), range(48)), lambda: ConcatDataset([Indices(40), Indices(8)]), Wrapper],
    ids=["alone", "subset", "concat", "unknown"],
)
def test_samples_come_in_order(options: dict[str, Any], wrapped: Any) -> None:
    dataset = Wrapper(Indices()) if wrapped is Wrapper else wrapped()
    expected = [*range(40), *range(8)] if isinstance(dataset, ConcatDataset) else list(range(48))
    assert indices(dataset, **options) == expected


def test_parts_of_a_sample_are_awaited() -> None:
    stacked = StackDataset(Indices(4), [10, 11, 12, 13])
    assert indices(stacked, num_workers=1) == [(0, 10), (1, 11), (2, 12), (3, 13)]
    assert indices(StackDataset(a=Indices(2), b=[7, 8])) == [{"a": 0, "b": 7}, {"a": 1, "b": 8}]


class InBulk(Indices):
    async def __getitems__(self, wanted: list[int]) -> list[int]:
        return list(await asyncio.gather(*[self[index] for index in wanted]))


@IN
def test_all_samples_may_be_read_by_one_coroutine(options: dict[str, Any]) -> None:
    assert indices(InBulk(), **options) == list(range(48))
    with DpexDataLoader(Indices(5), batch_size=None, **options) as loader:
        assert list(loader) == list(range(5))


class Split(AsyncDataset):
    """Sample: ten times its index."""

    def __init__(self, count: int = 48) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    async def fetch(self, index: int) -> Any:
        await nap()
        return str(index)

    def decode(self, index: int, raw: Any) -> Any:
        return 10 * int(raw)


class Failing(Indices):
    """Samples 5 and 7 fail, 7 first; ``log`` receives a letter from each other one that is cancelled."""

    def __init__(self, log: Path | None = None) -> None:
        super().__init__(16)
        self.log = log

    async def __getitem__(self, index: int) -> Any:
        if index == 7:
            raise KeyError("seven")
        if index == 5:
            for _ in range(20):
                await turn()
            raise ValueError("five")
        if index == 6 and self.log is not None:
            try:
                await asyncio.get_running_loop().create_future()
            finally:
                self.log.touch()
        return await super().__getitem__(index)


@IN
def test_the_first_samples_error_is_raised_and_others_cancelled(options: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="five"):
        indices(Failing(tmp_path / "cancelled"), **options)
    assert (tmp_path / "cancelled").exists()


@pytest.mark.parametrize("count", [0, 2])
@pytest.mark.filterwarnings("ignore:sample:RuntimeWarning")
def test_policies_fill_the_places_of_samples_that_fail(count: int) -> None:
    skip = indices(Failing(), num_workers=count, sample_policy=SamplePolicy(on_error="skip"))
    assert skip == [0, 1, 2, 3, 4, 6, 6, 0, *range(8, 16)]
    replace = indices(Failing(), num_workers=count, sample_policy=SamplePolicy(on_error="replace"))
    assert len(replace) == 16
    assert {5, 7}.isdisjoint(replace)


class Logged(Split):
    """Sample 5 fails when it is fetched, and sample 7 when it is decoded. ``log`` receives each sample's fetches."""

    def __init__(self, log: Path) -> None:
        super().__init__(16)
        self.log = log

    async def fetch(self, index: int) -> Any:
        with (self.log / str(index)).open("a") as file:
            file.write("x")
        if index == 5:
            raise ValueError("five")
        return await super().fetch(index)

    def decode(self, index: int, raw: Any) -> Any:
        if index == 7:
            raise KeyError("seven")
        return super().decode(index, raw)


@pytest.mark.parametrize("count", [0, 2])
@pytest.mark.filterwarnings("ignore:sample:RuntimeWarning")
def test_no_sample_is_fetched_twice_because_another_one_fails(count: int, tmp_path: Path) -> None:
    skip = indices(Logged(tmp_path), num_workers=count, sample_policy=SamplePolicy(on_error="skip"))
    assert skip == [0, 10, 20, 30, 40, 60, 60, 0, *range(80, 160, 10)]
    assert {each.name: each.read_text() for each in tmp_path.iterdir()} == {str(at): "x" for at in range(16)}
    replace = indices(Logged(tmp_path), num_workers=count, sample_policy=SamplePolicy(on_error="replace"))
    assert len(replace) == 16
    assert {50, 70}.isdisjoint(replace)


class Cancels(Indices):
    async def __getitem__(self, index: int) -> Any:
        raise asyncio.CancelledError


@IN
def test_a_dataset_that_cancels_itself_fails_its_batch(options: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match="loading sample 0 was cancelled by the dataset itself"):
        indices(Cancels(), **options)


TIMEOUT_S = 1.0
"""Only the sample that hangs takes a hundredth of it."""


class Hangs(Indices):
    """Sample 3 never comes: it waits, or with ``blocks`` it blocks the loop."""

    def __init__(self, *, blocks: bool) -> None:
        super().__init__(16)
        self.blocks = blocks

    async def __getitem__(self, index: int) -> Any:
        while index == 3 and self.blocks:
            os.getpid()
        if index == 3:
            await asyncio.get_running_loop().create_future()
        return await super().__getitem__(index)


@pytest.mark.parametrize("options", [{"num_workers": 0}, {"num_workers": 2}], ids=["here", "workers"])
def test_a_sample_that_waits_too_long_is_cancelled(options: dict[str, Any]) -> None:
    with pytest.raises(SampleTimeoutError, match=r"loading sample 3 took longer than timeout_s=1"):
        indices(Hangs(blocks=False), sample_policy=SamplePolicy(timeout_s=TIMEOUT_S), **options)


def test_a_sample_that_blocks_the_loop_ends_its_worker() -> None:
    policy = SamplePolicy(on_error="skip", timeout_s=TIMEOUT_S)
    with pytest.warns(RuntimeWarning, match=r"loading sample 3 took longer than timeout_s=1"):
        found = indices(Hangs(blocks=True), num_workers=2, sample_policy=policy)
    assert found == [0, 1, 2, 4, 4, 5, 6, 7, *range(8, 16)]


class Meets(Indices):
    """A sample waits until ``together`` samples are open in its process. Sample: the most that were."""

    def __init__(self, count: int, together: int) -> None:
        super().__init__(count)
        self.together = together
        self.open = self.most = 0

    async def __getitem__(self, index: int) -> int:
        self.open += 1
        self.most = max(self.most, self.open)
        while self.most < self.together:
            await turn()
        await nap()
        self.open -= 1
        return self.most


def test_a_worker_loads_batches_at_once_up_to_its_concurrency() -> None:
    config = WorkerConfig(concurrency=24)
    found = indices(Meets(96, together=24), num_workers=1, worker_config=config)
    assert set(found) == {24}


def test_without_workers_a_large_batch_is_bounded_too() -> None:
    assert set(indices(Meets(64, together=10), batch_size=32, worker_config=WorkerConfig(concurrency=10))) == {10}


def test_a_given_prefetch_is_kept() -> None:
    with DpexDataLoader(Indices(640), batch_size=8, num_workers=1, prefetch_factor=3, collate_fn=list) as loader:
        next(iter(loader))
        assert loader.stats().in_flight + loader.stats().ready <= 3


class Closes(Indices):
    """Writes down each call of ``aclose``. Sample: the process that loaded it."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.folder = folder

    async def __getitem__(self, index: int) -> int:
        await nap()
        return os.getpid()

    async def aclose(self) -> None:
        await turn()
        with (self.folder / str(os.getpid())).open("a") as file:
            file.write("closed")


def test_clients_are_closed_once_in_each_worker(tmp_path: Path) -> None:
    makers = set(indices(Subset(Closes(tmp_path), range(48)), num_workers=2))
    closed = {int(each.name): each.read_text() for each in tmp_path.iterdir()}
    assert makers
    assert makers <= closed.keys()
    assert set(closed.values()) == {"closed"}


async def initialised(number: int) -> None:
    await turn()
    torch.dpex_number = number  # type: ignore[attr-defined]


class Initialised(Indices):
    async def __getitem__(self, index: int) -> Any:
        return torch.dpex_number  # type: ignore[attr-defined]


@pytest.mark.parametrize("seeding", ["batch", "worker"])
def test_an_async_worker_init_fn_is_awaited(seeding: str) -> None:
    options = {"worker_init_fn": initialised, "seeding": seeding}
    assert set(indices(Initialised(), num_workers=2, **options)) <= {0, 1}


def test_batches_are_made_in_a_thread_that_runs_another_loop() -> None:
    async def program() -> list[Any]:
        await turn()
        return indices(Indices())

    assert asyncio.run(program()) == list(range(48))


def test_a_loop_that_was_used_before_a_fork_still_works() -> None:
    assert indices(Indices()) == list(range(48))
    assert indices(Indices(), num_workers=2) == list(range(48))
    assert indices(Indices()) == list(range(48))


def test_workers_that_are_spawned_load_at_once() -> None:
    assert indices(Indices(), num_workers=1, multiprocessing_context="spawn") == list(range(48))


class ReadsAnother(Split):
    def decode(self, index: int, raw: Any) -> Any:
        return self[0]


class LoadsInside(Split):
    async def fetch(self, index: int) -> Any:
        return next(iter(DpexDataLoader(Indices(2), batch_size=2)))


@IN
@pytest.mark.parametrize("kind", [ReadsAnother, LoadsInside])
def test_a_loop_is_not_made_to_wait_for_itself(kind: type[Split], options: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match="await the inner sample"):
        indices(kind(), **options)


class Around(Split):
    """As `Split`, and one more."""

    def __init__(self, base: Split) -> None:
        super().__init__(len(base))
        self.base = base

    async def fetch(self, index: int) -> Any:
        return await self.base.fetch(index)

    def decode(self, index: int, raw: Any) -> Any:
        return 1 + self.base.decode(index, raw)


@IN
@pytest.mark.parametrize("wrapped", [Split, lambda count: Subset(Split(64), range(count)), lambda n: Around(Split(n))])
def test_samples_are_fetched_and_decoded(options: dict[str, Any], wrapped: Any) -> None:
    dataset = wrapped(16)
    expected = [10 * index + isinstance(dataset, Around) for index in range(16)]
    assert indices(dataset, **options) == expected
    assert [dataset[at] for at in range(16)] == expected
    with DpexDataLoader(dataset, batch_size=None, **options) as loader:
        assert list(loader) == expected


@IN
def test_decoded_samples_may_be_parts_of_others(options: dict[str, Any]) -> None:
    assert indices(ConcatDataset([Split(2), Indices(2)]), **options) == [0, 10, 0, 1]
    assert indices(StackDataset(Split(2), Indices(2), [7, 8]), **options) == [(0, 0, 7), (10, 1, 8)]
    assert indices(StackDataset(a=Split(2), b=[7, 8]), **options) == [{"a": 0, "b": 7}, {"a": 10, "b": 8}]


@pytest.mark.parametrize("count", [0, 2])
@pytest.mark.parametrize("batch_size", [4, None])
def test_torchs_loader_reads_an_async_dataset(count: int, batch_size: int | None) -> None:
    loader = DataLoader(Subset(Split(16), range(8)), batch_size=batch_size, num_workers=count)
    assert torch.tensor([torch.as_tensor(each).tolist() for each in loader]).flatten().tolist() == list(
        range(0, 80, 10)
    )


def test_a_synchronous_wrapper_of_an_async_dataset_works() -> None:
    class Adds(Wrapper):
        def __getitem__(self, index: int) -> Any:
            return 1 + self.base[index]

    assert indices(Adds(Split(8)), num_workers=1, multiprocessing_context="fork") == list(range(1, 80, 10))


async def decoded(text: str) -> int:
    await nap()
    return int(text)


class Texts(IterableDataset[Any]):
    num_shards = 1

    def __iter__(self) -> Iterator[str]:
        return map(str, range(40))


@pytest.mark.parametrize("count", [0, 1, "auto"])
def test_streams_are_decoded_by_async_functions(count: Any) -> None:
    assert indices(decode_in_workers(Texts(), decoded), num_workers=count) == list(range(40))


def test_a_cache_refuses_what_it_cannot_read_one_by_one() -> None:
    with pytest.raises(OptionError, match=r"Indices.__getitem__ is async, and a cache reads samples one by one: make"):
        cached(Indices())
    assert indices(cached(Split(8)), num_workers=1) == list(range(0, 80, 10))
