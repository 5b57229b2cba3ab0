"""On a real GPU: batches that arrive on it are right, copies run beside training, slots are read in place.

Needs torch, numpy and pytest, and nothing else (`make test-gpu`). Figures are printed and kept in the report, not
asserted: ``pytest -rP`` shows them.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from inspection import feed_of
from torch.utils.data import Dataset
from workload import wait_as_work

from dpex import DpexDataLoader, UsageError
from dpex.device import devices
from dpex.device.devices import QueueDevice, opened
from dpex.options import DeviceConfig
from dpex.transport.arena import Arena

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
MB = 1 << 20


class Numbered(Dataset[torch.Tensor]):
    """Sample: float32 (``size``,), full of its index."""

    def __init__(self, length: int, size: int = 50_000) -> None:
        self.length, self.size = length, size

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((self.size,), float(index))


@pytest.fixture(params=["locked slots", "staged"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Both ways to the device."""
    if request.param == "staged":
        monkeypatch.setattr(QueueDevice, "_refuses_locks", True)
        monkeypatch.setattr(devices, "_locked", {})
    return str(request.param)


def spin(cycles: int = 2_000_000) -> None:
    """Keep the training stream busy for about a millisecond."""
    torch.cuda._sleep(cycles)


# -- right -------------------------------------------------------------------------------------------------------------


def test_a_thousand_batches_with_edits_and_kept_ones(way: str) -> None:
    """Training is behind all the time, so memory that came back too early would be seen."""
    sums, kept = [], []
    with DpexDataLoader(Numbered(4000), batch_size=4, num_workers=4, device="cuda", prefetch_factor=4) as loader:
        iterator: Any = iter(loader)
        for number, batch in enumerate(iterator):
            assert batch.device == torch.device("cuda", torch.cuda.current_device())
            spin()
            sums.append(batch.double().sum())
            if number % 100 == 0:
                kept.append(batch)
            else:
                batch.zero_()
            del batch
        staged = feed_of(iterator).staged_bytes
    expected = [50_000.0 * sum(range(first, first + 4)) for first in range(0, 4000, 4)]
    assert torch.stack(sums).tolist() == expected
    assert [int(batch[0, 0]) for batch in kept] == list(range(0, 4000, 400))
    assert (staged == 0) == (way == "locked slots"), "shared memory could not be page-locked here"


@pytest.mark.parametrize("workers", [0, 2])
def test_on_another_stream_of_training(workers: int) -> None:
    sums = []
    with (
        torch.cuda.stream(torch.cuda.Stream()),
        DpexDataLoader(Numbered(400), batch_size=4, num_workers=workers, device="cuda") as loader,
    ):
        for batch in loader:
            spin()
            sums.append(batch.double().sum())
            del batch
    torch.cuda.synchronize()
    assert torch.stack(sums).tolist() == [50_000.0 * sum(range(first, first + 4)) for first in range(0, 400, 4)]


def noisy(batch: torch.Tensor) -> torch.Tensor:
    return batch + torch.rand(batch.shape, device=batch.device) + torch.rand(()).item()


@pytest.mark.parametrize("seeding", ["batch", "worker"])
def test_a_transform_draws_the_same_whoever_made_the_batch(seeding: Any) -> None:
    runs = []
    for workers in (0, 1, 3):
        torch.manual_seed(0)
        loader = DpexDataLoader(
            Numbered(40, 100),
            batch_size=4,
            num_workers=workers,
            seeding=seeding,
            device="cuda",
            device_config=DeviceConfig(transform=noisy),
            generator=torch.Generator().manual_seed(1),
        )
        with loader:
            before = torch.cuda.get_rng_state(), torch.get_rng_state()
            runs.append(torch.cat([batch.cpu() for batch in loader]))
            assert torch.equal(torch.cuda.get_rng_state(), before[0])
            assert torch.equal(torch.get_rng_state(), before[1])
    assert torch.equal(runs[0], runs[1])
    assert torch.equal(runs[0], runs[2])


def test_no_batch_is_handed_out_while_a_graph_is_captured() -> None:
    with DpexDataLoader(Numbered(40), batch_size=4, device="cuda") as loader:
        iterator = iter(loader)
        static = next(iterator).clone()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            total = static.sum()
            with pytest.raises(UsageError):
                next(iterator)
        static.copy_(next(iterator))
        graph.replay()
        assert total.item() == 50_000.0 * (4 + 5 + 6 + 7)


# -- page locks --------------------------------------------------------------------------------------------------------


def test_a_page_lock_error_does_not_surface_in_the_next_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    device = opened(torch.device("cuda"))
    assert isinstance(device, QueueDevice)
    monkeypatch.setattr(QueueDevice, "_refuses_locks", False)
    assert not device.lock_pages(4096, 4096), "nobody owns that page"
    assert QueueDevice._refuses_locks
    assert torch.ones(10, device="cuda").sum().item() == 10


