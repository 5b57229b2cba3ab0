"""Loaders of a process that is connected to a cluster by ``ray://``: the same batches, on workers of the cluster.

`test_ray_heads` runs this in a process of its own, without the shared Ray.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Any

import pytest
import torch
from families import Augmented, assert_same, seeded, stacked
from growing_cluster import ClientServer
from torch.utils.data import DataLoader
from waiting import until

from dpex import AutotuneConfig, DpexDataLoader

pytestmark = [pytest.mark.ray, pytest.mark.timeout(300)]
ray = pytest.importorskip("ray")
pytest.importorskip("grpc", reason="Ray's client needs ray[client], which is not installed")

SHAPE: dict[str, Any] = {"batch_size": 8, "shuffle": True}
LENGTH = 1_000_000
HEADS = 3
PATIENCE_S = 150.0
"""For workers of a cluster to be at work on a busy machine: four processes of Ray start for the first one."""


def connected_head() -> ClientServer:
    """A head that this process is connected to.

    Ray forks a server for each client in a process with threads of gRPC, and now and then the child dies at once.
    """
    logs = []
    for _ in range(HEADS):
        head = ClientServer(cpus=3, store_bytes=100 << 20)
        try:
            ray.init(head.client_address, logging_level="ERROR", log_to_driver=False)
            return head
        except ConnectionError as error:
            logs.append(f"{error}\n{head.logs()}")
            head.shutdown()
        except BaseException:
            head.shutdown()
            raise
    raise AssertionError(f"{HEADS} heads of Ray did not serve a client:\n" + "\n".join(logs))


@pytest.fixture(scope="module")
def client() -> Iterator[ClientServer]:
    """A head with three CPUs; this process is connected to it, and no part of it."""
    started = connected_head()
    try:
        yield started
        ray.shutdown()
    finally:
        started.shutdown()


def made_far(loader: Any) -> int:
    """Batches that came from the cluster."""
    pools = loader.stats().pools
    return pools["remote"].tickets if "remote" in pools else 0


def batches_until_many_are_made_far(loader: Any) -> torch.Tensor:
    iterator = iter(loader)
    got: list[torch.Tensor] = []

    def are_made_far() -> bool:
        got.append(next(iterator))
        return made_far(loader) > 50

    until(are_made_far, PATIENCE_S)
    return stacked(got)


def test_batches_are_torchs(client: ClientServer) -> None:
    with DpexDataLoader(
        Augmented(LENGTH, nap_s=0.001), generator=seeded(), num_workers=2, distribute_mode=True, **SHAPE
    ) as loader:
        got = batches_until_many_are_made_far(loader)
        assert loader.stats().deaths == 0
    expected = DataLoader(Augmented(LENGTH), generator=seeded(), num_workers=2, **SHAPE)
    assert_same(got, stacked(islice(expected, len(got) // 8)))


def test_a_tuned_loader_finds_the_room_of_the_cluster(client: ClientServer) -> None:
    config = AutotuneConfig(max_local=1, interval_s=0.25)
    with DpexDataLoader(
        Augmented(LENGTH, nap_s=0.005),
        generator=seeded(),
        num_workers="auto",
        distribute_mode=True,
        autotune=config,
        **SHAPE,
    ) as loader:
        got = batches_until_many_are_made_far(loader)
        assert any(decision.new.remote > 0 for decision in loader.decisions)
    expected = DpexDataLoader(Augmented(LENGTH), generator=seeded(), seeding="batch", **SHAPE)
    assert_same(got, stacked(islice(expected, len(got) // 8)))
