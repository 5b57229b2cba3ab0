"""What is fetched with which index, how it is batched, and how streams end."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.data import ChainDataset, ConcatDataset, IterableDataset, StackDataset, Subset, TensorDataset
from torch.utils.data.datapipes.iter import IterableWrapper
from torch.utils.data.datapipes.map import SequenceWrapper

from .datasets import Bulk, Counting, Of, Stream, as_is, as_tensor, epochs, pair
from .harness import PASSES, WORKERS, Loader, caught, drain, parity


@WORKERS
@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("batch_size", [1, 3, 10, 11])
@parity
def test_batches(cls: Loader, workers: int, drop_last: bool, batch_size: int) -> Any:
    return list(cls(Of(as_tensor, 10), batch_size, num_workers=workers, drop_last=drop_last))


@WORKERS
@parity
def test_empty(cls: Loader, workers: int) -> Any:
    return [
        list(cls([], num_workers=workers)),
        list(cls([], num_workers=workers, batch_size=None)),
        list(cls(Stream(pair, 0), num_workers=workers)),
        list(cls(Counting(3), num_workers=workers, sampler=[])),
        list(cls(Counting(3), num_workers=workers, batch_size=4, drop_last=True)),
        list(cls(Counting(3), num_workers=workers, batch_sampler=[])),
    ]


@WORKERS
@parity
def test_an_empty_batch(cls: Loader, workers: int) -> Any:
    return [
        drain(iter(cls(Counting(3), num_workers=workers, batch_sampler=[[0], [], [1]]))),
        drain(iter(cls(Counting(3), num_workers=workers, batch_sampler=[[0], [], [1]], collate_fn=as_is))),
    ]


@WORKERS
@parity
def test_bulk(cls: Loader, workers: int) -> Any:
    return [
        list(cls(Bulk(as_tensor, 5), batch_size=2, num_workers=workers)),
        list(cls(Bulk(as_tensor, 3), batch_size=None, num_workers=workers)),
        list(cls(Bulk(int, 5), batch_sampler=[[3, 1], [2]], num_workers=workers, collate_fn=as_is)),
    ]


class NotBulk(Counting):
    __getitems__ = None


class BulkOfATensor(Counting):
    def __getitems__(self, indices: list[int]) -> torch.Tensor:
        return torch.tensor(indices) * 2


@WORKERS
@parity
def test_bulk_that_is_none_or_no_list(cls: Loader, workers: int) -> Any:
    return [
        list(cls(NotBulk(5), batch_size=2, num_workers=workers)),
        drain(iter(cls(BulkOfATensor(5), batch_size=2, num_workers=workers))),
        list(cls(BulkOfATensor(5), batch_size=2, num_workers=workers, collate_fn=as_is)),
    ]


class Point:
    def __init__(self, x: int) -> None:
        self.x = x


INDICES: dict[str, list[Any]] = {
    "tuples": [(1, 2), (3, 4), (5, 6)],
    "slices": [slice(0, 2), slice(1, None)],
    "dicts": [{"a": 1}, {"a": 2}],
    "tensors": [torch.tensor(1), torch.tensor(2)],
    "objects": [Point(1), Point(2)],
    "bytes and floats": [b"x", 1.5, -3, 10**30],
}


@WORKERS
@pytest.mark.parametrize("kind", INDICES)
@parity
def test_any_object_is_an_index(cls: Loader, kind: str, workers: int) -> Any:
    dataset = Of(as_is, 0)
    indices = INDICES[kind]
    return [
        list(cls(dataset, sampler=indices, batch_size=2, num_workers=workers, collate_fn=as_is)),
        list(cls(dataset, sampler=indices, batch_size=None, num_workers=workers, collate_fn=as_is)),
        list(cls(dataset, batch_sampler=[indices, tuple(indices)], num_workers=workers, collate_fn=as_is)),
    ]


@WORKERS
@parity
def test_a_batch_of_indices_that_is_a_tensor_or_a_generator(cls: Loader, workers: int) -> Any:
    tensors = [torch.tensor([1, 2]), torch.tensor([3])]
    seen = [list(cls(Of(as_is, 0), batch_sampler=tensors, num_workers=workers))]
    if not workers:
        seen.append(list(cls(Counting(9), batch_sampler=[(i for i in (1, 2))])))
    return seen


@WORKERS
@parity
def test_a_sampler_that_gives_whole_batches(cls: Loader, workers: int) -> Any:
    """Bulk loading: batch_size=None and lists from the sampler."""
    return list(cls(Of(torch.tensor, 10), batch_size=None, sampler=[[1, 2], [3]], num_workers=workers))


@WORKERS
@pytest.mark.parametrize("batch_size", [None, 1, 3, 4])
@pytest.mark.parametrize("drop_last", [False, True])
@parity
def test_stream(cls: Loader, workers: int, batch_size: int | None, drop_last: bool) -> Any:
    """Each worker ends with its own partial batch."""
    if batch_size is None and drop_last:
        return None
    return list(cls(Stream(pair, 7), batch_size, num_workers=workers, drop_last=drop_last))


@pytest.mark.parametrize(
    ("sizes", "prefetch_factor", "batch_size"),
    [
        ((0, 4, 20), 1, None),
        ((20, 4, 0), 2, 3),
        ((20, 4, 0), 5, None),
        ((0, 0, 0), 2, 3),
        ((1, 9, 1), 5, None),
        ((0, 0, 5), 1, None),
    ],
)
@parity
def test_uneven_streams(cls: Loader, sizes: tuple[int, ...], prefetch_factor: int, batch_size: int | None) -> Any:
    loader = cls(Stream(pair, *sizes), batch_size, num_workers=3, prefetch_factor=prefetch_factor)
    return list(loader)


@pytest.mark.smoke
@pytest.mark.parametrize("persistent", [False, True])
@parity
def test_uneven_streams_over_epochs(cls: Loader, persistent: bool) -> Any:
    loader = cls(Stream(pair, 2, 0, 7), 2, num_workers=3, persistent_workers=persistent)
    return epochs(loader, 3)


class OneTime(IterableDataset[Any]):
    """Its own iterator, spent after one pass: a second epoch of persistent workers sees nothing."""

    def __init__(self, length: int) -> None:
        self.left = length

    def __iter__(self) -> OneTime:
        return self

    def __next__(self) -> int:
        if not self.left:
            raise StopIteration
        self.left -= 1
        return self.left


@PASSES
@parity
def test_a_stream_that_is_its_own_iterator(cls: Loader, workers: int, persistent: bool) -> Any:
    return epochs(cls(OneTime(5), 2, num_workers=workers, persistent_workers=persistent), 2)


@WORKERS
@parity
def test_an_ended_iterator_stays_ended(cls: Loader, workers: int) -> Any:
    iterator, stream = (iter(cls(Counting(2), num_workers=workers)), iter(cls(Stream(pair, 1), num_workers=workers)))
    return [
        drain(iterator),
        [caught(next, iterator) for _ in range(3)],
        drain(stream),
        [caught(next, stream) for _ in range(3)],
    ]


def stop_at_three(index: int) -> int:
    if index == 3:
        raise StopIteration("inside the dataset")
    return index


@WORKERS
@pytest.mark.parametrize("batch_size", [None, 1, 2])
@parity
def test_stop_iteration_inside_a_map_dataset(cls: Loader, workers: int, batch_size: int | None) -> Any:
    iterator = iter(cls(Of(stop_at_three, 8), batch_size, num_workers=workers))
    seen: list[Any] = [caught(next, iterator) for _ in range(10)]
    return seen


@WORKERS
@parity
def test_torch_s_own_datasets(cls: Loader, workers: int) -> Any:
    tensors = TensorDataset(torch.arange(12.0).reshape(6, 2), torch.arange(6))
    datasets: list[Any] = [
        tensors,
        Subset(tensors, [5, 3, 1]),
        ConcatDataset([tensors, tensors]),
        StackDataset(tensors, Counting(6)),
        StackDataset(a=tensors, b=Counting(6)),
        ChainDataset([Stream(pair, 3), Stream(pair, 2)]),
        Subset(Bulk(int, 6), [5, 3, 1]),
    ]
    return [list(cls(dataset, batch_size=4, num_workers=workers)) for dataset in datasets]


@WORKERS
@parity
def test_plain_python_objects_as_datasets(cls: Loader, workers: int) -> Any:
    return [
        list(cls(dataset, batch_size=2, num_workers=workers))
        for dataset in ([1, 2, 3], (1.5, 2.5), range(5), "abc", {0: "x", 1: "y"}, torch.arange(6).reshape(3, 2))
    ]


def square(value: int) -> int:
    return value * value


@pytest.mark.parametrize("workers", [0, 2])
@parity
def test_data_pipes(cls: Loader, workers: int) -> Any:
    stream = IterableWrapper(range(12)).shuffle().sharding_filter().map(square)
    loader = cls(stream, 3, shuffle=True, num_workers=workers)
    generated = cls(stream, 3, shuffle=True, num_workers=workers, generator=torch.Generator().manual_seed(4))
    mapped = cls(SequenceWrapper(range(5)).map(square), 2, num_workers=workers)
    unshuffled = cls(stream, 3, shuffle=False, num_workers=workers)
    return [
        epochs(loader, 2),
        epochs(generated, 2),
        generated.generator,
        list(mapped),
        list(unshuffled),
        type(loader.dataset),
    ]


@parity
def test_persistent_data_pipes(cls: Loader) -> Any:
    stream = IterableWrapper(range(12)).shuffle().sharding_filter().map(square)
    return epochs(cls(stream, 3, shuffle=True, num_workers=2, persistent_workers=True), 3)


@WORKERS
@parity
def test_a_large_index_batch(cls: Loader, workers: int) -> Any:
    """Index batches larger than a pipe's buffer, many of them in flight."""
    batches = [list(range(k, k + 40_000)) for k in range(6)]
    return [int(total) for total in cls(Counting(50_000), batch_sampler=batches, num_workers=workers, collate_fn=sum)]
