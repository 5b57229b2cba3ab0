"""`python -m benchmarks.sweep`: what a sweep of trainings on one machine costs, with and without `share=`.

Three ways are measured in turn: one training; several, each with workers of its own; several that share. All read the
same batches of the same work, and one byte of each of their pages. What counts is the CPU time of all processes from
`iter()` to the end of the last training, workers and producers included: this process is the parent of all that lose
theirs (PR_SET_CHILD_SUBREAPER), and the kernel adds up what those used that have ended. Imports are outside. What the
training processes do not use themselves is preprocessing.
"""

import argparse
import ctypes
import os
import resource
import time
import traceback
from contextlib import suppress
from statistics import median
from typing import Any, NamedTuple

import torch
from torch.utils.data import Subset

from benchmarks.consumer import read_pages
from benchmarks.works import WORKS
from dpex import DpexDataLoader
from dpex.options import WorkerConfig

_PR_SET_CHILD_SUBREAPER = 36
"""Of linux/prctl.h."""
NAME = f"benchmark of {os.getpid()}"


class Cost(NamedTuple):
    """CPU seconds of all processes, those of them that made batches, and wall seconds."""

    cpu_s: float
    preprocessing_s: float
    wall_s: float


def train(dataset: Any, batch_size: int, workers: int, share: str | None) -> None:
    """One training: it takes every batch, and reads one byte of every page."""
    torch.manual_seed(0)
    with DpexDataLoader(
        dataset, batch_size=batch_size, num_workers=workers, seeding="batch", worker_config=WorkerConfig(share=share)
    ) as loader:
        for batch in loader:
            read_pages(batch)


def cost_of(trainings: int, *work: Any) -> Cost:
    """What that many trainings cost, which begin at the same time."""
    used, began, started = used_s(), time.monotonic(), set()
    told, tell = os.pipe()
    for _ in range(trainings):
        started.add(pid := os.fork())
        if not pid:
            try:
                train(*work)
                os.write(tell, f"{used_s(resource.RUSAGE_SELF)}\n".encode())
            except BaseException:
                traceback.print_exc()
                os._exit(1)
            os._exit(0)
    os.close(tell)
    failed = 0
    with suppress(ChildProcessError):
        while True:
            pid, status = os.wait()
            failed += pid in started and status != 0
    with os.fdopen(told) as lines:
        own_s = sum(map(float, lines))
    if failed:
        raise SystemExit(f"{failed} of {trainings} trainings failed")
    cpu_s = used_s() - used
    return Cost(cpu_s, cpu_s - own_s, time.monotonic() - began)


def adopt_orphans() -> None:
    """Have descendants that lose their parents become children of this process, so that `used_s` counts them."""
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)


def used_s(of: int = resource.RUSAGE_CHILDREN) -> float:
    """CPU seconds; by default of all that this process has waited for, and of all that those have."""
    used = resource.getrusage(of)
    return used.ru_utime + used.ru_stime


def main() -> None:
    """Measure the three ways in turn, and print medians and the median ratios to one training."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.sweep", description=__doc__)
    parser.add_argument("--work", choices=WORKS, default="jpeg", help="what a batch is (jpeg)")
    parser.add_argument("--trainings", type=int, default=4, metavar="N", help="trainings of the sweep (4)")
    parser.add_argument("--batches", type=int, default=40, metavar="N", help="batches that each takes (40)")
    parser.add_argument("--workers", type=int, default=2, metavar="N", help="num_workers of each (2)")
    parser.add_argument("--rounds", type=int, default=3, metavar="N", help="each way is measured so often (3)")
    options = parser.parse_args()
    adopt_orphans()
    torch.set_num_threads(1)
    work, several = WORKS[options.work], f"{options.trainings} trainings"
    ways = {"1 training": (1, None), several: (options.trainings, None)}
    ways[f"{several}, share="] = (options.trainings, NAME)
    costs: dict[str, list[Cost]] = {way: [] for way in ways}
    with work.opened(options.batches) as dataset:
        part = Subset(dataset, range(options.batches * work.batch_size))
        for _ in range(options.rounds):
            for way, (trainings, share) in ways.items():
                costs[way].append(cost_of(trainings, part, work.batch_size, options.workers, share))
    print(f"{options.batches} batches of {options.work} each, {options.workers} workers each, {os.cpu_count()} CPUs")
    for way, found in costs.items():
        medians = Cost(*map(median, zip(*found, strict=True)))
        pairs = list(zip(found, costs["1 training"], strict=True))
        ratio, made = (median(one[at] / alone[at] for one, alone in pairs) for at in (0, 1))
        told = f"{ratio:6.2f} times one training, preprocessing {made:.2f} times"
        print(f"{way:24} {medians.cpu_s:8.2f} s of CPU {medians.wall_s:8.2f} s {told}")


if __name__ == "__main__":
    main()
