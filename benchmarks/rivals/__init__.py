"""Other loaders on the same works, each in the way its documentation recommends; `requirements.txt` installs them.

The unit of their work is the batch, like ours: a task makes all samples of a batch and collates them. Where a rival has
operations of its own (tf.data, DALI), it uses those. What cannot be imported is reported as such.
"""

import asyncio
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from importlib import import_module
from typing import Any

from torch.utils.data import BatchSampler, Dataset, SequentialSampler, default_collate

from benchmarks.contestants import Contestant

MODULES = {
    "spdl": "spdl_pipeline",
    "grain-threads": "grain_dataset",
    "grain-processes": "grain_dataset",
    "nodes-threads": "torchdata_nodes",
    "nodes-processes": "torchdata_nodes",
    "tf.data": "tf_data",
    "dali": "dali_pipeline",
    "webdataset": "webdataset_shards",
    "ray-data": "ray_data",
    "litdata": "litdata_raw",
}

Opened = AbstractContextManager[Iterable[Any]]


class BatchOf:
    """Makes a batch of a dataset from its indices. It pickles if the dataset does."""

    def __init__(self, dataset: Dataset[Any]) -> None:
        self.dataset = dataset

    def __call__(self, indices: Iterable[int]) -> Any:
        return default_collate([self.dataset[int(index)] for index in indices])


class AwaitedBatchOf(BatchOf):
    """As `BatchOf`, of an asynchronous dataset, whose samples are loaded at the same time."""

    async def __call__(self, indices: Iterable[int]) -> Any:
        return default_collate(await asyncio.gather(*[self.dataset[int(index)] for index in indices]))


def index_batches(dataset: Dataset[Any], batch_size: int) -> Iterable[list[int]]:
    """The indices of every batch, in order."""
    return BatchSampler(SequentialSampler(dataset), batch_size, drop_last=True)  # type: ignore[arg-type]


def open_rival(contestant: Contestant, dataset: Dataset[Any], batch_size: int) -> Opened:
    """The rival's loader. Raises ImportError where it is not installed."""
    module = import_module(f"{__name__}.{MODULES[contestant.engine]}")
    opened: Callable[[Contestant, Dataset[Any], int], Opened] = module.opened
    return opened(contestant, dataset, batch_size)


class Iterating:
    """An iterable from a function that starts an iterator, so that starting is part of the course."""

    def __init__(self, start: Callable[[], Iterator[Any]]) -> None:
        self.start = start

    def __iter__(self) -> Iterator[Any]:
        return self.start()
