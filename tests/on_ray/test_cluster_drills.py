"""What nodes of a Ray cluster may suffer, as the loader sees it: same batches, whatever happens."""

import os
import signal
import time
import warnings
from collections.abc import Iterator
from itertools import islice
from typing import Any

import psutil
import pytest
import torch
from families import Augmented, seeded
from inspection import pool_of
from shared_ray import QUICK_TO_NOTICE, STORE_BYTES, SharedRay, own_ray
from test_cluster import SHAPE, SLOW, assert_same, epochs, remote, until_all_run
from torch.utils.data import DataLoader
from waiting import until

from benchmarks.drills.trainer import Work
from benchmarks.drills.watched import AFTER, Watched
from dpex import DpexDataLoader
from dpex.options import ClusterConfig

pytestmark = [pytest.mark.long, pytest.mark.ray]
ray = pytest.importorskip("ray")

PREEMPTION = 2
"""``DRAIN_NODE_REASON_PREEMPTION``, as `ray drain-node` has it."""


@pytest.fixture(scope="module")
def cluster(ray_of_session: SharedRay) -> Iterator[Any]:
    """A Ray of its own, as nodes end here. Agents of one test do not serve the next one."""
    with own_ray(ray_of_session, settings=QUICK_TO_NOTICE) as started:
        yield started


def kill_raylet(node: Any) -> None:
    """SIGKILL to a node's raylet; its workers follow."""
    for process in node.all_processes["raylet"]:
        psutil.Process(process.process.pid).send_signal(signal.SIGKILL)


@pytest.mark.parametrize("seeding", ["batch", "worker"])
def test_a_raylet_killed_in_the_middle_changes_nothing(cluster: Any, seeding: Any) -> None:
    expected = (
        epochs(DataLoader(SLOW, **SHAPE, num_workers=3, generator=seeded()))
        if seeding == "worker"
        else epochs(DpexDataLoader(SLOW, **SHAPE, num_workers=0, seeding="batch", generator=seeded()))
    )
    victim = cluster.add_node(num_cpus=2, object_store_memory=STORE_BYTES)
    try:
        with remote(SLOW, **SHAPE, num_workers=3, seeding=seeding) as loader:
            iterator = iter(loader)
            got = [next(iterator) for _ in range(8)]
            until(lambda: loader.stats().pools["remote"].running == 3 or next_into(got, iterator))
            kill_raylet(victim)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                got += list(iterator)
        assert_same(expected, got)
    finally:
        cluster.remove_node(victim, allow_graceful=False)


def test_logical_workers_of_a_drained_node_restart_elsewhere(cluster: Any) -> None:
    """They stay on their workers as long as these live."""
    drained, other = (
        cluster.add_node(num_cpus=2, resources={"pair": 2}, object_store_memory=STORE_BYTES) for _ in range(2)
    )
    try:
        pair = {"resources": {"pair": 1}}
        with remote(
            Augmented(20_000, nap_s=0.004), **SHAPE, num_workers=2, cluster_config=ClusterConfig(ray_remote_args=pair)
        ) as loader:
            iterator: Any = iter(loader)
            pool = pool_of(iterator, "remote")
            got = [next(iterator)]
            while loader.stats().pools["remote"].running < 2:
                got.append(next(iterator))
            assert set(pool._nodes._nodes) == {drained.node_id, other.node_id}
            in_an_hour_ms = int(1000 * (time.time() + 3600))
            client = ray._raylet.GcsClient(address=cluster.address)
            assert client.drain_node(drained.node_id, PREEMPTION, "a test", in_an_hour_ms)[0]
            got += islice(iterator, 30)
            kill_raylet(drained)

            def has_moved() -> bool:
                got.append(next(iterator))
                return nodes_of(pool) == {other.node_id}

            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                until(has_moved, 90.0)
                got += islice(iterator, 60)
        # Forked beside Ray on Python 3.13, torch's workers crash here while a client of Ray is deallocated.
        fresh: Any = {"multiprocessing_context": "spawn"}
        made = DataLoader(Augmented(20_000), **SHAPE, **fresh, num_workers=2, generator=seeded())
        assert_same(list(islice(made, len(got))), got)
    finally:
        for node in (drained, other):
            cluster.remove_node(node, allow_graceful=False)


def nodes_of(pool: Any) -> set[str]:
    """Where workers are up."""
    numbers = pool._nodes._numbers  # which forgets a lost node before the pool has read that its agent is gone
    return {
        numbers[agent.number].node if agent.number in numbers else "lost" for agent in pool._agents.values() if agent.up
    }


def next_into(got: list[torch.Tensor], iterator: Iterator[torch.Tensor]) -> bool:
    """Go on a little, so that the engine hears of actors that came up."""
    if len(got) < 30:
        got.append(next(iterator))
    return len(got) >= 30


def test_sixty_four_workers_of_two_nodes(cluster: Any) -> None:
    many = [cluster.add_node(num_cpus=32, resources={"many": 32}, object_store_memory=STORE_BYTES) for _ in range(2)]
    try:
        options = {"num_workers": 64, "cluster_config": ClusterConfig(ray_remote_args={"resources": {"many": 1}})}
        with remote(Augmented(10**6, nap_s=0.05), **SHAPE, seeding="batch", **options) as loader:
            got = until_all_run(loader, iter(loader))
            assert loader.stats().deaths == 0
            assert len(loader.stats().pools["remote"].nodes) == len(many)
        made = DpexDataLoader(Augmented(10**6), **SHAPE, num_workers=0, seeding="batch", generator=seeded())
        assert_same(list(islice(made, len(got))), got)
    finally:
        for node in many:
            cluster.remove_node(node, allow_graceful=False)


def test_no_node_left_means_local_workers(cluster: Any) -> None:
    """Last but one of the module: it takes the cluster's nodes away."""
    expected = epochs(DpexDataLoader(SLOW, **SHAPE, num_workers=0, seeding="batch", generator=seeded()))
    with remote(SLOW, **SHAPE, num_workers=2, seeding="batch") as loader:
        iterator = iter(loader)
        got = [next(iterator) for _ in range(8)]
        for node in list(cluster.worker_nodes):
            cluster.remove_node(node, allow_graceful=False)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that local workers take over, unless the actors outlived their raylets
            got += list(iterator)
    assert_same(expected, got)


def test_without_rays_control_service_workers_go_on(cluster: Any) -> None:
    """Last of the module: it ends the cluster. Ray ends whoever is connected a minute later, so nobody here may be."""
    cluster.add_node(num_cpus=2, object_store_memory=STORE_BYTES)
    ray.shutdown()
    (service,) = cluster.head_node.all_processes["gcs_server"]
    with Watched(Work(place="cluster", workers=2, address=cluster.address)) as training:
        training.until_all_run()
        os.kill(service.process.pid, signal.SIGKILL)
        made = training.made_by("remote")
        training.until(lambda: training.made_by("remote") > made + AFTER)
        assert training.finish() == 0, training.errors()
    assert (training.lost, training.repeated, training.deaths) == (0, 0, 0)
