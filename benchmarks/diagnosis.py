"""Does the diagnosis predict what happens, and what does it cost? `python -m benchmarks.diagnosis`.

Six workloads run for some seconds each with N workers and are diagnosed; then with half as many and with twice as many.
Beside each prediction stands the wait that was then measured.

Then (`--only overhead`) loaders run in turns without and with what a diagnosis needs: counting, where it can be left
out, and now and then a batch whose transforms are timed. The ratio is the median over pairs of neighbouring runs, of
the wall time per batch and of the CPU time of the process and its workers.
"""

from __future__ import annotations

import argparse
import os
import random
import resource
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
from torch.utils.data import Dataset

from dpex import DpexDataLoader
from dpex.autotune.types import Settings
from dpex.diagnose.diagnosis import Diagnosis
from dpex.profile.live_timer import SWITCH

BATCH = 4


class Work(Dataset[torch.Tensor]):
    """Samples that are waited for and computed; ``spread`` is the standard deviation of the waits' logarithms."""

    def __init__(self, size: int, wait_s: float, cpu_s: float, spread: float) -> None:
        self.size, self.wait_s, self.cpu_s, self.spread = size, wait_s, cpu_s, spread

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> torch.Tensor:
        if self.wait_s:
            factor = random.Random(index).lognormvariate(-(self.spread**2) / 2, self.spread) if self.spread else 1.0
            time.sleep(self.wait_s * factor)
        until = time.thread_time() + self.cpu_s
        while time.thread_time() < until:
            pass
        return torch.zeros(64)


@dataclass(frozen=True, kw_only=True)
class Workload:
    """Seconds per sample and step, and workers to begin with."""

    name: str
    wait_s: float = 0.0
    cpu_s: float = 0.0
    spread: float = 0.0
    step_s: float = 0.01
    workers: int = 4

    def run(self, workers: int, seconds: float) -> Diagnosis:
        """For about so long."""
        data = Work(1 << 20, self.wait_s, self.cpu_s, self.spread)
        with DpexDataLoader(data, BATCH, num_workers=workers, seeding="batch", prefetch_factor=4) as loader:
            batches = iter(loader)
            next(batches)
            loader.diagnose(reset=True)
            until = time.perf_counter() + seconds
            while time.perf_counter() < until:
                next(batches)
                time.sleep(self.step_s)
            return loader.diagnose()


WORKLOADS = (
    Workload(name="waits, evenly", wait_s=0.010, step_s=0.008),
    Workload(name="waits, unevenly", wait_s=0.010, spread=0.8, step_s=0.008),
    Workload(name="waits, nearly enough workers", wait_s=0.010, step_s=0.011),
    Workload(name="computes", cpu_s=0.002, step_s=0.003, workers=2),
    Workload(name="waits and computes", wait_s=0.010, cpu_s=0.0005, step_s=0.006),
    Workload(name="long steps", wait_s=0.003, step_s=0.020, workers=2),
)


def main(arguments: Sequence[str] | None = None) -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description="Predicted and measured wait for half and twice the workers.")
    parser.add_argument("--seconds", type=float, default=3.0, help="of each run (3)")
    parser.add_argument("--only", choices=("predictions", "overhead"), help="leave the other out")
    parser.add_argument("--rounds", type=int, default=9, help="pairs of runs for the overhead (9)")
    options = parser.parse_args(arguments)
    if options.only != "overhead":
        _predictions(options.seconds)
    if options.only != "predictions":
        _overhead(options.rounds)


def _predictions(seconds: float) -> None:
    print(
        f"{'workload':28}{'workers':>8}{'measured':>10}   then{'predicted':>12}{'from, to':>12}{'measured':>10}  off by"
    )
    off = [row for workload in WORKLOADS for row in _compare(workload, seconds)]
    print(f"\noff by {100 * sum(off) / len(off):.1f} points on average, {100 * max(off):.1f} at most")
    print(f"{sum(one <= 0.1 for one in off)} of {len(off)} within 10 points")


