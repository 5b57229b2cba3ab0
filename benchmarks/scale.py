"""`python -m benchmarks.scale`: what one trainer takes in from remote workers, and what the cluster's coordinator does.

An agent is started beside the trainer, without Ray, and hands over batches that are there already, of each size: over
loopback, as another machine would, or in shared memory, as on the trainer's own. What counts is the CPU time of the
training process for each batch, of its training thread and of all its threads: with CPUs of their own for the workers,
a trainer takes in as many as fit into a second of its busiest thread. The rate that was reached here, where agent,
workers and trainer share the CPUs, stands beside it.

The coordinator is run with that many loaders, each of which reports once a second, for a simulated minute.
"""

import argparse
import json
import random
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch.utils.data import Dataset

from benchmarks.machine import commit, load, machine, versions
from benchmarks.network.nodes import ProcessNodes
from benchmarks.process import ROOT
from dpex import DpexDataLoader
from dpex.core.fair_shares import Claim, ClusterShares
from dpex.loader.runtime import LoaderRuntime
from dpex.pools.agent.pool import RemotePool
from dpex.pools.factory import PoolFactory

SIZES = (1_000, 10_000, 100_000, 1_000_000, 10_000_000, 38_000_000)
JOBS = (10, 100, 1000)
CPUS_PER_JOB = 30
MINUTE_S = 60
ENDLESS = 10**9
WORKERS = 2
FEW = 4
"""Batches at least in the part that is not measured."""


@dataclass(frozen=True, kw_only=True)
class Intake:
    """One size on one way. CPU times are seconds for each batch: of the training thread, and of the whole process."""

    way: str
    nbytes: int
    batches: int
    seconds: float
    thread_cpu_s: float
    process_cpu_s: float

    @property
    def busiest_s(self) -> float:
        """CPU time of the busiest thread: the one that trains, or the one that receives."""
        return max(self.thread_cpu_s, self.process_cpu_s - self.thread_cpu_s)


class Ready(Dataset[torch.Tensor]):
    """Batches that cost their worker nothing but handing them over."""

    def __init__(self, nbytes: int) -> None:
        self.batch = torch.zeros(nbytes, dtype=torch.uint8)

    def __len__(self) -> int:
        return ENDLESS

    def __getitem__(self, index: int) -> torch.Tensor:
        return self.batch


@contextmanager
def agent_here(way: str) -> Iterator[None]:
    """Have remote workers by an agent on this machine, reached as one elsewhere or as one here."""
    make = PoolFactory.__call__

    def made(self: PoolFactory, name: str, count: int, setup: Any, shared_queue: bool) -> Any:
        if name != "remote":
            return make(self, name, count, setup, shared_queue)
        nodes = ProcessNodes(setup, [WORKERS], near=[0] if way == "memory" else [])
        return RemotePool(nodes, shared_queue=shared_queue, first_workers=count, probe_index=0)

    with (
        patch.object(PoolFactory, "__call__", made),
        patch.object(LoaderRuntime, "hold_cluster", lambda self, head_address: None),
    ):
        yield


def intake(way: str, nbytes: int, window_s: float) -> Intake:
    """Measure one size on one way."""
    options: dict[str, Any] = {"batch_size": None, "seeding": "batch", "distribute_mode": True}
    with (
        agent_here(way),
        DpexDataLoader(Ready(nbytes), num_workers=WORKERS, local_while_starting=False, **options) as loader,
    ):
        batches = iter(loader)
        for _ in range(FEW):
            next(batches)
        began, thread_s, process_s, count = time.monotonic(), time.thread_time(), time.process_time(), 0
        while not count or time.monotonic() - began < window_s:
            next(batches)
            count += 1
        return Intake(
            way=way,
            nbytes=nbytes,
            batches=count,
            seconds=time.monotonic() - began,
            thread_cpu_s=(time.thread_time() - thread_s) / count,
            process_cpu_s=(time.process_time() - process_s) / count,
        )


@dataclass(frozen=True, kw_only=True)
class Coordination:
    """A coordinator with so many loaders: the part of a core that it takes, and its slowest answer in seconds."""

    jobs: int
    cpus: int
    core_ratio: float
    slowest_s: float


