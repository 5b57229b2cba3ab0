"""loadtune beside `num_workers="auto"`: what each finds for a training loop, when, and what that setting makes.

loadtune runs trials before a training and proposes arguments of PyTorch's loader. "auto" finds its setting while
training runs, from a cold start. Both have the same dataset, batch size and step, which is a sleep as of a GPU.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterable
from statistics import median
from typing import Any, NamedTuple

import torch
from loadtune import Workload, tune
from torch import nn
from torch.utils.data import DataLoader, Dataset, Subset

from benchmarks.works import WORKS
from dpex import DpexDataLoader

SAMPLES = 65_536
SECONDS = 20.0
"""Of training with each setting; the rate is that of the second half."""


def part_of(work: str) -> Dataset[Any]:
    """The first samples of a work, which is endless."""
    with WORKS[work].opened() as dataset:
        return Subset(dataset, range(SAMPLES))


class Found(NamedTuple):
    """Seconds until the setting was found, the setting in words, and the batches/s that it made afterwards."""

    after_s: float
    setting: str
    rate: float


def rate_of(loader: Iterable[Any], step_s: float) -> float:
    """Train for `SECONDS`; returns batches/s of the second half."""
    began, counted, half = time.monotonic(), 0, 0.0
    for _ in loader:
        time.sleep(step_s)
        now = time.monotonic()
        if now - began > SECONDS / 2:
            half = half or now
            counted += 1
        if now - began > SECONDS:
            break
    return (counted - 1) / (time.monotonic() - half)


def by_loadtune(work: str, step_s: float) -> Found:
    """What loadtune proposes after its trials."""

    def step(*_: Any) -> torch.Tensor:
        time.sleep(step_s)
        return torch.zeros(())

    batch_size, began = WORKS[work].batch_size, time.monotonic()
    workload = Workload(
        name=work,
        make_dataset=lambda: part_of(work),
        make_model=lambda: nn.Linear(1, 1),
        train_step=step,
        make_optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
        default_batch_size=batch_size,
    )
    result = tune(workload, steps=50, max_trials=6, fast=True, verbose=False)
    after_s = time.monotonic() - began
    knobs = result.best.knobs if result.best is not None else None
    options = {"num_workers": 0} if knobs is None else knobs.loader_kwargs()
    rate = rate_of(DataLoader(part_of(work), batch_size=batch_size, shuffle=True, **options), step_s)
    return Found(after_s, f"num_workers={options['num_workers']}", rate)


def by_auto(work: str, step_s: float) -> Found:
    """What "auto" has found when it took its last decision, and its rate in the second half of the same run."""
    with DpexDataLoader(part_of(work), batch_size=WORKS[work].batch_size, shuffle=True, num_workers="auto") as loader:
        rate = rate_of(loader, step_s)
        found = loader.stats()
        workers = sum(pool.running for pool in found.pools.values())
        last_s = max((decision.at for decision in loader.decisions), default=0.0)
        return Found(last_s, f"{workers} workers, prefetch {found.prefetch}", rate)


def main() -> None:
    """Print a table: medians of rounds in which both take turns."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.others.tuners", description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--step-ms", type=float, default=20.0)
    parser.add_argument("--works", nargs="+", choices=WORKS, default=["wait", "jpeg"])
    options = parser.parse_args()
    print("| work | tuner | found after | setting (last round) | batches/s with it |\n| --- | --- | --- | --- | --- |")
    for work in options.works:
        rounds = [[by(work, options.step_ms / 1e3) for by in (by_loadtune, by_auto)] for _ in range(options.rounds)]
        for name, results in zip(("loadtune", 'dpex, "auto"'), zip(*rounds, strict=True), strict=True):
            after_s, rate = median(one.after_s for one in results), median(one.rate for one in results)
            print(f"| {work} | {name} | {after_s:.1f} s | {results[-1].setting} | {rate:.1f} |", flush=True)


if __name__ == "__main__":
    main()
