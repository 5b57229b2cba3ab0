"""A worker pool without processes: it behaves as the real ones do, and nothing happens before the test says so.

What holds of real pools holds here: a message to a worker is a queue's next tickets in order; a worker makes one ticket
after the other; messages to one worker keep their order; a pool that is full takes a message not at all; who is asked
to leave first finishes what it holds; who is killed loses what it held, and its random state; results of earlier epochs
are not told. Under ``shared`` any worker takes the next message; otherwise messages name their worker, which must be
the logical worker of their queue.

A logical worker's random state is the number of tickets that it has made since its start. Every batch tells it
(`Work`), so that a test sees whether it was made with the right one.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from dpex.measure.batch_times import NO_TIMES, BatchTimes
from dpex.measure.batch_times import PoolTimes as PoolTimes
from dpex.measure.settings import LOCAL
from dpex.pools.base import PoolCounts as PoolCounts
from dpex.schedule.events import PoolEvent, Snapshot, TicketMade, WorkerGone, WorkerUp
from dpex.schedule.schedule import Ticket


class Work(NamedTuple):
    """A batch as a `FakePool` makes it: what was asked for, by whom, and ``state``, the random state before it.

    Without logical workers the state is None, as it is a function of epoch and number alone.
    """

    epoch: int
    number: int
    index: Any
    logical: int
    worker: int
    state: int | None


class _Message(NamedTuple):
    """What a worker is sent; ``kind`` is "tickets", "adopt", "ask_state" or "leave"."""

    kind: str
    epoch: int = 0
    logical: int = 0
    tickets: tuple[Ticket, ...] = ()
    state: Any = None


_LEAVE = _Message("leave")


@dataclass(kw_only=True)
class _Worker:
    """One worker; ``states``: random state of the logical workers that it is."""

    number: int
    is_up: bool = False
    is_leaving: bool = False
    is_dead: bool = False
    inbox: deque[_Message] = field(default_factory=deque)
    states: dict[int, int] = field(default_factory=dict)
    latest: dict[int, tuple[int, int]] = field(default_factory=dict)
    group: _Message | None = None
    made: int = 0

    def held(self, epoch: int) -> tuple[int, ...]:
        """Numbers of the tickets of ``epoch`` that it has not made."""
        working = () if self.group is None else self.group.tickets[self.made :]
        messages = [(self.group.epoch if self.group else 0, working), *((m.epoch, m.tickets) for m in self.inbox)]
        return tuple(ticket.number for of, tickets in messages if of == epoch for ticket in tickets)


class FakePool:
    """See the module; implements `dpex.pools.base.WorkerPool`.

    Args:
        name: "local" or "remote".
        shared: any worker makes any ticket (``seeding="batch"``); else tickets belong to logical workers.
        make: makes a batch, or raises StopIteration where a stream has no more; None: the batch is the `Work`.
        room: messages that the pool, or under logical workers each of its workers, holds at most.
        starts_slowly: workers take tickets once they are up, not from when they were asked for.

    ``failed``: set it to a sentence, and no worker can be had.
    """

    def __init__(
        self,
        name: str = LOCAL,
        *,
        shared: bool = True,
        make: Callable[[Work], Any] | None = None,
        room: int = 1_000_000,
        starts_slowly: bool = False,
    ) -> None:
        self.name = name
        self.counts = PoolCounts()
        self.times = PoolTimes()
        self.failed: str | None = None
        self.crashes = 0
        self.room = room
        self.starts_slowly = starts_slowly
        self._shared = shared
        self._make = make or (lambda work: work)
        self._queue: deque[_Message] = deque()
        self._workers: dict[int, _Worker] = {}
        self._next_worker = 0
        self._epoch = 0
        self._events: deque[PoolEvent] = deque()

    # -- the protocol of a worker pool ---------------------------------------------------------------------------

    def resize(self, wanted: int) -> None:
        """See `WorkerPool.resize`."""
        self.counts.wanted = wanted
        staying = [worker for worker in self._workers.values() if not worker.is_leaving]
        for _ in range(wanted - len(staying) if self.failed is None else 0):
            self._workers[self._next_worker] = _Worker(number=self._next_worker)
            self._next_worker += 1
        for worker in staying[::-1][: max(0, len(staying) - wanted)]:
            if self._shared or not worker.is_up:
                self._leave(worker)
        self._count()

    def _leave(self, worker: _Worker) -> None:
        if not worker.is_leaving:
            worker.is_leaving = True
            worker.inbox.append(_LEAVE)

    def _count(self) -> None:
        self.counts.requested = len(self._workers)
        self.counts.running = sum(worker.is_up for worker in self._workers.values())

    def workers(self) -> list[int]:
        """See `WorkerPool.workers`."""
        slow = self.starts_slowly
        return [w.number for w in self._workers.values() if not w.is_leaving and (w.is_up or not slow)]

    def at_work(self) -> int:
        """See `WorkerPool.at_work`."""
        return sum(worker.group is not None or bool(worker.inbox) for worker in self._workers.values())

    def send(self, tickets: list[Ticket], epoch: int, worker: int | None = None) -> bool:
        """See `WorkerPool.send`.

        Raises:
            AssertionError: the message is one that no pool may be sent.
        """
        assert self._shared == (worker is None), (
            "messages name a worker where there are logical workers, and only there"
        )
        assert len({ticket.queue for ticket in tickets}) == 1, "a message holds tickets of one queue"
        box = self._queue if worker is None else self._workers[worker].inbox
        if sum(message.kind == "tickets" for message in box) >= self.room:
            return False
        box.append(_Message("tickets", epoch, tickets[0].queue, tuple(tickets)))
        return True

    def adopt(self, worker: int, logical: int, state: Any) -> None:
        """See `WorkerPool.adopt`."""
        self._workers[worker].inbox.append(_Message("adopt", logical=logical, state=state))

    def ask_state(self, worker: int, logical: int) -> None:
        """See `WorkerPool.ask_state`; the state is told once."""
        self._workers[worker].inbox.append(_Message("ask_state", logical=logical))

    def new_epoch(self, epoch: int) -> None:
        """See `WorkerPool.new_epoch`."""
        self._epoch = epoch

    def descriptors(self) -> list[int]:
        """See `WorkerPool.descriptors`: there are none."""
        return []

    def poll(self) -> deque[PoolEvent]:
        """See `WorkerPool.poll`."""
        for worker in [w for w in self._workers.values() if w.is_dead]:
            self._remove(worker)
        return self._events

    def close(self, grace_s: float = 5.0) -> None:
        """See `WorkerPool.close`."""
        self._workers.clear()
        self._queue.clear()
        self._events.clear()
        self.counts = PoolCounts()

    # -- what a test has happen ----------------------------------------------------------------------------------

    def start(self, count: int | None = None) -> None:
        """Let so many of the workers that were asked for come up; None: all."""
        for worker in [w for w in self._workers.values() if not (w.is_up or w.is_dead)][:count]:
            worker.is_up = True
            self._events.append(WorkerUp(self.name, worker.number))
        self._count()

    def work(self, worker: int | None = None, tickets: int | None = None) -> None:
        """Let one worker, or each in turn, make so many tickets; None: all that there are."""
        left = tickets
        while left is None or left > 0:
            workers = [w for w in self._workers.values() if worker in (None, w.number)]
            if not sum(map(self._step, workers)):
                return
            left = None if left is None else left - 1

    def kill(self, worker: int) -> None:
        """End a worker unexpectedly. The pool learns of it in `poll`; what the worker holds by then is lost."""
        self._workers[worker].is_dead = True

    def _remove(self, worker: _Worker) -> None:
        del self._workers[worker.number]
        group = worker.group
        epoch = group.epoch if group is not None and self._shared else self._epoch
        lost = worker.held(epoch)
        working_on = lost[0] if group is not None and group.epoch == epoch else None
        self.crashes += 1
        self._count()
        why = f"worker {worker.number} of the {self.name} pool was killed"
        self._events.append(WorkerGone(self.name, worker.number, epoch, lost, working_on, False, why, worker.number))
        self._take_stock()
        self.resize(self.counts.wanted)

    def snapshot(self, logical: int) -> bool:
        """Tell the random state of a logical worker, as workers do now and then; False: it is nowhere."""
        for worker in self._workers.values():
            if logical in worker.states and logical in worker.latest:
                self._events.append(Snapshot(logical, *worker.latest[logical], worker.states[logical]))
                return True
        return False

    @property
    def is_idle(self) -> bool:
        """Whether no worker has anything to do."""
        return not self._queue and all(not w.inbox and w.group is None for w in self._workers.values())

    # -- inside workers ------------------------------------------------------------------------------------------

    def _step(self, worker: _Worker) -> bool:
        """Let a worker make a ticket, or follow its next messages if it has none; whether it did anything."""
        if worker.is_dead or not worker.is_up or worker.number not in self._workers:
            return False
        took = False
        while worker.group is None and (message := self._next_message(worker)) is not None:
            took = True
            self._follow(worker, message)
        if worker.group is None:
            return took
        self._make_next(worker, worker.group)
        return True

    def _next_message(self, worker: _Worker) -> _Message | None:
        if worker.number not in self._workers:
            return None
        if self._shared and not worker.is_leaving:
            return self._queue.popleft() if self._queue else None
        return worker.inbox.popleft() if worker.inbox else None

    def _follow(self, worker: _Worker, message: _Message) -> None:
        if message.kind == "adopt":
            worker.states[message.logical] = message.state or 0
        elif message.kind == "ask_state":
            self.snapshot(message.logical)
        elif message.kind == "leave":
            self._left(worker)
        elif not self._shared or message.epoch >= self._epoch:
            worker.group, worker.made = message, 0

    def _left(self, worker: _Worker) -> None:
        del self._workers[worker.number]
        self._count()
        self._events.append(WorkerGone(self.name, worker.number, self._epoch, (), None, True, "it left", worker.number))
        if not self._workers:
            self._take_stock()
        if len(self._workers) < self.counts.wanted:  # one more left than should have, as another had just died
            self.resize(self.counts.wanted)

    def _take_stock(self) -> None:
        """Lose the queued tickets, and those that a living worker has just taken and makes as well."""
        if not self._shared:
            return
        unseen = [w.group for w in self._workers.values() if w.group is not None and not (w.made or w.is_dead)]
        messages = [message for message in (*unseen, *self._queue) if message.kind == "tickets"]
        for epoch in sorted({message.epoch for message in messages}):
            lost = tuple(t.number for message in messages if message.epoch == epoch for t in message.tickets)
            self._events.append(WorkerGone(self.name, -1, epoch, lost, None, True, "a worker died as it took them"))
        self._queue.clear()

    def _make_next(self, worker: _Worker, group: _Message) -> None:
        ticket = group.tickets[worker.made]
        worker.made += 1
        if worker.made == len(group.tickets):
            worker.group = None
        state = None if self._shared else worker.states[group.logical]
        if state is not None:
            worker.states[group.logical] = state + 1
            worker.latest[group.logical] = (group.epoch, ticket.number)
        work = Work(group.epoch, ticket.number, ticket.index, group.logical, worker.number, state)
        self._tell(work)

    def _tell(self, work: Work) -> None:
        self.times.count(NO_TIMES)
        self.crashes = 0
        if work.epoch < self._epoch:
            return
        batch, is_end = None, False
        try:
            batch = self._make(work)
        except StopIteration:
            is_end = True
        self._events.append(
            TicketMade(work.epoch, work.number, work.worker, lambda: batch, is_end, BatchTimes(samples=1, nbytes=1))
        )
