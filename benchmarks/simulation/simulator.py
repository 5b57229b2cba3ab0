"""A simulated loader, machine, cluster and trainer on virtual time, to judge controllers by.

CPUs are shared as a kernel shares them: everybody who wants one gets an equal part, at most a whole one (egalitarian
processor sharing). So does the link to the cluster. Local workers, the training process and other people's work meet
on the trainer's machine; remote workers have a CPU each. Batches are drawn into a window, made in any order and
delivered in order, as `dpex.engine` does it.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Sequence

from benchmarks.simulation.event_loop import EventLoop, SharedResource
from benchmarks.simulation.history import History
from benchmarks.simulation.rank import Rank, Worker
from benchmarks.simulation.steering import Steering
from benchmarks.simulation.world import Phase, Step, Work, World


class Simulator:
    """The whole: run it with `run`, then look at ``ranks[i].history``."""

    def __init__(self, world: World, steering: Sequence[Steering]) -> None:
        if len(steering) != world.ranks:
            raise ValueError(f"{world.ranks} ranks need as many controllers, got {len(steering)}")
        self.world = world
        self.loop = EventLoop()
        self.cpus = SharedResource(self.loop, world.cpus)
        self.link = SharedResource(self.loop, 1e9, each=1e15)
        self.work = Work()
        self.step = Step()
        self._nodes = 0
        self._queue: deque[tuple[Rank, Worker]] = deque()
        self.ranks: list[Rank] = []
        for phase in sorted(world.phases, key=lambda phase: phase.at):
            if phase.at <= 0:
                self._begin(phase)
            else:
                self.loop.at(phase.at, lambda phase=phase: self._begin(phase))  # type: ignore[misc]
        for number, steer in enumerate(steering):
            rank = Rank(self, steer, world.seed * 1000 + number)
            self.ranks.append(rank)
            rank.begin()

    def run(self, seconds: float) -> None:
        """Let simulated time pass."""
        self.loop.run(self.loop.now + seconds)

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

    def _placed(self) -> list[tuple[Rank, Worker]]:
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

    def queue_for_node(self, rank: Rank, worker: Worker) -> None:
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
                self.loop.after(self.world.actor_s, lambda rank=rank, worker=worker: rank.came_up(worker))  # type: ignore[misc]

    def _evict(self) -> None:
        placed = self._placed()
        placed.sort(key=lambda pair: [w for w in pair[0].workers if w.remote].index(pair[1]))
        for rank, worker in placed[self._nodes :]:
            rank.lose(worker)


def _log_normal(rng: random.Random, sigma: float) -> float:
    return rng.lognormvariate(-sigma * sigma / 2, sigma) if sigma else 1.0


def simulate(world: World, steering: Sequence[Steering], seconds: float) -> list[History]:
    """Run a world; the ranks' histories."""
    simulator = Simulator(world, steering)
    simulator.run(seconds)
    return [rank.history for rank in simulator.ranks]
