"""A tuned loader that connects to a cluster by itself: its local workers are forked before Ray has threads."""

from typing import Any

import pytest
import torch
from families import Augmented, assert_same, is_alive, seeded
from inspection import pool_of
from waiting import until

from dpex import ClusterError, DpexDataLoader
from dpex.loader.runtime import LoaderRuntime
from dpex.pools.local.fork_server import ForkStarter

WHERE: dict[str, Any] = {"batch_size": 4, "num_workers": "auto", "distribute_mode": True, "head_address": "nowhere:1"}


@pytest.fixture(autouse=True)
def unconnected(monkeypatch: pytest.MonkeyPatch) -> None:
    """This process is not connected to Ray, whatever other tests have left."""
    for module in ("loader.passes", "loader.checks", "pools.local.clean_server"):
        monkeypatch.setattr(f"dpex.{module}.is_ray_connected", lambda: False)


def test_local_workers_are_forked_before_the_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    connected_with: list[Any] = []

    def hold(runtime: LoaderRuntime, head_address: str) -> None:
        (iterator,) = runtime.iterators
        connected_with.append(pool_of(iterator, "local")._starter)

    monkeypatch.setattr(LoaderRuntime, "hold_cluster", hold)
    data = Augmented(40)
    with DpexDataLoader(data, generator=seeded(), **WHERE) as loader:
        got = torch.cat(list(loader))
    assert [type(starter) for starter in connected_with] == [ForkStarter]
    assert_same(got, torch.cat(list(DpexDataLoader(data, batch_size=4, generator=seeded(), seeding="batch"))))


def test_workers_end_if_the_cluster_does_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    pids: list[int] = []

    def hold(runtime: LoaderRuntime, head_address: str) -> None:
        (iterator,) = runtime.iterators
        pool = pool_of(iterator, "local")
        until(lambda: pool.poll() is not None and pool.counts.running > 0)
        pids.extend(pool.pids())
        raise ClusterError("nothing answers there")

    monkeypatch.setattr(LoaderRuntime, "hold_cluster", hold)
    loader = DpexDataLoader(Augmented(40), generator=seeded(), **WHERE)
    local = DpexDataLoader(Augmented(40), generator=seeded(), batch_size=4, num_workers="auto")
    loader.load_state_dict(local.state_dict())
    with pytest.raises(ClusterError, match="nothing answers"):
        iter(loader)
    assert pids
    until(lambda: not any(map(is_alive, pids)))
    assert loader._runtime.resume is not None
