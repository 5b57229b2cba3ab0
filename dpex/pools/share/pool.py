"""The pool of a training that shares batches: the producer is its agent, on this machine.

Each batch is copied out of the workers' memory when it arrives, so that it is this training's own to write into. It is
read through the producer's entry in ``/proc``. It stays as it is until the training says that it has its copy.

When the producer dies, the connection ends. The first training that notices starts another producer, the others find
it, and all ask it for the batches that they still want.
"""

from __future__ import annotations

import marshal
import math
import socket
import time
from collections import deque
from collections.abc import Callable
from typing import Any

from dpex.errors import ShareError
from dpex.measure.sums import LinkSums, NodeStats
from dpex.pools.agent.connection import AgentLink, Arrived, wake_nobody
from dpex.pools.agent.pool import WORKERS_AN_AGENT, AgentHandle, NodeNews, Nodes, RemotePool
from dpex.pools.local.fork_server import keep_from_templates
from dpex.pools.local.forking import ProcessHandle
from dpex.pools.share.meeting import Facts, MeetingPlace
from dpex.schedule.events import Notice, PoolEvent
from dpex.schedule.names import LOCAL
from dpex.transport.arena import Arena

CONNECTIONS_IN_A_ROW = 4
"""Producers that may end before a batch came of any."""
TRIES = 100
AGAIN_S = 0.01
"""Seconds between two attempts to connect to a process that is about to listen, or to end."""


class SharedNodes(Nodes):
    """The producer, as a node that has room for all workers.

    Args:
        place: The meeting place.
        start: Starts a producer that listens at the place.

    Attributes:
        connections: Producers that were connected to since a batch came.

    Raises:
        ShareError: There is no producer, and none can be started.
        OSError: The system refuses.
    """

    def __init__(self, place: MeetingPlace, start: Callable[[socket.socket], None]) -> None:
        self._place = place
        self._start = start
        self._wanted = self._number = self.connections = 0
        self._news: deque[NodeNews] = deque()
        self._wake: Callable[[], None] = wake_nobody
        self._connect()

    def _connect(self) -> None:
        connection = self._connected()
        keep_from_templates(connection)
        self.connections += 1
        self._number += 1
        self._link = AgentLink(connection, bytearray)
        self._news.append(NodeNews("ready", self._number, "this machine", self._link))

    def _connected(self) -> socket.socket:
        """Return a connection to the producer, which is started if none runs."""
        for _ in range(TRIES):
            if (connection := self._place.connect()) is not None:
                return connection
            if (listener := self._place.listen()) is not None:
                with listener:
                    self._start(listener)
            else:
                time.sleep(AGAIN_S)  # another training is just about to listen, or a producer to end
        raise ShareError("share: the process that makes the batches ended as it started")

    def begin(self, wake: Callable[[], None]) -> None:
        self._wake = wake

    def want(self, workers: int) -> None:
        self._wanted = workers

    def room(self, agent: int) -> int:
        return self._wanted

    def runs(self, agent: int, workers: int) -> None:
        """The producer counts them itself."""

    def set_aside(self, agent: int, why: str) -> None:
        """The pool raises an error instead."""

    def cut_off(self, agent: int) -> None:
        """Connect to whatever producer there is now."""
        ended = "the process that makes the batches ended"
        try:
            if self.connections >= CONNECTIONS_IN_A_ROW:
                raise ShareError(f"{self.connections} ended before a batch came of any")
            self._connect()
        except (OSError, ShareError) as error:
            why = f"{ended}, and there can be no other: {error}; without share= this training has its own workers"
            self._news.append(NodeNews("failed", why=why, for_good=True))
        self._wake()

    def news(self) -> list[NodeNews]:
        return [self._news.popleft() for _ in range(len(self._news))]

    def close(self) -> None:
        """The producer goes on for the others, and ends with the last."""
        self._link.close()


