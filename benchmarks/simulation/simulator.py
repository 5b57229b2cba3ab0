"""A simulated loader, machine, cluster and trainer on virtual time, to judge controllers by.

CPUs are shared as a kernel shares them: everybody who wants one gets an equal part, at most a whole one (egalitarian
processor sharing). So does the link to the cluster. Local workers, the training process and other people's work meet
on the trainer's machine; remote workers have a CPU each. Batches are drawn into a window, made in any order and
delivered in order, as `dpex.engine.engine` does it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from benchmarks.simulation.draws import spells
from benchmarks.simulation.event_loop import EventLoop, SharedResource
from benchmarks.simulation.gpu import AllReduce, GpuTrainer
from benchmarks.simulation.history import History, MachineBytes
from benchmarks.simulation.rank import Rank, Worker
from benchmarks.simulation.steering import Steering
from benchmarks.simulation.tuning import Tuning
from benchmarks.simulation.world import Bursts, Pauses, Phase, Step, Work, World
from dpex.measure.settings import Settings


class Simulator:
    """The whole: run it with `run`, then look at ``ranks[i].history``.

    Where ``steering`` decides nothing there is no need for it to be asked: without ``is_tuned`` no windows are taken.
    """

    def __init__(
        self, world: World, steering: Sequence[Steering], *, is_tuned: bool = True, interval_s: float = 1.0
    ) -> None:
        if len(steering) != world.ranks:
            raise ValueError(f"{world.ranks} ranks need as many controllers, got {len(steering)}")
        self.world = world
        self.loop = EventLoop()
        self.granted = world.cpus
        self.cpus = SharedResource(self.loop, world.cpus)
        self.link = SharedResource(self.loop, 1e9, each=1e15)
        self.storage = SharedResource(self.loop, 1e15, each=1e15)
        reduce_s = 0.0 if world.gpu is None else world.gpu.all_reduce_s
        self._all_reduce = AllReduce(self.loop, world.ranks, reduce_s)
        self.work = Work()
        self.step = Step()
        self.stream = 0
        self._others = 0.0
        self._is_burst = False
        self._nodes = 0
        self._queue: deque[tuple[Rank, Worker]] = deque()
        self.machine_bytes = MachineBytes()
        self.ranks: list[Rank] = []
        for phase in sorted(world.phases, key=lambda phase: phase.at):
            if phase.at <= 0:
                self._begin(phase)
            else:
                self.loop.at(phase.at, lambda phase=phase: self._begin(phase), is_fixed=True)  # type: ignore[misc]
        self._begin_troubles()
        for number, steer in enumerate(steering):
            seed = world.seed * 1000 + number
            rank = Rank(self, steer.begin(), seed)
            self.ranks.append(rank)
            rank.begin()
            if is_tuned:
                Tuning(self, rank, steer, seed, interval_s).begin()

    def run(self, seconds: float) -> None:
        """Let simulated time pass."""
        self.loop.run(self.loop.now + seconds)

    def set(self, settings: Settings) -> None:
        """All ranks have these settings from now on."""
        for rank in self.ranks:
            rank.set(settings)

    def make_gpu(self) -> GpuTrainer | None:
        """The GPU of one more rank, if they have any."""
        gpu = self.world.gpu
        return None if gpu is None else GpuTrainer(self.loop, self.cpus, gpu, self._all_reduce)

    # -- what holds now --------------------------------------------------------------------------------------------

    def _begin(self, phase: Phase) -> None:
        self.work = phase.work or self.work
        self.step = phase.step or self.step
        if phase.cpus is not None:
            self.granted = phase.cpus
            self.cpus.set(capacity=phase.cpus)
        if phase.others is not None:
            self._others = phase.others
            self._set_others()
        if phase.link is not None:
            self.link.set(capacity=phase.link)
        if phase.storage is not None:
            self.storage.set(capacity=phase.storage.capacity, each=phase.storage.reader, loss=phase.storage.loss)
        if phase.nodes is not None:
            self._nodes = phase.nodes
            self._evict()
            self.nodes_freed()
        if phase.stream is not None:
            self.stream = phase.stream
            for rank in self.ranks:
                rank.begin_stream(phase.stream)

    def slowdown(self) -> float:
        """Factor on CPU work while many processes want to run."""
        return self._thrashing() * self._hyper_threading()

    def _thrashing(self) -> float:
        return 1.0 + self.world.thrash * max(0.0, self.cpus.jobs + 1 - self.granted)

    def _hyper_threading(self) -> float:
        """CPUs at work over the cores' worth that they are."""
        if self.world.smt_yield is None:
            return 1.0
        cores = self.granted / 2
        busy = min(self.granted, self.cpus.jobs + 1 + self._others)
        return busy / min(busy, cores + max(0.0, busy - cores) * self.world.smt_yield)

    def ticks(self, cpu_s: float) -> float:
        """CPU time as the machine's clocks show it."""
        tick_s = self.world.tick_s
        return cpu_s // tick_s * tick_s if tick_s else cpu_s

    @property
    def memory(self) -> float:
        """Bytes of all ranks."""
        return sum(rank.memory for rank in self.ranks)

    def note_memory(self) -> None:
        """A rank holds more than before."""
        self.machine_bytes.note(self.loop.now, self.memory)

    # -- troubles --------------------------------------------------------------------------------------------------

    def _begin_troubles(self) -> None:
        pauses, bursts = self.world.pauses, self.world.bursts
        if pauses is not None and pauses.stops_all:
            self.loop.at(pauses.every_s, lambda: self._stop_all(pauses), is_fixed=True)
        if bursts is not None:
            self._burst(bursts)

    def _stop_all(self, pauses: Pauses) -> None:
        self.loop.at(self.loop.now + pauses.every_s, lambda: self._stop_all(pauses), is_fixed=True)
        for resource in (self.cpus, self.link, self.storage):
            resource.stop(pauses.seconds)
        self.loop.postpone(pauses.seconds)

    def _burst(self, bursts: Bursts) -> None:
        found = spells(f"{self.world.seed} burst", bursts.off_s, bursts.on_s, is_regular=bursts.is_regular)
        self._is_burst = found.is_on(self.loop.now)
        self._set_others()
        self.loop.at(found.next_change(self.loop.now), lambda: self._burst(bursts), is_fixed=True)

    def _set_others(self) -> None:
        burst = self.world.bursts.cpus if self.world.bursts is not None and self._is_burst else 0.0
        self.cpus.set(others=self._others + burst)

    def slowness(self, seed: int, worker: Worker) -> float:
        """Factor on a batch that this worker begins now."""
        slow = self.world.slow
        if slow is None or slow.remote != worker.remote:
            return 1.0
        who = f"{seed} slow {worker.remote} {worker.number // slow.together}"
        off_s = slow.seconds * (1.0 - slow.share) / slow.share
        return slow.factor if spells(who, off_s, slow.seconds).is_on(self.loop.now) else 1.0

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


def simulate(world: World, steering: Sequence[Steering], seconds: float, interval_s: float = 1.0) -> list[History]:
    """Run a world; the ranks' histories. interval_s: see `dpex.autotune.config.AutotuneConfig`."""
    simulator = Simulator(world, steering, interval_s=interval_s)
    simulator.run(seconds)
    return [rank.history for rank in simulator.ranks]
