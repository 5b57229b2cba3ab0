"""Beside programs that keep all CPUs busy, queueing for one is not taken for waiting, and waiting still is."""

import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from math import ceil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import Dataset
from workload import wait_as_work

from dpex import DpexDataLoader
from dpex.autotune.law.model import Model
from dpex.measure.views import mean_s
from dpex.system.cpus import usable_cpus

pytestmark = [
    pytest.mark.alone,
    pytest.mark.skipif(not Path("/proc/self/schedstat").exists(), reason="this kernel does not tell who queues"),
]
CPUS = ceil(usable_cpus())
TICKETS = 60
PATIENCE_S = 60.0


class Work(Dataset[Any]):
    """Samples that are waited for, then computed for so much CPU time, however long that takes."""

    def __init__(self, cpu_s: float, wait_s: float) -> None:
        self.cpu_s, self.wait_s = cpu_s, wait_s

    def __len__(self) -> int:
        return 10**6

    def __getitem__(self, index: int) -> Any:
        wait_as_work(self.wait_s)
        until = time.thread_time() + self.cpu_s
        while time.thread_time() < until:
            pass
        return torch.zeros(3)


@pytest.fixture
def neighbours() -> Iterator[None]:
    """Twice as many busy programs as there are CPUs."""
    started = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(2 * CPUS)]
    yield
    for process in started:
        process.kill()
        process.wait()


def tuned(data: Work, enough: Callable[[Model], bool] = lambda _: True) -> tuple[Model, DpexDataLoader[Any]]:
    """The law's model of the work once that is ``enough`` after `TICKETS` batches; and the loader."""
    deadline = time.monotonic() + PATIENCE_S
    with DpexDataLoader(data, batch_size=4, num_workers="auto") as loader:
        for number, _ in enumerate(loader):
            assert loader._runtime.tuner is not None
            model: Model | None = loader._runtime.tuner._law.policy.model  # type: ignore[attr-defined]
            if number >= TICKETS and model is not None and enough(model):
                return model, loader
            assert time.monotonic() < deadline, f"{number} batches were seen, of which {model} is known"
    raise AssertionError("the data ended")


def test_queueing_is_not_taken_for_waiting(neighbours: None) -> None:
    """However long the queue is: a fifth of it, at most, is taken for waiting."""
    model, loader = tuned(Work(cpu_s=0.002, wait_s=0.0))
    wall_s = mean_s(loader._runtime.tuner._law.policy._work.sum.local)  # type: ignore[union-attr]
    assert model.local.service_s - model.local.cpu_s < 0.2 * (wall_s - model.local.cpu_s)


def test_waiting_beside_busy_programs_is_seen(neighbours: None) -> None:
    """Sooner or later: the start of workers queues as well, and counts in the first batches."""
    tuned(Work(cpu_s=0.0005, wait_s=0.01), lambda model: model.cpu_share < 0.5)
