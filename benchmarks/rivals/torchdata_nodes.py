"""torchdata.nodes: batches of indices, mapped in parallel and in order, in threads or in processes."""

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch.utils.data import Dataset
from torchdata.nodes import IterableWrapper, Loader, ParallelMapper, Prefetcher

from benchmarks.contestants import Contestant
from benchmarks.rivals import BatchOf, Iterating, index_batches

PREFETCH = 2


def opened(contestant: Contestant, dataset: Dataset[Any], batch_size: int) -> AbstractContextManager[Iterable[Any]]:
    """The loader with so many threads or processes."""
    method = "thread" if contestant.engine == "nodes-threads" else "process"

    def start() -> Iterator[Any]:
        source = IterableWrapper(index_batches(dataset, batch_size))
        mapped = ParallelMapper(
            source, BatchOf(dataset), num_workers=int(contestant.workers), in_order=True, method=method
        )
        return iter(Loader(Prefetcher(mapped, prefetch_factor=PREFETCH)))

    return nullcontext(Iterating(start))
