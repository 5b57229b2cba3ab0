"""`python -m benchmarks.cached`: five epochs over photographs, with caches of decoded photographs and without.

A sample is a JPEG file of about 500x375 that is decoded (the same in each epoch), then cropped, resized and normalised
at random. Each contestant runs in a process of its own, with each number of workers, in rounds that take turns in the
order. The rate is that of epochs 2 to 5, the starts of epochs included. Memory is the proportional set size (PSS) of
all processes of the tree at the end of each epoch, the largest, and the files in shared memory that no process maps.

"augmentation alone" has the decoded photographs in an array that all workers share: no cache can be faster.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import psutil
import torch
from torch.utils.data import DataLoader, Dataset

import dpex
from benchmarks.consumer import read_pages
from benchmarks.machine import process_tree
from benchmarks.works.jpeg import encoded_photographs, normalised, random_resized_crop
from dpex import DpexDataLoader

BATCH = 64
EPOCHS = 5
WORKERS = (1, 2, 4)


class Decoded(Dataset[np.ndarray]):
    """The deterministic part: uint8 of shape (375, 500, 3)."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.files = encoded_photographs(count)

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> np.ndarray:
        cv2.setNumThreads(0)
        return cv2.imdecode(self.files[index], cv2.IMREAD_COLOR)

    def __getstate__(self) -> Any:
        return {"count": self.count}

    def __setstate__(self, state: Any) -> None:
        self.__init__(state["count"])  # type: ignore[misc]


class Augmented(Dataset[tuple[torch.Tensor, int]]):
    """The random part: normalised float32 of shape (3, 224, 224), and the number of the file."""

    def __init__(self, images: Any) -> None:
        self.images = images

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        cv2.setNumThreads(0)
        crop = cv2.cvtColor(random_resized_crop(self.images[index]), cv2.COLOR_BGR2RGB)
        return normalised(crop), index


class InDict(Dataset[np.ndarray]):
    """What people write first: each worker has its own dict."""

    def __init__(self, images: Any) -> None:
        self.images = images
        self.kept: dict[int, np.ndarray] = {}

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> np.ndarray:
        if index not in self.kept:
            self.kept[index] = self.images[index]
        return self.kept[index]


class InLMDB(Dataset[np.ndarray]):
    """What people write next: a file that all workers share, opened in each."""

    def __init__(self, images: Any, place: Path) -> None:
        self.images, self.place = images, place
        self.env: Any = None

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> np.ndarray:
        import lmdb

        if self.env is None:
            self.env = lmdb.open(str(self.place), map_size=1 << 33, sync=False)
        key = index.to_bytes(8, "big")
        with self.env.begin(buffers=True) as transaction:
            found = transaction.get(key)
            if found is not None:
                return np.frombuffer(found, np.uint8).reshape(375, 500, 3).copy()
        image = self.images[index]
        with self.env.begin(write=True) as transaction:
            transaction.put(key, image.tobytes())
        return image


def in_one_array(images: Any) -> np.ndarray:
    """Return all decoded photographs in one array, which forked workers share."""
    return np.stack([images[index] for index in range(len(images))])


# Of each: the loader, the dataset, and options of the loader.
CONTESTANTS: dict[str, tuple[Any, Callable[[Any, Path], Any], dict[str, Any]]] = {
    "augmentation alone, dpex": (DpexDataLoader, lambda images, _: in_one_array(images), {}),
    "dpex, cache in memory": (DpexDataLoader, lambda images, _: dpex.cached(images, memory="4GB"), {}),
    "dpex, cache on disk": (
        DpexDataLoader,
        lambda images, place: dpex.cached(images, memory=0, disk=place, version=1),
        {},
    ),
    "dpex, no cache": (DpexDataLoader, lambda images, _: images, {}),
    "torch, no cache": (DataLoader, lambda images, _: images, {}),
    "torch, `dpex.cached` in memory": (DataLoader, lambda images, _: dpex.cached(images, memory="4GB"), {}),
    "torch, a dict": (DataLoader, lambda images, _: InDict(images), {"persistent_workers": True}),
    "torch, LMDB by hand": (DataLoader, InLMDB, {}),
}


def shared_files() -> int:
    """Return the bytes of the caches of this user in shared memory."""
    return sum(path.stat().st_blocks * 512 for path in Path(f"/dev/shm/dpex-{os.getuid()}").glob("*"))


def mapped_and_not() -> int:
    """Return the proportional set size of this process and all below it, and of shared files that none of them maps."""
    total, shared = 0, 0
    for process in process_tree():
        with suppress(psutil.Error, OSError):
            found = process.memory_maps(grouped=True)
            total += sum(one.pss for one in found)
            shared += sum(one.pss for one in found if ".samples" in one.path)
    return total + max(0, shared_files() - shared)


