"""A training process of the simulation: its loader with the workers, and the consumer."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from itertools import count
from typing import TYPE_CHECKING

from benchmarks.simulation.draws import Draws, draws_of
from benchmarks.simulation.gpu import GpuTrainer
from benchmarks.simulation.history import History
from benchmarks.simulation.pool_counts import PoolCounts
from dpex.autotune.types import Decision
from dpex.measure.causes import STRAGGLER, UNKNOWN
from dpex.measure.consumer_time import Tally
from dpex.measure.settings import Settings
from dpex.schedule.failures import LEAST_PATIENCE_S, PATIENCE
from dpex.schedule.prefetch import REMOTE_WINDOW
from dpex.system.meter import RunQueueTimes

if TYPE_CHECKING:
    from benchmarks.simulation.simulator import Simulator


_BEGAN_AT = 1.0
"""When the virtual clock of `Tally` stands at its beginning, as 0 means "never" there."""
_ROUNDING_S = 1e-9
_WEIGHT = 0.02
"""Of the latest batch in the mean of what a batch takes, as in `dpex.schedule.prefetch`."""


@dataclass(eq=False)
class Worker:
    """A worker. number: the lowest that was free in its pool. cpu_s: CPU time it has used."""

    remote: bool
    number: int = 0
    cpu_s: float = 0.0
    up: bool = False
    leaving: bool = False
    dead: bool = False
    ticket: int | None = None


class Rank:
    """A training process with its loader."""

    def __init__(self, simulator: Simulator, settings: Settings, seed: int) -> None:
        self._simulator = simulator
        self._loop = simulator.loop
        self._seed = seed
        self._streams: list[tuple[int, int, Draws]] = []
        self.history = History(machine_bytes=simulator.machine_bytes)
        self.settings = settings
        self.workers: list[Worker] = []
        self.pending: deque[int] = deque()
        self.remotes = 0
        self._drawn = self._next = 0
        epochs = simulator.world.epochs
        self._pass_ends: float = math.inf if epochs is None else epochs.batches
        self.epoch = 0
        self._pass_began_at = self.start_s = 0.0
        """When the latest pass began, and what the latest that has begun took for its first batch."""
        self.ready: set[int] = set()
        self.making: set[int] = set()
        self._held = 0
        """Tickets that its remote workers hold, as of one node behind the link."""
        self._far: dict[int, float] = {}
        """When its remote workers were given what nobody else makes."""
        self._awaited, self._awaited_since, self._jammed_at = -1, 0.0, -math.inf
        self._usual_s, self._seen = 0.0, 0
        """What a batch takes lately, of so many, as the loader that ships learns it."""
        self._to_send: deque[Callable[[], None]] = deque()
        """Batches on their way, one behind the other as on a connection, by what follows the arrival of each."""
        self._sending_s = self._sending_since = 0.0
        """For how long something was under way, as the kernel of a node counts it."""
        self._is_asking = False
        self._peak = 0.0
        self._pauses = 0
        self.tally = Tally()
        self.local, self.remote = PoolCounts(), PoolCounts()
        self.trainer_cpu_s = self._trainer_queued_s = 0.0
        self.gpu = simulator.make_gpu()
        self.begin_stream(simulator.stream)

    def begin(self) -> None:
        """Start the first workers and the consumer; the simulator must know this rank by now."""
        self._draw()
        self._want()
        self._loop.after(0.0, self.ask)

    def begin_stream(self, stream: int) -> None:
        """Tickets begun and steps done from now on get the random numbers of another stream, from its beginning."""
        first = self.pending[0] if self.pending else self._drawn
        self._streams.append((first, self._next, draws_of(f"{self._seed} {stream}")))

    def _work_of(self, ticket: int, worker: Worker | None) -> tuple[float, float, float]:
        """Waiting, CPU, and what is read from shared storage."""
        first, _, draws = next(stream for stream in reversed(self._streams) if stream[0] <= ticket)
        wait_s, cpu_s, read = draws.work(self._simulator.work, ticket - first)
        if worker is not None and self._simulator.world.slow is not None:
            factor = self._simulator.slowness(self._seed, worker)
            return wait_s * factor, cpu_s * factor, read
        return wait_s, cpu_s, read

    # -- the loader ----------------------------------------------------------------------------------------------

    def _draw(self) -> None:
        while self._drawn - self._next < max(1, self.settings.prefetch) and self._drawn < self._pass_ends:
            self.pending.append(self._drawn)
            self._drawn += 1
        self._feed()

    def _feed(self) -> None:
        for worker in self.workers:
            if not self.pending:
                return
            if worker.up and not worker.leaving and worker.ticket is None:
                self._make_if_allowed(worker)

    def _make_if_allowed(self, worker: Worker) -> None:
        """A node holds `REMOTE_WINDOW` tickets for each of its workers at most, as by the pool that ships."""
        if not worker.remote or self._held < REMOTE_WINDOW * sum(w.remote and w.up for w in self.workers):
            self._make(worker)

    def _send(self, then: Callable[[], None]) -> None:
        """A batch goes on the link, behind those that are there."""
        self._to_send.append(then)
        if len(self._to_send) == 1:
            self._sending_since = self._loop.now
            self._send_next()

    def _send_next(self) -> None:
        self._simulator.link.start(self._simulator.work.batch_bytes, self._sent)

    def _sent(self) -> None:
        then = self._to_send.popleft()
        if self._to_send:
            self._send_next()
        else:
            self._sending_s += self._loop.now - self._sending_since
        then()

    @property
    def sending_s(self) -> float:
        """Seconds in which something was on the link, as the kernel of a node counts them."""
        return self._sending_s + (self._loop.now - self._sending_since if self._to_send else 0.0)

    def _arrived(self, ticket: int, stages: tuple[float, ...]) -> None:
        """A batch has come over the link, or would have, had its worker not been lost."""
        self._held -= 1
        self._made(True, ticket, *stages)
        self._feed()

    def _make_again_what_is_late(self) -> None:
        """Idle local workers make what remote ones owe for too long, as in `dpex.schedule.failures`."""
        now, head = self._loop.now, self._next
        if head not in self._far:
            return
        if self._awaited != head:
            self._awaited, self._awaited_since = head, now
            late_s = max(LEAST_PATIENCE_S, PATIENCE * self._usual_s)
            self._loop.after(late_s, self._deliver)
        idle = [w for w in self.workers if not w.remote and w.up and not w.leaving and w.ticket is None]
        late_at = self._awaited_since + max(LEAST_PATIENCE_S, PATIENCE * self._usual_s)
        if not idle:
            return
        if now >= late_at - _ROUNDING_S:
            self._jammed_at = now
        elif self._far[head] > self._jammed_at:
            return
        late = sorted(ticket for ticket, sent_at in self._far.items() if sent_at <= self._jammed_at)
        for worker, ticket in zip(idle, late, strict=False):
            del self._far[ticket]
            self._make(worker, ticket)

    def _make(self, worker: Worker, again: int | None = None) -> None:
        """Have it make what waits first, or that ticket ``again``."""
        ticket = worker.ticket = self.pending.popleft() if again is None else again
        self._held += worker.remote
        self.making.add(ticket)
        if worker.remote:
            self._far[ticket] = self._loop.now
        self._note_memory()
        wait_s, cpu_s, read = self._work_of(ticket, worker)
        began, encode_s = self._loop.now, self._simulator.work.encode_s
        thrashing, asked_at = 1.0, 0.0

        def compute() -> None:
            nonlocal thrashing, asked_at
            if worker.dead:
                return
            asked_at = self._loop.now
            if worker.remote:
                self._loop.after(cpu_s + encode_s, computed)
            else:
                thrashing = self._simulator.slowdown()
                self._simulator.cpus.start((cpu_s + encode_s) * thrashing, computed)

        def computed() -> None:
            if worker.dead:
                return
            now = self._loop.now
            queued_s = max(0.0, now - asked_at - (cpu_s + encode_s) * thrashing)
            stages = self._clocked(worker, cpu_s * thrashing), encode_s * thrashing, now - began, queued_s
            if worker.remote:
                self._free(worker)
                self._loop.after(
                    self._simulator.world.rtt_s,
                    lambda: self._send(lambda: self._arrived(ticket, stages)),
                )
            else:
                self._made(False, ticket, *stages)
                self._free(worker)

        self._read(wait_s, read, compute)

    def _read(self, wait_s: float, read: float, then: Callable[[], None]) -> None:
        """Wait, then read from the shared storage."""
        if read:
            self._loop.after(wait_s, lambda: self._simulator.storage.start(read, then))
        else:
            self._loop.after(wait_s, then)

    def _clocked(self, worker: Worker, cpu_s: float) -> float:
        """CPU time as the worker's clock shows it."""
        tick_s = self._simulator.world.tick_s
        before, worker.cpu_s = worker.cpu_s, worker.cpu_s + cpu_s
        return cpu_s if not tick_s else (worker.cpu_s // tick_s - before // tick_s) * tick_s

    def _free(self, worker: Worker) -> None:
        worker.ticket = None
        if worker.leaving:
            self._end(worker)
            self._deliver()
        elif self.pending:
            self._make_if_allowed(worker)

    def _made(self, remote: bool, ticket: int, cpu_s: float, encode_s: float, wall_s: float, queued_s: float) -> None:
        if ticket not in self.making:
            return
        self.making.discard(ticket)
        self._far.pop(ticket, None)
        self._seen += 1
        self._usual_s += max(_WEIGHT, 1.0 / self._seen) * (wall_s - self._usual_s)
        self.ready.add(ticket)
        (self.remote if remote else self.local).made(cpu_s, encode_s, wall_s, queued_s)
        self._deliver()

    def _end(self, worker: Worker) -> None:
        worker.dead = True
        if worker in self.workers:
            self.workers.remove(worker)
            self.remotes -= worker.remote
            if worker.remote:
                self._simulator.nodes_freed()

    def lose(self, worker: Worker) -> None:
        """A remote worker dies with its node; what it held is made again."""
        ticket = worker.ticket
        self._held -= ticket is not None
        self._end(worker)
        if ticket is not None and self._far.pop(ticket, None) is not None:
            self.making.discard(ticket)
            self.pending.appendleft(ticket)
        self._want()
        self._feed()
        self._deliver()

    # -- size ----------------------------------------------------------------------------------------------------

    def _want(self) -> None:
        """Start and dismiss workers."""
        for remote, wanted in ((False, self.settings.local), (True, self.settings.remote)):
            here = [w for w in self.workers if w.remote == remote and not w.leaving]
            for worker in sorted(here, key=lambda w: w.up)[: max(0, len(here) - wanted)]:
                worker.leaving = True
                if worker.ticket is None:
                    self._end(worker)
            for _ in range(wanted - len(here)):
                taken = {w.number for w in self.workers if w.remote == remote}
                worker = Worker(remote, next(number for number in count() if number not in taken))
                self.workers.append(worker)
                self.remotes += remote
                if remote:
                    self._simulator.queue_for_node(self, worker)
                else:
                    self._loop.after(self._simulator.world.fork_s, lambda worker=worker: self._forked(worker))  # type: ignore[misc]
        self._feed()

    def _forked(self, worker: Worker) -> None:
        """A local worker is a process, and imports what it needs."""
        if self._simulator.world.start_cpu_s:
            self._simulator.cpus.start(self._simulator.world.start_cpu_s, lambda: self.came_up(worker))
        else:
            self.came_up(worker)

    def came_up(self, worker: Worker) -> None:
        """A worker has started."""
        if not worker.dead:
            worker.up = True
            if worker.leaving:
                self._end(worker)
            elif self.pending:
                self._make(worker)

    # -- the consumer --------------------------------------------------------------------------------------------

    def ask(self) -> None:
        """The consumer calls next()."""
        if self._next == self._pass_ends:
            self._end_pass()
            return
        self._is_asking = True
        self.tally.enter(self.clock())
        if self.gpu is not None:
            self.gpu.enter()
        self._deliver()

    @property
    def engine(self) -> int:
        """The number of the engine at work: each pass has one of its own, unless its workers live on."""
        epochs = self._simulator.world.epochs
        return self.epoch if epochs is not None and not epochs.is_kept else 0

    def _end_pass(self) -> None:
        """The consumer is told that a pass is over, and begins the next."""
        epochs = self._simulator.world.epochs
        assert epochs is not None
        self.tally.enter(self.clock())
        self.tally.leave(0.0, self.clock(), over=True)
        if not epochs.is_kept:
            for worker in [w for w in self.workers if not w.leaving]:
                worker.leaving = True
                if worker.ticket is None:
                    self._end(worker)
        self._loop.after(epochs.between_s, self._begin_pass)

    def _begin_pass(self) -> None:
        epochs = self._simulator.world.epochs
        assert epochs is not None
        self.epoch += 1
        self._pass_ends += epochs.batches
        self._pass_began_at = self._loop.now
        self._want()
        self._draw()
        self.ask()

    def _deliver(self) -> None:
        if not self._is_asking:
            return
        if self._next in self.ready:
            self.ready.discard(self._next)
            self._hand_out(self._simulator.world.own_s)
        elif not self.settings.workers and not any(w.up for w in self.workers) and self._next in self.pending:
            self.pending.remove(self._next)
            self._make_here(self._next)
        else:
            self._wait_because(STRAGGLER if self.ready else UNKNOWN)
            self._make_again_what_is_late()

    def _wait_because(self, cause: int) -> None:
        tally = self.tally
        if not tally.blocked_at:
            tally.block(self.clock(), cause)
        elif tally.cause != cause:
            tally.unblock(self.clock())
            tally.block(self.clock(), cause)

    def _make_here(self, ticket: int) -> None:
        wait_s, cpu_s, read = self._work_of(ticket, None)
        asked_at = self._answered()

        def compute() -> None:
            nonlocal asked_at
            asked_at = self._loop.now
            self._simulator.cpus.start(cpu_s, made)

        def made() -> None:
            queued_s = max(0.0, self._loop.now - asked_at - cpu_s)
            self.trainer_cpu_s += cpu_s
            self._trainer_queued_s += queued_s
            self._take()

        self._read(wait_s, read, compute)

    def _hand_out(self, own_s: float) -> None:
        began = self._answered()

        def handed() -> None:
            self.trainer_cpu_s += own_s
            self._trainer_queued_s += max(0.0, self._loop.now - began - own_s)
            self._take()

        self._simulator.cpus.start(own_s, handed)

    def _answered(self) -> float:
        """The consumer waits no longer; now."""
        if self.tally.blocked_at:
            self.tally.unblock(self.clock())
        self._is_asking = False
        return self._loop.now

    def _take(self) -> None:
        self._next += 1
        if self.tally.starting:
            self.start_s = self._loop.now - self._pass_began_at
        self.tally.batches += 1
        if self.gpu is not None:
            self.gpu.leave(starting=self.tally.starting)
        self.tally.leave(self.clock(), self.clock(), over=False)
        self.history.delivered.append(self._loop.now)
        self._draw()
        gpu_s, cpu_s, pause_s = self._step()
        if self.gpu is not None:
            self._step_on(self.gpu, gpu_s, cpu_s, pause_s)
            return
        started = self._loop.now

        def computed() -> None:
            self.trainer_cpu_s += cpu_s
            self._trainer_queued_s += max(0.0, self._loop.now - started - cpu_s)
            self._loop.after(gpu_s + pause_s, self.ask)

        self._simulator.cpus.start(cpu_s, computed)

    def _step_on(self, gpu: GpuTrainer, gpu_s: float, cpu_s: float, pause_s: float) -> None:
        def stepped(launch_s: float, queued_s: float) -> None:
            self.trainer_cpu_s += launch_s
            self._trainer_queued_s += queued_s
            self.ask()

        gpu.step(gpu_s, cpu_s, pause_s, stepped)

    def _step(self) -> tuple[float, float, float]:
        """GPU and CPU of the step that begins, and a pause that is due after it, in seconds."""
        _, first, draws = self._streams[-1]
        gpu_s, cpu_s = draws.step(self._simulator.step, self._next - 1 - first)
        pauses = self._simulator.world.pauses
        if pauses is not None and not pauses.stops_all and self._loop.now >= (self._pauses + 1) * pauses.every_s:
            self._pauses = int(self._loop.now / pauses.every_s)
            return gpu_s, cpu_s, pauses.seconds
        return gpu_s, cpu_s, 0.0

    # -- sizes ---------------------------------------------------------------------------------------------------

    def carry_out(self, decision: Decision) -> None:
        """Do as a controller decided."""
        self.history.decisions.append(decision)
        more = decision.new.remote - decision.old.remote
        if more > 0 and more > self._simulator.room(self):
            self.history.beyond_room.append(decision)
        self.set(decision.new)

    def set(self, settings: Settings) -> None:
        """Have these settings from now on."""
        self.settings = settings
        self._want()
        self._draw()
        self._deliver()

    # -- looking at it -------------------------------------------------------------------------------------------

    @property
    def memory(self) -> float:
        """Bytes in batches in flight and in local workers."""
        world, work = self._simulator.world, self._simulator.work
        local = len(self.workers) - self.remotes
        return local * world.worker_bytes + (len(self.ready) + len(self.making)) * work.batch_bytes

    def _note_memory(self) -> None:
        self._peak = max(self._peak, self.memory)
        self._simulator.note_memory()

    def most_memory(self) -> float:
        """The most bytes since this was last asked."""
        peak, self._peak = max(self._peak, self.memory), self.memory
        return peak

    @property
    def trainer(self) -> RunQueueTimes:
        """CPU of the training process, and its time on run queues."""
        return RunQueueTimes(self.trainer_cpu_s, self._trainer_queued_s)

    @property
    def began_at(self) -> float:
        """By `clock`."""
        return _BEGAN_AT

    def clock(self) -> float:
        """Seconds, as `Tally` is told."""
        return _BEGAN_AT + self._loop.now
