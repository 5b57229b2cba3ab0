"""Grain: a map dataset whose records are the batches, read by threads, or by processes with one thread each."""

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import grain
from absl import flags
from torch.utils.data import Dataset

from benchmarks.contestants import Contestant
from benchmarks.rivals import BatchOf, Iterating

BUFFERED_PER_THREAD = 2
LEAST_BUFFERED = 16


def opened(contestant: Contestant, dataset: Dataset[Any], batch_size: int) -> AbstractContextManager[Iterable[Any]]:
    """The dataset with so many threads or processes."""
    if not flags.FLAGS.is_parsed():
        flags.FLAGS(["benchmark"])  # Grain's processes ask for absl's flags
    workers, make = int(contestant.workers), BatchOf(dataset)
    batches = len(dataset) // batch_size  # type: ignore[arg-type]

    def record(number: int) -> Any:
        return make(range(number * batch_size, (number + 1) * batch_size))

    def start() -> Iterator[Any]:
        source = grain.MapDataset.range(batches).map(record)
        if contestant.engine == "grain-threads":
            buffered = max(LEAST_BUFFERED, BUFFERED_PER_THREAD * workers)
            return iter(source.to_iter_dataset(grain.ReadOptions(num_threads=workers, prefetch_buffer_size=buffered)))
        one = source.to_iter_dataset(grain.ReadOptions(num_threads=1, prefetch_buffer_size=BUFFERED_PER_THREAD))
        return iter(one.mp_prefetch(grain.MultiprocessingOptions(num_workers=workers)))

    return nullcontext(Iterating(start))
