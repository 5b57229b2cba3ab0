"""Many trainings on one cluster: `python -m benchmarks.simulation.cluster`.

Each trainer has a machine, a network and the law that ships; they share the nodes as `dpex.pools.ray.room` does,
by `dpex.schedule.fair_shares`. Nodes fail and come back. Every trainer runs on a clock of its own, and none is ahead
of another by more than `SLICE_S`.
"""

from __future__ import annotations

import argparse
import random
import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from statistics import fmean

from benchmarks.simulation.history import History
from benchmarks.simulation.rank import Rank, Worker
from benchmarks.simulation.score import Guarded, cold_start
from benchmarks.simulation.simulator import Simulator
from benchmarks.simulation.tuning import Tuning
from benchmarks.simulation.world import Phase, Step, Work, World
from dpex.autotune.config import AutotuneConfig
from dpex.autotune.law import law_for
from dpex.autotune.need import made_without, remote_need
from dpex.autotune.runtime.tuner import ROOM_EVERY_S
from dpex.autotune.runtime.window_sample import Window
from dpex.autotune.types import Sample
from dpex.schedule.fair_shares import Claim, ClusterShares
from dpex.schedule.room import KnownNeed, RoomFound, RoomWanted, room_found

SLICE_S = 0.05
"""Small beside the second between two reports to the coordinator."""
BATCH_CPU_S = 0.4
"""A batch of 64 photographs that are decoded, cropped and normalised takes a core so long."""
BATCH_BYTES = 64 * 3 * 224 * 224.0
"""As bytes, one for each value of a pixel."""
LINK = 12.5e9
"""Bytes a second: 100 Gbit/s at each trainer."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What is simulated. wants: batches a second that each trainer's GPU could take.

    A node fails every ``fail_every_s`` and is back after ``repair_s``.
    """

    wants: tuple[float, ...]
    nodes: int = 64
    per_node: int = 32
    cpus: float = 16.0
    seconds: float = 120.0
    fail_every_s: float = 20.0
    repair_s: float = 30.0
    seed: int = 0

    @property
    def places(self) -> int:
        """Workers that the cluster has room for while all nodes are up."""
        return self.nodes * self.per_node


