"""Worker processes on this machine, without a thread in the trainer. See `fork_server` and `worker_process`.

The trainer owns one socket per worker (results, and tickets when there are logical workers), and what all workers share
(`shared_queue`). What a dead worker held is known from the messages sent to it, or from the board when the queue is
shared; the moment between taking a message and writing it down is covered by a recount.

How many workers there are, and what follows when one ends, is in `workers`; here is what they are sent and what they
answer.
"""

from __future__ import annotations

import marshal
import pickle
import select
from collections import deque
from collections.abc import Callable
from itertools import islice
from typing import Any

from dpex.pools.base import PoolCounts, PoolTimes
from dpex.pools.local.handles import LocalResult, LocalWorkerHandle
from dpex.pools.local.packing import Packing
from dpex.pools.local.shared_queue import hang_up, pack, write
from dpex.pools.local.starter import Starter
from dpex.pools.local.worker_process import END, TICKET_BYTES
from dpex.pools.local.workers import LocalWorkers
from dpex.schedule.events import (
    Notice,
    PoolEvent,
    Snapshot,
    SplittingKnown,
    TicketMade,
    WorkerUp,
    ticket_made_of,
)
from dpex.schedule.schedule import Ticket
from dpex.schedule.streams import ALL
from dpex.schedule.worker_life import IS_ASKED_TO_LEAVE, LIFE, RUNNING, SERVES, STAYING
from dpex.system.clock import monotonic
from dpex.worker.logical_state import RngState

SETTLED_S = 0.02
"""How long nothing may be under way before tickets count as lost unseen. A worker writes down what it took within some
50 microseconds, unless it has no CPU; a ticket that counts as lost too early is made twice, and delivered once."""

_EVENTS: dict[str, Callable[..., PoolEvent]] = {"snapshot": Snapshot, "splitting": SplittingKnown, "notice": Notice}
"""What workers tell that is an event as it is."""