def test_copies_out_of_a_locked_map_return_at_once() -> None:
    device = opened(torch.device("cuda"))
    assert isinstance(device, QueueDevice)
    tensor = Arena(shared=True, announce=lambda spec, fd: None).tensor((64 * MB // 4,), torch.float32)
    stage = devices.Staging(device)
    if stage(tensor) is not tensor:
        pytest.skip("shared memory cannot be page-locked here")
    assert tensor.is_pinned()
    torch.cuda._sleep(100_000_000)
    began = time.perf_counter()
    copy = tensor.to("cuda", non_blocking=True)
    took_s = time.perf_counter() - began
    assert not torch.cuda.current_stream().query(), "the copy was waited for"
    print(f"begun in {took_s * 1e6:.0f} µs")
    torch.cuda.synchronize()
    assert torch.equal(copy.cpu(), tensor)


def test_what_both_ways_carry(way: str, record_property: Callable[[str, object], None]) -> None:
    """GB/s of 38 MB batches from two workers to the device, with nothing to train; not asserted."""
    with DpexDataLoader(Numbered(400, 38 * MB // 4), batch_size=None, num_workers=2, device="cuda") as loader:
        iterator: Any = iter(loader)
        for _ in range(50):
            next(iterator)
        torch.cuda.synchronize()
        began = time.perf_counter()
        count = sum(1 for _ in iterator)
        torch.cuda.synchronize()
        rate = count * 38 * MB / (time.perf_counter() - began) / 1e9
        feed = feed_of(iterator)
    bus = feed.copied_bytes / feed.copy_s / 1e9
    record_property(way, (rate, bus))
    print(f"{way}: {rate:.2f} GB/s end to end, {bus:.2f} GB/s while a copy ran")
    assert count == 350


# -- beside training ---------------------------------------------------------------------------------------------------


def test_copies_run_while_kernels_do(tmp_path: Path, record_property: Callable[[str, object], None]) -> None:
    with DpexDataLoader(Numbered(120, 2_000_000), batch_size=2, num_workers=4, device="cuda") as loader:
        with torch.profiler.profile() as profile:
            for batch in loader:
                spin(20_000_000)
                del batch
            torch.cuda.synchronize()
        late = loader.diagnose().facts.feed_wait_s
    trace = tmp_path / "trace.json"
    profile.export_chrome_trace(str(trace))
    events = [event for event in json.loads(trace.read_text())["traceEvents"] if event.get("ph") == "X"]
    kernels = [(e["ts"], e["ts"] + e["dur"]) for e in events if e.get("cat") == "kernel"]
    copies = [(e["ts"], e["ts"] + e["dur"]) for e in events if e.get("cat") == "gpu_memcpy" and "HtoD" in e["name"]]
    assert len(copies) >= 60
    beside = [copy for copy in copies if any(start < copy[1] and copy[0] < end for start, end in kernels)]
    record_property("copies beside kernels, all copies, seconds waited for copies", (len(beside), len(copies), late))
    print(f"{len(beside)} of {len(copies)} copies ran while a kernel did; training waited {late} s for copies")
    assert len(beside) > len(copies) / 2


def test_a_transform_that_training_waits_for_is_named() -> None:
    def slow(batch: torch.Tensor) -> torch.Tensor:
        spin(40_000_000)
        return batch * 2

    with DpexDataLoader(
        Numbered(400, 1000), batch_size=4, num_workers=2, device="cuda", device_config=DeviceConfig(transform=slow)
    ) as loader:
        for number, batch in enumerate(loader):
            batch.sum()
            if number % 5 == 0:
                torch.cuda.synchronize()
        torch.cuda.synchronize()
        found = loader.diagnose()
    print(found)
    assert (found.verdict.cause, found.verdict.where) == ("transfer", "device transform")


def test_memory_of_the_device_does_not_grow() -> None:
    most = []
    with DpexDataLoader(Numbered(400, 500_000), num_workers=2, device="cuda", persistent_workers=True) as loader:
        for _ in range(3):
            for batch in loader:
                batch.sum()
                del batch
            torch.cuda.synchronize()
            most.append(torch.cuda.memory_reserved())
    assert most[2] <= most[1] + 20 * MB


def test_what_a_step_costs_the_host(record_property: Callable[[str, object], None]) -> None:
    """Of small batches that are ready: median µs of the training thread in ``next()``, and CPU µs of the process for a
    batch, the thread that copies included; not asserted."""
    found = {}
    for device in (None, "cuda"):
        with DpexDataLoader(Numbered(600, 1000), num_workers=2, device=device, prefetch_factor=8) as loader:
            spent: list[float] = []
            began_s = time.process_time()
            for _ in iterate_slowly(iter(loader), spent):
                pass
            cpu_s = time.process_time() - began_s
        found[str(device)] = 1e6 * sorted(spent)[len(spent) // 2], 1e6 * cpu_s / len(spent)
    record_property("µs in next(), CPU µs per batch", found)
    print(f"median µs inside next(), CPU µs per batch: {found}")
    assert len(found) == 2


def iterate_slowly(iterator: Iterator[Any], spent: list[float]) -> Iterator[Any]:
    while True:
        began = time.perf_counter()
        try:
            batch = next(iterator)
        except StopIteration:
            return
        spent.append(time.perf_counter() - began)
        yield batch
        wait_as_work(0.002)
