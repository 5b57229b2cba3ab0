"""Ranks of one job, over gloo: what each pays for a batch, and how long `dpex top` and `diagnose(group=)` take."""

import json
import os
import subprocess
import sys
import tempfile
import time
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, DistributedSampler

from benchmarks.process import MeasurementError
from benchmarks.scale.course import BATCH, BatchWaits, Course
from dpex import DpexDataLoader, WorkerConfig

RANKS = (2, 4, 8, 16)
WHO = ("torch", "dpex", "auto", "share_rank")
RATE = 200.0
"""Batches per second of all ranks together, with two workers in each."""
WORKERS = 2
PER_GROUP = 2
"""Ranks that read the same batches, where ranks share."""


def loader_of(who: str, rank: int, ranks: int) -> Any:
    """Return the loader of a rank."""
    groups = ranks // PER_GROUP if who == "share_rank" else ranks
    group = rank * groups // ranks
    data = BatchWaits(WORKERS * ranks / RATE, length=10**6)
    arguments: dict[str, Any] = {"batch_size": BATCH, "sampler": DistributedSampler(data, groups, group)}
    if who == "torch":
        return DataLoader(data, num_workers=WORKERS, **arguments)
    config = WorkerConfig(share=f"ranks {os.getppid()}", share_rank=group) if who == "share_rank" else WorkerConfig()
    number: Any = "auto" if who == "auto" else WORKERS
    return DpexDataLoader(data, num_workers=number, metrics_port=0, worker_config=config, **arguments)


def train(who: str, rank: int, ranks: int, seconds: float, folder: str) -> dict[str, Any]:
    """Run one rank; return the figures of the job, at rank 0."""
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks)}
    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=ranks)
    began = time.perf_counter()
    loader = loader_of(who, rank, ranks)
    found = Course(iter(loader), began).run(seconds)
    gathered: list[Any] = [None] * ranks
    dist.all_gather_object(gathered, found)
    told = {
        "first_s": max(one["first_s"] for one in gathered),
        "thread_us": median(one["thread_us"] for one in gathered),
        "rate": sum(one["rate"] for one in gathered),
    }
    if who != "torch":
        if rank == 0:
            told |= _seen_from_outside()
        dist.barrier()
        asked = time.perf_counter()
        verdict = loader.diagnose(group=dist.group.WORLD)
        told |= {"diagnose_s": time.perf_counter() - asked, "verdict": str(verdict).splitlines()[0]}
        dist.barrier()
        loader.close()
    dist.destroy_process_group()
    return told


def _seen_from_outside() -> dict[str, Any]:
    """Return how long `dpex top` took, and how many ranks it showed the report of."""
    asked, command = time.perf_counter(), [sys.executable, "-m", "dpex", "top", "--once"]
    shown = subprocess.run(command, capture_output=True, text=True, timeout=120).stdout
    return {"top_s": time.perf_counter() - asked, "answered": shown.count(", rank ")}


def main(argument: str) -> None:
    """Measure ``[who, ranks, seconds]``, and print the figures. Raises MeasurementError if a rank fails."""
    who, ranks, seconds = json.loads(argument)
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        os.environ["DPEX_METRICS_DIR"] = folder
        for rank in range(ranks):
            if not os.fork():
                told = train(who, rank, ranks, seconds, folder)
                if rank == 0:
                    print(json.dumps(told), flush=True)
                os._exit(0)
        for _ in range(ranks):
            if os.wait()[1]:
                raise MeasurementError(f"a rank of {ranks} failed")  # the caller ends the others


if __name__ == "__main__":
    main(sys.argv[1])
