"""`python -m benchmarks.scale`: what one trainer takes in from remote workers, and what the cluster's coordinator does.

An agent is started beside the trainer, without Ray, and hands over batches that are there already, of each size: over
loopback, as another machine would, or in shared memory, as on the trainer's own. What counts is the CPU time of the
training process for each batch, of its training thread and of all its threads: with CPUs of their own for the workers,
a trainer takes in as many as fit into a second of its busiest thread. The rate that was reached here, where agent,
workers and trainer share the CPUs, stands beside it.

The coordinator is run with that many loaders, each of which reports once a second, for a simulated minute.

A file of raw results is written after each measurement; the same command goes on with what is missing.
"""

import argparse
import random
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch.utils.data import Dataset

from benchmarks.network.nodes import ProcessNodes
from benchmarks.process import ROOT
from benchmarks.scale.tables import (
    KEPT,
    QUOTED_ROUNDS,
    SUBJECT,
    Coordination,
    Intake,
    coordination_key,
    coordination_table,
    intake_key,
    intake_table,
    origin_text,
    problems,
)
from benchmarks.training import runs
from benchmarks.training.runs import Run
from dpex import DpexDataLoader
from dpex.loader.runtime import LoaderRuntime
from dpex.pools.agent.pool import RemotePool
from dpex.pools.factory import PoolFactory
from dpex.schedule.fair_shares import Claim, ClusterShares

LOCAL = runs.RESULTS / "local-scale.json"
WAYS = ("network", "memory")
SIZES = (1_000, 10_000, 100_000, 1_000_000, 10_000_000, 38_000_000)
JOBS = (10, 100, 1000)
CPUS_PER_JOB = 30
MINUTE_S = 60
ENDLESS = 10**9
WORKERS = 2
FEW = 4
"""Batches at least in the part that is not measured."""


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
        DpexDataLoader(Ready(nbytes), num_workers=WORKERS, **options) as loader,
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


def main(arguments: Sequence[str] | None = None) -> int:
    """0 once everything has been measured, and kept where that was asked for."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.scale", description=__doc__)
    parser.add_argument("--sizes", nargs="+", type=int, default=list(SIZES), help="bytes of a batch")
    parser.add_argument("--rounds", type=int, default=QUOTED_ROUNDS, help=f"rounds ({QUOTED_ROUNDS})")
    parser.add_argument("--window-s", type=float, default=4.0, help="seconds of a measurement (4)")
    parser.add_argument("--jobs", nargs="*", type=int, default=list(JOBS), help="loaders that a coordinator has")
    parser.add_argument("--results", type=Path, default=LOCAL, help=f"where they go ({LOCAL.relative_to(ROOT)})")
    parser.add_argument("--keep", metavar="NAME", help="keep a whole run as results/scale/scale-NAME.json")
    options = parser.parse_args(arguments)
    run = measured(options)
    print(f"{intake_table(run)}\n\n{coordination_table(run)}\n\n{origin_text(run)}")
    return 0 if runs.kept_if_asked(run, options.keep, problems, KEPT) else 1


def measured(options: argparse.Namespace) -> Run:
    """A round of everything after the other; a run that was ended goes on with what is missing."""
    rows: dict[str, Callable[[], Intake | Coordination]] = {
        intake_key(way, nbytes): partial(intake, way, nbytes, options.window_s)
        for way in WAYS
        for nbytes in options.sizes
    }
    coordinated = {coordination_key(jobs): partial(coordination, jobs) for jobs in options.jobs}
    settings = {
        "rounds": options.rounds,
        "window_s": options.window_s,
        "intake": list(rows),
        "coordination": list(coordinated),
    }
    run = runs.begun(SUBJECT, settings, options.results)
    for number in range(options.rounds):
        for key, measure in (rows | coordinated).items():
            found = run.rows.get(key, ())
            if len(found) <= number:
                run = runs.with_row(run, key, [*found, asdict(measure())])
                runs.write(run, options.results)
    return run


if __name__ == "__main__":
    sys.exit(main())
