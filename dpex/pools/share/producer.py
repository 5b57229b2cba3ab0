"""The producer: a process that makes each batch once for all connected trainings.

It is a `LocalPool` with connections in place of an engine, like an agent (`dpex.pools.agent.serving`), but serves
several trainings. It makes each batch once (`cache`), for all trainings that wait for the batch or ask for it while it
is kept. Batches with the lowest numbers are made first, so that slower trainings catch up while faster ones still have
batches. The number of workers is the largest that any training wants. A batch stays in the memory of the workers, and
the producer keeps the descriptors of their segments.

The producer has one thread, and ends with its last connection.

A training sends an agent's requests and ``("taken", keys)``. The order in "open" is ``(facts, kept_bytes, rank)``.
The producer sends reports: ``("report", pool, results, events, failed, processes, None)``. A result is ``(data of a
`SharedBatch`, is_first)``. ``processes`` are the producer's process, its workers, and the count of connected ranks.
"""

from __future__ import annotations

import contextlib
import heapq
import marshal
import os
import pickle
import select
import socket
import weakref
from collections import deque
from dataclasses import replace
from typing import Any

from dpex.pools.local.fork_server import TemplateStarter
from dpex.pools.local.forking import ProcessHandle, readable_within
from dpex.pools.local.handles import LocalWorkerHandle
from dpex.pools.local.pool import LocalPool
from dpex.pools.share.cache import BatchCache, Key, OtherOrderError
from dpex.pools.share.meeting import Facts, difference, other_order, peer
from dpex.schedule.events import PoolEvent, WorkerGone, WorkerUp, plain
from dpex.schedule.schedule import Ticket
from dpex.system.clock import monotonic
from dpex.system.processes import pidfd
from dpex.transport.arena import Segment, SegmentSpec
from dpex.transport.codec import slots_of
from dpex.transport.frames import FrameReader, FrameWriter

FIRST_S = 30.0
"""Seconds for which a new producer waits for a connection, because the training that started it may have died."""
SLEEP_MS = 1000
"""Maximum milliseconds until the pool checks for an overdue process."""
TRY_AGAIN_MS = 10
"""Maximum milliseconds until tickets that did not fit in the workers' socket are sent again."""
MESSAGES_A_WORKER = 2
"""Messages of tickets per worker: the current and the following. Further tickets wait, lowest number first."""


class KeptDescriptor:
    """A duplicate of a descriptor, which is closed when this object is freed."""

    def __init__(self, fd: int) -> None:
        self.fd: int = os.dup(fd)
        self._end = weakref.finalize(self, os.close, self.fd)


class SharingHandle(LocalWorkerHandle):
    """A worker whose segments other processes may read."""

    def __init__(self, number: int, worker_id: int, process: ProcessHandle, sock: socket.socket, row: int) -> None:
        super().__init__(number, worker_id, process, sock, row)
        self.kept: dict[int, KeptDescriptor] = {}

    def open_segment(self, spec: SegmentSpec, fd: int) -> Segment:
        try:
            kept = KeptDescriptor(fd)
        except OSError:
            os.close(fd)
            raise
        segment = super().open_segment(spec, fd)
        self.kept = {number: one for number, one in self.kept.items() if number in self.segments}
        self.kept[spec.segment] = kept
        return segment


class SharedBatch:
    """A batch that a worker made, undecoded. ``data`` is the message to every training, and ``nbytes`` the memory of
    the batch in this process.

    The worker gets the slots back when this object is freed.
    """

    __slots__ = ("_kept", "_slots", "data", "nbytes")

    def __init__(
        self, worker: SharingHandle, key: tuple[int, int], kind: int, node: Any, rest: tuple[Any, ...]
    ) -> None:
        self._slots = slots_of(node, worker.lease) if node is not None else {}
        self._kept = {number: worker.kept[number] for number, _ in self._slots}
        places = [  # for each slot: its name in the batch, then descriptor, offset and length of its bytes
            (number, slot, self._kept[number].fd, worker.segments[number].offset(slot), base.nbytes)
            for (number, slot), base in self._slots.items()
        ]
        self.data: bytes = marshal.dumps((*key, worker.number, kind, node, rest, places))
        self.nbytes: int = len(self.data) + sum(base.nbytes for base in self._slots.values())

    @property
    def is_lent(self) -> bool:
        """True if the batch is in slots, which must stay unchanged while a training copies them."""
        return bool(self._slots)


class ProducerPool(LocalPool):
    """A local pool whose results are kept undecoded. ``made``: the results since ``made`` was last emptied."""

    handle_type: type[LocalWorkerHandle] = SharingHandle

    def __init__(self, starter: TemplateStarter) -> None:
        self.made: deque[tuple[Key, SharedBatch]] = deque()
        super().__init__(starter, shared_queue=True, first_workers=0, on_result=self._keep)

    def _keep(self, worker: LocalWorkerHandle, epoch: int, number: int, kind: int, node: Any, *rest: Any) -> None:
        assert isinstance(worker, SharingHandle)
        key = epoch, number
        self.made.append((key, SharedBatch(worker, key, kind, node, rest)))

    @property
    def takes_more(self) -> bool:
        assert self._queue is not None
        return len(self._queue.groups) < MESSAGES_A_WORKER * max(1, self.counts.wanted)

    @property
    def processes(self) -> list[tuple[int, int]]:
        """The number and pid of each worker that serves."""
        return [(number, self._workers[number].process.pid or 0) for number in self.workers()]


