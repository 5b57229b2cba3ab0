"""What an agent reports beside batches: events of its workers, their waits for a CPU, what its connection carried.

Reports travel in headers of frames, so they are made of plain values.
"""

from __future__ import annotations

import socket
from collections.abc import Iterable
from dataclasses import fields
from typing import Any

from dpex.core.events import Notice, PoolEvent, Released, Snapshot, WorkerGone, WorkerUp
from dpex.measure.sums import NodeSums
from dpex.pools.local.handles import ProcessHandle
from dpex.system.clock import Clock, monotonic
from dpex.system.run_queue import Queued, look
from dpex.system.tcp import NO_COUNTS, TcpCounts, tcp_counts

LOOK_EVERY_S = 0.25
"""Seconds between two looks at the kernel's counts. A look takes some microseconds, and 10 µs for each thread of a
worker; a window of the controller is rarely shorter."""
_EVENTS = {kind.__name__: kind for kind in (Notice, Released, Snapshot, WorkerGone, WorkerUp)}


def plain(event: PoolEvent) -> tuple[Any, ...]:
    """Return an event of an agent's pool as plain values."""
    name = type(event).__name__
    return (name, *(getattr(event, one.name) for one in fields(_EVENTS[name])))


def event_of(name: str, *values: Any) -> PoolEvent:
    """Return the event that `plain` was given."""
    return _EVENTS[name](*values)


class DelayMeter:
    """Measures how long processes wait for a CPU, as the kernel of their machine counts it."""

    def __init__(self) -> None:
        self._delay: float | None = None
        self._looked_at = 0.0
        self._queued = Queued()

    def of(self, processes: Iterable[ProcessHandle]) -> float | None:
        """Return the seconds on run queues for each second on a CPU, lately; None if the kernel does not tell."""
        now = monotonic()
        if now - self._looked_at > LOOK_EVERY_S:
            self._looked_at = now
            queued = look([handle.pid for handle in processes if handle.pid and handle.exitcode is None], 0)
            ran, self._queued = queued.since(self._queued).workers, queued
            self._delay = None if ran is None else round(ran.delay, 3)
        return self._delay


class TrafficMeter:
    """Measures what a connection carries."""

    def __init__(self, connection: socket.socket, clock: Clock = monotonic) -> None:
        self._connection = connection
        self._clock = clock
        self._looked_at = 0.0
        self._counts = NO_COUNTS

    def news(self) -> TcpCounts | None:
        """Return what was carried since the last look; None if it is too early, or the connection is not counted."""
        now = self._clock()
        if now - self._looked_at < LOOK_EVERY_S:
            return None
        self._looked_at = now
        found = tcp_counts(self._connection)
        if found is None:
            return None
        before, self._counts = self._counts, found
        return found.since(before)


def node_sums(busy_s: float, cpu_s: float, tickets: int, delay: float | None) -> NodeSums:
    """Return what an answer adds to the sums of its machine; ``delay`` is that of `DelayMeter`."""
    known = NodeSums(tickets=tickets, busy_s=busy_s, cpu_s=cpu_s)
    return known if delay is None else known.plus(NodeSums(queued_s=cpu_s * delay, asked_s=busy_s))