class LocalPool(LocalWorkers):
    """See the module; implements `dpex.pools.base.WorkerPool`."""

    def __init__(
        self,
        starter: Starter,
        *,
        shared_queue: bool,
        first_workers: int,
        packing: Packing | None = None,
    ) -> None:
        super().__init__(starter, shared_queue=shared_queue, packing=packing)
        self.times = PoolTimes()
        self._first = 0
        self._group = 0
        self._settled_since: float | None = None
        self._buffer = memoryview(bytearray(TICKET_BYTES))
        self._arrived: deque[Any] = deque()
        """The message that lies in the buffer and is not yet taken in, if any; see `dpex.system.interrupts`."""
        self._sender: LocalWorkerHandle | None = None
        self._taken_in = 0
        """How many of its results are."""
        try:
            self._open_source()
            self.resize(first_workers)
        except BaseException:
            self._release_resources()
            raise

    # -- size ----------------------------------------------------------------------------------------------------

    @property
    def is_unsettled(self) -> bool:
        """Whether `poll` has something to find out that no descriptor tells."""
        return self._suspicious or self._crowded

    def at_work(self) -> int:
        """Workers that have something to do, at most."""
        return self.counts.running

    # -- tickets -------------------------------------------------------------------------------------------------

    def send(
        self,
        tickets: list[Ticket],
        epoch: int,
        worker: int | None = None,
        sent: list[Any] | None = None,
        *,
        again: bool = False,
    ) -> bool:
        """See `WorkerPool.send`; all tickets of a message belong to one logical worker."""
        sent = [] if sent is None else sent
        self._group = group = self._group + 1
        data = pack(("tickets", group, epoch, tickets[0].queue, [(t.number, t.index) for t in tickets]))
        if worker is None:
            self._settled_since = None
            assert self._queue is not None
            self._queue.send(group, tickets, data, sent)
        elif self._flush(place := self._workers[worker]):
            held = {(epoch, t.number): t for t in tickets}
            place.held.update(held)
            write(place.socket, data, sent)
            if not sent:
                for key in held:
                    del place.held[key]
        return bool(sent)

    def adopt(self, worker: int, logical: int, state: RngState | None, streams: int = ALL) -> None:
        """See `WorkerPool.adopt`."""
        self._post(self._workers[worker], pickle.dumps(("adopt", logical, state, streams)))

    def ask_state(self, worker: int, logical: int) -> None:
        """See `WorkerPool.ask_state`."""
        self._post(self._workers[worker], pickle.dumps(("ask_state", logical)))

    def _post(self, worker: LocalWorkerHandle, data: bytes) -> None:
        """Send this to a worker now or, as its socket is full, before anything else that it is sent.

        Nobody may wait for room here: the worker may itself be waiting for the trainer to read its results.
        """
        worker.outbox.append(data)
        self._flush(worker)

    def _flush(self, worker: LocalWorkerHandle) -> bool:
        """Send what was kept back, in order; True if nothing is left of it."""
        outbox = worker.outbox
        while outbox:
            sent: list[Any] = []
            if not write(worker.socket, outbox[0], sent):
                self._epoll.modify(worker.socket.fileno(), select.EPOLLIN | select.EPOLLOUT)
                return False
            del outbox[0]
        return True

    def _room_again(self, worker: LocalWorkerHandle) -> None:
        """The socket of a worker takes something again."""
        if self._flush(worker) and not worker.hung_up:
            self._epoll.modify(worker.socket.fileno(), select.EPOLLIN)

    def new_epoch(self, epoch: int) -> None:
        """See `WorkerPool.new_epoch`."""
        self._epoch = epoch
        self._fleet.packing.new_epoch()
        if self._queue is not None:
            self._queue.groups.clear()
        self._board.new_epoch(epoch)

    # -- what happened -------------------------------------------------------------------------------------------

    def descriptors(self) -> list[int]:
        """See `WorkerPool.descriptors`: the pool's own epoll."""
        return [self._epoll.fileno()]

    def poll(self) -> deque[PoolEvent]:
        """See `WorkerPool.poll`."""
        if self._closed:
            return self._events
        self._take_in()
        for fd, what in self._epoll.poll(0):
            worker = self._by_fd.get(fd)
            if worker is None:
                self._hear_source()
                continue
            if what & select.EPOLLOUT:
                self._room_again(worker)
            if what & ~select.EPOLLOUT:
                self._drain(worker)
        if not self._source.ready and self._source.overdue:
            self._source_died()
        if self._suspicious:
            self._recount()
        if self._crowded:
            self._adjust()
        return self._events

    def _drain(self, worker: LocalWorkerHandle) -> None:
        self._take_in()
        while not worker.hung_up:
            self._sender = worker
            try:
                if worker.announces_memory:
                    worker.map_announced(self._buffer)
                self._arrived.extend(map(worker.socket.recv_into, (self._buffer,)))
            except BlockingIOError:
                return
            except ConnectionResetError:
                self._hang_up(worker)
            self._take_in()

    def _take_in(self) -> None:
        """Read the message in the buffer, if there is one; what an exception broke off is gone on with."""
        if not self._arrived:
            return
        worker = self._sender
        assert worker is not None
        count = self._arrived[0]
        if count:
            self._read(worker, *marshal.loads(self._buffer[:count]))
        else:
            self._hang_up(worker)
        self._taken_in = 0
        del self._arrived[0]

    def _read(self, worker: LocalWorkerHandle, message: Any, retired: list[int]) -> None:
        kind = message[0]
        if kind == "made":
            self._made(worker, message[1], message[2])
            if self._fleet.packing.untried and message[2]:
                self._fleet.packing.tried()
                self._keep_promises()
        elif kind == "coming":
            worker.announces_memory = True
        elif kind == "segments":  # they are mapped already
            worker.announces_memory = False
        elif kind == "spilled":
            self._read(worker, marshal.loads(worker.lease(*message[1:])), [])
            worker.leased = {}
        elif kind in _EVENTS:
            self._tell(_EVENTS[kind](*message[1:]))
        elif kind == "serving":
            self._serves(worker, message[1])
        elif kind == "bye":
            self._leaves(worker)
        else:
            self._read_trouble(worker, *message)
        for number in retired:
            worker.segments.pop(number, None)

    def _read_trouble(self, worker: LocalWorkerHandle, kind: str, *about: Any) -> None:
        if kind == "hung":
            worker.hung = about[0], about[1]
        elif kind == "draws":
            self._drew(worker.process, about[0])
        elif kind == "refused":
            self._refused([worker], about[0])

    def _serves(self, worker: LocalWorkerHandle, pid: int) -> None:
        worker.process.handle.pid = pid  # the template's news may come later than the last batch
        self._failed_starts = 0
        if worker.stage not in RUNNING:
            self.counts.running += 1  # without a call: see `dpex.system.interrupts`
            worker.stage = LIFE[worker.stage, SERVES]
        self._tell(WorkerUp(self.name, worker.number))
        self._keep_promises()

    def _leaves(self, worker: LocalWorkerHandle) -> None:
        if self._queue is not None and worker.stage in STAYING:
            self._queue.leaves -= self._queue.leaves > 0  # without a call: see `dpex.system.interrupts`
        worker.stage = LIFE[worker.stage, IS_ASKED_TO_LEAVE]
        if worker.is_thread:
            self._left(worker)

    def _tell(self, event: PoolEvent) -> None:
        """Tell of the message that is being read; once, even if it is read again."""
        if not self._taken_in:
            self._events += (event,)  # from here on without a call: see `dpex.system.interrupts`
            self._taken_in = 1

    def _made(self, worker: LocalWorkerHandle, group: int, results: list[tuple[Any, ...]]) -> None:
        for result in islice(results, self._taken_in, None):
            worker.held.pop(result[:2], None)
            self._crashes = 0
            self._result(worker, *result)
        if group and self._queue is not None:
            self._queue.groups.pop(group, None)

    def _result(
        self,
        worker: LocalWorkerHandle,
        epoch: int,
        number: int,
        kind: int,
        node: Any,
        stages: tuple[Any, ...],
        cpu_s: float,
        encode_s: float,
        nbytes: int,
    ) -> None:
        """Count a result, and tell of it; once, even if it is read again."""
        service_s = self.times.count(stages, cpu_s, encode_s, nbytes)
        if epoch == self._epoch:
            value = LocalResult(worker, kind, node)
            load_s, collate_s, load_cpu_s, _, samples, _, slowest, failed = stages
            place = (epoch, number, self._first + worker.number, value, kind == END, service_s, nbytes, samples)
            making = (load_s, load_cpu_s, collate_s, encode_s, 0.0)
            event = ticket_made_of(TicketMade, (*place, making, slowest, failed))
            self._events += (event,)  # from here on without a call: see `dpex.system.interrupts`
            self._taken_in += 1
        else:
            self._taken_in += 1
            if kind != END:
                worker.decoder.decode(node)  # nobody wants it: its slots go back at once
                worker.leased = {}

    # -- ends ----------------------------------------------------------------------------------------------------

    def _recount(self) -> None:
        """After a death: once the queue is empty and all workers idle for a while, what is still out was lost."""
        for worker in list(self._by_fd.values()):
            self._drain(worker)
        if self._in_doubt():
            self._settled_since = None
            return
        now = monotonic()
        if self._settled_since is None:
            self._settled_since = now
        if now - self._settled_since < SETTLED_S:
            return
        self._suspicious, self._settled_since = False, None
        self._lose_the_rest()  # with it goes a request to leave that somebody took as it died
        self._adjust()

    def _in_doubt(self) -> bool:
        assert self._queue is not None
        busy = any(not self._board.is_idle(worker.row) for worker in self._workers.values())
        return busy or not self._queue.is_empty()

    def _lose_the_rest(self) -> None:
        """Nobody holds a ticket, or is left to read the queue: take back what is out."""
        assert self._queue is not None
        lost = self._queue.forget()
        if lost:
            self._tell_end(-1, "a worker died as it took them", lost)

    # -- closing -------------------------------------------------------------------------------------------------

    def close(self, grace_s: float = 5.0) -> None:
        """See `WorkerPool.close`; idle workers end at once."""
        if self._closed:
            return
        self._hang_up_all(grace_s)
        for what, *about in self._source.join(grace_s + 3.0):
            if what == "exit" and about[0] in self._fleet.processes:
                self._fleet.processes[about[0]].handle.exitcode = about[2]
        self.counts = PoolCounts()
        self._release_resources()

    def _hang_up_all(self, grace_s: float) -> None:
        """Let every worker know that it is over, and the template that it ends those which stay."""
        self._closed = True
        self._board.end()
        self._hear_source()
        if self._queue is not None:
            self._queue.shut_down()
        for process in self._fleet.processes.values():
            if process.control is not None:
                hang_up(process.control)
        for worker in self._workers.values():
            if not worker.hung_up:
                hang_up(worker.socket)
        self._source.end(grace_s)
