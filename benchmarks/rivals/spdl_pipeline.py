"""SPDL: a pipeline of one stage in a pool of threads, batches in the order of their indices."""

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from spdl.pipeline import PipelineBuilder
from torch.utils.data import Dataset

from benchmarks.contestants import Contestant
from benchmarks.rivals import BatchOf, Iterating, index_batches

SINK_BATCHES = 4
"""Finished batches that may wait for the consumer; torch keeps two per worker."""


def opened(contestant: Contestant, dataset: Dataset[Any], batch_size: int) -> AbstractContextManager[Iterable[Any]]:
    """The pipeline with so many threads."""
    threads = int(contestant.workers)

    def start() -> Iterator[Any]:
        builder = PipelineBuilder().add_source(index_batches(dataset, batch_size))
        builder = builder.pipe(BatchOf(dataset), concurrency=threads, output_order="input")
        pipeline = builder.add_sink(max(SINK_BATCHES, threads)).build(num_threads=threads)
        with pipeline.auto_stop():
            yield from pipeline

    return nullcontext(Iterating(start))
