"""On a real GPU: ``num_workers="auto"`` goes by what the GPU loses, and is beside the best fixed number of workers.

Batches wait for as long as they say and need no CPU, steps keep the GPU busy and are never waited for, so the training
loop runs ahead of the GPU as far as the launch queue lets it.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils.data import Dataset
from workload import wait_as_work

from dpex import AutotuneConfig, DpexDataLoader

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
STEP_S = 0.02
MOST = 8
SECONDS = 12.0
NEARLY = 0.95
"""Of the best fixed number's rate, what "auto" must reach once it has learnt."""


class Waits(Dataset[torch.Tensor]):
    """Sample: float32 (1000,), after so many seconds."""

    def __init__(self, wait_s: float) -> None:
        self.wait_s = wait_s

    def __len__(self) -> int:
        return 10**6

    def __getitem__(self, index: int) -> torch.Tensor:
        wait_as_work(self.wait_s)
        return torch.full((1000,), float(index))


@pytest.fixture(scope="module")
def step() -> Callable[[], None]:
    """Queues a kernel that runs for `STEP_S`."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    cycles = 20_000_000
    for _ in range(10):
        begin.record()
        torch.cuda._sleep(cycles)
        end.record()
        end.synchronize()
    per_second = cycles / (begin.elapsed_time(end) / 1e3)
    return lambda: torch.cuda._sleep(int(STEP_S * per_second))


def train(
    workers: Any, wait_s: float, step: Callable[[], None], seconds: float = SECONDS, most: int = MOST
) -> tuple[float, Any]:
    """Batches per second in the second half of ``seconds``, and the loader, which is closed."""
    options: dict[str, Any] = {"autotune": AutotuneConfig(max_local=most)} if workers == "auto" else {}
    with DpexDataLoader(Waits(wait_s), num_workers=workers, device="cuda", **options) as loader:
        began, half, settled = time.perf_counter(), 0.0, 0
        for taken, batch in enumerate(loader, 1):
            now = time.perf_counter()
            if now - began > seconds:
                break
            if now - began > seconds / 2:
                half = half or now
                settled += 1
            batch.sum()
            step()
            if taken % 50 == 0:
                torch.cuda.synchronize()
        torch.cuda.synchronize()
        return (settled - 1) / (time.perf_counter() - half), loader


def test_auto_beside_the_best_fixed_number(
    step: Callable[[], None], record_property: Callable[[str, object], None]
) -> None:
    """A batch takes three times a step: three workers keep up, and a fourth gains nothing."""
    fixed = {workers: train(workers, 3 * STEP_S, step, SECONDS / 2)[0] for workers in (1, 2, 3, 4, MOST)}
    rate, loader = train("auto", 3 * STEP_S, step)
    workers = loader.decisions[-1].new.workers
    record_property("fixed", fixed)
    record_property("auto", (rate, workers))
    print(f"batches per second by workers {fixed}; auto {rate:.1f} with {workers} workers")
    assert rate >= NEARLY * max(fixed.values())
    assert workers <= 5
    assert {decision.signal for decision in loader.decisions} == {"events"}


def test_a_loop_that_waits_under_a_busy_gpu_gets_no_more_workers(
    step: Callable[[], None], record_property: Callable[[str, object], None]
) -> None:
    """One worker keeps up with the GPU; the loop, which has nothing else to do, waits for it nearly all the time."""
    _, loader = train("auto", 0.8 * STEP_S, step)
    workers = loader.decisions[-1].new.workers if loader.decisions else None
    wait = loader.diagnose().facts.wait_ratio
    record_property("workers", workers)
    record_property("wait", wait)
    print(f"{workers} workers, waiting {wait:.0%}", *(decision.text for decision in loader.decisions), sep="\n")
    assert all(
        decision.new.workers <= decision.old.workers for decision in loader.decisions if decision.reason != "start"
    )
    assert {decision.signal for decision in loader.decisions} <= {"events"}


def test_a_loop_whose_gpu_starves_gets_more_workers(
    step: Callable[[], None], record_property: Callable[[str, object], None]
) -> None:
    """A batch takes twelve times a step, and at most eight workers run at the start."""
    _, loader = train("auto", 12 * STEP_S, step, most=32)
    workers = loader.decisions[-1].new.workers
    record_property("workers", workers)
    assert workers >= 12
    assert any("the GPU" in decision.text and "CUDA events" in decision.text for decision in loader.decisions)
