"""A simulated loader, machine, cluster and trainer on virtual time, to try controllers on.

CPUs are shared as a kernel shares them: everybody who wants one gets an equal part, at most a whole one (egalitarian
processor sharing). So does the link to the cluster. Local workers, the training process and other people's work meet
on the trainer's machine; remote workers have a CPU each. Batches are drawn into a window, made in any order and
delivered in order, as `dpex.engine` does it.
"""

from __future__ import annotations

import math
import random
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from dpex.autotune.clockwork import Clock, Shared
from dpex.autotune.types import Decision, HostSample, LaneSample, Sample, Settings

_SERVICES_KEPT = 32
_TINY = 1e-12


class Steering(Protocol):
    """What a plant asks: the settings to begin with, and, window by window, what to change."""

    def begin(self) -> Settings:
        """Settings at the start."""

    def step(self, sample: Sample) -> Decision | None:
        """A change, or None."""


@dataclass(frozen=True, kw_only=True)
class Work:
    """Making one batch: waiting (storage, network) and CPU, in seconds.

    spread: sigma of a log-normal factor with mean 1 on both. rare, rare_factor: a share of batches takes that much
    longer. encode_s: CPU for handing it over, in a worker only.
    """

    cpu_s: float = 0.0
    wait_s: float = 0.0
    spread: float = 0.0
    rare: float = 0.0
    rare_factor: float = 1.0
    encode_s: float = 0.0
    batch_bytes: float = 1e6


@dataclass(frozen=True, kw_only=True)
class Step:
    """What the consumer does with a batch: time on its GPU, CPU on the host, both in seconds; spread as in `Work`."""

    gpu_s: float = 0.0
    cpu_s: float = 0.0
    spread: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Phase:
    """From ``at`` seconds on this holds; what is None stays as it was.

    others: CPUs that other people's programs want on the trainer's machine. nodes: remote workers the cluster has room
    for (those beyond it die). link: bytes per second from the cluster.
    """

    at: float = 0.0
    work: Work | None = None
    step: Step | None = None
    others: float | None = None
    nodes: int | None = None
    link: float | None = None


@dataclass(frozen=True, kw_only=True)
class World:
    """A plant's constants. own_s: CPU of the consumer per batch from a worker. fork_s, actor_s: until a worker is up.

    thrash: by how much more CPU a batch costs per process beyond the number of CPUs (caches, memory bandwidth).
    worker_bytes: memory of a local worker. noise: relative error of every measured time.
    """

    cpus: float = 2.0
    ranks: int = 1
    own_s: float = 0.0003
    fork_s: float = 0.02
    actor_s: float = 1.5
    rtt_s: float = 0.001
    thrash: float = 0.0
    worker_bytes: float = 5e7
    memory: float = 8e9
    noise: float = 0.0
    seed: int = 0
    phases: tuple[Phase, ...] = ()


@dataclass
class Mark:
    """One sampling window of a rank, for looking back. memory: the most that it held in it."""

    at: float
    settings: Settings
    running: int
    rate: float
    stall: float
    memory: float


@dataclass
class History:
    """What a rank did: windows, decisions, delivery times, and worker-seconds by lane."""

    marks: list[Mark] = field(default_factory=list)
    decisions: list[Decision] = field(default_factory=list)
    delivered: list[float] = field(default_factory=list)
    local_s: float = 0.0
    remote_s: float = 0.0

    def rate(self, start: float, end: float) -> float:
        """Batches per second delivered between two moments."""
        return (bisect_right(self.delivered, end) - bisect_right(self.delivered, start)) / max(_TINY, end - start)


@dataclass(eq=False)
class _Worker:
    remote: bool
    up: bool = False
    leaving: bool = False
    dead: bool = False
    ticket: int | None = None


