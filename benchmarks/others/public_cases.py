"""Cases that others have published about PyTorch's loader, measured with PyTorch's loader and with dpex.

- Start-up (SPDL's documentation): a dataset that is a list of strings of 64 bytes, 16 and 128 MiB in all, with workers
  that are spawned or come from a fork server; seconds from the constructor to the first batch.
- Payload (SPDL's documentation): samples of 32 MiB that a worker returns as bytes, NumPy array and tensor; MB/s at the
  training loop.
- Noisy neighbour (SPDL's documentation): the loader's workers and a training step of 2 ms of Python want the same CPUs;
  how long the step takes.
- Paths (mlcommons/storage#697): 8.3 million paths, batches of 24, 2 workers, no work; the first batch, `next()`, and
  the memory of all processes.
- xarray (pytorch#139792): 8 workers are spawned, and each imports xarray; seconds to the first batch.

The scripts of the reports are not public packages, so this program is written anew.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import time
from collections.abc import Callable
from statistics import median
from typing import Any

import numpy as np
import psutil
import torch
from torch.utils.data import DataLoader, Dataset

PAYLOAD_BYTES = 32 << 20
PAYLOADS = 40
PATHS = 8_300_000
PATH_BATCHES = 20_000
NEIGHBOUR_S = 8.0
MAKE: dict[str, Callable[[], Any]] = {
    "bytes": lambda: bytes(PAYLOAD_BYTES),
    "numpy": lambda: np.zeros(PAYLOAD_BYTES, np.uint8),
    "torch": lambda: torch.zeros(PAYLOAD_BYTES, dtype=torch.uint8),
}


class Strings(Dataset[str]):
    """A list of strings of 64 bytes."""

    def __init__(self, mebibytes: int) -> None:
        text = random.Random(0)
        self.strings = [f"{text.getrandbits(256):064x}" for _ in range((mebibytes << 20) // 64)]

    def __len__(self) -> int:
        return len(self.strings)

    def __getitem__(self, index: int) -> str:
        return self.strings[index]


class Paths(Dataset[int]):
    """A list of 8.3 million paths. A sample is the length of one."""

    def __init__(self) -> None:
        self.paths = [f"/data/train/{number // 1000:05d}/{number:08d}.jpg" for number in range(PATHS)]

    def __len__(self) -> int:
        return PATHS

    def __getitem__(self, index: int) -> int:
        return len(self.paths[index])


class Arrays(Dataset[Any]):
    """Rows of an xarray. A worker that unpickles it imports xarray."""

    def __init__(self) -> None:
        import xarray

        self.rows = xarray.DataArray(np.zeros((4096, 256), np.float32), dims=("row", "column"))

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Any:
        return self.rows[index].values


class Busy(Dataset[int]):
    """Samples of 4 ms of CPU time."""

    def __len__(self) -> int:
        return 1 << 20

    def __getitem__(self, index: int) -> int:
        compute(0.004)
        return index


class Payloads(Dataset[Any]):
    """Samples of 32 MiB of one kind."""

    def __init__(self, kind: str) -> None:
        self.kind = kind

    def __len__(self) -> int:
        return PAYLOADS

    def __getitem__(self, index: int) -> Any:
        return MAKE[self.kind]()


def compute(seconds: float) -> None:
    """Run Python code for so much CPU time of this thread."""
    end_s = time.thread_time() + seconds
    while time.thread_time() < end_s:
        pass


def loader_class(name: str) -> Any:
    """Return the class of a loader, "torch" or "dpex"."""
    if name == "torch":
        return DataLoader
    from dpex import DpexDataLoader

    return DpexDataLoader


def start_up(loader: str, mebibytes: int, method: str, workers: int) -> float:
    """Return the seconds from the loader's constructor to its first batch."""
    return first_batch_s(loader, Strings(mebibytes), batch_size=8, num_workers=workers, multiprocessing_context=method)


def xarray_start(loader: str) -> float:
    """Return the seconds to the first batch of 8 spawned workers that import xarray."""
    return first_batch_s(loader, Arrays(), batch_size=8, num_workers=8, multiprocessing_context="spawn")


def first_batch_s(loader: str, dataset: Dataset[Any], **options: Any) -> float:
    """Return the seconds from the loader's constructor to its first batch."""
    kind = loader_class(loader)
    start_s = time.monotonic()
    batches = iter(kind(dataset, **options))
    next(batches)
    seconds = time.monotonic() - start_s
    del batches
    return seconds


