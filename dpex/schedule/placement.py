"""The worker pools, the workers wanted of each, and the messages under way to them. PURE.

Tickets that any worker may make go to the pool with the fewest tickets under way per worker. Tickets of a logical
worker go to the worker that `LogicalWorkers` names. A sent ticket counts to the ``load`` of its pool until
`Placement.remove_ticket` reports it as made or lost.

A message counts as sent once its `Send` is among the instructions. When a pool refuses it, `Placement.refused` takes
back the message and all later messages to the same receiver, so that tickets keep their order. The next attempt at this
receiver is a single message, so a full receiver costs one attempt instead of one per waiting ticket. The pool may then
have as many tickets as before the refusal, plus one message. This limit grows with each message that the pool takes. If
there are other pools, they make the waiting tickets until a ticket of the pool that refused returns.
"""

from __future__ import annotations

import math
from collections.abc import Container
from dataclasses import replace
from typing import NamedTuple

from dpex.errors import WorkerDiedError
from dpex.measure.settings import LOCAL, REMOTE, Settings
from dpex.schedule.events import NO_STATUS, Instruction, Notice, PoolStatus, Raise, Scale, Send
from dpex.schedule.prefetch import PrefetchRules
from dpex.schedule.schedule import SHARED, Schedule, Ticket

CRASHES_IN_A_ROW = 8
"""Workers that may end unexpectedly without a result in between, beyond one per wanted worker."""


class Place(NamedTuple):
    """A worker: the pool's name and the worker's number in it."""

    pool: str
    worker: int


