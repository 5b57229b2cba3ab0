"""Which pool and worker a ticket is sent to, in messages of which size. PURE.

Tickets that any worker may make go to the pool with the least on its way by worker; those of a logical worker to where
it lives. A ticket that was sent counts to its pool's ``load`` until `arrived` says that it came back, made or lost.

A message counts as sent once its `Send` is among the instructions. When a pool refuses it, `refused` takes it back, and
with it all later messages to the same receiver, so that tickets keep their order. The next time such a receiver gets
one message only: a full one costs one attempt, not one for each ticket that waits. A pool is sent as many tickets as it
had when it refused, and one message more, as it may take more by now; if it does, more and more. A pool that refused is
left out until something comes back from it, so that others make meanwhile what it would not take.
"""

from __future__ import annotations

import math
from collections.abc import Container, Mapping

from dpex.core.events import PoolStatus
from dpex.core.instructions import Instruction, Send
from dpex.core.logical_workers import LogicalWorkers
from dpex.core.names import REMOTE
from dpex.core.prefetch import PrefetchRules
from dpex.core.schedule import SHARED, Schedule, Ticket


class Dispatch:
    """Messages to workers.

    Args:
        pools: status of each pool.
        logicals: where logical workers are placed.
        rules: how many tickets a message holds.
        dirty: queues with something to send.
        out: where instructions go.
        are_bound: tickets belong to logical workers.

    ``load``: tickets on their way, by pool; may be read from any thread.
    """

    def __init__(
        self,
        pools: Mapping[str, PoolStatus],
        logicals: LogicalWorkers,
        rules: PrefetchRules,
        dirty: set[int],
        out: list[Instruction],
        *,
        are_bound: bool,
    ) -> None:
        self._pools = pools
        self._logicals = logicals
        self._rules = rules
        self._dirty = dirty
        self._out = out
        self._are_bound = are_bound
        self._carrier: dict[int, str] = {}
        self._sent_at: dict[int, float] = {}
        """When other machines were given what they hold."""
        self._now = 0.0
        self._full: set[tuple[str, int]] = set()
        """Workers, with their pools, that took no more when they were last sent something."""
        self._room: dict[str, tuple[int, int]] = {}
        """Of pools that took no more: how many tickets they may have, and by how many more this rises with the next
        attempt."""
        self._paused: set[str] = set()
        """Pools that refused what any worker may make, and from which nothing has come back since."""
        self.incomplete: set[int] = set()
        """Queues of which something waits for the rest of its message, for all that is known."""
        self.load: dict[str, int] = {}

    def new_epoch(self) -> None:
        """Nothing is on its way any more."""
        self._carrier.clear()
        self._sent_at.clear()
        self._full.clear()
        self._room.clear()
        self._paused.clear()
        self.incomplete.clear()
        self.load = dict.fromkeys(self._pools, 0)

    def workers(self) -> int:
        """Workers that take tickets; 1 where there is none."""
        return max(1, sum(len(status.workers) for status in self._pools.values()))

    # -- sending -------------------------------------------------------------------------------------------------

    def issue(self, schedule: Schedule, epoch: int, now: float, *, starving: bool) -> None:
        """Send what waits, as far as there is somebody to take it; ``starving``: incomplete messages, too."""
        self._now = now
        self.incomplete.clear()
        if not self._are_bound:
            if self._paused:
                self._paused = {pool for pool in self._paused if self.load[pool]}  # from others something comes back
            self._issue_shared(schedule, epoch, starving)
            return
        self._logicals.place(now)
        for queue in sorted(self._dirty):
            if self._issue_logical(schedule, epoch, queue, starving):
                self._dirty.discard(queue)

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
            size = rules.message_size(prefetch, len(self._pools[pool].workers), pool == REMOTE)
            self._send(schedule, min(waiting, size), SHARED, epoch, pool, None)
            if self._is_beyond_room(pool):
                closed.add(pool)
        self._dirty.clear()

    def _is_beyond_room(self, pool: str) -> bool:
        """Whether the pool has more now than when it took no more; if it takes this, it may have some more."""
        load, (room, more) = self.load[pool], self._room.get(pool, (math.inf, 1))
        if load > room:
            self._room[pool] = load + more, 2 * more
        return load > room

    def _issue_logical(self, schedule: Schedule, epoch: int, queue: int, starving: bool) -> bool:
        """Send what waits for one logical worker; True if nothing waits any longer."""
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
        """Send so many waiting tickets as one message; False if the same receiver should not be sent another now.

        An exception of a signal handler may come anywhere in here: what was sent then is on its way, the rest waits.
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
                self._out += sends  # before any call, in which this could be broken off
                self._on_its_way(tickets, pool)
            else:
                schedule.give_back(tickets)
        if worker is None or (pool, worker) not in self._full:
            return True
        self._full.discard((pool, worker))
        return False

    def _least_loaded(self, prefetch: int, closed: Container[str]) -> str | None:
        best, best_load = None, 0.0
        for name, status in self._pools.items():
            workers = len(status.workers)
            if not workers or name in self._paused or name in closed:
                continue
            load = self.load[name] / workers
            if best is None or load < best_load:
                best, best_load = name, load
        if len(self._pools) > 1 and best_load >= max(2 * self._rules.group, prefetch / self.workers()):
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
        """A ticket came back, made or lost."""
        carrier = self._carrier.get(number)
        if carrier is not None:  # without a call: see `dpex.system.interrupts`
            del self._carrier[number]
            self.load[carrier] -= 1
            self._paused.discard(carrier)
            if carrier == REMOTE:
                self._sent_at.pop(number, None)

    # -- made again ----------------------------------------------------------------------------------------------

    def sent_at(self, number: int) -> float | None:
        """When another machine was given that ticket; None where none has it, or a worker here was given it since."""
        return self._sent_at.get(number)

    def make_elsewhere(self, ticket: Ticket, epoch: int, pool: str) -> None:
        """Have any worker of that pool make a ticket that another pool holds, and may still answer.

        It counts to the load of the pool that was given it last.
        """
        paused = set(self._paused)
        self._out += (Send(pool, None, ticket.queue, epoch, [ticket]),)
        self.arrived(ticket.number)
        self._paused |= paused  # nothing came back from there
        self._on_its_way([ticket], pool)

    # -- refusals ------------------------------------------------------------------------------------------------

    def issue_elsewhere(self, schedule: Schedule, epoch: int) -> None:
        """Send what was refused to pools that refused nothing."""
        if self._paused:
            self._issue_shared(schedule, epoch, starving=True)

    def resume(self, pool: str) -> None:
        """A pool stands otherwise now, and may take again what it refused."""
        self._paused.discard(pool)
        self._room.pop(pool, None)

    def refused(self, schedule: Schedule, send: Send) -> None:
        """Take back a message, and those after it to the same receiver. May be broken off, and done again."""
        pool, worker = send.pool, send.worker
        kept: list[Instruction] = []
        back: list[Send] = []
        for message in self._out:
            if isinstance(message, Send) and message.pool == pool and message.worker == worker:
                back.append(message)
            else:
                kept.append(message)
        again: dict[int, list[Ticket]] = {}
        for message in back:
            self._dirty.add(message.queue)
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
        self._out[:] = kept
        if worker is None and len(self._pools) > 1:
            self._paused.add(pool)

    def _take_back(self, schedule: Schedule, message: Send) -> None:
        schedule.give_back(message.tickets)
        for ticket in message.tickets:
            self.arrived(ticket.number)
        if message.worker is not None:
            self._logicals.not_sent(message.queue)