def paths(loader: str) -> tuple[float, float, float]:
    """Return the seconds to the first of batches of 8.3 million paths, µs per `next()`, and GB of all processes."""
    dataset, kind = Paths(), loader_class(loader)
    start_s = time.monotonic()
    batches = iter(kind(dataset, batch_size=24, shuffle=True, num_workers=2))
    next(batches)
    first_s = time.monotonic() - start_s
    start_s = time.monotonic()
    for _ in range(PATH_BATCHES):
        next(batches)
    next_us = 1e6 * (time.monotonic() - start_s) / PATH_BATCHES
    own = psutil.Process()
    memory = sum(one.memory_full_info().pss for one in (own, *own.children(recursive=True)))
    return first_s, next_us, memory / 1e9


def noisy_neighbour(loader: str) -> tuple[float, float]:
    """Return the mean ms of a step of 2 ms of Python beside 2 workers that want all CPUs, and batches/s."""
    batches = iter(loader_class(loader)(Busy(), batch_size=8, num_workers=2))
    for _ in range(20):
        next(batches)
    start_s, stepped_s, count = time.monotonic(), 0.0, 0
    while time.monotonic() - start_s < NEIGHBOUR_S:
        next(batches)
        began_s = time.monotonic()
        compute(0.002)
        stepped_s += time.monotonic() - began_s
        count += 1
    return 1e3 * stepped_s / count, count / (time.monotonic() - start_s)


def payload(loader: str, kind: str) -> float:
    """Return MB/s of samples of one kind out of one worker, the first two left out; every page is read."""
    batches = iter(loader_class(loader)(Payloads(kind), batch_size=None, num_workers=1))
    for _ in range(2):
        next(batches)
    start_s, count = time.monotonic(), 0
    for sample in batches:
        pages = np.frombuffer(sample, np.uint8) if isinstance(sample, bytes) else sample
        pages[::4096].sum()
        count += 1
    return count * PAYLOAD_BYTES / 1e6 / (time.monotonic() - start_s)


CASES: dict[str, tuple[Callable[..., Any], tuple[Any, ...], tuple[tuple[str, str], ...]]] = {
    **{
        f"start-up, {size} MiB, {method}, {workers} workers": (start_up, (size, method, workers), (("", "s"),))
        for size in (16, 128)
        for method in ("spawn", "forkserver")
        for workers in (1, 8)
    },
    **{f"payload of 32 MiB, {kind}": (payload, (kind,), (("", "MB/s"),)) for kind in MAKE},
    "noisy neighbour": (noisy_neighbour, (), ((", step of 2 ms of CPU", "ms"), (", batches", "/s"))),
    "8.3 million paths": (paths, (), ((", first batch", "s"), (", next()", "µs"), (", memory", "GB"))),
    "xarray, spawn, 8 workers, first batch": (xarray_start, (), (("", "s"),)),
}
"""Function, its arguments behind the loader's name, and the name and unit of each figure that it returns."""


def one(case: str, loader: str) -> list[float]:
    """Measure in a process of its own."""
    command = [sys.executable, "-m", "benchmarks.others.public_cases", "--one", case, loader]
    output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return [float(figure) for figure in json.loads(output.splitlines()[-1])]


def main() -> None:
    """Print a table of medians over rounds in which the loaders take turns."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.others.public_cases", description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--cases", default="", metavar="START", help="those whose names begin so")
    parser.add_argument("--one", nargs=2, metavar=("CASE", "LOADER"), help="measure once, in this process")
    options = parser.parse_args()
    if options.one:
        case, loader = options.one
        measure, arguments, _ = CASES[case]
        found = measure(loader, *arguments)
        print(json.dumps(found if isinstance(found, tuple) else [found]))
        return
    print("| case | torch | dpex |\n| --- | --- | --- |")
    for case, (_, _, figures) in CASES.items():
        if not case.startswith(options.cases):
            continue
        rounds = [[one(case, loader) for loader in ("torch", "dpex")] for _ in range(options.rounds)]
        for number, (name, unit) in enumerate(figures):
            torchs, ours = (median(each[number] for each in turns) for turns in zip(*rounds, strict=True))
            print(f"| {case}{name} | {torchs:.3g} {unit} | {ours:.3g} {unit} |", flush=True)


if __name__ == "__main__":
    main()
