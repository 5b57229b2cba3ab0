"""Large things: a shuffle of many indices, a dataset of a gigabyte sent to nodes, and many loaders at once."""

import json
import resource
import sys
import time
from collections.abc import Iterator
from itertools import islice
from typing import Any

import numpy as np
import psutil
import torch
from torch.utils.data import DataLoader, Dataset

from benchmarks.cluster import connected
from benchmarks.machine import process_tree, tree_bytes
from benchmarks.scale.course import BATCH, BatchWaits
from dpex import DpexDataLoader

NODES = 4
INDICES = 100_000_000
GIGABYTE = 1 << 30
LARGE_BATCH = 10_000_000


class Range(Dataset[int]):
    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> int:
        return index


class Held(BatchWaits):
    """Samples beside a gigabyte of data that travels with the dataset."""

    def __init__(self) -> None:
        super().__init__(0.01)
        self.data = np.random.default_rng(0).integers(0, 256, GIGABYTE, np.uint8)


def shuffle(who: str) -> dict[str, Any]:
    """Return the seconds until the first batch of a shuffle, and the peak of this process's memory."""
    loader_class: Any = DataLoader if who == "torch" else DpexDataLoader
    before, began = psutil.Process().memory_info().rss, time.perf_counter()
    generator = torch.Generator().manual_seed(0)
    loader = loader_class(Range(INDICES), batch_size=256, shuffle=True, num_workers=2, generator=generator)
    batches = iter(loader)
    first = next(batches)
    seconds = time.perf_counter() - began
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return {"first_s": seconds, "peak_gb": (peak - before) / 1e9, "order": first[:4].tolist()}


def alive(who: str, count: int = 100) -> dict[str, Any]:
    """Return processes and memory of many loaders that have an open iterator each."""
    loader_class: Any = DataLoader if who == "torch" else DpexDataLoader
    number = "auto" if who == "auto" else 1
    loaders = [loader_class(BatchWaits(0.001), batch_size=BATCH, num_workers=number) for _ in range(count)]
    began = time.perf_counter()
    iterators = [iter(loader) for loader in loaders]
    for batches in iterators:
        next(batches)
    seconds = time.perf_counter() - began
    found = {"processes": len(process_tree()) - 1, "memory_gb": tree_bytes() / 1e9, "first_s": seconds / count}
    for loader in loaders if who != "torch" else ():
        loader.close()
    return found


def send(who: str) -> dict[str, Any]:
    """Return the seconds until each of four nodes has made a batch of a dataset of a gigabyte, or has a copy of it."""
    with connected([1] * NODES, store_bytes=3 * GIGABYTE // 2):
        time.sleep(3.0)
        data, began = Held(), time.perf_counter()
        came = (time.perf_counter() - began for _ in (copies if who == "Ray tasks" else new_workers)(data))
        seen = list(islice(came, NODES))
        return {"first_s": seen[0], "all_s": seen[-1]}


def new_workers(data: Held) -> Iterator[int]:
    """Yield each worker with its first batch."""
    seen = set()
    with DpexDataLoader(data, BATCH, num_workers=NODES, distribute_mode=True, seeding="batch") as loader:
        for batch in loader:
            if (worker := int(batch[0, 1])) not in seen:
                seen.add(worker)
                yield worker


def copies(data: Held) -> Iterator[int]:
    """Yield as each node's task has its copy."""
    import ray

    sent = ray.put(data.data)
    tasks = [ray.remote(copied).options(scheduling_strategy="SPREAD").remote([sent]) for _ in range(NODES)]
    while tasks:
        _, tasks = ray.wait(tasks)
        yield len(tasks)


def carry(who: str) -> dict[str, Any]:
    """Return the gigabytes per second of batches of 10 MB over loopback, and the CPU seconds of a gigabyte."""
    with connected([NODES]):
        data = BatchWaits(0.0, LARGE_BATCH // BATCH)
        with DpexDataLoader(data, BATCH, num_workers=NODES, distribute_mode=True, seeding="batch") as loader:
            batches = iter(loader)
            for _ in range(100):
                next(batches)
            began, cpu_s = time.perf_counter(), time.process_time()
            for _ in range(500):
                next(batches)
            seconds, cpu_s = time.perf_counter() - began, time.process_time() - cpu_s
    gigabytes = 500 * LARGE_BATCH / 1e9
    return {"gigabytes_s": gigabytes / seconds, "cpu_s": cpu_s / gigabytes}


def copied(data: list[Any]) -> int:
    import ray

    return int(ray.get(data[0]).copy()[-1])


def main(argument: str) -> None:
    """Measure ``[part, who]``, and print the figures."""
    part, who = json.loads(argument)
    print(json.dumps({"shuffle": shuffle, "alive": alive, "send": send, "carry": carry}[part](who)), flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
