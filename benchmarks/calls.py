"""Does the report name the call that costs, with its share? `python -m benchmarks.calls`.

Each dataset exists twice: as a user writes it, and as a copy with a clock around one call. The first is diagnosed. Its
costliest call and its share of making a batch stand beside the share by the clock of the copy. Shares are of CPU time
for calls that compute, because other programs may hold the CPUs, and of wall time for calls that wait. `--costs` shows
the additional cost of a timed batch and of an epoch.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any

import cv2
import torch

from benchmarks.works.calls import CLOCK, WORKS, Albumentations, Endless, Modules, NumPy, OpenCv, Pandas, Pillow, Work
from dpex import DpexDataLoader
from dpex.diagnose.hot_calls import hot_calls
from dpex.profile.live_timer import SWITCH

BATCH = 16


def made(dataset: Any, collate_fn: Any, seconds: float) -> Any:
    """Return the facts of a loader that makes batches in this process for ``seconds``."""
    with DpexDataLoader(dataset, BATCH, num_workers=0, seeding="batch", collate_fn=collate_fn) as loader:
        loader.diagnose()
        until = time.perf_counter() + seconds
        for _ in loader:
            if time.perf_counter() > until:
                break
        return loader.diagnose().facts


def row(work: Work, seconds: float) -> tuple[str, bool]:
    """Return a row of the table, and True if the named call is right and its share within five points."""
    os.environ[SWITCH] = "0"
    CLOCK.wall_s = CLOCK.cpu_s = 0.0
    by_clock = made(work.copy(), work.collate[1], seconds)
    share = CLOCK.wall_s / by_clock.busy_s if work.waits else CLOCK.cpu_s / by_clock.cpu_s
    share = 1.0 - share if work.is_rest else share
    os.environ[SWITCH] = ""
    facts = made(work.dataset(), work.collate[0], seconds)
    named = max(hot_calls(facts), key=lambda one: one.wall_s if work.waits else one.cpu_s, default=None)
    if named is None:
        return f"{work.name:28}{share:8.0%}{'-':>8}  nothing named", False
    told = named.share if work.waits else named.cpu_s / facts.cpu_s
    waits = f", waits for {named.waits_for}" if named.waits_for else ""
    is_right = work.call in named.placed and abs(told - share) <= 0.05
    return f"{work.name:28}{share:8.0%}{told:8.0%}  {named.placed}{waits}", is_right


# -- costs -------------------------------------------------------------------------------------------------------------


class Tiny(Endless):
    def __getitem__(self, index: int) -> Any:
        return index


COSTLY: dict[str, Callable[[], Any]] = {
    "tiny": Tiny,
    "Pillow": Pillow,
    "OpenCV": OpenCv,
    "NumPy": NumPy,
    "albumentations": Albumentations,
    "nn.Sequential": Modules,
    "pandas": Pandas,
}


def timed_batch(dataset: Any, batches: int) -> tuple[float, float]:
    """Return the CPU seconds of a batch that is not timed, and of one that is: the medians of batches in turn."""
    taken: tuple[list[float], list[float]] = [], []
    with DpexDataLoader(dataset, 2 * BATCH, num_workers=0, seeding="batch", collate_fn=len) as loader:
        loader.diagnose()
        timer, iterator = loader._runtime.timer, iter(loader)
        for number in range(2 * batches + 8):
            timer._occasions._began, timer._occasions._pass_by = 0.0, 0
            timer._occasions.due = timer.due = 0.0 if number % 2 else float("inf")
            began = time.process_time()
            next(iterator)
            if number >= 8:
                taken[number % 2].append(time.process_time() - began)
    return median(taken[0]), median(taken[1])


def epoch(dataset: Any, seconds: float, switch: str) -> float:
    """Return the CPU seconds of a batch of an epoch of ``seconds``."""
    os.environ[SWITCH] = switch
    with DpexDataLoader(dataset, 2 * BATCH, num_workers=0, seeding="batch", collate_fn=len) as loader:
        loader.diagnose()
        began, until = time.process_time(), time.perf_counter() + seconds
        for number, _ in enumerate(loader, 1):  # noqa: B007
            if time.perf_counter() > until:
                break
        return (time.process_time() - began) / number


def costs(rounds: int, seconds: float) -> None:
    """Print the additional CPU time of a timed batch and of an epoch, by round."""
    for name, kind in COSTLY.items():
        pairs = [timed_batch(kind(), 12 if name != "tiny" else 400) for _ in range(rounds)]
        more = ", ".join(f"{100 * (timed / plain - 1):.1f}" for plain, timed in pairs)
        each_ms = 1e3 * median(plain for plain, _ in pairs) / (2 * BATCH)
        print(f"{name:28}sample {each_ms:7.3f} ms, a timed batch {more} % more", flush=True)
    for name in ("tiny", "Pillow"):
        pairs = [(epoch(COSTLY[name](), seconds, "0"), epoch(COSTLY[name](), seconds, "")) for _ in range(rounds)]
        more = ", ".join(f"{100 * (timed / plain - 1):.2f}" for plain, timed in pairs)
        print(f"{name:28}an epoch of {seconds:g} s {more} % more", flush=True)


def main(arguments: Sequence[str] | None = None) -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description="The call that costs most, by the report and by a clock.")
    parser.add_argument("--seconds", type=float, default=3.0, help="of each run (3)")
    parser.add_argument(
        "--costs", action="store_true", help="show the additional cost of a timed batch and of an epoch instead"
    )
    parser.add_argument("--only", default="", help="datasets whose names contain this")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)  # as in a worker; the threads of libraries have other CPU clocks
    cv2.setNumThreads(1)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    if options.costs:
        costs(5, options.seconds)
        return
    print(f"{'dataset':28}{'clock':>8}{'report':>8}  call")
    for work in WORKS:
        if options.only in work.name:
            text, is_right = row(work, options.seconds)
            print(f"{text}{'' if is_right else '   << WRONG'}", flush=True)


if __name__ == "__main__":
    main()
