"""Messages to workers: the pool and the worker that a ticket is sent to, and the size of a message. PURE.

Tickets that any worker may make go to the pool with the fewest tickets under way for each worker. Those of a logical
worker go to the worker that it is placed on. A ticket that was sent counts to the ``load`` of its pool until
`Dispatch.arrived` says that it came back, made or lost.

A message counts as sent once its `Send` is among the instructions. When a pool refuses it, `Dispatch.refused` takes it
back, and with it all later messages to the same receiver, so that tickets keep their order. Such a receiver is sent a
single message next time, so a full one costs one attempt instead of one for each waiting ticket. A pool is sent as many
tickets as it had when it refused, and one message more. If it takes that, the number grows. A pool that refused gets
nothing else until a ticket comes back from it, so that other pools make meanwhile what it did not take.
"""

from __future__ import annotations

import math
from collections.abc import Container

from dpex.schedule.instructions import Instruction, Send
from dpex.schedule.logical_workers import LogicalWorkers
from dpex.schedule.names import REMOTE
from dpex.schedule.placement import Placement
from dpex.schedule.prefetch import PrefetchRules
from dpex.schedule.schedule import SHARED, Schedule, Ticket


class Dispatch:
    """Messages to workers.

    Args:
        placement: The pools, and what they are asked for.
        logicals: Where logical workers are placed.
        rules: Say how many tickets a message holds.
        are_bound: Tickets belong to logical workers.

    Attributes:
        load: Tickets under way, by pool. Any thread may read it.
        incomplete: Queues whose waiting tickets do not fill a message, as far as is known.
    """

    def __init__(
        self, placement: Placement, logicals: LogicalWorkers, rules: PrefetchRules, *, are_bound: bool
    ) -> None:
        self._placement = placement
        self._logicals = logicals
        self._rules = rules
        self._are_bound = are_bound
        self._carrier: dict[int, str] = {}
        """The pool that was sent a ticket last, by its number."""
        self._sent_at: dict[int, float] = {}
        """When another machine was sent a ticket, seconds, by its number."""
        self._now = 0.0
        self._full: set[tuple[str, int]] = set()
        """Workers, with their pools, that refused the latest message."""
        self._room: dict[str, tuple[int, int]] = {}
        """By pool that refused: how many tickets it may have, and by how many this grows with the next attempt."""
        self._paused: set[str] = set()
        """Pools that refused what any worker may make, and from which no ticket has come back since."""
        self.incomplete: set[int] = set()
        self.load: dict[str, int] = {}

    def new_epoch(self) -> None:
        """Forget what is under way."""
        self._carrier.clear()
        self._sent_at.clear()
        self._full.clear()
        self._room.clear()
        self._paused.clear()
        self.incomplete.clear()
        self.load = dict.fromkeys(self._placement.pools, 0)

    def workers(self) -> int:
        """Return the number of workers that take tickets, or 1 if there is none."""
        return max(1, self._placement.serving())

    # -- sending -------------------------------------------------------------------------------------------------

    def issue(self, schedule: Schedule, epoch: int, now: float, *, starving: bool) -> None:
        """Send what waits, as far as workers take it; if ``starving``, incomplete messages as well."""
        self._now = now
        self.incomplete.clear()
        if not self._are_bound:
            if self._paused:
                self._paused = {pool for pool in self._paused if self.load[pool]}  # from the others a ticket comes back
            self._issue_shared(schedule, epoch, starving)
            return
        self._logicals.place(now)
        for queue in sorted(self._placement.dirty):
            if self._issue_logical(schedule, epoch, queue, starving):
                self._placement.dirty.discard(queue)

    def _issue_shared(self, schedule: Schedule, epoch: int, starving: bool) -> None:
        rules, prefetch = self._rules, schedule.prefetch
        closed: set[str] = set()
        while waiting := schedule.pending():
            pool = self._least_loaded(prefetch, closed)
            if pool is None:
                return
            if waiting < rules.group and not starving and schedule.ready:
                self.incomplete.add(SHARED)
                return
            size = rules.message_size(prefetch, len(self._placement.pools[pool].workers), pool == REMOTE)
            self._send(schedule, min(waiting, size), SHARED, epoch, pool, None)
            if self._is_beyond_room(pool):
                closed.add(pool)
        self._placement.dirty.clear()

    def _is_beyond_room(self, pool: str) -> bool:
        """Return True if the pool has more now than when it refused. If it takes this, it may have more."""
        load, (room, more) = self.load[pool], self._room.get(pool, (math.inf, 1))
        if load > room:
            self._room[pool] = load + more, 2 * more
        return load > room

    def _issue_logical(self, schedule: Schedule, epoch: int, queue: int, starving: bool) -> bool:
        """Send what waits for one logical worker. Return True if nothing waits any longer."""
        place = self._logicals.destination(queue)
        if place is None:
            return False
        group, (pool, worker) = self._rules.group, place
        while waiting := schedule.pending(queue):
            if waiting < group and not starving and schedule.ready:
                self.incomplete.add(queue)
                return False
            if not self._send(schedule, min(waiting, group), queue, epoch, pool, worker):
                return not schedule.pending(queue)
        return True

    def _send(self, schedule: Schedule, count: int, queue: int, epoch: int, pool: str, worker: int | None) -> bool:
        """Send ``count`` waiting tickets as one message. Return False if the receiver should not be sent another now.

        A signal handler may raise anywhere in here: what was sent by then is under way, and the rest waits.
        """
        tickets: list[Ticket] = []
        sends: list[Instruction] = []
        try:
            schedule.take(count, queue, tickets)
            if worker is not None:
                self._logicals.sent(queue)
            sends.append(Send(pool, worker, queue, epoch, tickets))
        finally:
            if sends:
                self._placement.instructions += sends  # before any call, in which this could be broken off
                self._on_its_way(tickets, pool)
            else:
                schedule.give_back(tickets)
        if worker is None or (pool, worker) not in self._full:
            return True
        self._full.discard((pool, worker))
        return False

    def _least_loaded(self, prefetch: int, closed: Container[str]) -> str | None:
        best, best_load = None, 0.0
        for name, status in self._placement.pools.items():
            workers = len(status.workers)
            if not workers or name in self._paused or name in closed:
                continue
            load = self.load[name] / workers
            if best is None or load < best_load:
                best, best_load = name, load
        if len(self._placement.pools) > 1 and best_load >= max(2 * self._rules.group, prefetch / self.workers()):
            return None
        return best

    def _on_its_way(self, tickets: list[Ticket], pool: str) -> None:
        carrier, load = self._carrier, self.load
        for ticket in tickets:
            carrier[ticket.number] = pool
            load[pool] += 1
        if pool == REMOTE:
            self._sent_at.update({ticket.number: self._now for ticket in tickets})

    def arrived(self, number: int) -> None:
        """Take note of a ticket that came back, made or lost."""
        carrier = self._carrier.get(number)
        if carrier is not None:  # without a call: see `dpex.system.interrupts`
            del self._carrier[number]
            self.load[carrier] -= 1
            self._paused.discard(carrier)
            if carrier == REMOTE:
                self._sent_at.pop(number, None)

    # -- made again ----------------------------------------------------------------------------------------------

    def sent_at(self, number: int) -> float | None:
        """Return when another machine was sent that ticket, in seconds; None if no other machine was sent it last."""
        return self._sent_at.get(number)

    def make_elsewhere(self, ticket: Ticket, epoch: int, pool: str) -> None:
        """Have any worker of ``pool`` make a ticket that another pool holds, and may still answer.

        The ticket counts to the load of the pool that was sent it last.
        """
        paused = set(self._paused)
        self._placement.instructions += (Send(pool, None, ticket.queue, epoch, [ticket]),)
        self.arrived(ticket.number)
        self._paused |= paused  # no ticket came back from there
        self._on_its_way([ticket], pool)

    # -- refusals ------------------------------------------------------------------------------------------------

    def issue_elsewhere(self, schedule: Schedule, epoch: int) -> None:
        """Send what was refused to pools that did not refuse."""
        if self._paused:
            self._issue_shared(schedule, epoch, starving=True)

    def resume(self, pool: str) -> None:
        """A pool's status has changed: offer it again what it refused."""
        self._paused.discard(pool)
        self._room.pop(pool, None)

    def refused(self, schedule: Schedule, send: Send) -> None:
        """Take back a message, and those after it to the same receiver. A call that was interrupted may be repeated."""
        pool, worker = send.pool, send.worker
        kept: list[Instruction] = []
        back: list[Send] = []
        for message in self._placement.instructions:
            if isinstance(message, Send) and message.pool == pool and message.worker == worker:
                back.append(message)
            else:
                kept.append(message)
        again: dict[int, list[Ticket]] = {}
        for message in back:
            self._placement.dirty.add(message.queue)
            if message.again:
                again.setdefault(message.queue, []).extend(message.tickets)
        for message in reversed(back):  # so that each ticket waits before those that came back before it
            if not message.again:
                self._take_back(schedule, message)
        if worker is None:
            self._room[pool] = self.load[pool], 1
        else:
            self._full.add((pool, worker))
        for queue, tickets in again.items():
            self._logicals.replay_refused(queue, tickets)
        self._placement.instructions[:] = kept
        if worker is None and len(self._placement.pools) > 1:
            self._paused.add(pool)

    def _take_back(self, schedule: Schedule, message: Send) -> None:
        schedule.give_back(message.tickets)
        for ticket in message.tickets:
            self.arrived(ticket.number)
        if message.worker is not None:
            self._logicals.not_sent(message.queue)
