"""The producer: a process that makes each batch once, for all trainings that are connected.

It is a `LocalPool` with connections in place of an engine. Each batch is made once (`cache`), and goes to all trainings
that wait for it, or ask for it while it is kept. Batches with the lowest numbers are made first, so that a training
that is behind catches up while the others have batches left. The number of workers is the largest that any training
wants.

The producer has one thread, and ends with its last connection.

Messages of a training, pickled: ``("hello", facts, kept_bytes)``, ``("resize", wanted)``, ``("tickets", epoch,
[(number, index), ...])``, ``("taken", [(epoch, number), ...])``, ``("epoch", number)``. Its answers, marshalled:
``("refused", why)``, ``("status", fields of a `PoolReport`)``, ``("segments", ...)`` with descriptors, ``("forget",
numbers)``, ``("made", [(data of a `MadeBatch`, is_first), ...])``, ``("gone", worker, lost, working_on, expected, why,
pid)``, ``("notice", text, is_warning)``.
"""

from __future__ import annotations

import contextlib
import heapq
import select
import socket
from collections import deque
from typing import Any, NamedTuple

from dpex.measure.readable import size
from dpex.pools.local.fork_server import TemplateStarter
from dpex.pools.local.handles import LocalWorkerHandle
from dpex.pools.local.pool import LocalPool
from dpex.pools.local.worker_process import TICKET_BYTES, read_ticket_message, receive
from dpex.pools.share.cache import BatchCache, Key, OtherOrderError
from dpex.pools.share.facts import Facts, difference, other_order
from dpex.pools.share.memory import MadeBatch, SharingHandle
from dpex.pools.share.place import MeetingPlace
from dpex.pools.share.subscriber import Subscriber
from dpex.schedule.events import Notice, WorkerGone
from dpex.schedule.schedule import Ticket
from dpex.system.clock import monotonic

FIRST_S = 30.0
"""Seconds for which it waits for the training that started it, which may die before it connects."""
SLEEP_MS = 1000
"""Milliseconds until the pool looks, at the latest, whether a process that it started is overdue."""
TRY_AGAIN_MS = 10
"""Milliseconds until tickets that do not fit in the workers' socket are tried again, at the latest."""
MESSAGES_A_WORKER = 2
"""Messages of tickets per worker: a current one and a following one. The others wait here, lowest number first."""


class PoolReport(NamedTuple):
    """The status of the producer's pool. ``pids``: of each worker that serves, by number."""

    running: int
    requested: int
    most: int | None
    why_most: str
    failed: str | None
    crashes: int
    pids: tuple[tuple[int, int], ...]


class ProducerPool(LocalPool):
    """A local pool whose results are kept undecoded. ``made``: those since they were last taken."""

    handle_type = SharingHandle

    def __init__(self, starter: TemplateStarter) -> None:
        self.made: deque[tuple[Key, MadeBatch]] = deque()
        super().__init__(starter, shared_queue=True, first_workers=0)

    def _result(self, worker: LocalWorkerHandle, epoch: int, number: int, kind: int, node: Any, *rest: Any) -> None:
        assert isinstance(worker, SharingHandle)
        self._taken_in += 1
        key = epoch, number
        self.made.append((key, MadeBatch(worker, key, kind, node, rest)))

    @property
    def takes_more(self) -> bool:
        """True if workers should have another message."""
        assert self._queue is not None
        return len(self._queue.groups) < MESSAGES_A_WORKER * max(1, self.counts.wanted)

    def report(self) -> PoolReport:
        """See `PoolReport`."""
        counts = self.counts
        pids = tuple((number, self._workers[number].process.pid or 0) for number in self.workers())
        return PoolReport(
            counts.running, counts.requested, counts.most, counts.why_most, self.failed, self.crashes, pids
        )