class Cluster:
    """The nodes, who runs where, and the coordinator."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._places: dict[int, list[tuple[Trainer, Worker] | None]] = {
            node: [None] * plan.per_node for node in range(plan.nodes)
        }
        self._free = deque((node, place) for place in range(plan.per_node) for node in range(plan.nodes))
        self._held: dict[Worker, tuple[int, int]] = {}
        self._queue: deque[tuple[Trainer, Rank, Worker]] = deque()
        self.shares = ClusterShares()
        self.coordinator_s = 0.0
        self.reports = 0

    @property
    def capacity(self) -> int:
        """Places on nodes that are up."""
        return len(self._places) * self._plan.per_node

    def report(self, name: str, claim: Claim, now: float) -> int:
        """Ask the coordinator."""
        began = time.process_time()
        granted = self.shares.report(name, claim, free=len(self._free), total=self.capacity, now=now)
        self.coordinator_s += time.process_time() - began
        self.reports += 1
        return granted

    @property
    def free(self) -> int:
        """Places that nobody has."""
        return len(self._free)

    def queued(self, rank: Rank) -> int:
        """Workers of this trainer that wait for a place."""
        return sum(waiting is rank and not worker.dead for _, waiting, worker in self._queue)

    def ask(self, trainer: Trainer, rank: Rank, worker: Worker) -> None:
        """A worker wants a place."""
        self._queue.append((trainer, rank, worker))
        self.place()

    def place(self) -> None:
        """Give free places to who waits, after those that have ended gave theirs back."""
        for worker in [worker for worker in self._held if worker.dead]:
            self._release(worker)
        while self._queue and self._free:
            trainer, rank, worker = self._queue.popleft()
            if worker.dead:
                continue
            node, place = self._free.popleft()
            self._held[worker] = node, place
            self._places[node][place] = (trainer, worker)
            trainer.loop.after(trainer.world.actor_s, lambda rank=rank, worker=worker: rank.came_up(worker))  # type: ignore[misc]

    def _release(self, worker: Worker) -> None:
        node, place = self._held.pop(worker)
        if node in self._places:
            self._places[node][place] = None
            self._free.append((node, place))

    def fail(self, node: int) -> None:
        """The node goes, with all workers on it."""
        gone = [held for held in self._places.pop(node) if held is not None]
        self._free = deque((other, place) for other, place in self._free if other != node)
        for trainer, worker in gone:
            trainer.ranks[0].lose(worker)

    def repair(self, node: int) -> None:
        """It is back, and empty."""
        self._places[node] = [None] * self._plan.per_node
        self._free.extend((node, place) for place in range(self._plan.per_node))
        self.place()


class Trainer(Simulator):
    """One training, whose remote workers have their places on the cluster that all share."""

    def __init__(self, name: str, world: World, cluster: Cluster) -> None:
        self.cluster = cluster
        config = AutotuneConfig()
        self.steering = Guarded(law_for(config, cold_start(world, config)))
        super().__init__(world, [self.steering], is_tuned=False)
        self.tuning = SharedTuning(self, name, self.ranks[0], self.steering, world.seed, config)
        self.tuning.begin()

    @property
    def history(self) -> History:
        """What it did."""
        return self.ranks[0].history

    def room(self, rank: Rank) -> int:
        """See `Simulator.room`."""
        return self.tuning.found.more

    def unplaced(self, rank: Rank) -> int:
        """See `Simulator.unplaced`."""
        return self.cluster.queued(rank)

    def queue_for_node(self, rank: Rank, worker: Worker) -> None:
        """See `Simulator.queue_for_node`."""
        self.cluster.ask(self, rank, worker)

    def nodes_freed(self) -> None:
        """See `Simulator.nodes_freed`."""
        self.cluster.place()


class SharedTuning(Tuning):
    """Reports to the coordinator about once a second, as `dpex.pools.ray.room.RemoteRoom` does."""

    def __init__(
        self, trainer: Trainer, name: str, rank: Rank, steering: Guarded, seed: int, config: AutotuneConfig
    ) -> None:
        super().__init__(trainer, rank, steering, seed, config.interval_s)
        self._trainer = trainer
        self._name = name
        self._wait_goal = config.wait_goal
        self._reported_at = -ROOM_EVERY_S
        self._known = KnownNeed()
        self._granted = 0
        self.found = RoomFound(more=0)
        self.steps_s = 0.0

    def _turn(self) -> None:
        began = time.process_time()
        super()._turn()
        self.steps_s += time.process_time() - began

    def _measured(self, window: Window) -> Sample:
        sample = super()._measured(window)
        remote = sample.remote
        need = remote_need(sample, self._wait_goal)
        wanted = RoomWanted(requested=remote.requested, running=remote.running, need=need, own=made_without(sample))
        self.found = self._look(wanted)
        return replace(sample, remote=replace(remote, room=self.found.more, granted=self.found.granted))

    def _look(self, wanted: RoomWanted) -> RoomFound:
        cluster, now = self._trainer.cluster, self._loop.now
        self._known.learn(wanted)
        if now - self._reported_at >= ROOM_EVERY_S:
            self._reported_at = now
            claim = Claim(**self._known.claim(wanted, cluster.capacity, 1.0))  # type: ignore[arg-type]
            self._granted = cluster.report(self._name, claim, now)
        return room_found(wanted, cluster.free, cluster.capacity, self._granted)


@dataclass(frozen=True, kw_only=True)
class Ended:
    """A run that is over."""

    plan: Plan
    trainers: tuple[Trainer, ...]
    cluster: Cluster
    failures: int

    def wait(self, trainer: Trainer, begin: float, end: float) -> float:
        """The part of that time that its training loop waited."""
        marks = [mark for mark in trainer.history.marks if begin < mark.at <= end]
        seconds = sum(mark.seconds for mark in marks)
        return sum(mark.wait * mark.seconds for mark in marks) / seconds if seconds else 0.0

    def workers(self, trainer: Trainer, begin: float, end: float) -> float:
        """Remote workers that it asked for, on average."""
        marks = [mark for mark in trainer.history.marks if begin < mark.at <= end]
        return fmean(mark.settings.remote for mark in marks) if marks else 0.0


def simulate(plan: Plan) -> Ended:
    """Run it."""
    cluster = Cluster(plan)
    trainers = tuple(
        Trainer(f"trainer {number}", _world(plan, wanted, number), cluster) for number, wanted in enumerate(plan.wants)
    )
    chance, down, failures = random.Random(plan.seed), deque[tuple[float, int]](), 0
    now, fails_at = 0.0, plan.fail_every_s
    while now < plan.seconds:
        now += SLICE_S
        for trainer in trainers:
            trainer.run(now - trainer.loop.now)
        while down and down[0][0] <= now:
            cluster.repair(down.popleft()[1])
        if now >= fails_at:
            fails_at += plan.fail_every_s
            failures += 1
            node = chance.choice([node for node in range(plan.nodes) if all(node != other for _, other in down)])
            cluster.fail(node)
            down.append((now + plan.repair_s, node))
    return Ended(plan=plan, trainers=trainers, cluster=cluster, failures=failures)


def _world(plan: Plan, wanted: float, number: int) -> World:
    work = Work(cpu_s=BATCH_CPU_S, spread=0.3, batch_bytes=BATCH_BYTES)
    phase = Phase(work=work, step=Step(gpu_s=1.0 / wanted), link=LINK)
    return World(cpus=plan.cpus, own_s=5e-5, memory=256e9, phases=(phase,), seed=plan.seed + number)


def report(ended: Ended) -> Iterator[str]:
    """Lines of a table, and what is to be said of the whole."""
    plan, third = ended.plan, ended.plan.seconds / 3
    yield (
        f"{len(plan.wants)} trainers, {plan.nodes} nodes of {plan.per_node} workers, {plan.seconds:g} s, "
        f"{ended.failures} nodes failed"
    )
    yield "| trainer | takes | workers that needs | workers, last third | waits, first third | last third | decisions |"
    yield "|---|---|---|---|---|---|---|"
    for number, (trainer, wanted) in enumerate(zip(ended.trainers, plan.wants, strict=True)):
        end = plan.seconds
        yield (
            f"| {number} | {wanted:.0f}/s | {wanted * BATCH_CPU_S:.0f} | {ended.workers(trainer, 2 * third, end):.0f} "
            f"| {ended.wait(trainer, 0, third):.0%} | {ended.wait(trainer, 2 * third, end):.0%} "
            f"| {len(trainer.history.decisions)} |"
        )
    waits = [ended.wait(trainer, 2 * third, plan.seconds) for trainer in ended.trainers]
    made = sum(trainer.history.count(2 * third, plan.seconds) for trainer in ended.trainers) / third
    most = min(sum(plan.wants), (plan.places + len(plan.wants) * plan.cpus) / BATCH_CPU_S)
    yield (
        f"last third: waits differ by {max(waits) - min(waits):.0%}; {made:,.0f} batches/s, "
        f"{made / most:.0%} of what all CPUs or GPUs allow"
    )
    steps = sum(trainer.tuning.steps_s for trainer in ended.trainers) / len(plan.wants) / plan.seconds
    yield (
        f"CPU: a law {steps:.2%} of a core, the coordinator {ended.cluster.coordinator_s / plan.seconds:.3%} "
        f"({ended.cluster.reports} reports)"
    )
    for error in _errors(ended.trainers):
        yield f"error: {error}"


def _errors(trainers: Iterable[Trainer]) -> list[str]:
    return [error for trainer in trainers for error in trainer.steering.errors]


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; 1 if a law has raised."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.simulation.cluster", description=__doc__)
    parser.add_argument("--trainers", type=int, default=8)
    parser.add_argument("--nodes", type=int, default=64)
    parser.add_argument("--per-node", type=int, default=32, help="workers of a node (32)")
    parser.add_argument("--seconds", type=float, default=120.0)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    each = options.nodes * options.per_node / options.trainers / BATCH_CPU_S
    chance = random.Random(options.seed)
    wants = tuple(each * chance.uniform(0.4, 2.0) for _ in range(options.trainers))
    ended = simulate(
        Plan(
            wants=wants,
            nodes=options.nodes,
            per_node=options.per_node,
            seconds=options.seconds,
            seed=options.seed,
        )
    )
    for line in report(ended):
        print(line)
    return int(bool(_errors(ended.trainers)))


if __name__ == "__main__":
    raise SystemExit(main())
