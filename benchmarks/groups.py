"""`python -m benchmarks.groups`: what loading costs a job with tensor parallelism, whose ranks read the same batches.

A job of real process groups (gloo) has data-parallel x tensor-parallel ranks. The ranks of a tensor-parallel group need
the same batches. Three ways to load them are measured in turn:

- each rank has a loader of its own;
- the first rank of a group loads, and broadcasts each batch to the others;
- the ranks of a group share (`WorkerConfig(share_rank=...)`).

In each step a rank reads one byte of every page of its batch, and all ranks meet. CPU seconds are those of all
processes, of ranks, workers and producers. Memory is the largest sum of their proportional set sizes (PSS) in a run,
which counts shared memory once. Imports are outside. ``--check`` compares every byte of all ranks' batches instead.
"""

import argparse
import contextlib
import os
import tempfile
import time
import traceback
import zlib
from collections.abc import Iterator
from statistics import median
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.data import DistributedSampler, Subset

from benchmarks.consumer import read_pages
from benchmarks.machine import process_tree, proportional_bytes
from benchmarks.sweep import adopt_orphans, used_s
from benchmarks.works import WORKS
from dpex import DpexDataLoader
from dpex.options import WorkerConfig

WAYS = ("a loader in each rank", "rank 0 loads and broadcasts", "share_rank=")
EVERY_S = 0.5
"""Seconds between two readings of memory, which take some 10 ms of this process's CPU."""


class Job(NamedTuple):
    """What all ranks know. ``shape``: data-parallel and tensor-parallel ranks."""

    shape: tuple[int, int]
    dataset: Any
    batch_size: int
    workers: int
    is_check: bool


class Cost(NamedTuple):
    """CPU seconds and the most memory of all processes, and wall seconds."""

    cpu_s: float
    memory_gb: float
    wall_s: float


def batches(job: Job, way: str, mesh: Any) -> Iterator[Any]:
    """Yield the batches of this rank."""
    tensor, is_first = mesh["tp"].get_group(), mesh["tp"].get_local_rank() == 0
    if way == WAYS[1] and not is_first:
        yield from _received(tensor)
        return
    torch.manual_seed(0)
    sampler: Any = DistributedSampler(job.dataset, job.shape[0], mesh["dp"].get_local_rank())
    config = WorkerConfig(share=f"groups {os.getppid()}", share_rank=mesh["dp"]) if way == WAYS[2] else WorkerConfig()
    with DpexDataLoader(
        job.dataset, job.batch_size, sampler=sampler, num_workers=job.workers, seeding="batch", worker_config=config
    ) as loader:
        for batch in loader:
            if way == WAYS[1]:
                _broadcast(batch, tensor)
            yield batch
    if way == WAYS[1]:
        _broadcast(None, tensor)


def _broadcast(batch: Any, group: Any) -> None:
    """Send the types and shapes as an object, and each tensor's bytes; None ends the epoch."""
    tensors = None if batch is None else [one for one in batch if isinstance(one, torch.Tensor)]
    dist.broadcast_object_list([tensors and [(one.shape, one.dtype) for one in tensors]], group=group, group_src=0)
    for one in tensors or ():
        dist.broadcast(one, group=group, group_src=0)


def _received(group: Any) -> Iterator[Any]:
    while True:
        told: list[Any] = [None]
        dist.broadcast_object_list(told, group=group, group_src=0)
        if told[0] is None:
            return
        batch = [torch.empty(shape, dtype=dtype) for shape, dtype in told[0]]
        for one in batch:
            dist.broadcast(one, group=group, group_src=0)
        yield batch


def train(job: Job, way: str, rank: int, meeting: str) -> int:
    """Run one rank; return a checksum of its batches, 0 where they are not compared."""
    ranks = job.shape[0] * job.shape[1]
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks)}
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=ranks)
    mesh, checksum = init_device_mesh("cpu", job.shape, mesh_dim_names=("dp", "tp")), 0
    for batch in batches(job, way, mesh):
        if job.is_check:
            for one in batch:
                checksum = zlib.crc32(one.numpy().tobytes(), checksum)
        else:
            read_pages(batch)
        dist.all_reduce(torch.zeros(1))
    dist.destroy_process_group()
    return checksum