class Placement:
    """See the module. Other threads may read ``pools``, ``wanted``, ``load`` and ``settings``.

    Args:
        settings: Workers and prefetch at the start.
        rules: The rules for the prefetch and the message size.
    """

    def __init__(self, settings: Settings, rules: PrefetchRules) -> None:
        self.pools: dict[str, PoolStatus] = {}
        """The latest status of each pool, with its requested and running workers."""
        self.wanted: dict[str, int] = {}
        """The number of workers wanted of each pool."""
        self.dirty: set[int] = set()
        """Queues that may have tickets to send."""
        self.load: dict[str, int] = {}
        """Tickets under way, by pool."""
        self.instructions: list[Instruction] = []
        """Instructions to perform, in order."""
        self.incomplete: set[int] = set()
        """Queues whose waiting tickets do not fill a message, as far as is known."""
        self.settings: Settings = settings
        """Workers and prefetch that are wanted now."""
        self.rules = rules
        self._former = settings
        self._took_over = 0
        """Number of local workers that took over from the cluster. They leave when it is available again."""
        self._now = 0.0
        """Time of the latest call of `issue`, in seconds."""
        self._carrier: dict[int, str] = {}
        """The pool to which a ticket was last sent, by ticket number."""
        self._sent_at: dict[int, float] = {}
        """Time at which a ticket was sent to another machine, in seconds, by ticket number."""
        self._full: set[tuple[str, int]] = set()
        """Pool and number of each worker that refused its latest message."""
        self._room: dict[str, tuple[int, int]] = {}
        """For each pool that refused a message: the limit of its tickets, and the next increment of this limit."""
        self._paused: set[str] = set()
        """Pools that refused a message for any worker, and from which no ticket has come back since."""

    def new_epoch(self) -> None:
        """Forget the tickets under way."""
        self._carrier.clear()
        self._sent_at.clear()
        self._full.clear()
        self._room.clear()
        self._paused.clear()
        self.incomplete.clear()
        self.load = dict.fromkeys(self.pools, 0)

    # -- workers -------------------------------------------------------------------------------------------------

    def update_status(self, pool: str, status: PoolStatus) -> None:
        """Take in the status of a pool, which has changed. Tickets that the pool refused are offered again.

        A pool that can start no worker causes a warning only if other pools continue. Otherwise the error that ends the
        epoch, or the warning that local workers take over, gives the reason.
        """
        had_failed = self.pools.get(pool, NO_STATUS).failed is not None
        self.pools[pool] = status
        if status.failed is not None and not had_failed and self._goes_on_without(pool):
            self.instructions.append(Notice(_why_none_can_come(pool, status, self.wanted.get(pool, 0))))
        self.load.setdefault(pool, 0)
        self._paused.discard(pool)
        self._room.pop(pool, None)

    def _goes_on_without(self, pool: str) -> bool:
        others = [name for name, count in self.wanted.items() if count and name != pool]
        return any(self.pools.get(name, NO_STATUS).failed is None for name in others)

    def places(self) -> list[Place]:
        """Return all workers that take tickets."""
        return [Place(name, worker) for name, status in self.pools.items() for worker in status.workers]

    def serves(self, place: Place) -> bool:
        """Return True if the worker takes instructions. An ended worker takes none, even before its end is reported."""
        return place.worker in self.pools[place.pool].workers

    def serving(self) -> int:
        """Return the number of workers that take tickets."""
        count = 0
        for status in self.pools.values():
            count += len(status.workers)
        return count

    def running(self) -> int:
        """Return the number of running workers, including workers that are about to leave."""
        return sum(status.running for status in self.pools.values())

    # -- workers wanted ------------------------------------------------------------------------------------------

    def request_workers(self, pool: str, count: int, *, optional: bool = False) -> None:
        self.wanted[pool] = count
        self.instructions.append(Scale(pool, count, optional))

    def request_start(self) -> None:
        """Ask for the workers of the first settings."""
        for name, count in ((LOCAL, self.settings.local), (REMOTE, self.settings.remote)):
            if count > 0:
                self.request_workers(name, count)

    def resize(self, settings: Settings) -> None:
        """Ask for the workers of new settings.

        Remote workers are optional if a tuner asks for them, because a refusal must not end the user's training.
        """
        self._former, self.settings = self.settings, settings
        self._took_over = 0
        for name, count in ((LOCAL, settings.local), (REMOTE, settings.remote)):
            if count > 0 or name in self.wanted:
                self.request_workers(name, count, optional=name == REMOTE and self.rules.is_tuned)

    def keep_workers(self, settings: Settings) -> None:
        """Apply only the prefetch of ``settings``, because logical workers stay on their workers while the iterator
        lives. Ask again for the workers of a pool that could not start all of them.
        """
        self.settings = replace(settings, local=self.settings.local, remote=self.settings.remote)
        for name, count in self.wanted.items():
            status = self.pools.get(name, NO_STATUS)
            if status.failed is not None or status.most is not None:
                self.request_workers(name, count)

    def scale_refused(self, scale: Scale, why: str) -> None:
        """Take in that a pool has no workers for this loader. If they were optional, ask for local workers instead."""
        if scale.pool not in self.pools:
            self.wanted.pop(scale.pool, None)
        if not scale.optional:
            self.settings = self._former
            return
        self.instructions.append(Notice(f"no {scale.pool} workers for this loader: {why}", warning=False))
        self.settings = replace(self.settings, remote=0, local=self.settings.local or 1)
        self.request_workers(LOCAL, self.settings.local)

    def take_over_locally(self, cpus: int) -> bool:
        """Ask for at most ``cpus`` local workers if no remote worker is left. Return True if they were asked for."""
        remote = self.pools.get(REMOTE)
        if remote is None or remote.failed is None or self.serving() or self.wanted.get(LOCAL):
            return False
        count = max(1, min(self.settings.workers, cpus))
        self.instructions.append(
            Notice(f"no remote worker is left, so local workers take over ({count}): {remote.failed}")
        )
        self.request_workers(LOCAL, count)
        self.settings = replace(self.settings, local=count)
        self._took_over = 0 if self.rules.is_tuned else count
        return True

    def hand_back(self) -> None:
        """Release the local workers that took over, once enough remote workers run to replace them."""
        remote = self.pools.get(REMOTE)
        if not self._took_over or remote is None or remote.running < min(self._took_over, self.settings.remote):
            return
        self.instructions.append(
            Notice("remote workers run again: the local workers that took over leave", warning=False)
        )
        self._took_over = 0
        self.settings = replace(self.settings, local=0)
        self.request_workers(LOCAL, 0)

    def give_up_without_workers(self) -> None:
        """End the epoch if every wanted pool has failed and no worker is left, as the consumer would wait for ever.

        A failed cluster may recover later, but until then only local workers could make batches.
        """
        wanted = [(name, self.pools.get(name, NO_STATUS)) for name, count in self.wanted.items() if count]
        reasons = [_why_none_can_come(name, status, self.wanted[name]) for name, status in wanted]
        if wanted and all(reasons) and not any(status.running for _, status in wanted):
            self.instructions.append(Raise(WorkerDiedError("; ".join(reasons))))

    # -- sending -------------------------------------------------------------------------------------------------

    def issue(self, schedule: Schedule, epoch: int, now: float, *, starving: bool) -> None:
        """Send tickets that any worker may make, as far as pools take them.

        ``starving``: Send incomplete messages as well.
        """
        self._now = now
        if self._paused:
            self._paused = {pool for pool in self._paused if self.load[pool]}  # others would stay paused
        self._issue_shared(schedule, epoch, starving)

    def issue_elsewhere(self, schedule: Schedule, epoch: int) -> None:
        """Send refused tickets to pools that have not refused."""
        if self._paused:
            self._issue_shared(schedule, epoch, starving=True)

    def _issue_shared(self, schedule: Schedule, epoch: int, starving: bool) -> None:
        rules, prefetch = self.rules, schedule.prefetch
        closed: set[str] = set()
        while waiting := schedule.pending():
            pool = self._least_loaded(prefetch, closed)
            if pool is None:
                return
            if waiting < rules.group and not starving and schedule.ready:
                self.incomplete.add(SHARED)
                return
            size = rules.message_size(prefetch, len(self.pools[pool].workers), pool == REMOTE)
            self.send(schedule, Send(pool, None, SHARED, epoch, []), min(waiting, size))
            if self._is_beyond_room(pool):
                closed.add(pool)
        self.dirty.clear()

    def _is_beyond_room(self, pool: str) -> bool:
        """Return True if the pool has more tickets than its limit after a refusal; in this case raise the limit."""
        load, (room, more) = self.load[pool], self._room.get(pool, (math.inf, 1))
        if load > room:
            self._room[pool] = load + more, 2 * more
        return load > room

    def _least_loaded(self, prefetch: int, closed: Container[str]) -> str | None:
        best, best_load = None, 0.0
        for name, status in self.pools.items():
            workers = len(status.workers)
            if not workers or name in self._paused or name in closed:
                continue
            load = self.load[name] / workers
            if best is None or load < best_load:
                best, best_load = name, load
        if len(self.pools) > 1 and best_load >= max(2 * self.rules.group, prefetch / max(1, self.serving())):
            return None
        return best

    def send(self, schedule: Schedule, message: Send, count: int) -> bool:
        """Send ``count`` waiting tickets as ``message``. Return False if no other should go to its receiver now."""
        message.tickets.extend(schedule.issue_tickets(count, message.queue))
        self.instructions.append(message)
        self._on_its_way(message.tickets, message.pool)
        if message.worker is None or (message.pool, message.worker) not in self._full:
            return True
        self._full.discard((message.pool, message.worker))
        return False

    def _on_its_way(self, tickets: list[Ticket], pool: str) -> None:
        carrier, load = self._carrier, self.load
        for ticket in tickets:
            carrier[ticket.number] = pool
            load[pool] += 1
        if pool == REMOTE:
            self._sent_at.update({ticket.number: self._now for ticket in tickets})

    def remove_ticket(self, number: int) -> None:
        """Remove a ticket from the load of its pool: it was made, lost or taken back."""
        carrier = self._carrier.pop(number, None)
        if carrier is not None:
            self.load[carrier] -= 1
            self._paused.discard(carrier)
            if carrier == REMOTE:
                self._sent_at.pop(number, None)

    # -- made again ----------------------------------------------------------------------------------------------

    def sent_at(self, number: int) -> float | None:
        """Return when the ticket was sent, in seconds; None if its latest receiver is not on another machine."""
        return self._sent_at.get(number)

    def make_elsewhere(self, ticket: Ticket, epoch: int, pool: str) -> None:
        """Have any worker of ``pool`` make a ticket that another pool holds and may still deliver.

        From now on the ticket counts to the load of ``pool``.
        """
        paused = set(self._paused)
        self.instructions.append(Send(pool, None, ticket.queue, epoch, [ticket]))
        self.remove_ticket(ticket.number)
        self._paused |= paused  # no ticket came back, so the pauses continue
        self._on_its_way([ticket], pool)

    # -- refusals ------------------------------------------------------------------------------------------------

    def refused(self, schedule: Schedule, send: Send) -> list[Send]:
        """Take back a message and all later ones to the same receiver. Return them, the latest first.

        After a refusal for any worker, the pool is paused if there are other pools.
        """
        pool, worker = send.pool, send.worker
        back = [one for one in self.instructions if isinstance(one, Send) and (one.pool, one.worker) == (pool, worker)]
        back.reverse()  # latest first, so that earlier tickets return in front of later ones
        for message in back:
            self.dirty.add(message.queue)
            if not message.again:
                schedule.give_back(message.tickets)
                for ticket in message.tickets:
                    self.remove_ticket(ticket.number)
        if worker is not None:
            self._full.add((pool, worker))
        else:
            self._room[pool] = self.load[pool], 1
            if back and len(self.pools) > 1:
                self._paused.add(pool)
        refused = set(map(id, back))
        self.instructions[:] = [one for one in self.instructions if id(one) not in refused]
        return back


def why_too_many_died(status: PoolStatus, wanted: int) -> str:
    """Return why a pool with ``wanted`` workers starts no more of them; "" if it does."""
    if status.crashes <= CRASHES_IN_A_ROW + wanted:
        return ""
    return f"{status.crashes} workers in a row died before they made a single batch"


def _why_none_can_come(name: str, status: PoolStatus, wanted: int) -> str:
    if not status.requested and (why := why_too_many_died(status, wanted)):
        return why
    if status.failed is None and status.most == 0:
        return f"no {name} worker can be started: {status.why_most}{_REMEDY[name]}"
    return f"{_PLACE[name]}{status.failed}" if status.failed is not None else ""


_PLACE = {LOCAL: "", REMOTE: "no worker can run on the cluster: "}
_REMEDY = {LOCAL: "; num_workers=0 makes batches in the training process", REMOTE: ""}
