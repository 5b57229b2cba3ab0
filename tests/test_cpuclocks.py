"""What a batch costs is counted with the threads that libraries start for it, in every pool."""

from __future__ import annotations

import threading
import time
import zlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch.utils.data import Dataset
from waiting import until

from dpex import DpexDataLoader
from dpex.system.cpu_clocks import (
    CPU_CLOCK_EVERY,
    LOOK_EVERY_S,
    SPIN_S,
    TINY_S,
    HelperThreads,
    SampledCpu,
    ThreadSighting,
    other_threads,
)

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


@pytest.mark.parametrize("name", ["process", "in-process"])
def test_the_diagnosis_calls_it_computing(name: str) -> None:
    _, options = POOLS[name]
    loader: DpexDataLoader[Any]
    with DpexDataLoader(Threaded(160, 0.004), batch_size=2, **options) as loader:
        loader.diagnose()
        for _ in loader:
            pass
        verdict = loader.diagnose().verdict
    assert verdict.cause == "cpu", str(loader.diagnose())


# -- threads that share a process --------------------------------------------------------------------------------------


def in_thread(work: Any) -> None:
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()


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


# -- the training process ----------------------------------------------------------------------------------------------


class World:
    """Threads and clocks of a training process, moved on by hand."""

    def __init__(self, own_s: float = 0.0) -> None:
        self.threads: dict[int, float] = {}
        self.now, self.own_s, self.gone_s = 0.0, own_s, 0.0
        self.helpers = HelperThreads(
            lambda: ThreadSighting(dict(self.threads), self.own_s),
            lambda: self.gone_s + self.own_s + sum(self.threads.values()),
            lambda: 0.0,
            lambda: self.now,
        )

    def step(self, seconds: float, **cpu_s: float) -> None:
        self.now += seconds
        for name, used_s in cpu_s.items():
            number = int(name.removeprefix("t"))
            self.threads[number] = self.threads.get(number, 0.0) + used_s

    def make(self, seconds: float, **cpu_s: float) -> None:
        if self.helpers.is_looking:
            self.helpers.begin()
        self.step(seconds, **cpu_s)
        if self.helpers.is_looking or self.now >= self.helpers.due:
            self.helpers.end(self.now, seconds)

    def passes(
        self, step: dict[str, float], making: dict[str, float], batches: int = 40, step_s: float = 0.02
    ) -> float:
        for _ in range(batches):
            self.make(0.04, **making)
            self.step(step_s, **step)
        return self.helpers.ratio(0.04)


def test_threads_that_rest_in_steps_help() -> None:
    assert World().passes({}, {"t1": 0.04, "t2": 0.02}) == pytest.approx(1.5)


def test_threads_of_the_step_that_spin_on_do_not_help() -> None:
    assert World().passes({"t1": 0.02, "t2": 0.02}, {"t1": 0.8 * SPIN_S, "t2": 0.8 * SPIN_S}) == 0.0


def test_threads_that_are_at_work_all_the_time_do_not_help() -> None:
    assert World().passes({"t1": 0.02}, {"t1": 0.022}) == 0.0


def test_threads_that_do_both_and_far_more_here_help() -> None:
    assert World().passes({"t1": 0.01}, {"t1": 0.04}) == pytest.approx(1.0)


def test_helpers_that_spin_into_a_short_step_help() -> None:
    assert World().passes({"t1": 0.00005}, {"t1": 0.04}, step_s=0.00005) == pytest.approx(1.0)


def test_threads_that_come_and_go_within_a_batch_help() -> None:
    world = World()
    for _ in range(20):
        world.make(0.04)
        world.step(0.02)
        if world.helpers.is_looking:
            world.helpers.begin()
            world.now += 0.04
            world.gone_s += 0.05
            world.helpers.end(world.now, 0.04)
    assert world.helpers.each_s == pytest.approx(0.05 - SPIN_S)


def test_threads_of_dpex_do_not_help() -> None:
    world = World()
    for _ in range(20):
        world.make(0.04)
        if world.helpers.is_looking:
            world.helpers.begin()
            world.now += 0.04
            world.own_s += 0.05
            world.helpers.end(world.now, 0.04)
    assert world.helpers.each_s == 0.0


def test_a_batch_that_took_longer_was_not_helped_more() -> None:
    """On a busy machine a batch takes twice as long, and the same CPU time."""
    world = World()
    world.passes({}, {"t1": 0.04})
    assert world.helpers.ratio(0.08) == pytest.approx(0.5)
    assert world.helpers.ratio(0.0001) == 0.0


def test_tiny_batches_are_not_looked_at() -> None:
    world = World()
    for _ in range(1000):
        world.make(0.0001, t1=0.0001)
    assert world.helpers.each_s == 0.0
    assert world.helpers.due == pytest.approx(world.now, abs=LOOK_EVERY_S)


def test_other_threads_are_seen_and_own_ones_told_apart() -> None:
    stop = threading.Event()
    own = threading.Thread(target=stop.wait, name="dpex-test", daemon=True)
    other = threading.Thread(target=stop.wait, name="other", daemon=True)
    for thread in (own, other):
        thread.start()
    try:
        seen = other_threads()
        assert other.native_id in seen.threads
        assert own.native_id not in seen.threads
        assert threading.get_native_id() not in seen.threads
        assert seen.own_s > 0
    finally:
        stop.set()


@pytest.fixture
def busy_helper() -> Iterator[threading.Thread]:
    stop = threading.Event()

    def work() -> None:
        while not stop.is_set():
            compute(0.001)

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    yield thread
    stop.set()
    thread.join()


def test_a_threads_clock_is_the_kernels(busy_helper: threading.Thread) -> None:
    def used_s() -> float:
        return other_threads().threads[busy_helper.native_id or 0]

    before = used_s()
    until(lambda: used_s() > before + 0.05)
