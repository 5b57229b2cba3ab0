"""Ray Data: indices mapped to batches by tasks, taken with `iter_torch_batches`.

Ray runs before the course begins, as a cluster does; the execution of the pipeline begins with it. Locally Ray is
started for this process alone; in the remote rows it is connected already, and this node has no processors for tasks.
"""

import logging
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from math import ceil
from typing import Any

import numpy as np
import ray
import torch
from torch.utils.data import Dataset

from benchmarks.contestants import Contestant
from benchmarks.rivals import BatchOf, Iterating

BLOCK_BYTES, BLOCK_S = 16 * 2**20, 0.5
"""About what a block of results holds, or takes: small ones drown in the costs of tasks, long ones come late."""
MOST_BATCHES_PER_BLOCK = 2_000
WORK_S, MOST_BLOCKS = 20.0, 2_000
"""Work for longer than a window. Each block that waits slows all down: of floats 2,000 blocks came at an eighth of the
rate of 100."""
PREFETCH_BATCHES = 4
EXECUTING = ("StreamingExecutor", "ray-data", "iter_threaded")
"""How the names of Ray Data's threads begin; one more, "Prefetcher", waits for ever and calls nothing."""
END_LIMIT_S = 20.0


@contextmanager
def opened(contestant: Contestant, dataset: Dataset[Any], batch_size: int) -> Iterator[Iterable[Any]]:
    """The pipeline. Locally Ray is told to have as many processors as there should be tasks at once."""
    connected = ray.is_initialized()
    if not connected:
        ray.init(
            address="local",
            num_cpus=int(contestant.workers),
            include_dashboard=False,
            log_to_driver=False,
            logging_level=logging.ERROR,
        )
    ray.data.DataContext.get_current().enable_progress_bars = False
    ray.data.DataContext.get_current().execution_options.preserve_order = True
    others = set(threading.enumerate())
    try:
        yield Iterating(lambda: _batches(dataset, batch_size, int(contestant.workers)))
    finally:
        _join(set(threading.enumerate()) - others)
        if not connected:
            ray.shutdown()


def _join(threads: set[threading.Thread]) -> None:
    """Wait until what executes has ended: a call of Ray's after Ray was shut down ends the process."""
    for thread in threads:
        if thread.name.startswith(EXECUTING):
            thread.join(END_LIMIT_S)


def _batches(dataset: Dataset[Any], batch_size: int, tasks: int) -> Iterator[Any]:
    make = BatchOf(dataset)

    def arrays(block: dict[str, np.ndarray]) -> Iterator[dict[str, np.ndarray]]:
        for start in range(0, len(block["id"]), batch_size):
            batch = make(block["id"][start : start + batch_size])
            parts = batch if isinstance(batch, (tuple, list)) else [batch]
            yield {f"part{number}": part.numpy() for number, part in enumerate(parts)}

    per_block, block_s = _block(make, batch_size)
    blocks = min(MOST_BLOCKS, ceil(WORK_S * tasks / block_s))
    batches = min(blocks * per_block, len(dataset) // batch_size)  # type: ignore[arg-type]
    indices = ray.data.range(batches * batch_size, override_num_blocks=ceil(batches / per_block))
    # The whole block at once: with a batch size Ray Data keeps reading and mapping apart (seen with 2.60), makes a task
    # of each for every block, and lists thousands of indices before the first batch is made.
    mapped = indices.map_batches(arrays, batch_size=None)
    return iter(mapped.iter_torch_batches(batch_size=batch_size, prefetch_batches=PREFETCH_BATCHES))


def _block(make: BatchOf, batch_size: int) -> tuple[int, float]:
    """Batches of a block that holds about `BLOCK_BYTES`, or takes about `BLOCK_S`, and its seconds, by one sample."""
    make([0])  # the first one opens files
    start_s = time.perf_counter()
    batch = make([1])
    sample_s = time.perf_counter() - start_s
    parts = batch if isinstance(batch, (tuple, list)) else [batch]
    sample_bytes = sum(part.nbytes for part in parts if isinstance(part, torch.Tensor))
    fitting = min(BLOCK_BYTES / sample_bytes, BLOCK_S / sample_s) / batch_size
    batches = min(MOST_BATCHES_PER_BLOCK, max(1, int(fitting)))
    return batches, batches * batch_size * sample_s
