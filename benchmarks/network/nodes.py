"""Agents that are started directly, without Ray, in this network namespace or in others: real processes and real
connections. Ray would only place them."""

import os
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any
from unittest.mock import patch

import numpy as np

from benchmarks.network.links import Network
from dpex.autotune.types import RoomFound, RoomWanted
from dpex.loader.runtime import LoaderRuntime
from dpex.pools.agent.connection import AdmissionServer, link_over, wake_nobody
from dpex.pools.agent.pool import NodeNews, Nodes, RemotePool, order_of
from dpex.pools.agent.serving import ShippedContents
from dpex.pools.factory import PoolFactory
from dpex.pools.ray import room as cluster_room
from dpex.transport.arena import Arena
from dpex.transport.memory import write_parts
from dpex.transport.pickling import pack
from dpex.worker.setup import WorkerSetup

_AGENT = """
import signal, sys
signal.signal(signal.SIGINT, signal.SIG_IGN)
sys.path[:] = {path!r}
from dpex.pools.agent.connection import TrainerAddress, connect
from dpex.pools.agent.serving import Agent
from dpex.worker.setup import prepare_process
connection = connect(TrainerAddress(*{address!r}))
prepare_process()
Agent(connection, -1).run()
"""
"""The program of a process that is an agent."""


class ProcessNodes(Nodes):
    """Implements `dpex.pools.agent.pool.Nodes`.

    Args:
        setup: what workers are told.
        rooms: how many workers each node has room for.
        address: where the trainer listens.
        reached_at: the trainer's address for each node, if that is another.
        enter: what to put before a node's command, if anything.
    """

    def __init__(
        self,
        setup: WorkerSetup,
        rooms: list[int],
        address: str = "127.0.0.1",
        reached_at: Sequence[str] = (),
        enter: Sequence[Sequence[str]] = (),
    ) -> None:
        packed = pack(ShippedContents(setup=setup))
        self.fd = write_parts([np.frombuffer(packed.header, np.uint8), *packed.buffers])
        self.rooms = rooms
        self.given = [0] * len(rooms)
        self.processes: dict[int, subprocess.Popen[bytes]] = {}
        self.server = AdmissionServer(address, self._admit)
        self._reached_at = reached_at or [address] * len(rooms)
        self._enter = enter or [()] * len(rooms)
        self.path = list(sys.path)
        """Where agents look for packages."""
        self._landing = Arena(shared=False)
        self._lock = threading.Lock()
        self._wake: Callable[[], None] = wake_nobody
        self._news: deque[NodeNews] = deque()

    def _memory(self, nbytes: int) -> Any:
        with self._lock:
            return self._landing.array(nbytes)[0]

    def _admit(self, connection: Any, agent: int) -> None:
        if (link := link_over(connection, self._memory)) is None:
            return
        path = f"/proc/{os.getpid()}/fd/{self.fd}"
        self._news.append(NodeNews("ready", agent, f"node {agent}", link, path))
        self._wake()

    def begin(self, wake: Callable[[], None]) -> None:
        """See `Nodes.begin`."""
        self._wake = wake
        self._news.clear()
        for agent in list(self.processes):
            self._end(agent)
            self._start(agent)

    def want(self, workers: int) -> None:
        """See `Nodes.want`: the first nodes come first."""
        for agent, room in enumerate(self.rooms):
            self.given[agent] = given = min(room, workers)
            workers -= given
            if given and agent not in self.processes:
                self._start(agent)

    def _start(self, agent: int) -> None:
        address = (self._reached_at[agent], self.server.port, self.server.secret, agent)
        code = _AGENT.format(path=self.path, address=address)
        command = [*self._enter[agent], sys.executable, "-c", code]
        self.processes[agent] = subprocess.Popen(command, stdin=subprocess.DEVNULL)

    def room(self, agent: int) -> int:
        """See `Nodes.room`."""
        return self.given[agent]

    def runs(self, agent: int, workers: int) -> None:
        """Nobody else wants the room."""

    def set_aside(self, agent: int, why: str) -> None:
        """See `Nodes.set_aside`."""
        self.given[agent] = 0

    def cut_off(self, agent: int) -> None:
        """See `Nodes.cut_off`."""
        self.given[agent] = 0

    def news(self) -> list[NodeNews]:
        """See `Nodes.news`."""
        return [self._news.popleft() for _ in range(len(self._news))]

    def close(self) -> None:
        """End the agents."""
        self.server.close()
        for agent in list(self.processes):
            self._end(agent)
        os.close(self.fd)

    def _end(self, agent: int) -> None:
        process = self.processes.pop(agent)
        process.kill()
        process.wait()


class Room:
    """Place for remote workers, as a cluster of that size would say."""

    most = 0

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def find(self, wanted: RoomWanted) -> RoomFound:
        """See `dpex.autotune.types.Room.find`."""
        return RoomFound(more=max(0, self.most - wanted.requested))

    def rest(self) -> None:
        """See `dpex.autotune.types.Room.rest`."""


@contextmanager
def agents_in(namespaces: Sequence[str], reached_at: Sequence[str], workers: int) -> Iterator[None]:
    """Have remote pools made of agents in these namespaces, which reach this process at these addresses.

    workers: room in each.
    """
    make = PoolFactory.__call__

    def made(self: PoolFactory, name: str, count: int, setup: Any, shared_queue: bool) -> Any:
        if name != "remote":
            return make(self, name, count, setup, shared_queue)
        enter = [Network.enter(one) for one in namespaces]
        nodes = ProcessNodes(setup, [workers] * len(namespaces), "0.0.0.0", reached_at, enter)
        order = partial(order_of, shared_queue=shared_queue, probes=True)
        return RemotePool(nodes, order, first_workers=count)

    Room.most = workers * len(namespaces)
    with (
        patch.object(PoolFactory, "__call__", made),
        patch.object(LoaderRuntime, "hold_cluster", lambda self, head_address: None),
        patch.object(cluster_room, "RemoteRoom", Room),
    ):
        yield