# -- a training --------------------------------------------------------------------------------------------------------


class Subscriber:
    """A training as the producer sees it: its connection, its unsent results, and its requests.

    ``wanted``: number of workers. ``pool``: number of the training's pool. ``rank``: the training's rank in its job."""

    def __init__(self, number: int, connection: socket.socket) -> None:
        self.number = number
        self.socket = connection
        self.reader: FrameReader = FrameReader(connection)
        self.wanted = self.epoch = self.rank = 0
        self.refused = ""
        self.pool = 0
        self._process = pidfd(peer(connection)[0])
        self._writer = FrameWriter(connection)
        self._results: list[tuple[bytes, bool]] = []
        self._events: list[tuple[Any, ...]] = []
        self._reported: tuple[Any, ...] = ()

    @property
    def is_admitted(self) -> bool:
        """True if the training reads the same data as all others."""
        return bool(self.pool) and not self.refused

    def is_alive(self) -> bool:
        """Return True if its process runs. The socket does not show this, because processes that it forked may hold the
        socket."""
        return self._process < 0 or not readable_within(self._process, 0)

    def watch(self, poller: select.poll) -> None:
        """Register the connection with ``poller`` for frames, for room to send pending frames, and for its end."""
        poller.register(self.socket, select.POLLIN | (select.POLLOUT if self._writer.pending_bytes else 0))
        if self._process >= 0:
            poller.register(self._process, select.POLLIN)

    def tell(self, event: PoolEvent) -> None:
        self._events.append(plain(event))

    def deliver(self, batch: SharedBatch, *, is_first: bool) -> None:
        self._results.append((batch.data, is_first))

    def report(self, failed: str | None, processes: tuple[Any, ...]) -> bool:
        """Send results and events, as far as the socket takes them. Return False if the training has ended.

        ``failed``: The reason why the pool cannot serve this training, or None.
        """
        if self._results or self._events or (failed, processes) != self._reported:
            self._reported = failed, processes
            self._writer.add_frame(("report", self.pool, self._results, self._events, failed, processes, None))
            self._results, self._events = [], []
        try:
            self._writer.flush()
        except OSError:
            return False
        return True

    def close(self) -> None:
        self.socket.close()
        if self._process >= 0:
            os.close(self._process)
            self._process = -1


# -- the producer ------------------------------------------------------------------------------------------------------