class SharedPool(RemotePool):
    """See the module.

    Args:
        nodes: The producer.
        facts: Facts that all trainings must have in common.
        kept_bytes: Bytes of batches that the producer keeps, at least.
    """

    name = LOCAL
    _lost = "the process that makes the batches of a share is lost: {why}"

    def __init__(self, nodes: SharedNodes, facts: Facts, kept_bytes: int, first_workers: int) -> None:
        self.handles: list[ProcessHandle] = []
        self._producers = nodes
        self._facts = facts
        self._kept_bytes = kept_bytes
        self._refused = ""
        self._processes: tuple[int, list[tuple[int, int]]] = 0, []
        """The producer's, and those of its workers, by number."""
        self._arena = Arena(shared=False)
        """Memory that batches are copied to."""
        super().__init__(nodes, shared_queue=True, first_workers=first_workers)

    def poll(self) -> deque[PoolEvent]:
        """See `WorkerPool.poll`.

        Raises:
            ShareError: The producer refuses this training, as it does not read the same.
        """
        if self._refused:
            raise ShareError(self._refused)
        return super().poll()

    def _order(self, news: NodeNews) -> tuple[Any, ...]:
        return self._facts, self._kept_bytes

    def _set_aside(self, agent: AgentHandle, why: str) -> None:
        self._refused = why
        raise ShareError(why)

    def _fail(self, why: str, for_good: bool) -> None:
        self.failed, self._is_hopeless = f"share={self._facts['share']!r}: {why}", for_good

    def _count(self) -> None:
        """Workers that this training does not want are those of others."""
        super()._count()
        self.counts.running = min(self.counts.running, self.counts.wanted)

    def _take_frame(self, agent: AgentHandle, arrived: Arrived) -> None:
        """Take in a frame of the producer's; see `dpex.pools.share.producer`."""
        *_, processes, _ = arrived.header
        if processes != self._processes:
            self._processes = processes
            numbered = [(agent.number * WORKERS_AN_AGENT + worker, pid or None) for worker, pid in processes[1]]
            self.handles = [ProcessHandle(f"dpex-worker-{number}", number, pid) for number, pid in numbered]
        super()._take_frame(agent, arrived)

    def _made(self, agent: AgentHandle, results: list[Any], arrived: Arrived, delay: Any) -> None:
        found: list[tuple[Any, ...]] = []
        buffers: list[Any] = []
        keys = []
        for data, is_first in results:
            epoch, number, worker, kind, node, rest, places = marshal.loads(data)
            try:
                slots = copied(places, self._processes[0], self._arena)
            except OSError as error:  # as where the producer was killed after it sent this; it is made again
                agent.link.why_ended = f"a batch of its could not be read: {error}"
                agent.link.close()
                break
            which = [(*at, len(buffers) + place) for place, at in enumerate(slots)]
            buffers += slots.values()
            keys += [(epoch, number)] if places else []
            found.append((worker, epoch, number, kind, node, *rest, which, math.inf))
            self.times.shared += not is_first
        super()._made(agent, found, arrived._replace(buffers=buffers), None)
        if found:
            self._producers.connections = 0
        self._put(agent, "taken", keys)

    def _take(self, agent: AgentHandle, event: PoolEvent) -> None:
        if isinstance(event, Notice):
            self._events.append(event)
        else:
            super()._take(agent, event)

    def _add(self, agent: AgentHandle, more: LinkSums | NodeStats, **levels: Any) -> None:
        """Add nothing, as there is no other machine."""


def copied(places: list[tuple[int, int, int, int, int]], producer: int, arena: Arena) -> dict[tuple[int, int], Any]:
    """Return arrays in ``arena`` with the bytes of these slots, by segment and slot; ``producer``: its process.

    Raises:
        OSError: The producer has ended.
    """
    found = {}
    for segment, slot, fd, offset, nbytes in places:
        array, _ = arena.array(nbytes)
        with open(f"/proc/{producer}/fd/{fd}", "rb", buffering=0) as file:  # noqa: PTH123  (no path of the file system)
            file.seek(offset)
            view = memoryview(array.data)
            while len(view):
                came = file.readinto(view)
                if not came:
                    raise OSError("the memory of a batch ended before the batch")
                view = view[came:]
        found[segment, slot] = array
    return found
