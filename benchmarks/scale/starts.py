"""The first batch on a cluster, beside a bare Ray actor that imports torch and answers once.

Each case is a process of its own on the same cluster, in turn, which is connected and at rest before its clock starts.
"""

import json
import math
import statistics
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import psutil

from benchmarks.cluster import join, raylets
from benchmarks.process import run_module
from benchmarks.scale.course import BATCH, BatchWaits
from benchmarks.scale.nodes import CPUS

NODES = (1, 4)
CASES = ("actors", "remote", "auto", "joins", "local")
REST_S, LONGEST_REST_S = 3.0, 60.0
"""Seconds of a rest, at least and at most."""
QUIET = 0.2
"""CPUs that a cluster at rest uses, at most."""


def starts(nodes: int, rounds: int) -> dict[str, Any]:
    """Return the seconds of each start: medians."""
    found: dict[str, list[float]] = {}
    with raylets([CPUS] * nodes) as address:
        for _ in range(rounds):
            for case in CASES:
                told = run_module("benchmarks.scale.starts", json.dumps([case, nodes, address]), 120.0)
                for name, seconds in json.loads(told.splitlines()[-1]).items():
                    found.setdefault(name, []).append(seconds)
    return {name: statistics.median(seconds) for name, seconds in found.items()}


def rest() -> None:
    """Wait until the cluster is quiet: Ray starts idle workers for each new driver, which takes seconds of CPU."""
    began, before = time.monotonic(), math.inf
    while time.monotonic() - began < LONGEST_REST_S:
        used = 0.0
        for one in cluster_processes():
            with suppress(psutil.Error):
                used += sum(one.cpu_times()[:2])
        if time.monotonic() - began >= REST_S and used - before < QUIET:
            return
        before = used
        time.sleep(1.0)


def cluster_processes() -> list[psutil.Process]:
    """Return the processes below the one that has started the cluster and this process."""
    here = psutil.Process()
    parent = here.parent()
    found = [] if parent is None else parent.children(recursive=True)
    return [one for one in found if one != here]


def case(name: str, nodes: int, address: str) -> dict[str, float]:
    """Return the seconds of the starts of one process."""
    from dpex import DpexDataLoader

    seconds: dict[str, float] = {}

    def timed(what: str, call: Callable[[], Any]) -> Any:
        began = time.perf_counter()
        found = call()
        seconds[what] = time.perf_counter() - began
        return found

    def loader(workers: Any, **where: Any) -> Any:
        return DpexDataLoader(BatchWaits(0.004), BATCH, num_workers=workers, **where)

    def first(made: Any) -> Any:
        iterator = iter(made)
        next(iterator)
        return iterator

    where = {"distribute_mode": True, "head_address": address}
    if name == "local":
        kept = timed("auto, no cluster", lambda: first(loader("auto")))
    elif name == "joins":
        kept = timed("auto, connects itself", lambda: first(loader("auto", **where)))
    else:
        join(address)
        rest()
    if name == "actors":
        timed("bare actor", lambda: actors(1))
        if nodes > 1:
            rest()
            timed("bare actors, one per node", lambda: actors(nodes))
    elif name == "remote":
        one = loader(2 * nodes, **where)
        kept = timed("first batch", lambda: first(one))
        other = timed("second loader beside it", lambda: first(loader(nodes, **where)))
        del kept, other
        kept = timed("second epoch", lambda: first(one))
        del kept
        one.close()
        kept = timed("second loader after it", lambda: first(loader(2 * nodes, **where)))
    elif name == "auto":
        kept = timed("auto, connected", lambda: first(loader("auto", **where)))
    return seconds


def actors(count: int) -> None:
    """Start an actor on each of so many nodes, and wait for the first answer."""
    import ray

    class Actor:
        def answer(self) -> int:
            import torch

            return torch.get_num_threads()

    made = [ray.remote(Actor).options(num_cpus=1, scheduling_strategy="SPREAD").remote() for _ in range(count)]
    ray.wait([actor.answer.remote() for actor in made], num_returns=1)


def main(argument: str) -> None:
    """Measure ``[nodes, rounds]``, or one case of it, and print the figures."""
    values = json.loads(argument)
    print(json.dumps(starts(*values) if len(values) == 2 else case(*values)), flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
