"""On a real GPU: planted stalls against the profiler's timeline, pinning, CUDA graphs, NVML.

Needs torch, numpy, nvidia-ml-py and pytest, and nothing else; without pytest-timeout: ``pytest -o addopts= tests/gpu``.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch.utils.data import Dataset
from workload import wait_as_work

from dpex import DpexDataLoader
from dpex.system.gpu.nvml import process_gpus
from dpex.system.gpu.stall import SHARE, cuda_stall

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
ROOT = Path(__file__).parents[2]
WAIT_S = 0.02
STEPS = 60
POINTS = 0.02
"""How far apart the two may be, of the time from the first kernel to the last."""
PLANTED = 0.1
"""How far from the plan a plant may grow: a busy machine sleeps longer than it is told."""


class Paced(Dataset[torch.Tensor]):
    """Takes its time for every sample."""

    def __init__(self, length: int, wait_s: float) -> None:
        self.length, self.wait_s = length, wait_s

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> torch.Tensor:
        wait_as_work(self.wait_s)
        return torch.full((1000,), float(index))


@pytest.fixture(scope="module")
def spin() -> Callable[[float], None]:
    """Queues a kernel that runs for about so many seconds, on one multiprocessor."""
    cycles = 20_000_000
    seconds = []
    for _ in range(20):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        torch.cuda._sleep(cycles)
        end.record()
        end.synchronize()
        seconds.append(begin.elapsed_time(end) / 1e3)
    per_second = cycles / sorted(seconds[10:])[5]
    return lambda seconds: torch.cuda._sleep(int(seconds * per_second))


class Timeline(NamedTuple):
    """What the profiler saw, in seconds: when kernels ran and when the consumer was inside ``next()``, in order."""

    kernels: list[tuple[float, float]]
    stays: list[tuple[float, float]]

    @property
    def seconds(self) -> float:
        """From the first kernel to the last."""
        return self.kernels[-1][1] - self.kernels[0][0]

    @property
    def gaps(self) -> list[tuple[float, float]]:
        """When no kernel ran."""
        return [(done, start) for (_, done), (start, _) in pairwise(self.kernels) if start > done]

    @property
    def idle(self) -> float:
        """Share of the time in which no kernel ran."""
        return sum(until - since for since, until in self.gaps) / self.seconds

    @property
    def stall(self) -> float:
        """Share of the time in which no kernel ran and the consumer was inside ``next()``."""
        overlaps = (min(gap[1], stay[1]) - max(gap[0], stay[0]) for gap in self.gaps for stay in self.stays)
        return sum(max(0.0, overlap) for overlap in overlaps) / self.seconds


def timeline(profile: Any, folder: Path) -> Timeline:
    trace = folder / "trace.json"
    profile.export_chrome_trace(str(trace))
    events = [event for event in json.loads(trace.read_text())["traceEvents"] if event.get("ph") == "X"]
    kernels = [event for event in events if event.get("cat") == "kernel"]
    stays = [event for event in events if event.get("cat") == "user_annotation" and event["name"] == "the next batch"]
    return Timeline(*(sorted((e["ts"] / 1e6, (e["ts"] + e["dur"]) / 1e6) for e in each) for each in (kernels, stays)))


def train(
    loader: DpexDataLoader[Any], launch: Callable[[], None], folder: Path, host_s: float = 0.0
) -> tuple[float, Timeline]:
    """One pass with a kernel per batch; the share of the time that dpex calls stall, and what the profiler saw."""
    iterator = iter(loader)
    torch.cuda.synchronize()
    with torch.profiler.profile() as profile:
        for _ in range(STEPS):
            with torch.profiler.record_function("the next batch"):
                next(iterator)
            wait_as_work(host_s)
            launch()
        torch.cuda.synchronize()
        assert next(iterator, None) is None
    seen = timeline(profile, folder)
    assert (len(seen.kernels), len(seen.stays)) == (STEPS, STEPS), "the profiler has not seen what was done"
    stall_s = loader.stats().gpu_stall_s
    assert stall_s is not None
    return stall_s / seen.seconds, seen


@pytest.mark.parametrize("pin_memory", [False, True])
@pytest.mark.parametrize("percent", [0, 10, 50, 90])
def test_a_planted_stall_is_what_the_profiler_sees(
    spin: Callable[[float], None],
    tmp_path: Path,
    record_property: Callable[[str, object], None],
    percent: int,
    pin_memory: bool,
) -> None:
    kernel_s = WAIT_S * (1.2 if percent == 0 else 1 - percent / 100)
    with DpexDataLoader(Paced(STEPS, WAIT_S), num_workers=1, pin_memory=pin_memory) as loader:
        stall, seen = train(loader, lambda: spin(kernel_s), tmp_path)
    record_property("stall by dpex, stall and idle by the profiler", (stall, seen.stall, seen.idle))
    assert seen.idle == pytest.approx(percent / 100, abs=PLANTED), "the plant did not grow"
    assert stall == pytest.approx(seen.stall, abs=POINTS)


def test_batches_made_in_the_training_process(spin: Callable[[float], None], tmp_path: Path) -> None:
    pytest.importorskip("prometheus_client")  # only loaders that export metrics count batches of their own process
    with DpexDataLoader(Paced(STEPS, WAIT_S), metrics_port=0) as loader:
        stall, seen = train(loader, lambda: spin(WAIT_S / 2), tmp_path)
    assert seen.idle == pytest.approx(0.5, abs=PLANTED)
    assert stall == pytest.approx(seen.stall, abs=POINTS)


def test_the_stream_that_training_uses_is_measured(spin: Callable[[float], None], tmp_path: Path) -> None:
    """And not the default one, which has nothing to do all the time."""
    with torch.cuda.stream(torch.cuda.Stream()), DpexDataLoader(Paced(STEPS, WAIT_S), num_workers=1) as loader:
        stall, seen = train(loader, lambda: spin(1.2 * WAIT_S), tmp_path)
    assert seen.idle == pytest.approx(0.0, abs=PLANTED)
    assert stall == pytest.approx(seen.stall, abs=POINTS)


def test_a_late_launch_is_not_the_loaders_fault(spin: Callable[[float], None], tmp_path: Path) -> None:
    with DpexDataLoader(Paced(STEPS, 0.0), num_workers=1) as loader:
        stall, seen = train(loader, lambda: spin(WAIT_S / 4), tmp_path, host_s=WAIT_S)
    assert seen.idle > 0.5
    assert stall == pytest.approx(seen.stall, abs=POINTS)
    assert stall < 0.1


def test_a_graph_that_is_captured_around_next_is_left_alone() -> None:
    total = torch.zeros(1, device="cuda")
    with DpexDataLoader(Paced(8, 0.0), num_workers=1) as loader:
        iterator = iter(loader)
        for _ in range(3):
            next(iterator)
            total += 1
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(2):
                next(iterator)
                total += 1
        graph.replay()
        for _ in iterator:
            total += 1
        assert total.item() == 3 + 2 + 3
        torch.cuda.synchronize()
        assert loader.stats().gpu_stall_s is not None


@pytest.mark.parametrize("share", [None, SHARE])
def test_what_a_visit_costs(share: float | None, record_property: Callable[[str, object], None]) -> None:
    """The mean of a loop with steps of 1 ms in µs is noted in the report, for every visit marked and for a share of
    them; nothing is asserted of it. No visit makes new events."""
    gpu = cuda_stall(share)
    assert gpu is not None
    visits, cost_s = 1000, 0.0
    torch.cuda.synchronize()
    began = time.perf_counter()
    for visit in range(visits):
        entered = time.perf_counter()
        mark = gpu.enter(starting=visit == 0)
        inside = time.perf_counter()
        gpu.leave(mark, inside - entered, starting=visit == 0, over=False)
        cost_s += time.perf_counter() - entered
        wait_as_work(0.001)
    record_property("us_per_visit", 1e6 * cost_s / visits)
    print(f"share {share}: a visit costs {1e6 * cost_s / visits:.1f} µs")
    torch.cuda.synchronize()
    gpu.leave(gpu.enter(starting=True), 0.0, starting=False, over=True)
    assert gpu.stall_s is not None
    assert 0 <= gpu.stall_s <= time.perf_counter() - began
    idle = gpu._events._idle[torch.cuda.current_device()]  # type: ignore[attr-defined]
    assert len(idle) <= 2 * 65


def test_cuda_is_not_initialised_by_a_loader() -> None:
    script = """
