"""Private memory of workers that read a dataset of Python objects: `python -m benchmarks --rows objects`.

The dataset is a list of dicts with five entries each, ten objects per dict, in a random order. A sample reads them all.
Each contestant runs one epoch in a process of its own. Memory is the private memory of each worker (unique set size),
eight batches before the end of the epoch: the median (the lower of two) and the largest. "dpex, not shared" is dpex
without `share_objects`. Run it with each version of Python: no objects are shared before 3.12.
The first batch includes the search for objects. `--work-us` adds work to each sample. `python -m benchmarks.objects
--help` lists the options.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from typing import Any

import psutil
import torch
from torch.utils.data import DataLoader, Dataset

from dpex import DpexDataLoader, WorkerConfig, compact

DICTS = 1_000_000
WORKERS = (2, 8)
BATCH = 256
BEFORE_THE_END = 8
"""Batches that are left when memory is read: the workers run until the last is drawn."""
CONTESTANTS: dict[str, tuple[Any, bool, dict[str, Any]]] = {
    "torch, fork": (DataLoader, False, {}),
    "torch, spawn": (DataLoader, False, {"multiprocessing_context": "spawn"}),
    "dpex, not shared": (DpexDataLoader, False, {"worker_config": WorkerConfig(share_objects=False)}),
    "dpex": (DpexDataLoader, False, {}),
    "dpex, spawn": (DpexDataLoader, False, {"multiprocessing_context": "spawn"}),
    "torch, compact": (DataLoader, True, {}),
    "dpex, compact": (DpexDataLoader, True, {}),
}
"""The loader, whether the rows are compact, and the loader's options."""


class Rows(Dataset[int]):
    """A list of dicts."""

    def __init__(self, count: int, work_s: float, *, is_compact: bool) -> None:
        self.work_s = work_s
        rows = [
            {
                "path": f"/data/{n:08d}.jpg",
                "label": n + 1000,
                "weight": n + 0.5,
                "caption": f"picture {n}",
                "box": (n + 300, n + 301, n + 302, n + 303),
            }
            for n in range(count)
        ]
        self.rows = compact(rows) if is_compact else rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> int:
        end, row = time.perf_counter() + self.work_s, self.rows[index]
        while time.perf_counter() < end:
            pass
        return int(row["label"] + row["weight"] + len(row["path"]) + len(row["caption"]) + sum(row["box"]))


def private_bytes(pids: list[int]) -> list[int]:
    """Return the private memory of each of these processes, ascending."""
    return sorted(int(psutil.Process(pid).memory_full_info().uss) for pid in pids)


def measured(name: str, count: int, workers: int, work_s: float) -> dict[str, Any]:
    """Run one contestant in this process."""
    loader_class, is_compact, options = CONTESTANTS[name]
    data = Rows(count, work_s, is_compact=is_compact)
    generator = torch.Generator().manual_seed(0)
    loader = loader_class(data, batch_size=BATCH, shuffle=True, num_workers=workers, generator=generator, **options)
    began, first_s, looked_s, memory = time.perf_counter(), 0.0, 0.0, [0]
    iterator = iter(loader)
    for number, _ in enumerate(iterator, 1):
        first_s = first_s or time.perf_counter() - began
        if number == len(loader) - BEFORE_THE_END:
            at = time.perf_counter()
            memory = private_bytes([worker.pid for worker in iterator._workers])
            looked_s = time.perf_counter() - at
    epoch_s = time.perf_counter() - began - looked_s
    rate = len(loader) / epoch_s
    return {"first_s": first_s, "rate": rate, "median": memory[(len(memory) - 1) // 2], "largest": memory[-1]}


def main() -> None:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dicts", type=int, default=DICTS)
    parser.add_argument("--workers", type=int, nargs="+", default=WORKERS)
    parser.add_argument("--work-us", type=float, default=0.0, help="CPU time of a sample, which lengthens the epoch")
    parser.add_argument("--only", nargs="+", choices=CONTESTANTS, default=list(CONTESTANTS))
    parser.add_argument("--measure", action="store_true", help="run one contestant here, and print JSON")
    asked = parser.parse_args()
    if asked.measure:
        print(json.dumps(measured(asked.only[0], asked.dicts, asked.workers[0], asked.work_us / 1e6)))
        return
    table(asked.dicts, asked.workers, asked.only, asked.work_us)


def table(
    dicts: int = DICTS, numbers: Sequence[int] = WORKERS, names: Iterable[str] = CONTESTANTS, work_us: float = 0.0
) -> None:
    """Measure each contestant with each number of workers, and print a table."""
    print(f"Python {sys.version.split()[0]}, {dicts:,} dicts, {work_us:.0f} µs of work per sample\n")
    print("| contestant | workers | first batch, s | batches/s | private memory, MB: median | largest |")
    print("|---" * 6 + "|")
    for workers in numbers:
        for name in names:
            command = [sys.executable, "-m", "benchmarks.objects", "--measure", "--only", name]
            command += ["--dicts", str(dicts), "--workers", str(workers), "--work-us", str(work_us)]
            found = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout)
            memory = f"{found['median'] / 1e6:,.0f} | {found['largest'] / 1e6:,.0f}"
            print(f"| {name} | {workers} | {found['first_s']:.2f} | {found['rate']:.0f} | {memory} |", flush=True)


if __name__ == "__main__":
    main()