def _compare(workload: Workload, seconds: float) -> list[float]:
    before = workload.run(workload.workers, seconds)
    found = []
    for workers in (max(1, workload.workers // 2), 2 * workload.workers):
        prediction = _prediction(before, workers)
        wait = workload.run(workers, seconds).facts.wait_ratio
        found.append(abs(prediction.wait - wait))
        print(
            f"{workload.name:28}{workload.workers:8}{before.facts.wait_ratio:10.1%}{workers:7}{prediction.wait:12.1%}"
            f"{100 * prediction.low:6.0f}-{100 * prediction.high:.0f} %{wait:10.1%}{100 * found[-1]:8.1f}",
            flush=True,
        )
    return found


def _prediction(diagnosis: Diagnosis, workers: int) -> Any:
    found = diagnosis.predict(Settings(local=workers, prefetch=4 * workers))
    assert found is not None
    return found


# -- what it costs -----------------------------------------------------------------------------------------------------


class Compose:
    """As torchvision's."""

    def __init__(self, *transforms: Callable[[Any], Any]) -> None:
        self.transforms = list(transforms)

    def __call__(self, value: Any) -> Any:
        for transform in self.transforms:
            value = transform(value)
        return value


class Photographs(Dataset[Any]):
    """Decoded, cropped and normalised in three transforms."""

    def __init__(self) -> None:
        from benchmarks.works.jpeg import encoded_photographs, normalised, random_resized_crop

        self.files = encoded_photographs()
        self.transform = Compose(_decoded, random_resized_crop, normalised)

    def __len__(self) -> int:
        return 1 << 20

    def __getitem__(self, index: int) -> Any:
        return self.transform(self.files[index % len(self.files)])


def _decoded(file: Any) -> Any:
    import cv2
    import numpy as np

    cv2.setNumThreads(0)
    return cv2.imdecode(np.frombuffer(file, np.uint8), cv2.IMREAD_COLOR)


class Rows(Dataset[Any]):
    """Rows ready made, through two transforms that do nothing."""

    def __init__(self) -> None:
        self.rows = torch.zeros(1000, 5)
        self.transform = Compose(_same, _same)

    def __len__(self) -> int:
        return 1 << 20

    def __getitem__(self, index: int) -> Any:
        return self.transform(self.rows[index % 1000])


def _same(value: Any) -> Any:
    return value


RUNS: tuple[tuple[str, Callable[[], Any], int, dict[str, Any]], ...] = (
    ("photographs, torch's own iterator", Photographs, 400, {"batch_size": 4}),
    ("photographs, in-process", Photographs, 400, {"batch_size": 4, "seeding": "batch"}),
    ("photographs, 2 workers", Photographs, 800, {"batch_size": 4, "seeding": "batch", "num_workers": 2}),
    ("rows of 5, torch's own iterator", Rows, 8000, {"batch_size": 8}),
    ("rows of 5, in-process", Rows, 8000, {"batch_size": 8, "seeding": "batch"}),
    ("rows of 5, 2 workers", Rows, 20000, {"batch_size": 8, "seeding": "batch", "num_workers": 2}),
)


def _overhead(rounds: int) -> None:
    print(f"\n{'without and with a diagnosis':38}{'a batch':>10}{'wall':>9}{'CPU':>9}{'timed':>8}")
    for name, dataset, batches, options in RUNS:
        data, ratios, plain_s, timed = dataset(), [], [], 0
        for number in range(rounds):
            sides: dict[bool, tuple[float, float]] = {}
            for on in (number % 2 == 0, number % 2 == 1):
                *sides[on], found = _run(data, batches, options, on=on)
                timed += found
            plain_s.append(sides[False][0] / batches)
            ratios.append([on / off - 1.0 for on, off in zip(sides[True], sides[False], strict=True)])
        wall, cpu = (median(column) for column in zip(*ratios, strict=True))
        print(f"{name:38}{1e6 * median(plain_s):7.0f} µs{wall:9.1%}{cpu:9.1%}{timed / rounds:8.0f}", flush=True)


def _run(data: Any, batches: int, options: dict[str, Any], *, on: bool) -> tuple[float, float, int]:
    """Wall and CPU seconds of so many batches, the workers' start and end included, and batches timed."""
    os.environ[SWITCH] = "" if on else "0"
    loader = DpexDataLoader(data, **options)
    if on:
        loader.diagnose()
    began, cpu_began = time.perf_counter(), _cpu_s()
    for _ in zip(range(batches), loader, strict=False):
        pass
    loader.close()
    took_s, cpu_s = time.perf_counter() - began, _cpu_s() - cpu_began
    steps = loader.diagnose().facts.transforms if on else ()
    return took_s, cpu_s, next((step.calls for step in steps or () if step.name == "collate"), 0)


def _cpu_s() -> float:
    used = [resource.getrusage(whose) for whose in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(one.ru_utime + one.ru_stime for one in used)


if __name__ == "__main__":
    main()