import torch
from dpex import DpexDataLoader
with DpexDataLoader(list(range(64)), num_workers="auto") as loader:
    total = sum(int(batch) for batch in loader)
    print(total, loader.stats().gpu_stall_s, torch.cuda.is_initialized())
"""
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, cwd=ROOT, timeout=120, check=False
    )
    assert done.stdout.split() == ["2016", "None", "False"], done.stderr


@pytest.mark.parametrize("pin_memory", [False, True])
def test_batches_arrive_whole_on_the_gpu(pin_memory: bool) -> None:
    """Memory of a batch that the consumer has dropped is not written again while it is still being copied."""
    sums = []
    with DpexDataLoader(Paced(400, 0.0), batch_size=4, num_workers=2, pin_memory=pin_memory) as loader:
        for batch in loader:
            assert batch.is_pinned() == pin_memory
            sums.append(batch.to("cuda", non_blocking=True).sum())
            del batch
    assert torch.stack(sums).tolist() == [1000.0 * sum(range(first, first + 4)) for first in range(0, 400, 4)]


# -- NVML --------------------------------------------------------------------------------------------------------------


def spin_for(spin: Callable[[float], None], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        spin(0.05)
        torch.cuda.synchronize()


def test_nvml_tells_of_the_gpu_that_is_used(spin: Callable[[float], None]) -> None:
    gpus = process_gpus()
    assert gpus is not None
    held = torch.zeros(1 << 28, dtype=torch.uint8, device="cuda")
    gpus.latest()
    spin_for(spin, 2.5)
    samples = gpus.latest()
    print(samples)
    sample = next(sample for sample in samples if sample.ordinal == torch.cuda.current_device())
    uuid = str(torch.cuda.get_device_properties(torch.cuda.current_device()).uuid)
    assert sample.uuid.removeprefix("GPU-").removeprefix("MIG-") == uuid.removeprefix("GPU-").removeprefix("MIG-")
    if sample.memory_used_bytes is not None:
        assert sample.memory_total_bytes is not None
        assert held.nbytes <= sample.memory_used_bytes <= sample.memory_total_bytes
    if sample.kernel_active_ratio is not None:
        assert sample.kernel_active_ratio > 0.5
        assert gpus.busy_ratio() is not None