class Rank:
    """A training process with its loader."""

    def __init__(self, plant: Plant, steering: Steering, seed: int) -> None:
        self._plant = plant
        self._clock = plant.clock
        self._steering = steering
        self._works, self._steps, self._errors = (random.Random(f"{seed} {what}") for what in ("work", "step", "error"))
        self.history = History()
        self.settings = steering.begin()
        self.workers: list[_Worker] = []
        self._pending: deque[int] = deque()
        self._remotes = 0
        self._drawn = self._next = 0
        self._ready: set[int] = set()
        self._making: set[int] = set()
        self._blocked_at: float | None = None
        self._head_at: float | None = None
        self._window_at = self._others_s = 0.0
        self._peak = 0.0
        self._sums = _Sums()

    def begin(self) -> None:
        """Start the first workers and the consumer; the plant must know this rank by now."""
        self._draw()
        self._want()
        self._clock.after(self._plant.period(0.0), self._sample)
        self._clock.after(0.0, self.ask)

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

    def _make(self, worker: _Worker) -> None:
        ticket = worker.ticket = self._pending.popleft()
        self._making.add(ticket)
        self._peak = max(self._peak, self.memory)
        wait_s, cpu_s = self._plant.draw_work(self._works)
        began, encode_s = self._clock.now, self._plant.work.encode_s
        thrashing, asked_at = 1.0, 0.0

        def compute() -> None:
            nonlocal thrashing, asked_at
            if worker.dead:
                return
            asked_at = self._clock.now
            if worker.remote:
                self._clock.after(cpu_s + encode_s, computed)
            else:
                thrashing = self._plant.thrashing()
                self._plant.cpus.start((cpu_s + encode_s) * thrashing, computed)

        def computed() -> None:
            if worker.dead:
                return
            now = self._clock.now
            queued_s = max(0.0, now - asked_at - (cpu_s + encode_s) * thrashing)
            stages = cpu_s * thrashing, encode_s * thrashing, now - began, queued_s
            if worker.remote:
                self._free(worker)
                size, link = self._plant.work.batch_bytes, self._plant.link
                self._clock.after(
                    self._plant.world.rtt_s, lambda: link.start(size, lambda: self._made(True, ticket, *stages))
                )
            else:
                self._made(False, ticket, *stages)
                self._free(worker)

        self._clock.after(wait_s, compute)

    def _free(self, worker: _Worker) -> None:
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

    def _end(self, worker: _Worker) -> None:
        worker.dead = True
        if worker in self.workers:
            self.workers.remove(worker)
            self._remotes -= worker.remote
            if worker.remote:
                self._plant.nodes_freed()

    def lose(self, worker: _Worker) -> None:
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
                worker = _Worker(remote)
                self.workers.append(worker)
                self._remotes += remote
                if remote:
                    self._plant.queue_for_node(self, worker)
                else:
                    self._clock.after(self._plant.world.fork_s, lambda worker=worker: self.came_up(worker))  # type: ignore[misc]
        self._feed()

    def came_up(self, worker: _Worker) -> None:
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
        self._blocked_at = self._clock.now
        self._deliver()

    def _deliver(self) -> None:
        if self._blocked_at is None:
            return
        if self._next in self._ready:
            self._ready.discard(self._next)
            self._hand_out(self._plant.world.own_s)
        elif not self.settings.workers and not any(w.up for w in self.workers) and self._next in self._pending:
            self._pending.remove(self._next)
            self._make_here()
        elif self._ready and self._head_at is None:
            self._head_at = self._clock.now

    def _make_here(self) -> None:
        wait_s, cpu_s = self._plant.draw_work(self._works)
        began = self._unblock()

        def made() -> None:
            wall_s = self._clock.now - began
            self._sums.made_here(wall_s, cpu_s, wall_s - wait_s - cpu_s)
            self._take(began)

        self._clock.after(wait_s, lambda: self._plant.cpus.start(cpu_s, made))

    def _hand_out(self, own_s: float) -> None:
        began = self._unblock()
        self._sums.trainer_cpu_s += own_s

        def handed() -> None:
            self._sums.trainer_queued_s += max(0.0, self._clock.now - began - own_s)
            self._take(began)

        self._plant.cpus.start(own_s, handed)

    def _unblock(self) -> float:
        """The consumer waits no longer; now."""
        self._count_waiting()
        self._blocked_at = self._head_at = None
        return self._clock.now

    def _count_waiting(self) -> None:
        """A wait that is under way counts up to now."""
        now = self._clock.now
        if self._blocked_at is not None:
            self._sums.wait_s += now - self._blocked_at
            self._blocked_at = now
        if self._head_at is not None:
            self._sums.head_s += now - self._head_at
            self._head_at = now

    def _take(self, began: float) -> None:
        self._sums.own_s += self._clock.now - began
        self._next += 1
        self._sums.batches += 1
        self.history.delivered.append(self._clock.now)
        self._draw()
        gpu_s, cpu_s = self._plant.draw_step(self._steps)
        self._sums.trainer_cpu_s += cpu_s
        started = self._clock.now

        def done() -> None:
            took_s = self._clock.now - started
            self._sums.work_s += took_s
            self._sums.steps += 1
            self._sums.steps_squared += took_s * took_s
            self._sums.trainer_queued_s += max(0.0, took_s - gpu_s - cpu_s)
            self.ask()

        self._plant.cpus.start(cpu_s, lambda: self._clock.after(gpu_s, done))

    # -- sampling ------------------------------------------------------------------------------------------------

    @property
    def memory(self) -> float:
        """Bytes in batches in flight and in local workers."""
        world, work = self._plant.world, self._plant.work
        local = len(self.workers) - self._remotes
        return local * world.worker_bytes + (len(self._ready) + len(self._making)) * work.batch_bytes

    def _sample(self) -> None:
        now, plant = self._clock.now, self._plant
        seconds = now - self._window_at
        running = [worker for worker in self.workers if worker.up]
        self._count_waiting()
        sums, self._sums = self._sums, _Sums()
        others_s, self._others_s = self._others_s, plant.cpus.taken_by_others()
        remote = [worker for worker in self.workers if worker.remote]
        noise = self._noise
        sample = Sample(
            at=now,
            seconds=seconds,
            settings=self.settings,
            batches=sums.batches,
            wait_s=noise(sums.wait_s),
            own_s=noise(sums.own_s),
            work_s=noise(sums.work_s),
            head_s=noise(sums.head_s),
            step_spread=sums.step_spread(),
            ready=len(self._ready),
            in_flight=len(self._making) + len(self._pending),
            batch_bytes=plant.work.batch_bytes,
            made_here=sums.lane("here", 0, 0, noise, None),
            local=sums.lane("local", len(self.workers) - len(remote), sum(not w.remote for w in running), noise, None),
            remote=replace(
                sums.lane("remote", len(remote), sum(w.remote for w in running), noise, plant.room(self)),
                unplaced=plant.unplaced(self),
            ),
            host=HostSample(
                cpus=plant.world.cpus / plant.world.ranks,
                others=noise((self._others_s - others_s) / seconds / plant.world.ranks),
                trainer_cpu_s=noise(sums.trainer_cpu_s),
                trainer_queued_s=noise(sums.trainer_queued_s),
                memory_free=int(plant.world.memory - plant.memory),
                worker_bytes=plant.world.worker_bytes,
            ),
        )
        self._window_at = now
        self.history.local_s += seconds * sum(not worker.remote for worker in running)
        self.history.remote_s += seconds * sum(worker.remote for worker in running)
        mark = Mark(now, self.settings, len(running), sample.rate, sample.stall, max(self._peak, self.memory))
        self.history.marks.append(mark)
        self._peak = self.memory
        decision = self._steering.step(sample)
        if decision is not None:
            self.history.decisions.append(decision)
            self.settings = decision.new
            self._want()
            self._draw()
            self._deliver()
        self._clock.after(plant.period(now), self._sample)

    def _noise(self, value: float) -> float:
        level = self._plant.world.noise
        return value * max(0.0, self._errors.gauss(1.0, level)) if level else value


