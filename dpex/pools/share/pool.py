"""The pool of a training that shares batches: a connection to the producer, in place of workers of its own.

Each batch is copied out of the workers' memory when it arrives, so that it is this training's own to write into.

The pool knows the batches that it has asked for and not received. When the producer dies, the connection ends. The
first training that notices starts another producer, the others find it, and all ask it for the batches that they still
want. The same happens if an exception of a signal handler interrupts the reading of a message (see
`dpex.system.interrupts`).
"""

from __future__ import annotations

import contextlib
import marshal
import select
import socket
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from dpex.errors import InternalError, ShareError
from dpex.measure.batch_times import batch_times
from dpex.measure.pool_times import PoolTimes
from dpex.pools.agent.pool import RemoteResult
from dpex.pools.base import PoolCounts, WorkerPool
from dpex.pools.local.fork_server import keep_from_templates
from dpex.pools.local.handles import ProcessHandle
from dpex.pools.local.shared_queue import pack, write
from dpex.pools.local.worker_process import END, TICKET_BYTES, receive
from dpex.pools.share.facts import Facts
from dpex.pools.share.memory import copied
from dpex.pools.share.place import MeetingPlace
from dpex.pools.share.producer import BUFFER_BYTES
from dpex.schedule.events import Notice, PoolEvent, TicketMade, WorkerGone, WorkerUp
from dpex.schedule.names import LOCAL
from dpex.schedule.schedule import Ticket
from dpex.transport.arena import Arena

CONNECTIONS_IN_A_ROW = 4
"""Producers that may end before a batch came of any."""
TRIES = 100
AGAIN_S = 0.01
"""Seconds between two attempts to connect to a process that is about to listen, or to end."""


@dataclass(frozen=True, kw_only=True)
class SharePlan:
    """The plan by which a loader shares one pass over its data.

    Attributes:
        facts: Facts that all trainings must have in common.
        place: The meeting place.
        kept_bytes: Bytes of batches that the producer keeps, at least.
        start: Starts a producer that listens at the place.
    """

    facts: Facts
    place: MeetingPlace
    kept_bytes: int
    start: Callable[[socket.socket], None]

    def connect(self) -> socket.socket:
        """Return a connection to the producer, which is started if none runs.

        Raises:
            ShareError: It cannot be started.
            OSError: The system refuses.
        """
        for _ in range(TRIES):
            if (connection := self.place.connect()) is not None:
                return connection
            if (listener := self.place.listen()) is not None:
                with listener:
                    self.start(listener)
            else:
                time.sleep(AGAIN_S)  # another training is just about to listen, or a producer to end
        raise ShareError(f"share={self.facts['share']!r}: the process that makes the batches ended as it started")


