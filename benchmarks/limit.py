"""What the machine could do at best: as many bare loops at once as there are cores, really run, nothing handed over.

Each process makes samples into a batch of its own, in memory that is faulted in already, and uses it as the consumer
would. Memory bandwidth, shared caches and clocks under load count as they are. Starting does not, and nor does faulting
in what samples freed before: it is a ceiling.
"""

import multiprocessing
import time
from collections.abc import Iterator, Mapping
from multiprocessing.connection import Connection
from multiprocessing.synchronize import Barrier
from typing import Any

import torch
from torch.utils.data import Dataset

from benchmarks.consumer import USES, Use
from benchmarks.course import Course

START_LIMIT_S = 60.0


def limit(dataset: Dataset[Any], batch_size: int, processes: int, window_s: float, use: Use) -> Course:
    """The batches of all processes within the window."""
    context = multiprocessing.get_context("fork")
    together = context.Barrier(processes)
    ends: list[Connection] = []
    started = []
    for number in range(processes):
        receiving, sending = context.Pipe(duplex=False)
        arguments = (dataset, batch_size, number, window_s, use, together, sending)
        process = context.Process(target=_work, args=arguments, daemon=True)
        process.start()
        sending.close()
        ends.append(receiving)
        started.append(process)
    rates = [receiving.recv() for receiving in ends]
    for process in started:
        process.join()
    return Course(batches=round(sum(rates) * window_s), seconds=window_s, waited_s=window_s)


KEPT_BYTES = 1 << 28
"""The heap keeps twice as much of what samples free, which is all."""


def _work(
    dataset: Dataset[Any], batch_size: int, number: int, window_s: float, use: Use, together: Barrier, end: Connection
) -> None:
    """One process: batches per second, sent when the window is over."""
    torch.set_num_threads(1)
    from dpex.transport.memory import learn  # not at the top: an older dpex that is compared has none

    learn(KEPT_BYTES)
    batches, read = bare_batches(dataset, batch_size, first=number * len(dataset) // 64), USES[use]  # type: ignore[arg-type]
    next(batches)
    together.wait(START_LIMIT_S)
    taken, start_s = 0, time.perf_counter()
    while (now_s := time.perf_counter()) - start_s < window_s:
        read(next(batches))
        taken += 1
    end.send(taken / (now_s - start_s))


def bare_batches(dataset: Dataset[Any], batch_size: int, first: int = 0) -> Iterator[torch.Tensor]:
    """Samples from index `first` on, copied one by one into a single batch that is written over and over."""
    batch = torch.zeros(batch_size, *_tensor(dataset[first]).shape, dtype=_tensor(dataset[first]).dtype)
    for start in range(first, len(dataset) - batch_size + 1, batch_size):  # type: ignore[arg-type]
        for row in range(batch_size):
            batch[row].copy_(_tensor(dataset[start + row]))
        yield batch


def _tensor(sample: Any) -> torch.Tensor:
    """The first tensor of a sample, which holds nearly all of its bytes."""
    if isinstance(sample, Mapping):
        return next(iter(sample.values()))
    return sample[0] if isinstance(sample, (tuple, list)) else sample