@dataclass
class _Sums:
    """What happened in a window."""

    batches: int = 0
    wait_s: float = 0.0
    own_s: float = 0.0
    work_s: float = 0.0
    head_s: float = 0.0
    steps: int = 0
    steps_squared: float = 0.0
    trainer_cpu_s: float = 0.0
    trainer_queued_s: float = 0.0
    lanes: dict[str, list[float]] = field(default_factory=dict)
    services: dict[str, list[float]] = field(default_factory=dict)

    def step_spread(self) -> float | None:
        """Standard deviation over mean of the steps that ended in it."""
        mean = self.work_s / self.steps if self.steps else 0.0
        if self.steps < 2 or mean <= 0:
            return None
        return math.sqrt(max(0.0, self.steps_squared / self.steps / mean**2 - 1.0))

    def made(
        self, remote: bool, cpu_s: float, encode_s: float, wall_s: float, queued_s: float, rng: random.Random
    ) -> None:
        """A worker made a batch; what of ``wall_s`` is not encoding counts as reading."""
        lane = "remote" if remote else "local"
        self._add(lane, (wall_s - encode_s, encode_s, cpu_s + encode_s, queued_s), wall_s, rng)

    def made_here(self, wall_s: float, cpu_s: float, queued_s: float) -> None:
        """The training process made a batch."""
        self.trainer_cpu_s += cpu_s
        self.trainer_queued_s += max(0.0, queued_s)
        self._add("here", (wall_s, 0.0, cpu_s, max(0.0, queued_s)), wall_s, None)

    def _add(self, lane: str, stages_s: Sequence[float], wall_s: float, rng: random.Random | None) -> None:
        sums = self.lanes.setdefault(lane, [0, 0.0, 0.0, 0.0, 0.0])
        sums[0] += 1
        for place, stage_s in enumerate(stages_s, 1):
            sums[place] += stage_s
        kept = self.services.setdefault(lane, [])
        if len(kept) < _SERVICES_KEPT:
            kept.append(wall_s)
        elif rng is not None and (place := rng.randrange(int(sums[0]))) < _SERVICES_KEPT:
            kept[place] = wall_s

    def lane(
        self, name: str, requested: int, running: int, noise: Callable[[float], float], room: int | None
    ) -> LaneSample:
        """The lane's part of a `Sample`."""
        tickets, read_s, encode_s, cpu_s, queued_s = self.lanes.get(name, [0, 0.0, 0.0, 0.0, 0.0])
        return LaneSample(
            requested=requested,
            running=running,
            tickets=int(tickets),
            read_s=noise(read_s),
            encode_s=noise(encode_s),
            cpu_s=noise(cpu_s),
            queued_s=noise(queued_s),
            services_s=tuple(self.services.get(name, ())),
            room=room,
        )


