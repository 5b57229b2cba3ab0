"""Which worker makes the tickets of which logical worker, and with what random state. PURE.

Used under ``seeding="worker"`` and for streams, where a ticket belongs to a logical worker. Those live on workers and
may move: asked to leave, a logical worker finishes what it was sent and hands over its state; after a death it starts
from its last snapshot and makes again what came after it. Running streams do so if their dataset has a state. Datasets
are asked for it from `ask_states` on; until then it is known that they could be, which is a state as at the start.

Of streams, only the first has a worker until it is known that the dataset splits itself (`dpex.core.first_stream`).

Instructions are put into ``out`` before the change that they belong to, where both cannot be one step: broken off in
between, the same is decided again, and pools take a second one of each kind.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from itertools import islice
from typing import Any

from dpex.core.events import PoolStatus, Released, Snapshot
from dpex.core.first_stream import ALL
from dpex.core.instructions import Adopt, AskState, Dismiss, Instruction, Release, Send
from dpex.core.logical_log import LogicalLog, LogicalPoint
from dpex.core.placement import Place, Placement
from dpex.core.prefetch import LARGEST_GROUP
from dpex.core.schedule import Ticket

CROWD_AFTER_S = 5.0
"""How long a logical worker without a worker waits for one of its own before it shares another's."""