class SharedPool(WorkerPool):
    """See the module; implements `dpex.pools.base.WorkerPool`.

    Raises:
        ShareError: There is no producer, and none can be started.
        OSError: The system refuses.
    """

    name = LOCAL
    crashes = 0

    def __init__(self, plan: SharePlan, first_workers: int) -> None:
        self.counts = PoolCounts()
        self.times = PoolTimes()
        self.handles: list[ProcessHandle] = []
        self._plan = plan
        self._refused: str | None = None
        self._arena = Arena(shared=False)
        """Memory that batches are copied to."""
        self._held: dict[tuple[int, int], Any] = {}
        """The index of each batch that was asked for and has not come, by pass and number."""
        self._taken: list[tuple[int, int]] = []
        self._outbox: deque[bytes] = deque()
        self._events: deque[PoolEvent] = deque()
        self._buffer = memoryview(bytearray(TICKET_BYTES))
        self._epoch = 0
        self._connections = 0
        self._is_torn = False
        self._closed = False
        self._epoll = select.epoll()
        self.counts.wanted = first_workers
        try:
            self._connect()
        except BaseException:
            self._epoll.close()
            raise

    # -- the connection ------------------------------------------------------------------------------------------

    def _connect(self) -> None:
        """Begin anew with whatever producer there is."""
        self._connections += 1
        self._socket = self._plan.connect()
        self._socket.setblocking(False)
        keep_from_templates(self._socket)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, BUFFER_BYTES)
        self._epoll.register(self._socket.fileno(), select.EPOLLIN)
        self._is_writing = False
        self._taken.clear()
        self._outbox.clear()
        self._put("hello", self._plan.facts, self._plan.kept_bytes)
        self._put("resize", self.counts.wanted)
        by_epoch: dict[int, list[tuple[int, Any]]] = {}
        for (epoch, number), index in self._held.items():
            by_epoch.setdefault(epoch, []).append((number, index))
        for epoch, tickets in by_epoch.items():
            self._put("tickets", epoch, tickets)

    def _disconnect(self) -> None:
        with contextlib.suppress(OSError, ValueError):
            self._epoll.unregister(self._socket.fileno())
        self._socket.close()

    def _connect_anew(self, why: str) -> None:
        self._disconnect()
        self._lose_workers(why)
        if self._connections >= CONNECTIONS_IN_A_ROW:
            self._fail(f"{why}, {self._connections} times in a row")
            return
        try:
            self._connect()
        except (OSError, ShareError, InternalError) as error:
            self._fail(f"{why}, and there can be no other: {error}")

    def _lose_workers(self, why: str) -> None:
        for handle in self.handles:
            self._events.append(WorkerGone(self.name, handle.worker, self._epoch, (), None, True, why))
        self.handles = []
        self.counts.running = 0

    def _fail(self, why: str) -> None:
        """There is no producer, and can be no other: the epoch ends with an error that says so."""
        self.failed = f"share={self._plan.facts['share']!r}: {why}; without share= this training has its own workers"
        self.counts.requested = 0
        lost = tuple(number for epoch, number in self._held if epoch == self._epoch)
        self._held.clear()
        self._events.append(WorkerGone(self.name, -1, self._epoch, lost, None, True, self.failed))

    # -- requests ------------------------------------------------------------------------------------------------

    def _put(self, *message: Any) -> None:
        self._outbox.append(pack(message))
        self._flush()

    def _flush(self) -> bool:
        """Send what was kept back, in order; True if nothing is left of it."""
        while self._outbox:
            sent: list[Any] = []
            if not write(self._socket, self._outbox[0], sent):
                break
            self._outbox.popleft()
        self._watch(is_writing=bool(self._outbox))
        return not self._outbox

    def _watch(self, *, is_writing: bool) -> None:
        if is_writing != self._is_writing:
            self._is_writing = is_writing
            self._epoll.modify(self._socket.fileno(), select.EPOLLIN | (select.EPOLLOUT if is_writing else 0))

    def resize(self, wanted: int) -> None:
        """See `WorkerPool.resize`: the producer has as many workers as the training wants that wants most."""
        self.counts.wanted = wanted
        if self.failed is not None:
            return
        self.counts.requested = wanted
        self._put("resize", wanted)

    def send(
        self,
        tickets: list[Ticket],
        epoch: int,
        worker: int | None = None,
        sent: list[Any] | None = None,
        *,
        again: bool = False,
    ) -> bool:
        """See `WorkerPool.send`."""
        if self.failed is not None or not self._flush():
            return False
        sent = [] if sent is None else sent
        asked = {(epoch, ticket.number): ticket.index for ticket in tickets}
        self._held.update(asked)
        write(self._socket, pack(("tickets", epoch, [(t.number, t.index) for t in tickets])), sent)
        if not sent:
            for key in asked:
                del self._held[key]
        return bool(sent)

    def new_epoch(self, epoch: int) -> None:
        """See `WorkerPool.new_epoch`."""
        self._epoch = epoch
        self._held = {key: index for key, index in self._held.items() if key[0] >= epoch}
        if self.failed is None:
            self._put("epoch", epoch)

    # -- answers -------------------------------------------------------------------------------------------------

    def workers(self) -> list[int]:
        """See `WorkerPool.workers`; tickets wait for workers at the producer, so they can be sent before there are."""
        if self.failed is not None:
            return []
        return [handle.worker for handle in self.handles] or list(range(self.counts.wanted))

    def descriptors(self) -> list[int]:
        """See `WorkerPool.descriptors`."""
        return [self._epoll.fileno()]

    def poll(self) -> deque[PoolEvent]:
        """See `WorkerPool.poll`.

        Raises:
            ShareError: The producer refuses this training, as it does not read the same.
        """
        if self._refused is not None:
            raise ShareError(self._refused)
        if self._closed or self.failed is not None:
            return self._events
        was_torn, self._is_torn = self._is_torn, True
        if was_torn:
            self._connect_anew("a signal handler broke in")
        self._hear()
        self._is_torn = False
        return self._events

    def _hear(self) -> None:
        while self.failed is None:
            try:
                received = receive(self._socket, self._buffer, socket.MSG_DONTWAIT)
            except BlockingIOError:
                break
            except ConnectionResetError:
                received = None
            if received is None:
                self._connect_anew("the process that makes the batches ended")
                continue
            message = marshal.loads(received[0])
            try:
                getattr(self, f"_hear_{message[0]}")(*message[1:])
            except OSError as error:  # of `copied`: the producer was killed after it sent this
                self._connect_anew(f"the process that makes the batches ended ({error})")
        if self.failed is None:
            self._answer()

    def _answer(self) -> None:
        """Let the producer have memory back, and send what was kept."""
        if self._taken:
            taken, self._taken = self._taken, []
            self._put("taken", taken)
        elif self._outbox:
            self._flush()

    def _hear_refused(self, why: str) -> None:
        self._refused = why
        raise ShareError(why)

    def _hear_status(
        self,
        running: int,
        requested: int,
        most: int | None,
        why_most: str,
        failed: str | None,
        crashes: int,
        pids: tuple[tuple[int, int], ...],
    ) -> None:
        """Take in the status of the producer's pool. Workers that this training does not want are those of others."""
        counts = self.counts
        counts.running, counts.requested = min(running, counts.wanted), min(requested, counts.wanted)
        counts.most, counts.why_most = (most, why_most) if most is not None and most < counts.wanted else (None, "")
        self.crashes = crashes
        known = {handle.worker for handle in self.handles}
        self._events.extend(WorkerUp(self.name, worker) for worker, _ in pids if worker not in known)
        self.handles = [_handle(worker, pid) for worker, pid in pids]
        if failed is not None:
            self._fail(failed)

    def _hear_notice(self, text: str, is_warning: bool) -> None:
        self._events.append(Notice(text, is_warning))

    def _hear_gone(
        self,
        worker: int,
        keys: list[tuple[int, int]],
        working_on: int | None,
        expected: bool,
        why: str,
        pid: int | None,
    ) -> None:
        lost = tuple(key[1] for key in keys if self._held.pop(key, None) is not None and key[0] == self._epoch)
        blamed = working_on if working_on in lost else None
        self._events.append(WorkerGone(self.name, worker, self._epoch, lost, blamed, expected, why, pid))

    def _hear_made(self, producer: int, results: list[tuple[bytes, bool]]) -> None:
        for data, is_first in results:
            epoch, number, worker, kind, node, rest, places = marshal.loads(data)
            slots = copied(places, producer, self._arena)
            if places:
                self._taken.append((epoch, number))
            if (epoch, number) not in self._held:
                continue
            self._connections = 0
            times = batch_times(*rest)
            self.times.count(times)  # for each training that gets the batch, as each would have made it
            self._events.append(TicketMade(epoch, number, worker, RemoteResult(kind, node, slots), kind == END, times))
            self.times.shared += not is_first
            del self._held[epoch, number]

    # -- closing -------------------------------------------------------------------------------------------------

    def close(self, grace_s: float) -> None:
        """See `WorkerPool.close`: the producer goes on for the others, and ends with the last."""
        if self._closed:
            return
        self._closed = True
        self._disconnect()
        self._epoll.close()
        self._held.clear()
        self._events.clear()
        self.counts = PoolCounts()


def _handle(worker: int, pid: int) -> ProcessHandle:
    handle = ProcessHandle(f"dpex-worker-{worker}", worker)
    handle.pid = pid or None
    return handle