def coordination(jobs: int) -> Coordination:
    """Run a coordinator for a simulated minute in which each loader's need and workers move."""
    chance, shares, cpus = random.Random(0), ClusterShares(), CPUS_PER_JOB * jobs
    needs = [chance.uniform(5.0, 80.0) for _ in range(jobs)]
    held, times = [0] * jobs, []
    for second in range(MINUTE_S):
        for job in chance.sample(range(jobs), jobs):
            claim = Claim(need=needs[job] * chance.uniform(0.9, 1.1), most=cpus, requested=held[job], running=held[job])
            began = time.process_time()
            now = second + job / jobs
            granted = shares.report(str(job), claim, free=cpus - sum(held), total=cpus, now=now)
            times.append(time.process_time() - began)
            held[job] = max(min(held[job], granted), min(granted, held[job] + cpus - sum(held)))
    return Coordination(jobs=jobs, cpus=cpus, core_ratio=sum(times) / MINUTE_S, slowest_s=max(times))


def intake_table(found: Sequence[Intake]) -> str:
    """In Markdown; medians where a size was measured several times."""
    lines = [
        "| way | batch | training thread, per batch | other threads | one trainer takes in | measured here |",
        "|---|---|---|---|---|---|",
    ]
    for way, nbytes in dict.fromkeys((one.way, one.nbytes) for one in found):
        those = [one for one in found if (one.way, one.nbytes) == (way, nbytes)]
        thread_s = statistics.median(one.thread_cpu_s for one in those)
        other_s = statistics.median(one.process_cpu_s - one.thread_cpu_s for one in those)
        most = 1.0 / statistics.median(one.busiest_s for one in those)
        rate = statistics.median(one.batches / one.seconds for one in those)
        lines.append(
            f"| {way} | {nbytes / 1e6:g} MB | {1e6 * thread_s:,.0f} µs | {1e6 * max(0.0, other_s):,.0f} µs "
            f"| {most:,.0f}/s, {most * nbytes / 1e9:.2g} GB/s | {rate:,.0f}/s, {rate * nbytes / 1e9:.2g} GB/s |"
        )
    return "\n".join(lines)


def coordination_table(found: Sequence[Coordination]) -> str:
    """In Markdown."""
    rows = [f"| {one.jobs} | {one.cpus:,} | {one.core_ratio:.1%} | {1e3 * one.slowest_s:.0f} ms |" for one in found]
    return "\n".join(["| loaders | CPUs | of one core | slowest answer |", "|---|---|---|---|", *rows])


def main(arguments: Sequence[str] | None = None) -> int:
    """0 once everything has been measured and kept."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.scale", description=__doc__)
    parser.add_argument("--sizes", nargs="+", type=int, default=list(SIZES), help="bytes of a batch")
    parser.add_argument("--rounds", type=int, default=3, help="rounds (3)")
    parser.add_argument("--window-s", type=float, default=4.0, help="seconds of a measurement (4)")
    parser.add_argument("--jobs", nargs="*", type=int, default=list(JOBS), help="loaders that a coordinator has")
    parser.add_argument("--results", type=Path, default=ROOT / "benchmarks" / "results" / "scale" / "local.json")
    options = parser.parse_args(arguments)
    before = load()
    ways = [(way, nbytes) for way in ("network", "memory") for nbytes in options.sizes]
    taken = [intake(way, nbytes, options.window_s) for _ in range(options.rounds) for way, nbytes in ways]
    coordinated = [coordination(jobs) for jobs in options.jobs]
    tables = [intake_table(taken), coordination_table(coordinated)]
    print("\n\n".join(tables))
    head, dirty = commit(ROOT)
    about = {"commit": head, "dirty": dirty, "machine": machine(), "versions": versions(), "load": [before, load()]}
    raw = {"intake": [asdict(one) for one in taken], "coordination": [asdict(one) for one in coordinated]}
    options.results.parent.mkdir(parents=True, exist_ok=True)
    options.results.write_text(json.dumps({**about, "tables": tables, **raw}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
