"""A simulation of one training and many nodes, made of dpex's own schedule and of measured costs.

`EngineState` draws, sends, counts and replays as it does in a loader. Around it, time is virtual: the training thread
is busy for ``thread_s`` per batch, a worker for ``batch_s``, and the bytes of a batch go through the link of their node
and then through that of the trainer, one batch behind the other. Nodes start one after the other, and die at random.
"""

from __future__ import annotations

import heapq
import random
from collections import deque
from dataclasses import dataclass, field

from dpex.measure.batch_times import NO_TIMES
from dpex.measure.settings import Settings
from dpex.schedule.engine_state import EngineState
from dpex.schedule.events import PoolStatus, Send, TicketMade, WorkerGone, WorkerUp
from dpex.schedule.prefetch import REMOTE_WINDOW, PrefetchRules

REMOTE = "remote"


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """What is simulated. Times are seconds, rates per second.

    Attributes:
        nodes, workers: Nodes, and workers of each.
        batch_s: Seconds of a worker for a batch.
        nbytes: Bytes of a batch.
        thread_s: Seconds of the training thread for a batch.
        step_s: Seconds of a training step.
        node_bytes_s, trainer_bytes_s: Bytes per second of a node's link and of the trainer's.
        round_trip_s: Seconds to a node and back.
        starts_s: Seconds until the first and until the last node has workers.
        deaths_per_hour: Of each node. One that died is back after ``down_s``.
    """

    nodes: int
    workers: int = 4
    batch_s: float = 0.064
    nbytes: int = 1024
    thread_s: float = 0.0004
    step_s: float = 0.0
    node_bytes_s: float = 1.25e9
    trainer_bytes_s: float = 1.25e9
    round_trip_s: float = 0.0002
    starts_s: tuple[float, float] = (0.0, 0.0)
    deaths_per_hour: float = 0.0
    down_s: float = 60.0


@dataclass
class _Worker:
    number: int
    node: int
    is_up: bool = False
    free_at: float = 0.0
    held: deque[Send] = field(default_factory=deque)
    epoch: int = 0
    """Counts its lives: results of an earlier life are lost."""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """Batches per second of the second half; shares of time of the training thread and of the trainer's link; batches
    made again; batches that came twice."""

    rate: float
    thread_share: float
    link_share: float
    remade: int
    twice: int


