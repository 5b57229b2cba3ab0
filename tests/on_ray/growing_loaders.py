"""Loaders on a cluster that grows on demand: a real autoscaler adds a raylet for them, and takes it away after them.

`test_ray_heads` runs this in a process of its own, without the shared Ray.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

import pytest
import torch
from families import Augmented, assert_same, seeded, stacked
from growing_cluster import GrowingCluster
from waiting import until
from workload import wait_as_work

from dpex import AutotuneConfig, DpexDataLoader

pytestmark = [pytest.mark.ray, pytest.mark.timeout(300)]
ray = pytest.importorskip("ray")

PATIENCE_S = 200.0
NODE_CPUS = 2
STEP_S = 0.02
LENGTH = 1_000_000
SLOW = Augmented(LENGTH, nap_s=0.01)
SHAPE: dict[str, Any] = {"batch_size": 8, "shuffle": True}
CONFIG = AutotuneConfig(max_local=1, max_remote=NODE_CPUS, interval_s=0.25)
"""One local worker makes 12 batches a second, and the training loop takes 50."""


@pytest.fixture(scope="module")
def cluster() -> Iterator[GrowingCluster]:
    started = GrowingCluster(node_cpus=NODE_CPUS, most_nodes=1, store_bytes=100 << 20)
    try:
        ray.init(address=started.address, log_to_driver=False, logging_level="ERROR")
        yield started
        ray.shutdown()
    finally:
        started.shutdown()


def nodes() -> int:
    """Those beside the head."""
    return sum(node["Alive"] for node in ray.nodes()) - 1


def train_until(enough: Callable[[], bool], loader: Any, iterator: Iterator[torch.Tensor]) -> list[torch.Tensor]:
    """Batches until then; AssertionError when patience ends."""
    got, deadline = [], time.monotonic() + PATIENCE_S
    while not enough():
        got.append(next(iterator))
        wait_as_work(STEP_S)
        assert time.monotonic() < deadline, f"{loader.decisions}, {loader.stats()}, {ray.nodes()}"
    return got


def running(loader: Any, pool: str) -> int:
    pools = loader.stats().pools
    return pools[pool].running if pool in pools else 0


def wait_until_it_has_shrunk() -> None:
    until(lambda: nodes() == 0, PATIENCE_S)


def test_demand_of_a_tuned_loader_brings_a_node_that_leaves_when_it_is_idle(
    cluster: GrowingCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dpex.pools.ray.nodes.IDLE_S", 0.5)
    assert nodes() == 0
    where: dict[str, Any] = {"num_workers": "auto", "distribute_mode": True, "autotune": CONFIG}
    with DpexDataLoader(SLOW, generator=seeded(), **SHAPE, **where) as loader:
        iterator = iter(loader)
        got = train_until(lambda: running(loader, "remote") == NODE_CPUS, loader, iterator)
        made = loader.stats().pools["remote"].tickets
        got += train_until(lambda: loader.stats().pools["remote"].tickets > made + 20, loader, iterator)
        told = [decision.text for decision in loader.decisions if decision.reason == "demand"]
        assert told[0].startswith(f"Asked the cluster for {NODE_CPUS} places for workers")
        loader.resize(local=1, remote=0)
        got += train_until(lambda: nodes() == 0, loader, iterator)
        assert running(loader, "local") == 1
    expected = DpexDataLoader(Augmented(LENGTH), generator=seeded(), seeding="batch", **SHAPE)
    assert_same(stacked(got), stacked(islice(expected, len(got))))


@pytest.mark.filterwarnings("ignore:no worker can run on the cluster", "ignore:no remote worker is left")
def test_fixed_workers_wait_for_a_node_while_local_ones_serve(cluster: GrowingCluster) -> None:
    wait_until_it_has_shrunk()
    where: dict[str, Any] = {"num_workers": NODE_CPUS, "distribute_mode": True, "seeding": "batch"}
    with DpexDataLoader(SLOW, generator=seeded(), **SHAPE, **where) as loader:
        iterator = iter(loader)
        got = train_until(lambda: running(loader, "local") > 0, loader, iterator)
        got += train_until(lambda: running(loader, "remote") == NODE_CPUS, loader, iterator)
        got += train_until(lambda: running(loader, "local") == 0, loader, iterator)
        made = loader.stats().pools["remote"].tickets
        got += train_until(lambda: loader.stats().pools["remote"].tickets > made + 20, loader, iterator)
    expected = DpexDataLoader(Augmented(LENGTH), generator=seeded(), seeding="batch", **SHAPE)
    assert_same(stacked(got), stacked(islice(expected, len(got))))
    wait_until_it_has_shrunk()
