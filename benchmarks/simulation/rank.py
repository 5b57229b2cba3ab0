"""A training process of the simulation: its loader with the workers, and the consumer."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from itertools import count
from typing import TYPE_CHECKING

from benchmarks.simulation.draws import Draws, draws_of
from benchmarks.simulation.history import History, Mark
from benchmarks.simulation.steering import Steering
from benchmarks.simulation.window_counts import WindowCounts
from dpex.autotune.types import Decision, Sample, Settings
from dpex.measure.samples import HostSample

if TYPE_CHECKING:
    from benchmarks.simulation.simulator import Simulator


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

    def __init__(self, simulator: Simulator, steering: Steering, seed: int) -> None:
        self._simulator = simulator
        self._loop = simulator.loop
        self._steering = steering
        self._seed = seed
        self._errors = random.Random(f"{seed} error")
        self._streams: list[tuple[int, int, Draws]] = []
        self.history = History()
        self.settings = steering.begin()
        self.workers: list[Worker] = []
        self._pending: deque[int] = deque()
        self._remotes = 0
        self._drawn = self._next = 0
        self._ready: set[int] = set()
        self._making: set[int] = set()
        self._blocked_at: float | None = None
        self._head_at: float | None = None
        self._window_at = self._others_s = 0.0
        self._peak = 0.0
        self._pauses = 0
        self._trainer_cpu_s = 0.0
        self._sums = WindowCounts()
        self.begin_stream(simulator.stream)

    def begin(self) -> None:
        """Start the first workers and the consumer; the simulator must know this rank by now."""
        self._draw()
        self._want()
        self._loop.after(self._simulator.period(0.0), self._sample)
        self._loop.after(0.0, self.ask)

    def begin_stream(self, stream: int) -> None:
        """Tickets begun and steps done from now on get the random numbers of another stream, from its beginning."""
        first = self._pending[0] if self._pending else self._drawn
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
        while self._drawn - self._next < max(1, self.settings.depth):
            self._pending.append(self._drawn)
            self._drawn += 1
        self._feed()

    def _feed(self) -> None:
        for worker in self.workers:
            if not self._pending:
                return
            if worker.up and not worker.leaving and worker.ticket is None:
                self._make(worker)

    def _make(self, worker: Worker) -> None:
        ticket = worker.ticket = self._pending.popleft()
        self._making.add(ticket)
        self._peak = max(self._peak, self.memory)
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
                size, link = self._simulator.work.batch_bytes, self._simulator.link
                self._loop.after(
                    self._simulator.world.rtt_s, lambda: link.start(size, lambda: self._made(True, ticket, *stages))
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
        elif self._pending:
            self._make(worker)

    def _made(self, remote: bool, ticket: int, cpu_s: float, encode_s: float, wall_s: float, queued_s: float) -> None:
        if ticket not in self._making:
            return
        self._making.discard(ticket)
        self._ready.add(ticket)
        self._sums.made(remote, cpu_s, encode_s, wall_s, queued_s, self._errors)
        self._deliver()

    def _end(self, worker: Worker) -> None:
        worker.dead = True
        if worker in self.workers:
            self.workers.remove(worker)
            self._remotes -= worker.remote
            if worker.remote:
                self._simulator.nodes_freed()

    def lose(self, worker: Worker) -> None:
        """A remote worker dies with its node; what it held is made again."""
        ticket = worker.ticket
        self._end(worker)
        if ticket is not None and ticket in self._making:
            self._making.discard(ticket)
            self._pending.appendleft(ticket)
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
                self._remotes += remote
                if remote:
                    self._simulator.queue_for_node(self, worker)
                else:
                    self._loop.after(self._simulator.world.fork_s, lambda worker=worker: self.came_up(worker))  # type: ignore[misc]
        self._feed()

    def came_up(self, worker: Worker) -> None:
        """A worker has started."""
        if not worker.dead:
            worker.up = True
            if worker.leaving:
                self._end(worker)
            elif self._pending:
                self._make(worker)

    # -- the consumer --------------------------------------------------------------------------------------------

    def ask(self) -> None:
        """The consumer calls next()."""
        self._blocked_at = self._loop.now
        self._deliver()

    def _deliver(self) -> None:
        if self._blocked_at is None:
            return
        if self._next in self._ready:
            self._ready.discard(self._next)
            self._hand_out(self._simulator.world.own_s)
        elif not self.settings.workers and not any(w.up for w in self.workers) and self._next in self._pending:
            self._pending.remove(self._next)
            self._make_here(self._next)
        elif self._ready and self._head_at is None:
            self._head_at = self._loop.now

    def _make_here(self, ticket: int) -> None:
        wait_s, cpu_s, read = self._work_of(ticket, None)
        began = asked_at = self._unblock()

        def compute() -> None:
            nonlocal asked_at
            asked_at = self._loop.now
            self._simulator.cpus.start(cpu_s, made)

        def made() -> None:
            self._sums.made_here(self._loop.now - began, cpu_s, self._loop.now - asked_at - cpu_s)
            self._take(began)

        self._read(wait_s, read, compute)

    def _hand_out(self, own_s: float) -> None:
        began = self._unblock()
        self._sums.trainer_cpu_s += own_s

        def handed() -> None:
            self._sums.trainer_queued_s += max(0.0, self._loop.now - began - own_s)
            self._take(began)

        self._simulator.cpus.start(own_s, handed)

    def _unblock(self) -> float:
        """The consumer waits no longer; now."""
        self._count_waiting()
        self._blocked_at = self._head_at = None
        return self._loop.now

    def _count_waiting(self) -> None:
        """A wait that is under way counts up to now."""
        now = self._loop.now
        if self._blocked_at is not None:
            self._sums.wait_s += now - self._blocked_at
            self._blocked_at = now
        if self._head_at is not None:
            self._sums.head_s += now - self._head_at
            self._head_at = now

    def _take(self, began: float) -> None:
        self._sums.own_s += self._loop.now - began
        self._next += 1
        self._sums.batches += 1
        self.history.delivered.append(self._loop.now)
        self._draw()
        gpu_s, cpu_s = self._step()
        self._sums.trainer_cpu_s += cpu_s
        started = self._loop.now

        def done() -> None:
            took_s = self._loop.now - started
            self._sums.work_s += took_s
            self._sums.steps += 1
            self._sums.steps_squared += took_s * took_s
            self._sums.trainer_queued_s += max(0.0, took_s - gpu_s - cpu_s)
            self.ask()

        self._simulator.cpus.start(cpu_s, lambda: self._loop.after(gpu_s, done))

    def _step(self) -> tuple[float, float]:
        """GPU and CPU of the step that begins, in seconds; a pause that is due counts as the GPU's."""
        _, first, draws = self._streams[-1]
        gpu_s, cpu_s = draws.step(self._simulator.step, self._next - 1 - first)
        pauses = self._simulator.world.pauses
        if pauses is not None and not pauses.stops_all and self._loop.now >= (self._pauses + 1) * pauses.every_s:
            self._pauses = int(self._loop.now / pauses.every_s)
            gpu_s += pauses.seconds
        return gpu_s, cpu_s

    # -- sampling ------------------------------------------------------------------------------------------------

    @property
    def memory(self) -> float:
        """Bytes in batches in flight and in local workers."""
        world, work = self._simulator.world, self._simulator.work
        local = len(self.workers) - self._remotes
        return local * world.worker_bytes + (len(self._ready) + len(self._making)) * work.batch_bytes

    def _sample(self) -> None:
        self._count_waiting()
        sums, self._sums = self._sums, WindowCounts()
        sample = self._measured(sums)
        self._look_back(sample)
        decision = self._steering.step(sample)
        if decision is not None:
            self._carry_out(decision)
        self._loop.after(self._simulator.period(self._loop.now), self._sample)

    def _carry_out(self, decision: Decision) -> None:
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

    def _measured(self, sums: WindowCounts) -> Sample:
        """What the tuner would measure of the window that ends now."""
        now, simulator, noise = self._loop.now, self._simulator, self._noise
        remotes, running = self._remotes, [sum(w.up and w.remote == remote for w in self.workers) for remote in (0, 1)]
        knows = simulator.world.knows_queue
        return Sample(
            at=now,
            seconds=now - self._window_at,
            settings=self.settings,
            batches=sums.batches,
            wait_s=noise(sums.wait_s),
            own_s=noise(sums.own_s),
            work_s=noise(sums.work_s),
            head_s=noise(sums.head_s),
            step_spread=sums.step_spread(),
            ready=len(self._ready),
            in_flight=len(self._making) + len(self._pending),
            batch_bytes=simulator.work.batch_bytes,
            made_here=sums.lane("here", noise, knows_queue=knows),
            local=sums.lane(
                "local", noise, knows_queue=knows, requested=len(self.workers) - remotes, running=running[0]
            ),
            remote=sums.lane(
                "remote",
                noise,
                knows_queue=knows,
                requested=remotes,
                running=running[1],
                room=simulator.room(self),
                unplaced=simulator.unplaced(self),
            ),
            host=self._host(sums),
        )

    def _host(self, sums: WindowCounts) -> HostSample:
        simulator, world, noise = self._simulator, self._simulator.world, self._noise
        seconds = self._loop.now - self._window_at
        others_s, self._others_s = self._others_s, simulator.ticks(simulator.cpus.taken_by_others())
        trainer_s, self._trainer_cpu_s = self._trainer_cpu_s, self._trainer_cpu_s + sums.trainer_cpu_s
        return HostSample(
            cpus=world.cpus / world.ranks,
            others=noise((self._others_s - others_s) / seconds / world.ranks),
            trainer_cpu_s=noise(simulator.ticks(self._trainer_cpu_s) - simulator.ticks(trainer_s)),
            trainer_queued_s=noise(sums.trainer_queued_s) if world.knows_queue else None,
            memory_free=int(world.memory - simulator.memory),
            worker_bytes=world.worker_bytes,
        )

    def _look_back(self, sample: Sample) -> None:
        """Keep what the history is to tell of a window, and begin the next."""
        history, running = self.history, sample.local.running + sample.remote.running
        history.local_s += sample.seconds * sample.local.running
        history.remote_s += sample.seconds * sample.remote.running
        peak, self._peak = max(self._peak, self.memory), self.memory
        history.marks.append(Mark(sample.at, self.settings, running, sample.rate, sample.stall, peak))
        self._window_at = sample.at

    def _noise(self, value: float) -> float:
        level = self._simulator.world.noise
        return value * max(0.0, self._errors.gauss(1.0, level)) if level else value
