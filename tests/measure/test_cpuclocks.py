"""What a batch costs is counted with the threads that libraries start for it, in every pool."""

import threading
import time
import zlib
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch.utils.data import Dataset

from dpex import DpexDataLoader
from dpex.worker.fetch import CPU_CLOCK_EVERY, TINY_S, SampledCpu

BLOCKS = 4


def compute(cpu_s: float) -> float:
    """Compress, which holds no lock of the interpreter's, for that much CPU time; returns how much it was."""
    block, began = bytes(1 << 18), time.thread_time()
    while time.thread_time() - began < cpu_s:
        zlib.compress(block, 9)
    return time.thread_time() - began


class Threaded(Dataset[Any]):
    """A decoder with threads of its own, as those of zarr, OpenCV and tokenizers; says what they used."""

    def __init__(self, size: int, cpu_s: float = 0.002) -> None:
        self.size, self.cpu_s = size, cpu_s
        self._lock = threading.Lock()
        self._pool: ThreadPoolExecutor | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {"size": self.size, "cpu_s": self.cpu_s}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(state["size"], state["cpu_s"])  # type: ignore[misc]

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> torch.Tensor:
        with self._lock:
            if self._pool is None:
                self._pool = ThreadPoolExecutor(BLOCKS)
        return torch.tensor(sum(self._pool.map(compute, [self.cpu_s] * BLOCKS)), dtype=torch.float64)


POOLS: dict[str, tuple[str, dict[str, Any]]] = {
    "process": ("local", {"num_workers": 1, "seeding": "batch"}),
    "logical worker": ("local", {"num_workers": 1, "seeding": "worker"}),
    "in-process": ("inline", {"num_workers": 0, "seeding": "batch"}),
    "torch's in-process": ("inline", {"num_workers": 0}),
}


@pytest.mark.parametrize("name", POOLS)
def test_threads_of_a_library_are_counted(name: str) -> None:
    pool, options = POOLS[name]
    loader: DpexDataLoader[Any]
    with DpexDataLoader(Threaded(120), batch_size=2, **options) as loader:
        loader.diagnose()
        used_s = sum(batch.sum().item() for batch in loader)
        found = loader.stats().pools[pool]
    assert found.tickets == 60
    assert 0.6 * used_s < found.cpu_s < 1.5 * used_s + 0.1


class Clock:
    """A CPU clock that advances by ``step_s`` each time it is read."""

    def __init__(self, step_s: float) -> None:
        self.step_s, self.now_s, self.readings = step_s, 0.0, 0

    def __call__(self) -> float:
        self.now_s, self.readings = self.now_s + self.step_s, self.readings + 1
        return self.now_s


def test_one_tiny_ticket_s_cpu_time_stands_for_several() -> None:
    clock = Clock(TINY_S / 8)
    sampled = SampledCpu(clock)
    costs = []
    for _ in range(2 * CPU_CLOCK_EVERY):
        sampled.begin()
        costs.append(sampled.end(TINY_S / 4))
    assert costs == pytest.approx([TINY_S / 8] * len(costs))
    assert clock.readings == 4


def test_the_cpu_time_of_every_long_ticket_is_its_own() -> None:
    clock = Clock(0.0)
    sampled = SampledCpu(clock)
    costs = []
    for clock.step_s in (1.0, 3.0, 0.5):
        sampled.begin()
        costs.append(sampled.end(2.0))
    assert costs == [1.0, 3.0, 0.5]
