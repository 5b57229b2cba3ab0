"""Two cases that SPDL's authors publish about PyTorch's loader, measured with PyTorch's loader and with dpex.

Start-up: a dataset that is a list of strings of 64 bytes, 16 and 128 MiB in all, with workers that are spawned or come
from a fork server; seconds from the constructor to the first batch. Payload: samples of 32 MiB that a worker returns as
bytes, NumPy array and tensor; MB/s at the training loop. The cases are described in SPDL's documentation; its own
scripts are not part of its package, so this program is written anew.
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
import torch
from torch.utils.data import DataLoader, Dataset

PAYLOAD_BYTES = 32 << 20
PAYLOADS = 40
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


class Payloads(Dataset[Any]):
    """Samples of 32 MiB of one kind."""

    def __init__(self, kind: str) -> None:
        self.kind = kind

    def __len__(self) -> int:
        return PAYLOADS

    def __getitem__(self, index: int) -> Any:
        return MAKE[self.kind]()


def loader_class(name: str) -> Any:
    """Return the class of a loader, "torch" or "dpex"."""
    if name == "torch":
        return DataLoader
    from dpex import DpexDataLoader

    return DpexDataLoader


def start_up(loader: str, mebibytes: int, method: str, workers: int) -> float:
    """Return the seconds from the loader's constructor to its first batch."""
    dataset, kind = Strings(mebibytes), loader_class(loader)
    start_s = time.monotonic()
    batches = iter(kind(dataset, batch_size=8, num_workers=workers, multiprocessing_context=method))
    next(batches)
    seconds = time.monotonic() - start_s
    del batches
    return seconds


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


CASES: dict[str, tuple[Callable[..., float], tuple[Any, ...], str]] = {
    **{
        f"start-up, {size} MiB, {method}, {workers} workers": (start_up, (size, method, workers), "s")
        for size in (16, 128)
        for method in ("spawn", "forkserver")
        for workers in (1, 8)
    },
    **{f"payload of 32 MiB, {kind}": (payload, (kind,), "MB/s") for kind in MAKE},
}


def one(case: str, loader: str) -> float:
    """Measure in a process of its own."""
    command = [sys.executable, "-m", "benchmarks.others.spdl_cases", "--one", case, loader]
    return float(
        json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()[-1])
    )


def main() -> None:
    """Print a table of medians over rounds in which the loaders take turns."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.others.spdl_cases", description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--cases", default="", metavar="START", help="those whose names begin so")
    parser.add_argument("--one", nargs=2, metavar=("CASE", "LOADER"), help="measure once, in this process")
    options = parser.parse_args()
    if options.one:
        case, loader = options.one
        measure, arguments, _ = CASES[case]
        print(json.dumps(measure(loader, *arguments)))
        return
    print("| case | torch | dpex |\n| --- | --- | --- |")
    for case, (_, _, unit) in CASES.items():
        if not case.startswith(options.cases):
            continue
        rounds = [[one(case, loader) for loader in ("torch", "dpex")] for _ in range(options.rounds)]
        torchs, ours = (median(values) for values in zip(*rounds, strict=True))
        print(f"| {case} | {torchs:.3g} {unit} | {ours:.3g} {unit} |", flush=True)


if __name__ == "__main__":
    main()
