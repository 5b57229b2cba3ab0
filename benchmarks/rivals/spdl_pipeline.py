"""SPDL: a pipeline of one stage, in threads or by tasks of an event loop, batches in the order of their indices."""

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from spdl.pipeline import PipelineBuilder
from torch.utils.data import Dataset

from benchmarks.contestants import Contestant
from benchmarks.rivals import AwaitedBatchOf, BatchOf, Iterating, index_batches

SINK_BATCHES = 4
"""Finished batches that may wait for the consumer; torch keeps two per worker."""


def opened(contestant: Contestant, dataset: Dataset[Any], batch_size: int) -> AbstractContextManager[Iterable[Any]]:
    """The pipeline with so many threads, or tasks for an asynchronous dataset."""
    threads = int(contestant.workers)
    make = (AwaitedBatchOf if contestant.form else BatchOf)(dataset)

    def start() -> Iterator[Any]:
        builder = PipelineBuilder().add_source(index_batches(dataset, batch_size))
        builder = builder.pipe(make, concurrency=threads, output_order="input")
        pipeline = builder.add_sink(max(SINK_BATCHES, threads)).build(num_threads=threads)
        with pipeline.auto_stop():
            yield from pipeline

    return nullcontext(Iterating(start))