def cost_of(job: Job, way: str) -> tuple[Cost, list[int]]:
    """Run a job; return what it cost, and each rank's checksum."""
    used, began, started, memory = used_s(), time.monotonic(), {}, 0.0
    told, tell = os.pipe()
    with tempfile.TemporaryDirectory() as folder:
        for rank in range(job.shape[0] * job.shape[1]):
            pid = os.fork()
            if not pid:
                try:
                    os.write(tell, f"{rank} {train(job, way, rank, f'{folder}/meeting')}\n".encode())
                except BaseException:
                    traceback.print_exc()
                    os._exit(1)
                os._exit(0)
            started[pid] = rank
        os.close(tell)
        failed, looked = [], began
        with contextlib.suppress(ChildProcessError):
            while True:
                pid, status = os.waitpid(-1, os.WNOHANG)
                failed += [started[pid]] if pid in started and status else []
                if failed:
                    raise SystemExit(f"{way}: rank {failed[0]} failed")
                if not pid:
                    time.sleep(0.01)
                if time.monotonic() - looked > EVERY_S:
                    held = proportional_bytes(process_tree()[1:]) / 1e9
                    memory, looked = max(memory, held), time.monotonic()
    with os.fdopen(told) as lines:
        sums = dict(map(int, line.split()) for line in lines)
    return Cost(used_s() - used, memory, time.monotonic() - began), [sums[rank] for rank in sorted(sums)]


def main() -> None:
    """Measure the three ways in turn, and print medians."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.groups", description=__doc__)
    parser.add_argument("--work", choices=WORKS, default="jpeg", help="what a batch is (jpeg)")
    parser.add_argument("--data", type=int, default=2, metavar="N", help="data-parallel ranks (2)")
    parser.add_argument("--tensor", type=int, default=4, metavar="N", help="tensor-parallel ranks of each (4)")
    parser.add_argument("--batches", type=int, default=20, metavar="N", help="batches of each rank (20)")
    parser.add_argument("--workers", type=int, default=1, metavar="N", help="num_workers of each loader (1)")
    parser.add_argument("--rounds", type=int, default=1, metavar="N", help="each way is measured so often (1)")
    parser.add_argument("--check", action="store_true", help="compare the batches of all ways, byte by byte")
    options = parser.parse_args()
    adopt_orphans()
    torch.set_num_threads(1)
    work, shape = WORKS[options.work], (options.data, options.tensor)
    found: dict[str, list[tuple[Cost, list[int]]]] = {way: [] for way in WAYS}
    with work.opened(options.batches * options.data) as dataset:
        part = Subset(dataset, range(options.batches * options.data * work.batch_size))
        job = Job(shape, part, work.batch_size, options.workers, options.check)
        for _ in range(options.rounds):
            for way in WAYS:
                found[way].append(cost_of(job, way))
    print(f"{shape[0]} x {shape[1]} ranks, {options.batches} batches of {options.work} each, {os.cpu_count()} CPUs")
    for way, runs in found.items():
        cpu_s, memory_gb, wall_s = map(median, zip(*(cost for cost, _ in runs), strict=True))
        print(f"{way:28} {cpu_s:8.2f} s of CPU {memory_gb:8.2f} GB {wall_s:8.2f} s")
    if options.check:
        first = found[WAYS[0]][0][1]
        if any(sums != first for runs in found.values() for _, sums in runs) or len(set(first)) != options.data:
            raise SystemExit(f"batches differ: {[(way, sums) for way, runs in found.items() for _, sums in runs]}")
        print("all batches are the same, byte by byte")


if __name__ == "__main__":
    main()