class Assignment:
    """Logical workers and where they live.

    Args:
        logicals: how many there are; 0 under ``seeding="batch"``.
        iterable: they are streams.
        pools: status of each pool.
        wanted: workers wanted by pool.
        dirty: queues with something to send; those that this module finds are added.
        out: where instructions go.

    ``streams``: how many streams the dataset is read in, as in `dpex.core.first_stream`.
    """

    def __init__(
        self,
        logicals: int,
        iterable: bool,
        pools: Mapping[str, PoolStatus],
        wanted: Mapping[str, int],
        dirty: set[int],
        out: list[Instruction],
    ) -> None:
        self._logicals = logicals
        self._iterable = iterable
        self.streams = ALL
        self._pools = pools
        self._wanted = wanted
        self._dirty = dirty
        self._out = out
        self.placement = Placement(logicals)
        self.logs = [LogicalLog(is_stream=iterable) for _ in range(logicals)]
        """What is known of each."""
        self._messages: dict[int, int] = {}
        """Sent to each stream in this epoch: one that was sent something has begun, and cannot begin anew."""
        self._vacating: set[Place] = set()
        self._replaying: dict[int, list[Ticket]] = {}
        self._unplaced = set(range(logicals))
        """Logical workers that never had a worker."""
        self._first_up_at: float | None = None
        self._asks_states = False
        self.untold: set[int] = set()
        """Those that were asked for their states and have not told them yet."""
        self._can_move = True

    @property
    def taking_part(self) -> range:
        """Logical workers that may have a worker."""
        return range(self._logicals if self.streams == ALL else 1)

    def places(self) -> list[Place]:
        """Workers that take tickets and are to stay."""
        return [
            place
            for name, status in self._pools.items()
            for worker in status.workers
            if (place := Place(name, worker)) not in self._vacating
        ]

    def lives_at(self, place: Place) -> set[int]:
        """Logical workers that live there."""
        return self.placement.logical_workers(place)

    # -- an epoch ------------------------------------------------------------------------------------------------

    def new_epoch(self, epoch: int, unfinished: Iterable[Ticket]) -> None:
        """As in torch, logical workers still make what they hold of epoch ``epoch``, broken off, and draw for it."""
        self._messages.clear()
        for ticket in unfinished:
            self.made(epoch, ticket)
        for log in self.logs:
            log.begin_epoch()

    def go_on(self, points: Iterable[LogicalPoint]) -> None:
        """Logical workers begin where those of another run stood, before any of them has a worker."""
        for logical, point in enumerate(points):
            self.logs[logical].go_on(point)
            self.placement.state[logical] = point.state

    def made(self, epoch: int, ticket: Ticket) -> None:
        """A ticket was made: after a death it is made again, unless a snapshot comes later."""
        self.logs[ticket.queue].made(epoch, ticket.number, ticket.index)

    def stream_ended(self, epoch: int, ticket: Ticket) -> None:
        """A stream has no more, as this ticket found; its worker may die."""
        self._messages.pop(ticket.queue, None)
        self.logs[ticket.queue].ended(epoch, ticket.number, ticket.index)

    def is_unplaced(self, logical: int) -> bool:
        """Whether this logical worker never had a worker."""
        return logical in self._unplaced

    @property
    def may_move(self) -> bool:
        """Whether logical workers may go on elsewhere: streams only if each can tell its state."""
        known = (self.logs[logical].is_known for logical in self.taking_part)
        return self._can_move and (not self._iterable or all(known))

    # -- placing and sending ---------------------------------------------------------------------------------------

    def place(self, now: float) -> None:
        """Give logical workers without a worker one."""
        placement = self.placement
        if None not in placement.place_of:
            return
        taking_part = self.taking_part
        if None not in placement.place_of[: len(taking_part)]:
            return
        wanted = max(1, sum(self._wanted.values()))
        late = self._first_up_at is not None and now - self._first_up_at > CROWD_AFTER_S
        for logical, place in placement.choose(self.places(), wanted, crowd=late):
            if logical not in taking_part:
                continue
            pool, worker = place
            if logical in self._unplaced and self.logs[logical].has_made_any:
                self._replaying[logical] = self._made_since(logical)
            self._out += (Adopt(pool, worker, logical, placement.state[logical], self.streams),)
            if self._asks_states:
                self._out += (AskState(pool, worker, logical),)
            placement.settle(logical, place)
            self._unplaced.discard(logical)
            self._dirty.add(logical)

    def ask_states(self) -> None:
        """Have workers ask datasets for their states from now on. A second time nothing happens."""
        if self._asks_states:
            return
        self._asks_states = True  # whoever is placed later is asked then
        for logical, place in enumerate(self.placement.place_of):
            if place is not None and logical not in self.placement.leaving and self._is_there(place):
                self._out += (AskState(*place, logical),)
                if not self._iterable or self.logs[logical].is_known:
                    self.untold.add(logical)

    def destination(self, logical: int) -> Place | None:
        """Where tickets of ``logical`` go now, after what must be made again; None: nowhere yet."""
        place = self.placement.place_of[logical]
        if place is None or logical in self.placement.leaving or not self._is_there(place):
            return None
        if logical in self._replaying:
            self._replay(logical, place)
        return place

    def sent(self, logical: int) -> None:
        """A message with tickets of this logical worker is on its way."""
        self._messages[logical] = self._messages.get(logical, 0) + 1

    def not_sent(self, logical: int) -> None:
        """It was refused."""
        self._messages[logical] = max(0, self._messages.get(logical, 0) - 1)

    def _replay(self, logical: int, place: Place) -> None:
        """Send again what a dead worker had made since its last known state, a message for each stretch of an epoch."""
        pool, worker = place
        waiting = deque(self._replaying[logical])
        sends = []
        while waiting:
            group = [t for t in islice(waiting, LARGEST_GROUP) if t.epoch == waiting[0].epoch]
            sends.append(Send(pool, worker, logical, group[0].epoch, group, again=True))
            for _ in group:
                waiting.popleft()
        self._out += sends  # from here on without a call: see `dpex.system.interrupts`
        del self._replaying[logical]

    def replay_refused(self, logical: int, tickets: list[Ticket]) -> None:
        """These are still to be made again."""
        self._replaying[logical] = tickets

    # -- moving --------------------------------------------------------------------------------------------------

    def worker_up(self, now: float) -> None:
        """A worker came up."""
        if self._first_up_at is None:
            self._first_up_at = now
        self.rebalance()

    def wait_anew(self, now: float) -> None:
        """More workers were asked for, for which logical workers wait before they share one."""
        if self._first_up_at is not None:
            self._first_up_at = now

    def rebalance(self) -> None:
        """Move logical workers to where they are wanted; running streams only where their datasets have a state."""
        if not self._logicals:
            return
        if self.may_move:
            self._vacate_surplus()
            for place in list(self._vacating):
                for logical in self.placement.logical_workers(place) - self.placement.leaving:
                    self._ask_to_move(logical)
                self._dismiss_if_empty(place)
            spare = self.placement.spare(self.places())
            if spare is not None:
                self._ask_to_move(spare)
        self._dirty.update(self.taking_part)

    def _vacate_surplus(self) -> None:
        """Empty workers that are not wanted any more, but no faster than others are there to take over."""
        places = self.places()
        spare = len(places) - sum(self._wanted.values())
        for name in self._pools:
            wanted = self._wanted.get(name, 0)
            here = [place for place in places if place[0] == name]
            surplus = min(spare, len(here) - wanted)
            for place in here[::-1][: max(0, surplus)]:
                self._vacating.add(place)
                spare -= 1

    def _ask_to_move(self, logical: int) -> None:
        place = self.placement.place_of[logical]
        assert place is not None
        if self._is_there(place):
            self._out += (Release(*place, logical),)
            self.placement.leave(logical)

    def _dismiss_if_empty(self, place: Place) -> None:
        if place in self._vacating and not self.placement.logical_workers(place) and self._is_there(place):
            self._out += (Dismiss(*place),)

    def _is_there(self, place: Place) -> bool:
        """Whether the worker takes instructions; one that has ended does not, though nobody was told yet."""
        pool, worker = place
        return worker in self._pools[pool].workers

    def released(self, event: Released) -> None:
        """A logical worker has left its worker; a second time nothing happens."""
        place = self.placement.place_of[event.logical]
        if event.logical not in self.placement.leaving or (place is not None and place[1] != event.worker):
            return
        if event.state is None:
            self._stays(event.logical, place)
            return
        self.logs[event.logical].given_up(event.state)
        self.placement.left(event.logical, event.state)
        self.rebalance()

    def _stays(self, logical: int, place: Place | None) -> None:
        """It could not leave, as its dataset could not tell its state: nobody is asked to leave again."""
        self._can_move = False
        if place is not None:
            self._vacating.discard(place)
        self._dirty.add(logical)
        self.placement.leaving.discard(logical)

    # -- deaths --------------------------------------------------------------------------------------------------

    def snapshot(self, event: Snapshot, epoch: int, first: int) -> None:
        """What came before this need not be made again. ``first``: the number of the next batch of ``epoch``."""
        log = self.logs[event.logical]
        self.untold.discard(event.logical)
        log.told(event.epoch, event.number, event.state)
        log.settle(epoch, first)

    def restart_elsewhere(self, place: Place) -> list[int]:
        """Prepare for the end of a worker: its logical workers go on from what is known of them.

        Returns running streams whose dataset has no state, which cannot. `evict` must follow; until then this may be
        done again.
        """
        broken = []
        for logical in sorted(self.placement.logical_workers(place)):
            log = self.logs[logical]
            if self._iterable and self._messages.get(logical) and not log.is_known:
                broken.append(logical)
                continue
            self.placement.state[logical] = log.latest()[0]
            self._replaying[logical] = self._made_since(logical)
            self._dirty.add(logical)
        return broken

    def _made_since(self, logical: int) -> list[Ticket]:
        """What was made since the last known state, to be made again."""
        return [_again(logical, *made) for made in self.logs[logical].latest()[1]]

    def evict(self, place: Place) -> None:
        """The worker is no more: nobody lives there."""
        self._vacating.discard(place)
        self.placement.evicted(place)


def _again(logical: int, epoch: int, number: int, index: Any) -> Ticket:
    ticket = Ticket(number, index, logical)
    ticket.epoch = epoch
    return ticket
