"""Plant a bottleneck, train into it, and print what the diagnosis says: python examples/bottlenecks.py straggler"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.utils.data import Dataset

from dpex import DpexDataLoader


def compute(seconds: float) -> None:
    """Keep a CPU busy for that much CPU time, as a decoder or an augmentation does."""
    until = time.thread_time() + seconds
    while time.thread_time() < until:
        pass


class Samples(Dataset[Any]):
    """Samples that wait, as for storage, and compute. The middle one of each ``every`` waits for ``slow_s`` instead."""

    def __init__(self, wait_s: float = 0.0, cpu_s: float = 0.0, every: int = 0, slow_s: float = 0.0) -> None:
        self.wait_s, self.cpu_s, self.every, self.slow_s = wait_s, cpu_s, every, slow_s

    def __len__(self) -> int:
        return 100_000

    def __getitem__(self, index: int) -> Any:
        is_slow = self.every and index % self.every == self.every // 2
        time.sleep(self.slow_s if is_slow else self.wait_s)
        compute(self.cpu_s)
        return torch.zeros(3)


class Words(Samples):
    """Samples of many small Python objects instead of a tensor."""

    def __getitem__(self, index: int) -> Any:
        return {f"word {number}": [float(number)] * 3 for number in range(8000)}


def as_they_are(samples: list[Any]) -> list[Any]:
    """Collate nothing."""
    return samples


CPUS = len(os.sched_getaffinity(0))
CASES: dict[str, tuple[Callable[[], Dataset[Any]], float, dict[str, Any]]] = {
    "saturated": (partial(Samples, cpu_s=0.006), 0.004, {"num_workers": CPUS}),
    "storage": (partial(Samples, wait_s=0.01, cpu_s=0.0005), 0.006, {"num_workers": 4}),
    "straggler": (
        partial(Samples, wait_s=0.0005, every=256, slow_s=0.5),
        0.004,
        {"num_workers": 4, "prefetch_factor": 4},
    ),
    "training-bound": (partial(Samples, wait_s=0.002), 0.06, {"num_workers": 2}),
    "transfer": (Words, 0.004, {"num_workers": 2, "collate_fn": as_they_are, "batch_size": 2}),
}
"""Dataset, seconds of a training step, and arguments of the loader, by name."""


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("cases", nargs="*", metavar="case", help=f"one of {', '.join(CASES)}; all by default")
    parser.add_argument("--seconds", type=float, default=10.0, help="of training, for each case (default: 10)")
    arguments = parser.parse_args()
    for name in arguments.cases or CASES:
        make, step_s, options = CASES[name]
        with DpexDataLoader(make(), **{"batch_size": 4, "name": name, "seeding": "batch", **options}) as loader:
            until = time.monotonic() + arguments.seconds
            for _ in loader:
                time.sleep(step_s)  # a GPU would work meanwhile
                if time.monotonic() > until:
                    break
            print(loader.diagnose(), end="\n\n")


if __name__ == "__main__":
    main()