class Simulation:
    """One run. See the module."""

    def __init__(self, cluster: Cluster, seed: int = 0) -> None:
        self.cluster = cluster
        self._random = random.Random(seed)
        count = cluster.nodes * cluster.workers
        rules = PrefetchRules(logical=False, may_group=True, memory_budget=None)
        settings = Settings(local=0, remote=count, prefetch=2 * count)
        self.state = EngineState(logicals=0, iterable=False, in_order=True, rules=rules, settings=settings)
        self._events: list[tuple[float, int, tuple[object, ...]]] = []
        self._order = 0
        self._workers = [_Worker(number, number // cluster.workers) for number in range(count)]
        self._node_free = [0.0] * cluster.nodes
        self._link_free = self._link_busy = self._thread_busy = 0.0

    def run(self, seconds: float) -> Outcome:
        """Let so many seconds of virtual time pass."""
        cluster, state = self.cluster, self.state
        first, last = cluster.starts_s
        for node in range(cluster.nodes):
            self._at(first + (last - first) * (node + 1) / cluster.nodes, "up", node)
        state.placement.request_start()
        state.placement.update_status(REMOTE, PoolStatus())
        state.begin_epoch()
        now, taken, twice, seen, half = 0.0, 0, 0, set(), (0.0, 0)
        while now < seconds:
            now = self._hear(now)
            self._send(now)
            delivery = state.schedule.pop()
            if delivery is None:
                if not self._events:
                    break
                now = max(now, self._events[0][0])
                continue
            twice += delivery.number in seen
            seen.add(delivery.number)
            now += cluster.thread_s + cluster.step_s
            self._thread_busy += cluster.thread_s
            taken += 1
            half = half if half[1] or now < seconds / 2 else (now, taken)
        rate = (taken - half[1]) / (now - half[0])
        return Outcome(
            rate=rate,
            thread_share=self._thread_busy / now,
            link_share=self._link_busy / now,
            remade=state.failures.remade,
            twice=twice,
        )

    def _at(self, when: float, *what: object) -> None:
        heapq.heappush(self._events, (when, self._order, what))
        self._order += 1

    def _hear(self, now: float) -> float:
        """Take in all that has happened by ``now``."""
        while self._events and self._events[0][0] <= now:
            _, _, (kind, *values) = heapq.heappop(self._events)
            getattr(self, f"_{kind}")(now, *values)
        if self.state.rules.is_due:
            self.state.apply_averages()
        return now

    def _status(self) -> None:
        up = tuple(worker.number for worker in self._workers if worker.is_up)
        count = len(self._workers)
        self.state.placement.update_status(REMOTE, PoolStatus(workers=up, requested=count, running=len(up)))

    def _up(self, now: float, node: int) -> None:
        mine = self._of(node)
        for worker in mine:
            worker.is_up, worker.free_at = True, now
        self._status()
        for worker in mine:
            self.state.apply_event(WorkerUp(REMOTE, worker.number), now)
        if self.cluster.deaths_per_hour:
            self._at(now + self._random.expovariate(self.cluster.deaths_per_hour / 3600), "down", node)

    def _down(self, now: float, node: int) -> None:
        mine = self._of(node)
        lost = {}
        for worker in mine:
            lost[worker.number] = tuple(t.number for send in worker.held for t in send.tickets)
            worker.is_up, worker.epoch = False, worker.epoch + 1
            worker.held.clear()
        self._status()
        for worker in mine:
            gone = WorkerGone(
                REMOTE, worker.number, self.state.epoch, lost[worker.number], None, False, "its node died"
            )
            self.state.apply_event(gone, now)
        self._at(now + self.cluster.down_s, "up", node)

    def _of(self, node: int) -> list[_Worker]:
        return self._workers[node * self.cluster.workers : (node + 1) * self.cluster.workers]

    def _send(self, now: float) -> None:
        """Draw and send what is wanted, and give messages to workers."""
        state = self.state
        for _ in range(state.room(starving=not state.schedule.ready)):
            state.placement.dirty.add(state.schedule.draw(state.schedule.drawn).queue)
        if state.has_to_send(starving=not state.schedule.ready):
            state.issue(now, starving=not state.schedule.ready)
        instructions = state.placement.instructions
        while instructions:
            instruction = instructions[0]
            if isinstance(instruction, Send) and not self._takes(instruction, now):
                state.refused(instruction)
            else:
                instructions.pop(0)

    def _takes(self, send: Send, now: float) -> bool:
        """Give a message to the worker that holds the fewest; return False if each holds as many as it may."""
        worker = min((w for w in self._workers if w.is_up), key=lambda w: len(w.held), default=None)
        if worker is None or len(worker.held) >= REMOTE_WINDOW:
            return False
        begins = max(worker.free_at, now + self.cluster.round_trip_s / 2)
        worker.free_at = begins + self.cluster.batch_s * len(send.tickets)
        worker.held.append(send)
        for place in range(len(send.tickets)):
            made_at = begins + self.cluster.batch_s * (place + 1)
            self._at(made_at, "made", worker.number, worker.epoch, send, place)
        return True

    def _made(self, now: float, number: int, epoch: int, send: Send, place: int) -> None:
        """A batch leaves its node: it arrives when both links have carried it."""
        worker, cluster = self._workers[number], self.cluster
        if worker.epoch != epoch:
            return
        node_s, trainer_s = cluster.nbytes / cluster.node_bytes_s, cluster.nbytes / cluster.trainer_bytes_s
        self._node_free[worker.node] = max(now, self._node_free[worker.node]) + node_s
        self._link_free = max(self._node_free[worker.node], self._link_free) + trainer_s
        self._link_busy += trainer_s
        self._at(self._link_free + cluster.round_trip_s / 2, "arrived", number, epoch, send, place)

    def _arrived(self, now: float, number: int, epoch: int, send: Send, place: int) -> None:
        worker = self._workers[number]
        if worker.epoch != epoch:
            return
        if place == len(send.tickets) - 1:
            worker.held.popleft()
        times = NO_TIMES._replace(samples=1, load_s=self.cluster.batch_s, nbytes=self.cluster.nbytes)
        ticket = send.tickets[place].number
        self.state.apply_event(TicketMade(send.epoch, ticket, number, lambda: ticket, times=times), now)
