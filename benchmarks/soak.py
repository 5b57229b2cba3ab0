"""Many batches and many resizes: memory, descriptors, threads and processes must stay flat (`make soak`).

    python -m benchmarks.soak --batches 1000000 --resize-every 5000      # tiny batches
    python -m benchmarks.soak --kind large --batches 60000 --resize-every 500
    python -m benchmarks.soak --seconds 300

The training process is looked at just before a resize, always with the same number of workers, once all others have
ended. The curves are printed, and a line is fitted through what came
after the first quarter: the exit status is 1 where it rises.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import astuple, dataclass, fields
from itertools import cycle
from typing import Any

import psutil
import torch
from torch.utils.data import Dataset

from dpex import DpexDataLoader

SIZES = {"tiny": 16, "large": 1 << 20}
"""Numbers in a sample: 64 bytes, and 4 MB."""
WORKERS = (2, 4, 1, 3)
"""The numbers of workers, one after the other; each look is at the end of the first."""
TEMPLATES = 1
"""Processes beside the workers: the one that they are forked from."""
SETTLING_S = 0.05
"""How long after the end of a worker the training process may still have its descriptors."""
ALLOWED = {"memory_mb": 16.0, "descriptors": 1.0, "threads": 0.5, "processes": 0.5}
"""How much the fitted line may rise from its first to its last point."""
WARM = 0.25
"""The part of the looks in which slots and heaps may still grow."""
LEAST_LOOKS = 8
BARS = "▁▂▃▄▅▆▇█"


@dataclass(frozen=True, kw_only=True)
class Look:
    """The training process at one moment, and how many processes it has started that live."""

    batches: int
    memory_mb: float
    descriptors: float
    threads: float
    processes: float


class Samples(Dataset[torch.Tensor]):
    """As many as anybody wants, of so many numbers each."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return 1 << 40

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((self.size,), float(index % 97))


def look(batches: int) -> Look:
    """Ask the kernel about this process."""
    here = psutil.Process()
    return Look(
        batches=batches,
        memory_mb=here.memory_info().rss / 2**20,
        descriptors=here.num_fds(),
        threads=here.num_threads(),
        processes=process_count(),
    )


def process_count() -> int:
    """How many processes live that this one or one of those has started."""
    return len(psutil.Process().children(recursive=True))


def looks(loader: DpexDataLoader[Any], *, batches: int, seconds: float, resize_every: int) -> Iterator[Look]:
    """Take batches until there were enough of them, or the time is over; one look in each round of `WORKERS`.

    Before a look batches are taken until all workers that were asked to leave have done so, and `SETTLING_S` longer.
    """
    wanted, ends_at = cycle(WORKERS), time.monotonic() + seconds
    workers, settled_at = next(wanted), 0.0
    for number, _ in enumerate(loader, 1):
        now = time.monotonic()
        if number >= batches or now > ends_at:
            return
        if number % resize_every == 0:
            if workers == WORKERS[0]:
                if process_count() != TEMPLATES + workers:
                    settled_at = now
                if now < settled_at + SETTLING_S:
                    continue
                yield look(number)
            workers, settled_at = next(wanted), now
            loader.resize(local=workers)


def rise(values: Sequence[float]) -> float:
    """How much the line of least squares through these rises from the first to the last."""
    count = len(values)
    middle, mean = (count - 1) / 2, sum(values) / count
    over = sum((at - middle) ** 2 for at in range(count))
    return sum((at - middle) * (value - mean) for at, value in enumerate(values)) / over * (count - 1)


def curve(values: Sequence[float], width: int = 60) -> str:
    """The values as bars, from the least to the largest."""
    chosen = [values[at * len(values) // min(width, len(values))] for at in range(min(width, len(values)))]
    low, high = min(chosen), max(chosen)
    return "".join(BARS[int((value - low) / (high - low or 1.0) * (len(BARS) - 1))] for value in chosen)


def report(found: Sequence[Look]) -> bool:
    """Print each curve and its rise; whether all are flat."""
    settled = [astuple(each) for each in found[int(WARM * len(found)) :]]
    if len(settled) < LEAST_LOOKS:
        print(f"too few looks for a line: {len(settled)} of {LEAST_LOOKS}; take more batches, or resize more often")
        return False
    flat = True
    for at, field in enumerate(fields(Look)[1:], 1):
        values = [each[at] for each in settled]
        rises, allowed = rise(values), ALLOWED[field.name]
        flat = flat and rises <= allowed
        print(f"{field.name:12} {curve(values)} {values[0]:.0f} to {values[-1]:.0f}, rises by {rises:.2f} ({allowed})")
    return flat


def main(arguments: Sequence[str] | None = None) -> int:
    """Soak, print, and return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kind", choices=SIZES, default="tiny", help="the size of batches")
    parser.add_argument("--batches", type=int, default=1_000_000, help="how many, at most")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="how long, at most")
    parser.add_argument("--resize-every", type=int, default=1000, help="batches between two resizes")
    given = parser.parse_args(arguments)
    began = time.monotonic()
    dataset = Samples(SIZES[given.kind])
    with DpexDataLoader(dataset, batch_size=2, num_workers=WORKERS[0], seeding="batch") as loader:
        found = list(looks(loader, batches=given.batches, seconds=given.seconds, resize_every=given.resize_every))
        stats = loader.stats()
    flat, deaths = report(found), stats.deaths
    told = f"{stats.batches:,} {given.kind} batches, {len(found) * len(WORKERS):,} resizes"
    print(f"{told}, {deaths} deaths, {time.monotonic() - began:.0f} s: {'flat' if flat else 'NOT FLAT'}")
    return 0 if flat and not deaths else 1


if __name__ == "__main__":
    sys.exit(main())
