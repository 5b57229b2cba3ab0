"""Does the diagnosis predict what happens? `python -m benchmarks.diagnosis`.

Six workloads run for some seconds each with N workers and are diagnosed; then with half as many and with twice as many.
Beside each prediction stands the wait that was then measured.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.utils.data import Dataset

from benchmarks.works import ENDLESS
from dpex import DpexDataLoader
from dpex.diagnose.diagnosis import Diagnosis
from dpex.measure.settings import Settings

BATCH = 4


@dataclass(frozen=True, kw_only=True)
class Workload(Dataset[torch.Tensor]):
    """Samples that are waited for and computed, so many seconds each; ``spread``: the standard deviation of the waits'
    logarithms. step_s: of a step. workers: to begin with."""

    name: str
    wait_s: float = 0.0
    cpu_s: float = 0.0
    spread: float = 0.0
    step_s: float = 0.01
    workers: int = 4

    def __len__(self) -> int:
        return ENDLESS

    def __getitem__(self, index: int) -> torch.Tensor:
        if self.wait_s:
            time.sleep(self.wait_s * random.Random(index).lognormvariate(-(self.spread**2) / 2, self.spread))
        until = time.thread_time() + self.cpu_s
        while time.thread_time() < until:
            pass
        return torch.zeros(64)

    def run(self, workers: int, seconds: float) -> Diagnosis:
        """For about so long."""
        with DpexDataLoader(self, BATCH, num_workers=workers, seeding="batch", prefetch_factor=4) as loader:
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
    seconds = parser.parse_args(arguments).seconds
    heads = f"{'workload':28}{'workers':>8}{'measured':>10}   then{'predicted':>12}{'from, to':>12}{'measured':>10}"
    print(f"{heads}  off by")
    off = [row for workload in WORKLOADS for row in _compare(workload, seconds)]
    print(f"\noff by {100 * sum(off) / len(off):.1f} points on average, {100 * max(off):.1f} at most")
    print(f"{sum(one <= 0.1 for one in off)} of {len(off)} within 10 points")


def _compare(workload: Workload, seconds: float) -> list[float]:
    before = workload.run(workload.workers, seconds)
    found = []
    for workers in (max(1, workload.workers // 2), 2 * workload.workers):
        prediction = before.predict(Settings(local=workers, prefetch=4 * workers))
        assert prediction is not None
        wait = workload.run(workers, seconds).facts.wait_ratio
        found.append(abs(prediction.wait - wait))
        print(
            f"{workload.name:28}{workload.workers:8}{before.facts.wait_ratio:10.1%}{workers:7}{prediction.wait:12.1%}"
            f"{100 * prediction.low:6.0f}-{100 * prediction.high:.0f} %{wait:10.1%}{100 * found[-1]:8.1f}",
            flush=True,
        )
    return found


if __name__ == "__main__":
    main()
