"""Four trainings with "auto" on one cluster of 12 places: how long until each has its share, as they come and go."""

import json
import time
from collections.abc import Callable, Sequence
from typing import Any

from benchmarks.drills.training import LOOKS, Training
from benchmarks.scale.nodes import CPUS

NODES, TRAININGS = 3, 4
NAP_S = 0.05
"""Seconds of a sample, which take no CPU."""
LIMIT_S = 60.0


def until_fair(trainings: Sequence[Training], places: int) -> dict[str, Any]:
    """Wait until all have the same number of workers and no place is left; return the seconds, or None at the limit."""
    began, share = time.monotonic(), {places // len(trainings)}
    while time.monotonic() - began < LIMIT_S:
        if all(len(one.lines) >= LOOKS and one.workers == share for one in trainings):
            return {"workers": [places // len(trainings)] * len(trainings), "seconds": time.monotonic() - began}
        time.sleep(0.05)
    return {"workers": [max(one.workers, default=0) for one in trainings], "seconds": None}


def course() -> dict[str, Any]:
    """Return what happened, and how long it took until the shares were equal."""
    from ray.cluster_utils import Cluster

    store = {"object_store_memory": 200 << 20}
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False, **store})
    trainings: list[Training] = []
    found: dict[str, Any] = {}

    def happens(what: str, act: Callable[[], Any], places: int) -> None:
        act()
        found[what] = until_fair(trainings, places)

    def begin(count: int) -> None:
        new = [Training(cluster.address, NAP_S) for _ in range(count)]
        trainings.extend(new)
        while not all(one.lines for one in new):
            time.sleep(0.05)

    try:
        for _ in range(NODES):
            cluster.add_node(num_cpus=CPUS, **store)
        cluster.wait_for_nodes()
        places = NODES * CPUS
        happens("one training alone", lambda: begin(1), places)
        happens("three more begin", lambda: begin(TRAININGS - 1), places)
        happens("one ends", lambda: trainings.pop().end(), places)
        happens("one is killed", lambda: trainings.pop().kill(), places)
        happens("a node joins", lambda: cluster.add_node(num_cpus=CPUS, **store), places + CPUS)
        return found
    finally:
        for one in trainings:
            one.kill()
        cluster.shutdown()


if __name__ == "__main__":
    print(json.dumps(course()), flush=True)
