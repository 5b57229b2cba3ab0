"""See num_workers="auto" follow the work: what it decides, why, what it expected, and what it got.

    python examples/auto.py                  # under a minute, on any laptop; no cluster
    python examples/auto.py --seconds 20     # the same in a hurry

JPEG files are decoded and cropped for real. Two things are sleeps, so that this shows the same on any machine: the
training step, which stands for a GPU, and the time that the storage takes to open a file. First a fixed number of
workers loads the data; then "auto" does, from a cold start. While it trains, the storage becomes slow; later the step
becomes long, and workers are given back. Each line is a second of training. Its bar is the wait: the share of that
second in which the training loop was blocked because the next batch was not ready.
"""

import argparse
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from dpex import DpexDataLoader
from pictures import Photographs
from show import Display, Stretch, Watch, total

BATCH = 16
ENDLESS = 200_000
QUICK_S, SLOW_S = 0.012, 0.025
"""How long the storage takes to open a file."""
STEP_S, LONG_STEP_S = 0.05, 0.25
SETTLED = 3
"""The last part in so many of an act: by then the tuner has settled."""


@dataclass(frozen=True, kw_only=True)
class Act:
    """Some seconds of training with one storage and one length of the step."""

    title: str
    seconds: float
    storage_s: float = QUICK_S
    step_s: float = STEP_S


@dataclass(frozen=True, kw_only=True)
class Result:
    """An act with one loader: all of it, its last third, and the workers at its end."""

    loader: str
    act: Act
    whole: Stretch
    settled: Stretch
    workers: int


def acts_of(seconds: float) -> tuple[list[Act], list[Act]]:
    """Return the acts for the fixed number of workers, and for "auto"; together they take `seconds`."""
    quick = f"opening a file takes {QUICK_S * 1e3:.0f} ms, a step {STEP_S * 1e3:.0f} ms"
    slow = f"the storage has become slow, opening a file takes {SLOW_S * 1e3:.0f} ms"
    longer = f"the step has become long, {LONG_STEP_S * 1e3:.0f} ms"
    fixed = [Act(title=quick, seconds=0.12 * seconds), Act(title=slow, seconds=0.1 * seconds, storage_s=SLOW_S)]
    auto = [
        Act(title=quick, seconds=0.28 * seconds),
        Act(title=slow, seconds=0.26 * seconds, storage_s=SLOW_S),
        Act(title=longer, seconds=0.24 * seconds, storage_s=SLOW_S, step_s=LONG_STEP_S),
    ]
    return fixed, auto


def train(display: Display, name: str, loader: Any, acts: list[Act], results: list[Result]) -> None:
    """Make one pass over endless data, act after act, and add what each one brought to `results`."""
    watch = Watch(display, loader)
    batches: Iterator[Any] | None = None
    for act in acts:
        display.heading(f"{name}: {act.title}")
        loader.dataset.storage_s.fill_(act.storage_s)
        if batches is None:
            batches = iter(loader)
            next(batches)  # how long workers take to start is not the subject
        known = len(watch.seconds)
        try:
            run(watch, batches, act)
        finally:  # also after Ctrl-C
            results.append(result_of(name, act, watch.seconds[known:], watch.workers))


def run(watch: Watch, batches: Iterator[Any], act: Act) -> None:
    """Train for as long as the act takes."""
    end_s = time.monotonic() + act.seconds
    for _ in watch.batches(batches):
        time.sleep(act.step_s)
        if time.monotonic() > end_s:
            return


def result_of(loader: str, act: Act, seconds: list[Stretch], workers: int) -> Result:
    """Return what these seconds add up to."""
    settled = seconds[-max(1, len(seconds) // SETTLED) :]
    return Result(loader=loader, act=act, whole=total(seconds), settled=total(settled), workers=workers)


def show_table(display: Display, results: list[Result]) -> None:
    """Print a row for each act; the workers are those at its end."""
    headings = "loader", "storage", "step", "batches/s", "wait", "last third", "workers"
    rows = []
    for one in results:
        times = f"{one.act.storage_s * 1e3:.0f} ms", f"{one.act.step_s * 1e3:.0f} ms"
        waits = f"{one.whole.wait_ratio:.0%}", f"{one.settled.wait_ratio:.0%}"
        rows.append((one.loader, *times, f"{one.whole.rate:.1f}", *waits, str(one.workers)))
    display.table(headings, rows)


def parse() -> argparse.Namespace:
    """Return the options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=50, help="of training in all (50)")
    parser.add_argument("--num-workers", type=int, default=2, help="of the loader with a fixed number (2)")
    return parser.parse_args()


def main() -> int:
    """Return 0, or 130 after Ctrl-C."""
    options, display, results = parse(), Display(), []
    photographs = Photographs(ENDLESS, QUICK_S)
    fixed, auto = acts_of(options.seconds)
    status = 0
    try:
        settings: dict[str, Any] = {"batch_size": BATCH, "shuffle": True, "generator": torch.Generator().manual_seed(0)}
        with DpexDataLoader(photographs, **settings, num_workers=options.num_workers) as loader:
            train(display, f"{options.num_workers} workers", loader, fixed, results)
        with DpexDataLoader(photographs, **settings, num_workers="auto") as loader:
            train(display, "auto", loader, auto, results)
    except KeyboardInterrupt:
        display.paragraph("Stopped.")
        status = 130
    show_table(display, results)
    return status


if __name__ == "__main__":
    sys.exit(main())
