"""A training run with a planted share of waiting, as a program: `python waiting_run.py KIND LOAD_S STEP_S LOG`.

A batch takes LOAD_S to make and a step STEP_S; ends when its standard input does. LOG gets a line per batch: the time,
seconds waited so far, seconds in all. KIND "fixed" has one worker; "tuned" as many as the tuner wants, and a stand-in
for a GPU that misses a quarter of the time.
"""

import os
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from torch.utils.data import Dataset

from dpex import AutotuneConfig, DpexDataLoader
from dpex.system.gpu.nvml import GpuSample
from dpex.telemetry.exporter import exporter
from tests.inspection import measure_gpu_with
from tests.workload import wait_as_work

GPU_STALL = 0.25
BATCH = 2


class Slow(Dataset[torch.Tensor]):
    def __init__(self, nap_s: float) -> None:
        self.nap_s = nap_s

    def __len__(self) -> int:
        return 1_000_000

    def __getitem__(self, index: int) -> torch.Tensor:
        wait_as_work(self.nap_s)
        return torch.zeros(1000)


class OneGpu:
    def latest(self) -> tuple[GpuSample, ...]:
        return (
            GpuSample(
                uuid="GPU-0",
                ordinal=0,
                index=0,
                model="stand-in",
                kernel_active_ratio=0.5,
                memory_used_bytes=10**9,
                memory_total_bytes=2 * 10**9,
            ),
        )


GPU_STEP_S = 0.04


class Stalls:
    """Misses its share of the time from now on."""

    def __init__(self) -> None:
        self.began = time.monotonic()

    def counts(self) -> dict[str, float]:
        seconds = time.monotonic() - self.began
        number = int((1.0 - GPU_STALL) * seconds / GPU_STEP_S)
        stalls = dict.fromkeys(("gpu_stall_s", "gpu_running_stall_s"), GPU_STALL * seconds)
        return {**stalls, "gpu_steps": number, "gpu_steps_s": number * GPU_STEP_S}


def train(batches: Iterator[torch.Tensor], step_s: float, log: Path, over: threading.Event) -> None:
    waited_s, began = 0.0, time.perf_counter()
    with log.open("w", buffering=1) as lines:
        while not over.is_set():
            asked = time.perf_counter()
            next(batches)
            got = time.perf_counter()
            waited_s += got - asked
            wait_as_work(step_s)
            lines.write(f"{time.time()} {waited_s} {time.perf_counter() - began}\n")


def main(kind: str, load_s: float, step_s: float, log: Path) -> None:
    over = threading.Event()
    threading.Thread(target=lambda: (os.read(0, 1), over.set()), daemon=True).start()
    tuned = kind == "tuned"
    workers = {"num_workers": "auto", "autotune": AutotuneConfig()} if tuned else {"num_workers": 1}
    with DpexDataLoader(Slow(load_s / BATCH), BATCH, metrics_port=0, name="train", **workers) as loader:
        batches = iter(loader)
        if tuned:
            exporter.collector.gpu = OneGpu()
            measure_gpu_with(batches, Stalls())
        train(batches, step_s, log, over)


if __name__ == "__main__":
    main(sys.argv[1], float(sys.argv[2]), float(sys.argv[3]), Path(sys.argv[4]))