class Producer:
    """See the module. ``facts``: the values that must be equal in all trainings."""

    def __init__(self, listener: socket.socket, facts: Facts, pool: ProducerPool) -> None:
        self._listener = listener
        self._facts = facts
        self._pool = pool
        self._cache = BatchCache(0)
        self._subscribers: dict[int, Subscriber] = {}
        self._last = 0
        self._to_make: list[tuple[Key, list[int]]] = []
        """Messages of tickets that no worker has yet: a heap, ordered by the key of the first ticket."""
        self._at_workers: dict[Key, Any] = {}
        """The samples of each batch that is being made, by its key."""
        self._idle_since = monotonic()

    def run(self) -> None:
        """Serve until no training is connected."""
        while not self._is_over():
            self._wait()
            self._accept()
            for subscriber in list(self._subscribers.values()):
                self._hear(subscriber)
            self._hear_workers()
            self._hand_on_tickets()
            self._tell_all()
        self._pool.close(0.0)

    # -- trainings -----------------------------------------------------------------------------------------------

    def _is_over(self) -> bool:
        """If no training is connected, stop listening and return True. A training that connects then starts another
        producer."""
        if self._subscribers or (not self._last and monotonic() - self._idle_since < FIRST_S):
            return False
        self._accept()
        if self._subscribers:
            return False
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # also ends listening for forked processes that hold the socket
        self._listener.close()
        return True

    def _wait(self) -> None:
        poller = select.poll()
        poller.register(self._listener, select.POLLIN)
        for subscriber in self._subscribers.values():
            subscriber.watch(poller)
        for fd in self._pool.descriptors():
            poller.register(fd, select.POLLIN)
        is_soon = self._pool.is_unsettled or (self._to_make and self._pool.takes_more)
        poller.poll(TRY_AGAIN_MS if is_soon else SLEEP_MS)

    def _accept(self) -> None:
        with contextlib.suppress(BlockingIOError, OSError):
            while True:
                connection, _ = self._listener.accept()
                if peer(connection)[1] != os.getuid():  # reject other users before reading anything
                    connection.close()
                    continue
                self._last += 1
                self._subscribers[self._last] = Subscriber(self._last, connection)

    def _hear(self, subscriber: Subscriber) -> None:
        """Handle the frames of a training, and remove an ended training."""
        for what, *about in subscriber.reader.read():
            getattr(self, f"_do_{what}")(subscriber, *about)
        if subscriber.reader.ended or not subscriber.is_alive():
            self._leave(subscriber)

    def _leave(self, subscriber: Subscriber) -> None:
        del self._subscribers[subscriber.number]
        subscriber.close()
        self._cache.leave(subscriber.number)
        self._resize()

    def _do_open(self, subscriber: Subscriber, pool: int, order: tuple[Facts, int, int]) -> None:
        facts, kept_bytes, subscriber.rank = order
        subscriber.pool, subscriber.refused = pool, difference(self._facts, facts)
        if subscriber.is_admitted:
            self._cache.budget_bytes = max(self._cache.budget_bytes, kept_bytes)
            for worker in self._pool.workers():
                subscriber.tell(WorkerUp("", worker))

    def _do_close(self, subscriber: Subscriber, grace_s: float) -> None:
        """Do nothing: the end of the connection follows."""

    def _do_resize(self, subscriber: Subscriber, wanted: int) -> None:
        subscriber.wanted = wanted if subscriber.is_admitted else 0
        self._resize(is_asked=True)

    def _resize(self, *, is_asked: bool = False) -> None:
        wanted = max((one.wanted for one in self._subscribers.values()), default=0)
        if wanted != self._pool.counts.wanted or (is_asked and self._pool.failed is not None):
            self._pool.resize(wanted)

    def _do_epoch(self, subscriber: Subscriber, epoch: int) -> None:
        subscriber.epoch = epoch
        self._cache.enter_pass(subscriber.number, epoch)

    def _do_taken(self, subscriber: Subscriber, keys: list[Key]) -> None:
        self._cache.taken(subscriber.number, keys)

    def _do_tickets(self, subscriber: Subscriber, worker: int | None, epoch: int, queue: int, data: bytes) -> None:
        to_make = []
        try:
            asked = pickle.loads(data) if subscriber.is_admitted else ()
        except Exception as error:
            subscriber.refused = (
                f"share={self._facts['share']!r}: the process that makes the batches cannot read the indices from the "
                f"sampler of this training: {type(error).__name__}: {error}. Have all trainings yield indices of types "
                "that the first one can import, or give another name to one of them"
            )
            return
        try:
            for number, index in asked:
                answer = self._cache.ask(subscriber.number, (epoch, number), index)
                if answer.must_make:
                    to_make.append(number)
                elif answer.value is not None:
                    subscriber.deliver(answer.value, is_first=answer.is_first)
        except OtherOrderError as error:
            subscriber.refused = other_order(self._facts, epoch, number, *error.args)
        if to_make:
            heapq.heappush(self._to_make, ((epoch, to_make[0]), to_make))

    # -- workers -------------------------------------------------------------------------------------------------

    def _hear_workers(self) -> None:
        pool = self._pool
        events = pool.poll()
        made, pool.made = pool.made, deque()
        for key, batch in made:
            for number, is_first in self._cache.made(key, self._at_workers.pop(key, None), batch):
                self._subscribers[number].deliver(batch, is_first=is_first)
            if self._cache.is_wanted(key):  # other samples are wanted, held back while a worker had the key
                heapq.heappush(self._to_make, (key, [key[1]]))
        for event in events:
            if isinstance(event, WorkerGone):
                self._lose(event)
            else:
                for subscriber in self._subscribers.values():
                    subscriber.tell(event)
        events.clear()

    def _lose(self, event: WorkerGone) -> None:
        """Report the end of a worker to all trainings. They ask anew for lost batches that they wait for."""
        keys = [key for number in event.lost if (key := (event.epoch, number)) in self._at_workers]
        for key in keys:
            del self._at_workers[key]
        missed = self._cache.lost(keys)
        for subscriber in self._subscribers.values():
            epoch = subscriber.epoch
            lost = tuple(number for of, number in missed.get(subscriber.number, []) if of == epoch)
            blamed = event.working_on if event.working_on in lost else None
            subscriber.tell(replace(event, epoch=epoch, lost=lost, working_on=blamed))

    def _hand_on_tickets(self) -> None:
        """Send workers enough tickets to keep them busy, the lowest batch numbers first."""
        while self._to_make and self._pool.takes_more:
            (epoch, _), numbers = self._to_make[0]
            keys = [(epoch, number) for number in numbers if self._cache.is_wanted((epoch, number))]
            tickets = [Ticket(key[1], self._cache.index(key), 0) for key in keys if key not in self._at_workers]
            if tickets and not self._pool.send(tickets, epoch):
                return
            self._at_workers.update(((epoch, ticket.number), ticket.index) for ticket in tickets)
            heapq.heappop(self._to_make)

    def _tell_all(self) -> None:
        ranks = len({subscriber.rank for subscriber in self._subscribers.values() if subscriber.is_admitted})
        failed, processes = self._pool.failed, (os.getpid(), self._pool.processes, ranks)
        for subscriber in list(self._subscribers.values()):
            if subscriber.pool and not subscriber.report(subscriber.refused or failed, processes):
                self._leave(subscriber)
