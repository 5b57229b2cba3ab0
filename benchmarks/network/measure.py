"""A loader behind a link, as a process in the trainer's network namespace: prints what it saw as a JSON object.

The agent's own process is started directly in the node's namespace; Ray would only place it. It takes the same
connection, the same pool and, for "auto", the same controller, which is told the node's room.
"""

import json
import sys
import time
from collections.abc import Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any, Literal
from unittest.mock import patch

import numpy as np
import torch
from torch.utils.data import Dataset

from benchmarks.network.links import Network
from benchmarks.network.nodes import ProcessNodes
from benchmarks.process import MeasurementError
from dpex import AutotuneConfig, ClusterConfig, DpexDataLoader, LoaderStats, PoolStats
from dpex.autotune.room import RoomFound, RoomWanted
from dpex.loader.runtime import LoaderRuntime
from dpex.pools.agent.pool import RemotePool
from dpex.pools.factory import PoolFactory
from dpex.pools.ray import room

BATCH = 16
ENDLESS = 10**8
KEPT = 61
"""Different samples; no batch is like another."""


@dataclass(frozen=True, kw_only=True)
class Request:
    """split: local and remote workers, None for "auto". most: of either for "auto". nodes: namespaces of the agents,
    and the trainer's address for each. rooms: workers that each has room for. content: of samples, "noise" or "few
    values". compression: the option. agents_look_in: directories in which agents look for packages first. compares:
    whether each batch is compared with what it should be. least_remote, least_late: batches of remote workers, and
    batches that were late, that there must be at the end."""

    split: tuple[int, int] | None
    most: tuple[int, int]
    nodes: Sequence[str]
    reached_at: Sequence[str]
    rooms: Sequence[int]
    window_s: float
    wait_s: float = 0.1
    side: int = 224
    content: str = "noise"
    compression: Literal["zstd"] | None = None
    agents_look_in: Sequence[str] = ()
    compares: bool = False
    least_remote: int = 0
    least_late: int = 0


class WaitingSamples(Dataset[torch.Tensor]):
    """Samples of (3, side, side) uint8, each after `wait_s`: any of 256 values, or of four, which zstd compresses."""

    def __init__(self, *, side: int, wait_s: float, content: str) -> None:
        values = {"noise": 256, "few values": 4}[content]
        self.kept = np.random.default_rng(0).integers(0, values, (KEPT, 3, side, side), np.uint8)
        self.wait_s = wait_s

    def __len__(self) -> int:
        return ENDLESS

    def __getitem__(self, index: int) -> torch.Tensor:
        time.sleep(self.wait_s)
        return self.made(index)

    def made(self, index: int) -> torch.Tensor:
        """Return the sample without waiting: its first 8 bytes are its index."""
        sample = torch.from_numpy(self.kept[index % KEPT].copy())
        sample.view(-1)[:8] = torch.frombuffer(bytearray(index.to_bytes(8, "little")), dtype=torch.uint8)
        return sample


class Room:
    """Place for remote workers, as a cluster of that size would say."""

    most = 0

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def look(self, wanted: RoomWanted) -> RoomFound:
        """See `dpex.autotune.room.Room.look`."""
        return RoomFound(more=max(0, self.most - wanted.requested))

    def rest(self) -> None:
        """See `dpex.autotune.room.Room.rest`."""


@contextmanager
def agents_of(request: Request) -> Any:
    """Have remote pools made of agents in the request's namespaces."""
    make = PoolFactory.__call__
    enter = [Network.enter(node) for node in request.nodes]

    def made(self: PoolFactory, name: str, count: int, setup: Any, shared_queue: bool) -> Any:
        if name != "remote":
            return make(self, name, count, setup, shared_queue)
        nodes = ProcessNodes(setup, list(request.rooms), "0.0.0.0", request.reached_at, enter)
        nodes.path = [*request.agents_look_in, *nodes.path]
        return RemotePool(
            nodes, shared_queue=shared_queue, first_workers=count, probe_index=0, compression=self.compression
        )

    Room.most = request.most[1]
    with (
        patch.object(PoolFactory, "__call__", made),
        patch.object(LoaderRuntime, "hold_cluster", lambda self, head_address: None),
        patch.object(room, "RemoteRoom", Room),
    ):
        yield


def loader_of(request: Request) -> DpexDataLoader[Any]:
    """The loader that is measured."""
    dataset = WaitingSamples(side=request.side, wait_s=request.wait_s / BATCH, content=request.content)
    common: dict[str, Any] = {"batch_size": BATCH, "seeding": "batch", "distribute_mode": True}
    common["cluster_config"] = ClusterConfig(compression=request.compression)
    if request.split is None:
        local, remote = request.most
        config = AutotuneConfig(max_local=local, max_remote=remote)
        return DpexDataLoader(dataset, num_workers="auto", autotune=config, **common)
    local, remote = request.split
    loader: DpexDataLoader[Any] = DpexDataLoader(dataset, num_workers=local + remote, **common)
    loader.resize(local=local, remote=remote)
    return loader


def course(loader: DpexDataLoader[Any], request: Request) -> list[float]:
    """When each batch came, in seconds; a fixed split is measured from when its workers run."""
    began, times = time.monotonic(), []
    is_up = request.split is None
    for number, batch in enumerate(loader):
        if request.compares and not torch.equal(batch, _expected(loader, number)):
            raise MeasurementError(f"batch {number} is not what it should be")
        if not is_up:
            is_up = sum(pool.running for pool in loader.stats().pools.values()) == sum(request.split or ())
            began = time.monotonic()
            continue
        times.append(time.monotonic() - began)
        if times[-1] >= request.window_s and _has_enough(loader.stats(), request):
            break
    return times


def _has_enough(stats: LoaderStats, request: Request) -> bool:
    remote = stats.pools.get("remote", PoolStats())
    return remote.tickets >= request.least_remote and stats.late >= request.least_late


def _expected(loader: DpexDataLoader[Any], number: int) -> torch.Tensor:
    made = loader.dataset.made  # type: ignore[attr-defined]
    return torch.stack([made(BATCH * number + at) for at in range(BATCH)])


def measure(request: Request) -> dict[str, Any]:
    """Return the number of batches, and what the loader says of its late batches, nodes and decisions."""
    with agents_of(request), loader_of(request) as loader:
        times, stats = course(loader, request), loader.stats()
        return {
            "batches": len(times),
            "late": stats.late,
            "nodes": {place: asdict(node) for place, node in stats.pools.get("remote", PoolStats()).nodes.items()},
            "decisions": [decision.text for decision in loader.decisions],
        }


if __name__ == "__main__":
    print(json.dumps(measure(Request(**json.loads(sys.argv[1])))), flush=True)