def cpu_used() -> float:
    """Return the CPU seconds of this process, of all below it, and of those that have ended and were waited for."""
    found = 0.0
    for process in process_tree():
        with suppress(psutil.Error):
            found += sum(process.cpu_times()[:4])  # own and children's, in user mode and in the kernel
    return found


def measured(name: str, count: int, workers: int, place: Path) -> dict[str, Any]:
    """Run one contestant in this process; return its seconds by epoch and its memory."""
    loader_class, cached, options = CONTESTANTS[name]
    dataset = Augmented(cached(Decoded(count), place))
    loader = loader_class(dataset, batch_size=BATCH, shuffle=True, num_workers=workers, drop_last=True, **options)
    seconds, cpu_s, memory = [], [], 0
    for _ in range(EPOCHS):
        began, cpu_began, looking_s, looking_cpu_s = time.perf_counter(), cpu_used(), 0.0, 0.0
        for number, batch in enumerate(loader, 1):
            read_pages(batch)
            if number == count // BATCH:  # the workers are there until the loop ends
                looked, looked_cpu = time.perf_counter(), time.process_time()
                memory = max(memory, mapped_and_not())
                looking_s, looking_cpu_s = time.perf_counter() - looked, time.process_time() - looked_cpu
        seconds.append(time.perf_counter() - began - looking_s)
        cpu_s.append(cpu_used() - cpu_began - looking_cpu_s)
    return {"seconds": seconds, "cpu_s": cpu_s, "bytes": memory, "batches": count // BATCH}


def turns(rounds: int, names: list[str], workers: list[int]) -> Iterator[tuple[str, int]]:
    """Yield the measurements; every second round goes backwards."""
    for number in range(rounds):
        yield from [(name, many) for name in names for many in workers][:: -1 if number % 2 else 1]


def in_a_process(name: str, count: int, workers: int) -> dict[str, Any]:
    """Measure in a process of its own, which leaves nothing."""
    place = Path(tempfile.mkdtemp(prefix="dpex-bench-"))
    here, there = multiprocessing.Pipe()

    def run() -> None:
        there.send(measured(name, count, workers, place))

    process = multiprocessing.get_context("fork").Process(target=run)
    process.start()
    there.close()
    try:
        return dict(here.recv())
    finally:
        process.join()
        shutil.rmtree(place)


def table(found: dict[str, dict[int, list[dict[str, Any]]]]) -> str:
    """Return the results as Markdown: each contestant at its best number of workers."""
    header = ("contestant", "workers", "first epoch, s", "batches/s, epochs 2 to 5", "CPU ms/batch there", "memory, MB")
    lines = [f"| {' | '.join(header)} |", "|---" * len(header) + "|"]
    for name, by_workers in found.items():
        rates = {many: [later_rate(run) for run in runs] for many, runs in by_workers.items()}
        best = max(rates, key=lambda many: statistics.median(rates[many]))
        runs = by_workers[best]
        first_s = statistics.median(run["seconds"][0] for run in runs)
        memory = statistics.median(run["bytes"] for run in runs) / 1e6
        rate = f"{statistics.median(rates[best]):.1f} ({min(rates[best]):.1f} to {max(rates[best]):.1f})"
        cpu_ms = statistics.median(1e3 * sum(run["cpu_s"][1:]) / (EPOCHS - 1) / run["batches"] for run in runs)
        lines.append(f"| {name} | {best} | {first_s:.1f} | {rate} | {cpu_ms:.0f} | {memory:,.0f} |")
    return "\n".join(lines)


def later_rate(run: dict[str, Any]) -> float:
    """Return the batches per second of all epochs but the first."""
    return float((EPOCHS - 1) * run["batches"] / sum(run["seconds"][1:]))


def main() -> None:
    """Measure, and print the table; each measurement is a line of JSON before it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--photographs", type=int, default=2000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--workers", type=int, nargs="+", default=list(WORKERS))
    parser.add_argument("--only", nargs="+", default=list(CONTESTANTS), choices=list(CONTESTANTS))
    options = parser.parse_args()
    encoded_photographs(options.photographs)
    found: dict[str, dict[int, list[dict[str, Any]]]] = {name: {} for name in options.only}
    for name, workers in turns(options.rounds, options.only, options.workers):
        run = in_a_process(name, options.photographs, workers)
        print(json.dumps({"contestant": name, "workers": workers, **run}), flush=True)
        found[name].setdefault(workers, []).append(run)
    print(table(found))


if __name__ == "__main__":
    main()