class Plant:
    """The whole: run it with `run`, then look at ``ranks[i].history``."""

    def __init__(self, world: World, steering: Sequence[Steering]) -> None:
        if len(steering) != world.ranks:
            raise ValueError(f"{world.ranks} ranks need as many controllers, got {len(steering)}")
        self.world = world
        self.clock = Clock()
        self.cpus = Shared(self.clock, world.cpus)
        self.link = Shared(self.clock, 1e9, each=1e15)
        self.work = Work()
        self.step = Step()
        self._nodes = 0
        self._queue: deque[tuple[Rank, _Worker]] = deque()
        self.ranks: list[Rank] = []
        for phase in sorted(world.phases, key=lambda phase: phase.at):
            if phase.at <= 0:
                self._begin(phase)
            else:
                self.clock.at(phase.at, lambda phase=phase: self._begin(phase))  # type: ignore[misc]
        for number, steer in enumerate(steering):
            rank = Rank(self, steer, world.seed * 1000 + number)
            self.ranks.append(rank)
            rank.begin()

    def run(self, seconds: float) -> None:
        """Let simulated time pass."""
        self.clock.run(self.clock.now + seconds)

    @staticmethod
    def period(now: float) -> float:
        """How long the next sampling window is: short at first."""
        return 0.1 if now < 1.0 else 0.25 if now < 5.0 else 1.0

    # -- what holds now --------------------------------------------------------------------------------------------

    def _begin(self, phase: Phase) -> None:
        self.work = phase.work or self.work
        self.step = phase.step or self.step
        if phase.others is not None:
            self.cpus.set(others=phase.others)
        if phase.link is not None:
            self.link.set(capacity=phase.link)
        if phase.nodes is not None:
            self._nodes = phase.nodes
            self._evict()
            self.nodes_freed()

    def draw_work(self, rng: random.Random) -> tuple[float, float]:
        """Waiting and CPU of one batch."""
        work = self.work
        factor = _log_normal(rng, work.spread)
        if work.rare and rng.random() < work.rare:
            factor *= work.rare_factor
        return work.wait_s * factor, work.cpu_s * factor

    def draw_step(self, rng: random.Random) -> tuple[float, float]:
        """GPU and CPU of one step."""
        factor = _log_normal(rng, self.step.spread)
        return self.step.gpu_s * factor, self.step.cpu_s * factor

    def thrashing(self) -> float:
        """Factor on CPU work while more processes than CPUs want to run."""
        return 1.0 + self.world.thrash * max(0.0, self.cpus.jobs + 1 - self.world.cpus)

    @property
    def memory(self) -> float:
        """Bytes of all ranks."""
        return sum(rank.memory for rank in self.ranks)

    # -- the cluster -----------------------------------------------------------------------------------------------

    def _placed(self) -> list[tuple[Rank, _Worker]]:
        queued = {id(worker) for _, worker in self._queue}
        return [(r, w) for r in self.ranks for w in r.workers if w.remote and id(w) not in queued]

    def room(self, rank: Rank) -> int:
        """Further remote workers that this rank could have now: what is free, up to its share."""
        free = self._nodes - len(self._placed()) - len(self._queue)
        share = self._nodes // self.world.ranks - sum(worker.remote for worker in rank.workers)
        return max(0, min(free, share))

    def unplaced(self, rank: Rank) -> int:
        """Remote workers of this rank that wait for a place."""
        return sum(waiting is rank and not worker.dead for waiting, worker in self._queue)

    def queue_for_node(self, rank: Rank, worker: _Worker) -> None:
        """A remote worker is asked for."""
        self._queue.append((rank, worker))
        self.nodes_freed()

    def nodes_freed(self) -> None:
        """Place who waits."""
        placed = len(self._placed())
        while self._queue and placed < self._nodes:
            rank, worker = self._queue.popleft()
            if not worker.dead:
                placed += 1
                self.clock.after(self.world.actor_s, lambda rank=rank, worker=worker: rank.came_up(worker))  # type: ignore[misc]

    def _evict(self) -> None:
        placed = self._placed()
        placed.sort(key=lambda pair: [w for w in pair[0].workers if w.remote].index(pair[1]))
        for rank, worker in placed[self._nodes :]:
            rank.lose(worker)


def _log_normal(rng: random.Random, sigma: float) -> float:
    return rng.lognormvariate(-sigma * sigma / 2, sigma) if sigma else 1.0


@dataclass(frozen=True)
class Fixed:
    """A steering that never changes anything: what the exhaustive search tries."""

    settings: Settings

    def begin(self) -> Settings:
        """See `Steering.begin`."""
        return self.settings

    def step(self, sample: Sample) -> Decision | None:
        """See `Steering.step`."""
        return None


def simulate(world: World, steering: Sequence[Steering], seconds: float) -> list[History]:
    """Run a world; the ranks' histories."""
    plant = Plant(world, steering)
    plant.run(seconds)
    return [rank.history for rank in plant.ranks]
