"""Nodes of a Ray cluster: rate beside the ideal, the first batch, and what a death costs; Ray Data beside them.

A node is a raylet of this machine with CPUs to give whatever the machine has, as the samples wait. Batches come over
loopback connections, not in shared memory.
"""

import json
import logging
import os
import signal
import sys
import time
from collections.abc import Iterator
from typing import Any

import numpy as np

from benchmarks.cluster import join
from benchmarks.process import run_module
from benchmarks.scale.course import BATCH, BatchWaits, Course

CPUS = 4
"""Workers of a node."""
WAIT_S = 0.064
"""Seconds of a batch: a node of four workers makes 62.5 batches/s."""
NODES = (1, 2, 4, 8)
WHO = ("dpex", "auto", "mix", "Ray Data, tasks", "Ray Data, actors", "tf.data service")
FAULTS = ("control service", "node")
_STORE_BYTES = 200 << 20


def ideal(nodes: int) -> float:
    """Return the batches per second of all workers of so many nodes."""
    return nodes * CPUS / WAIT_S


def loader_of(who: str, nodes: int, dataset: Any) -> Any:
    """Return dpex's loader: a fixed number of remote workers, "auto", or half of a node's number here as well."""
    from dpex import DpexDataLoader

    if who == "auto":
        return DpexDataLoader(dataset, batch_size=BATCH, num_workers="auto", distribute_mode=True)
    loader = DpexDataLoader(dataset, batch_size=BATCH, num_workers=CPUS * nodes, distribute_mode=True, seeding="batch")
    if who == "mix":
        loader.resize(local=CPUS // 2, remote=CPUS * nodes)
    return loader


class RowWaits:
    """The same work for Ray Data: one wait for the rows of a batch."""

    def __call__(self, rows: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        ids = rows["id"]
        time.sleep(WAIT_S)
        samples = np.zeros((len(ids), 8), np.int64)
        samples[:, 0], samples[:, 1] = ids, os.getpid()
        return {"x": samples}


def ray_data(who: str, nodes: int, seconds: float) -> Iterator[Any]:
    """Yield Ray Data's batches, of tasks or of one actor per CPU but one, which it needs for reading."""
    import ray

    context = ray.data.DataContext.get_current()
    context.enable_progress_bars = False
    context.execution_options.preserve_order = False
    logging.getLogger("ray.data").setLevel(logging.ERROR)
    blocks = int(3 * seconds * ideal(nodes) / 8) + CPUS * nodes
    rows = ray.data.range(blocks * 8 * BATCH, override_num_blocks=blocks)
    if who.endswith("actors"):
        size = max(1, CPUS * nodes - 1)
        made = rows.map_batches(RowWaits, batch_size=BATCH, concurrency=size, num_cpus=1)
    else:
        made = rows.map_batches(RowWaits(), batch_size=BATCH, num_cpus=1)
    for batch in made.iter_torch_batches(batch_size=BATCH, prefetch_batches=8):
        yield batch["x"]


def steady(who: str, nodes: int, seconds: float) -> dict[str, Any]:
    """Return the figures of a course on a cluster that runs."""
    began = time.perf_counter()
    if who.startswith("Ray"):
        return Course(ray_data(who, nodes, seconds), began).run(seconds)
    with loader_of(who, nodes, BatchWaits(WAIT_S)) as loader:
        return Course(iter(loader), began).run(seconds)


def fault(what: str, cluster: Any, nodes: list[Any], seconds: float) -> dict[str, Any]:
    """Kill a node, which another one replaces, or Ray's control service, in mid-epoch.

    Return what was lost or came twice, and how long after it the rate was full.
    """
    length = int(ideal(len(nodes)) * seconds) * BATCH
    began = time.perf_counter()
    with loader_of("dpex", len(nodes), BatchWaits(WAIT_S, length=length)) as loader:
        course, killed_at, seen = Course(iter(loader), began), 0.0, []
        for batch in course.batches:
            course.count += 1
            now = time.perf_counter() - began
            course.marks.append((now, course.count))
            seen += batch[:, 0].tolist()
            if not killed_at and now > seconds / 3:
                node, kind = (nodes[0], "raylet") if what == "node" else (cluster.head_node, "gcs_server")
                os.kill(node.all_processes[kind][0].process.pid, signal.SIGKILL)
                killed_at = now
                if what == "node":
                    cluster.add_node(num_cpus=CPUS, object_store_memory=_STORE_BYTES)
        return {
            "lost": length - len(set(seen)),
            "twice": len(seen) - len(set(seen)),
            "full_again_s": course.full_s(ideal(len(nodes)), killed_at + 0.5),
            "seconds": course.marks[-1][0],
        }


def main(argument: str) -> None:
    """Measure ``[who, nodes, seconds]`` on a cluster that is made for it, and print the figures.

    With an address the process is the trainer on that cluster: threads of Ray Data outlive an iterator that was left.
    """
    who, count, seconds, *address = json.loads(argument)
    if address:
        join(*address)
        time.sleep(3.0)  # Ray starts idle workers
        print(json.dumps(steady(who, count, seconds)), flush=True)
        os._exit(0)
    import ray
    from ray.cluster_utils import Cluster

    cluster = Cluster(
        initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False, "object_store_memory": 1 << 30}
    )
    try:
        nodes = [cluster.add_node(num_cpus=CPUS, object_store_memory=_STORE_BYTES) for _ in range(count)]
        cluster.wait_for_nodes()
        if who in FAULTS:
            join(cluster.address)
            time.sleep(3.0)
            print(json.dumps(fault(who, cluster, nodes, seconds)), flush=True)
        else:
            asked = json.dumps([who, count, seconds, cluster.address])
            print(run_module("benchmarks.scale.nodes", asked, seconds + 120.0).splitlines()[-1], flush=True)
    finally:
        ray.shutdown()
        cluster.shutdown()


if __name__ == "__main__":
    main(sys.argv[1])
