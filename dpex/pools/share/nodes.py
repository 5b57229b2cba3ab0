"""Connect a training's pool to the producer (the process that makes shared batches), which acts as a local agent.

The training copies each batch out of the workers' memory, so that it may write into its copy. It reads the memory
through the producer's entry in ``/proc``. The memory stays unchanged until the training reports its copy ("taken").

When the producer dies, the connection ends. The first training that notices starts another producer, the others find
it, and all ask it for the batches that they still want.
"""

from __future__ import annotations

import marshal
import math
import socket
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from dpex.errors import ShareError
from dpex.pools.agent.connection import AgentLink, Arrived, wake_nobody
from dpex.pools.agent.pool import WORKERS_AN_AGENT, AgentReport, NodeNews, Nodes
from dpex.pools.local.fork_server import keep_from_templates
from dpex.pools.local.forking import ProcessHandle
from dpex.pools.share.meeting import MeetingPlace
from dpex.transport.arena import Arena

CONNECTIONS_IN_A_ROW = 4
"""Maximum producers in a row that end before a batch arrives from any of them."""
TRIES = 100
AGAIN_S = 0.01
"""Seconds between two attempts to connect to a process that is about to listen or about to end."""


class SharedNodes(Nodes):
    """The producer, as a node that has room for all workers. ``start`` starts a producer that listens at ``place``.

    ``connections``: Count of connections to producers since the last batch arrived. Raises ShareError if no producer
    runs and none can be started, and OSError if the system refuses.
    """

    def __init__(self, place: MeetingPlace, start: Callable[[socket.socket], None], name: str) -> None:
        self._place = place
        self._start = start
        self._name = name
        self._refused = ""
        self._processes: tuple[int, list[tuple[int, int]], int] = 0, [], 1
        """The producer's process id, the process ids of its workers by number, and the number of ranks of a job that
        share."""
        self._arena = Arena(shared=False)
        """Memory that batches are copied to."""
        self.connections: int = 0
        self._wanted = self._number = 0
        self._news: deque[NodeNews] = deque()
        self._wake: Callable[[], None] = wake_nobody
        self._connect()

    def _connect(self) -> None:
        connection = self._connected()
        keep_from_templates(connection)
        self.connections += 1
        self._number += 1
        self._link = AgentLink(connection, bytearray)
        self._news.append(NodeNews("ready", self._number, link=self._link))

    def _connected(self) -> socket.socket:
        """Return a connection to the producer, which is started if none runs."""
        for _ in range(TRIES):
            if (connection := self._place.connect()) is not None:
                return connection
            if (listener := self._place.listen()) is not None:
                with listener:
                    self._start(listener)
            else:
                time.sleep(AGAIN_S)  # a training is about to listen, or a producer is about to end
        raise ShareError("share: the producer of the batches ended while it was starting")

    def begin(self, wake: Callable[[], None]) -> None:
        self._wake = wake

    def want(self, workers: int) -> None:
        self._wanted = workers

    def room(self, agent: int) -> int:
        return self._wanted

    def runs(self, agent: int, workers: int) -> None:
        """Do nothing: the producer counts its workers itself."""

    def set_aside(self, agent: int, why: str) -> None:
        """Do nothing: `report` raises an error instead."""

    def cut_off(self, agent: int) -> None:
        ended = "the process that makes the batches ended"
        try:
            if self.connections >= CONNECTIONS_IN_A_ROW:
                raise ShareError(f"{self.connections} producers in a row ended before a batch arrived")
            self._connect()
        except (OSError, ShareError) as error:
            why = f"{ended}, and there can be no other: {error}; without share= this training has its own workers"
            why = f"share={self._name!r}: {why}"
            self._news.append(NodeNews("failed", why=why, for_good=True))
        self._wake()

    def news(self) -> list[NodeNews]:
        """Return what happened since the last call. Raises ShareError if the producer refuses this training."""
        if self._refused:
            raise ShareError(self._refused)
        return [self._news.popleft() for _ in range(len(self._news))]

    def report(self, link: AgentLink, arrived: Arrived) -> AgentReport:
        """Return the contents of a frame from the producer. Raises ShareError if it refuses this training."""
        _, pool, results, events, failed, processes, _ = arrived.header
        if failed is not None:
            self._refused = failed
            raise ShareError(failed)
        if processes != self._processes:
            self._processes = processes
            numbered = [(self._number * WORKERS_AN_AGENT + worker, pid or None) for worker, pid in processes[1]]
            self.handles: Sequence[ProcessHandle] = [
                ProcessHandle(f"dpex-worker-{number}", number, pid) for number, pid in numbered
            ]
        report = AgentReport(pool, [], events, None, None, None, [], sharing_ranks=processes[2])
        return self._with_results(report, link, results) if results else report

    def _with_results(self, report: AgentReport, link: AgentLink, results: list[tuple[bytes, bool]]) -> AgentReport:
        found, buffers, shared = report.results, report.buffers, 0
        keys = []
        for data, is_first in results:
            epoch, number, worker, kind, node, rest, places = marshal.loads(data)
            try:
                slots = copied(places, self._processes[0], self._arena)
            except OSError as error:  # the producer may have been killed; the batch is made again
                link.why_ended = f"one of its batches could not be read: {error}"
                link.close()
                break
            which = [(*at, len(buffers) + place) for place, at in enumerate(slots)]
            buffers += slots.values()
            keys += [(epoch, number)] if places else []
            found.append((worker, epoch, number, kind, node, *rest, which, math.inf))
            shared += not is_first
        if found:
            self.connections = 0
        link.put("taken", keys)
        return report._replace(shared=shared)

    def close(self) -> None:
        """Leave the producer, which serves other trainings and ends with the last."""
        self._link.close()


def copied(places: list[tuple[int, int, int, int, int]], producer: int, arena: Arena) -> dict[tuple[int, int], Any]:
    """Copy slots of the process ``producer`` into arrays in ``arena``; return the arrays by segment and slot.

    Raises OSError if the producer has ended.
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