class Producer:
    """See the module. ``facts``: what all trainings must have alike. The ``listener`` listens at ``place``."""

    def __init__(self, listener: socket.socket, place: MeetingPlace, facts: Facts, pool: ProducerPool) -> None:
        self._listener = listener
        self._place = place
        self._facts = facts
        self._pool = pool
        self._cache = BatchCache(0)
        self._subscribers: dict[int, Subscriber] = {}
        self._last = 0
        self._to_make: list[tuple[Key, list[int]]] = []
        """Messages of tickets that no worker has yet, by the first one's key: a heap."""
        self._at_workers: set[Key] = set()
        self._buffer = memoryview(bytearray(TICKET_BYTES))
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
        """Return True, and stop listening, if no training is connected. One that connects just now is served."""
        if self._subscribers or (not self._last and monotonic() - self._idle_since < FIRST_S):
            return False
        with self._place.locked():
            self._accept()
            if not self._subscribers:
                self._place.remove()
                self._listener.close()
        return not self._subscribers

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
                self._last += 1
                self._subscribers[self._last] = Subscriber(self._last, connection)

    def _hear(self, subscriber: Subscriber) -> None:
        """Take in what a training says; one that has ended leaves nothing behind."""
        is_alive = subscriber.is_alive()
        try:
            while is_alive and (received := receive(subscriber.socket, self._buffer, socket.MSG_DONTWAIT)):
                message = read_ticket_message(*received)
                getattr(self, f"_do_{message[0]}")(subscriber, *message[1:])
        except BlockingIOError:
            return
        except OSError:
            pass
        self._leave(subscriber)

    def _leave(self, subscriber: Subscriber) -> None:
        del self._subscribers[subscriber.number]
        subscriber.close()
        self._cache.leave(subscriber.number)
        self._resize()

    def _do_hello(self, subscriber: Subscriber, facts: Facts, kept_bytes: int) -> None:
        why_not = difference(self._facts, facts)
        if why_not:
            subscriber.tell("refused", why_not)
            return
        self._cache.budget_bytes = max(self._cache.budget_bytes, kept_bytes)
        subscriber.is_admitted = True

    def _do_resize(self, subscriber: Subscriber, wanted: int) -> None:
        subscriber.wanted = wanted if subscriber.is_admitted else 0
        self._resize(is_asked=True)

    def _resize(self, *, is_asked: bool = False) -> None:
        wanted = max((one.wanted for one in self._subscribers.values()), default=0)
        if wanted != self._pool.counts.wanted or (is_asked and self._pool.failed is not None):
            self._pool.resize(wanted)

    def _do_epoch(self, subscriber: Subscriber, epoch: int) -> None:
        subscriber.is_behind = False
        self._cache.enter_pass(subscriber.number, epoch)

    def _do_taken(self, subscriber: Subscriber, keys: list[Key]) -> None:
        self._cache.taken(subscriber.number, keys)

    def _do_tickets(self, subscriber: Subscriber, epoch: int, tickets: list[tuple[int, Any]]) -> None:
        if not subscriber.is_admitted:
            return
        to_make = []
        try:
            for number, index in tickets:
                answer = self._cache.ask(subscriber.number, (epoch, number), index)
                if answer.must_make:
                    to_make.append(number)
                    self._tell_how_far_behind(subscriber, answer.behind)
                elif answer.value is not None:
                    subscriber.deliver(answer.value, is_first=answer.is_first)
        except OtherOrderError as error:
            subscriber.tell("refused", other_order(self._facts, epoch, number, error.known, error.other))
        if to_make:
            heapq.heappush(self._to_make, ((epoch, to_make[0]), to_make))

    def _tell_how_far_behind(self, subscriber: Subscriber, behind: int) -> None:
        if not behind or subscriber.is_behind:
            return
        subscriber.is_behind = True
        kept = size(self._cache.budget_bytes)
        subscriber.tell(
            "notice",
            f"share={self._facts['share']!r}: this training is {behind} batches behind the first, and what it wants "
            f"now is not kept any more (the latest {kept} of batches are). Its batches are made again for it, until "
            "it has caught up. A larger share_bytes keeps more",
            True,
        )

    # -- workers -------------------------------------------------------------------------------------------------

    def _hear_workers(self) -> None:
        pool = self._pool
        events = pool.poll()
        made, pool.made = pool.made, deque()
        for key, batch in made:
            self._at_workers.discard(key)
            for number, is_first in self._cache.made(key, batch):
                self._subscribers[number].deliver(batch, is_first=is_first)
        for event in events:
            if isinstance(event, WorkerGone):
                self._lose(event)
            elif isinstance(event, Notice):
                for subscriber in self._subscribers.values():
                    subscriber.tell("notice", event.text, event.warning)
        events.clear()

    def _lose(self, event: WorkerGone) -> None:
        """Report the end of a worker to the trainings that wait for its batches. They ask anew.

        The pool reports numbers without their pass: with trainings in two passes at once a batch may be made twice.
        """
        numbers = set(event.lost)
        keys = [key for key in self._at_workers if key[1] in numbers]
        self._at_workers.difference_update(keys)
        missed = self._cache.lost(keys)
        for subscriber in self._subscribers.values():
            lost = missed.get(subscriber.number, [])
            subscriber.tell("gone", event.worker, lost, event.working_on, event.expected, event.why, event.pid)

    def _hand_on_tickets(self) -> None:
        """Give workers as much as they need to be busy, the lowest numbers first."""
        while self._to_make and self._pool.takes_more:
            (epoch, _), numbers = self._to_make[0]
            keys = [(epoch, number) for number in numbers if self._cache.is_wanted((epoch, number))]
            tickets = [Ticket(key[1], self._cache.index(key), 0) for key in keys if key not in self._at_workers]
            if tickets and not self._pool.send(tickets, epoch):
                return
            self._at_workers.update((epoch, ticket.number) for ticket in tickets)
            heapq.heappop(self._to_make)

    def _tell_all(self) -> None:
        report = self._pool.report()
        gone, SharingHandle.gone[:] = list(SharingHandle.gone), []
        for subscriber in list(self._subscribers.values()):
            if subscriber.is_admitted:
                subscriber.report(tuple(report))
                subscriber.forget(gone)
            if not subscriber.flush():
                self._leave(subscriber)
