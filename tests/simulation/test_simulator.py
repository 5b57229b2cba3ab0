"""The simulated loader against what is known of such systems: processor sharing, bottlenecks, order, loss, memory."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from decisions import a_decision

from benchmarks.simulation.event_loop import EventLoop, SharedResource
from benchmarks.simulation.history import History
from benchmarks.simulation.simulator import simulate
from benchmarks.simulation.steering import Fixed
from benchmarks.simulation.world import Pauses, Phase, Step, Storage, Work, World
from dpex.autotune.types import Decision, Sample
from dpex.schedule.prefetch import Settings

pytestmark = pytest.mark.long
Watched = tuple[History, list[Sample]]


class Recorder:
    """Keeps every sample; changes settings at given moments."""

    def __init__(self, start: Settings, *changes: tuple[float, Settings]) -> None:
        self.samples: list[Sample] = []
        self._start, self._changes = start, list(changes)

    def begin(self) -> Settings:
        return self._start

    def step(self, sample: Sample) -> Decision | None:
        self.samples.append(sample)
        if not self._changes or sample.at < self._changes[0][0] - 1e-9:
            return None
        new = self._changes.pop(0)[1]
        return a_decision(at=sample.at, old=sample.settings, new=new, reason="explore")


def world(work: Work, step: Step | None = None, *, phases: Iterable[Phase] = (), **constants: Any) -> World:
    """A world without costs but those named."""
    free = {"own_s": 0.0, "fork_s": 0.0, "actor_s": 0.0, "rtt_s": 0.0} | constants
    has = {"link": 1e12} | {name: free.pop(name) for name in ("nodes", "link", "storage") if name in free}
    return World(phases=(Phase(work=work, step=step or Step(), **has), *phases), **free)


def run(of: World, settings: Settings, seconds: float = 20.0) -> History:
    return simulate(of, [Fixed(settings)] * of.ranks, seconds)[0]


def watched(of: World, start: Settings, *changes: tuple[float, Settings], seconds: float = 20.0) -> Watched:
    recorder = Recorder(start, *changes)
    return simulate(of, [recorder], seconds)[0], recorder.samples


def recorded(of: World, start: Settings, *changes: tuple[float, Settings], seconds: float = 20.0) -> list[Sample]:
    return watched(of, start, *changes, seconds=seconds)[1]


def workers(local: int = 0, remote: int = 0, prefetch: int | None = None) -> Settings:
    return Settings(local=local, remote=remote, prefetch=4 * (local + remote) if prefetch is None else prefetch)


# -- sharing -----------------------------------------------------------------------------------------------------------


def ends(capacity: float, *jobs: tuple[float, float], others: float = 0.0, each: float = 1.0) -> list[float]:
    """When jobs (start, work) end, in the order given."""
    loop = EventLoop()
    shared = SharedResource(loop, capacity, each)
    shared.set(others=others)
    ended = [-1.0] * len(jobs)

    def end(number: int) -> Callable[[], None]:
        return lambda: ended.__setitem__(number, loop.now)

    for number, (start, work) in enumerate(jobs):
        loop.at(start, lambda work=work, number=number: shared.start(work, end(number)))  # type: ignore[misc]
    loop.run(1e4)
    return ended


@pytest.mark.parametrize(
    ("capacity", "jobs", "others", "ended"),
    [
        (4, [(0, 1)] * 4, 0, [1] * 4),
        (4, [(0, 1)] * 6, 0, [1.5] * 6),
        (0.5, [(0, 1)] * 3, 0, [6] * 3),
        (1, [(0, 1), (0, 2)], 0, [2, 3]),  # a shorter job leaves its part to the other
        (1, [(0, 2), (1, 2)], 0, [3, 4]),  # a later one takes its part from when it comes
        (2, [(0, 1), (0, 1)], 2, [2, 2]),
    ],
)
def test_jobs_share_a_capacity(
    capacity: float, jobs: list[tuple[float, float]], others: float, ended: list[float]
) -> None:
    assert ends(capacity, *jobs, others=others) == pytest.approx(ended)


def test_transfers_after_an_idle_hour_still_take_their_time() -> None:
    """An idle link once ran up so much service that all transfers ended with the first."""
    assert ends(1e6, (3600, 1e6), (3600, 3e6), each=1e15) == pytest.approx([3602, 3604])


def test_capacity_may_change_under_way() -> None:
    loop, ended = EventLoop(), []
    shared = SharedResource(loop, 1.0, each=10.0)
    shared.start(4.0, lambda: ended.append(loop.now))
    loop.at(2.0, lambda: shared.set(capacity=4.0))
    loop.run(10)
    assert ended == pytest.approx([2.5])


# -- rates by formula --------------------------------------------------------------------------------------------------


DISK = Storage(capacity=4e7, reader=1e7)
IN_PROCESS = world(Work(cpu_s=0.01, wait_s=0.02, encode_s=0.5), Step(gpu_s=0.03, cpu_s=0.01), own_s=0.5, cpus=1)
"""There is nothing to encode and to hand over."""


@pytest.mark.parametrize(
    ("of", "settings", "rate"),
    [
        *(
            (world(Work(cpu_s=0.05), cpus=4), workers(local), rate)
            for local, rate in ((1, 20), (3, 60), (4, 80), (8, 80))
        ),
        (world(Work(cpu_s=0.03, encode_s=0.01), cpus=2), workers(4), 50),
        (
            world(Work(cpu_s=0.03), Step(cpu_s=0.005), cpus=2, own_s=0.005),
            workers(8),
            2 / 0.04,
        ),  # the loop has its part
        (world(Work(wait_s=0.1), cpus=1), workers(1), 10),
        (world(Work(wait_s=0.1), cpus=1), workers(16), 160),
        (world(Work(wait_s=0.1), cpus=1), workers(16, prefetch=5), 50),
        (world(Work(cpu_s=0.01), Step(gpu_s=0.02, cpu_s=0.004), cpus=8, own_s=0.001), workers(4), 1 / 0.025),
        (world(Work(cpu_s=0.05, wait_s=0.05), cpus=1, nodes=8), workers(remote=8), 80),  # each has a CPU of its own
        (world(Work(cpu_s=0.1), nodes=3), workers(remote=8), 30),
        (world(Work(cpu_s=0.02, batch_bytes=4e6), nodes=8, link=1e8), workers(remote=8), 25),
        (world(Work(cpu_s=0.1), cpus=2, nodes=3), workers(2, 3), 50),
        (IN_PROCESS, Settings(), 1 / 0.07),
        (replace(IN_PROCESS, phases=(*IN_PROCESS.phases, Phase(others=3.0))), Settings(), 1 / 0.13),
        (world(Work(cpu_s=0.04), cpus=2, thrash=0.1), workers(6), 2 / (0.04 * 1.4)),
        (world(Work(cpu_s=0.1), cpus=8, smt_yield=0.3), workers(16), 52),
        (world(Work(read=1e6), cpus=16, storage=DISK), workers(1), 10),
        (world(Work(read=1e6), cpus=16, storage=DISK), workers(8), 40),  # it gives four of them all that they can take
        (world(Work(read=1e6), cpus=16, nodes=4, storage=DISK), workers(4, 4), 40),
        (world(Work(read=1e6), cpus=16, storage=replace(DISK, loss=0.1)), workers(11), 20),
    ],
)
def test_the_rate_is_that_of_the_bottleneck(of: World, settings: Settings, rate: float) -> None:
    assert run(of, settings, 60).rate(10, 60) == pytest.approx(rate, rel=0.03)


def test_two_ranks_get_half_of_the_machine_each() -> None:
    histories = simulate(world(Work(cpu_s=0.05), cpus=4, ranks=2), [Fixed(workers(4))] * 2, 20)
    assert [history.rate(5, 20) for history in histories] == pytest.approx([40, 40], rel=0.02)


def test_stragglers_hold_up_a_shallow_window() -> None:
    of = world(Work(wait_s=0.02, rare=0.01, rare_factor=20), Step(gpu_s=0.004))
    shallow, deep = (run(of, workers(8, prefetch=prefetch), 60).rate(5, 60) for prefetch in (8, 200))
    assert shallow < 0.8 * deep
    assert deep == pytest.approx(250, rel=0.02)


# -- windows -----------------------------------------------------------------------------------------------------------


BUSY = world(Work(cpu_s=0.02, wait_s=0.03, spread=0.5), Step(gpu_s=0.01, cpu_s=0.002), cpus=3, own_s=0.001)


def test_the_consumer_s_time_adds_up_but_for_what_is_under_way() -> None:
    samples = recorded(BUSY, workers(2))
    spent = sum(sample.wait_s + sample.busy_s + sample.work_s for sample in samples)
    assert spent == pytest.approx(sum(sample.seconds for sample in samples), abs=0.1)


def test_saturated_workers_are_always_busy_with_a_full_window() -> None:
    samples = recorded(world(Work(wait_s=0.08), cpus=2), workers(6, prefetch=10))[-10:]
    assert sum(s.local.busy_s for s in samples) / sum(s.seconds for s in samples) == pytest.approx(6, rel=0.02)
    assert {sample.ready + sample.in_flight for sample in samples} == {10}


# -- order -------------------------------------------------------------------------------------------------------------


def test_delivery_is_in_order() -> None:
    """The first batch takes a second, the other three of the window a tenth; nothing overtakes it."""
    work = Work(recorded=((1.0, 0.0), *[(0.1, 0.0)] * 3, *[(100.0, 0.0)] * 10))
    assert run(world(work), workers(4, prefetch=4), 5).delivered == pytest.approx([1.0] * 4)


# -- size and memory ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("settings", "first"), [(workers(1), 0.3), (workers(remote=1), 2.1), (Settings(), 0.1)])
def test_workers_take_time_to_start(settings: Settings, first: float) -> None:
    history = run(world(Work(wait_s=0.1), nodes=1, fork_s=0.2, actor_s=2.0), settings)
    assert history.delivered[0] == pytest.approx(first)


@pytest.mark.parametrize("change", [1.03, 1.5, 2.22])
def test_any_way_between_pools_goes_on_delivering(change: float) -> None:
    of = world(Work(wait_s=0.1, spread=1.0), nodes=4, actor_s=0.3, fork_s=0.05)
    places = [workers(2), Settings(), workers(remote=3), workers(1, 2), Settings(), workers(remote=1), workers(4)]
    changes = [(change * (number + 1), place) for number, place in enumerate(places * 3)]
    samples = recorded(of, workers(3), *changes, seconds=change * 25)
    assert min(sum(s.batches for s in samples[i : i + 8]) for i in range(10, len(samples) - 8)) > 0


def test_lost_nodes_lose_no_batch() -> None:
    """A batch lost would stop delivery for good, as it is in order."""
    of = world(
        Work(cpu_s=0.1, spread=0.5), cpus=2, nodes=6, phases=[Phase(at=10.05, nodes=1), Phase(at=20.05, nodes=6)]
    )
    history = run(of, workers(2, 6, prefetch=64), 30)
    assert [history.rate(start, start + 7) for start in (3, 13, 23)] == pytest.approx([80, 30, 80], rel=0.12)


def test_room_is_a_fair_share_of_what_is_free() -> None:
    recorders = [Recorder(workers(remote=2)), Recorder(workers(remote=4))]
    simulate(world(Work(cpu_s=0.1), nodes=8, ranks=2), recorders, 5)
    assert [recorder.samples[-1].remote.room for recorder in recorders] == [2, 0]
    assert [recorder.samples[-1].remote.running for recorder in recorders] == [2, 4]


def test_memory_is_workers_and_batches_in_flight() -> None:
    """The consumer is slow, so all eight batches of the window are ready."""
    of = world(Work(cpu_s=0.01, batch_bytes=1e8), Step(gpu_s=0.5), cpus=2, worker_bytes=3e8, memory=4e9)
    recorder = Recorder(workers(3, prefetch=8))
    history = simulate(of, [recorder], 20)[0]
    assert max(mark.memory for mark in history.marks) == pytest.approx(3 * 3e8 + 8 * 1e8)
    free = [sample.machine.memory_free for sample in recorder.samples]
    assert min(left for left in free if left is not None) == pytest.approx(4e9 - 1.7e9)


# -- time and chance ---------------------------------------------------------------------------------------------------


def test_a_seed_gives_the_same_run_and_another_another() -> None:
    of = replace(BUSY, noise=0.1)
    same = [run(of, workers(3)) for _ in range(2)]
    assert same[0].delivered == same[1].delivered
    assert [mark.wait for mark in same[0].marks] == [mark.wait for mark in same[1].marks]
    assert run(replace(of, seed=1), workers(3)).delivered != same[0].delivered


def test_phases_change_only_what_they_name() -> None:
    of = world(
        Work(wait_s=0.1), Step(gpu_s=0.05), phases=[Phase(at=10, work=Work(wait_s=0.4)), Phase(at=20, step=Step())]
    )
    history = run(of, workers(4), 30)
    assert [history.rate(start, start + 8) for start in (2, 12, 22)] == pytest.approx([20, 10, 10], rel=0.05)


def test_the_trainer_pauses_between_steps_and_workers_go_on() -> None:
    of = world(Work(wait_s=0.1), Step(gpu_s=0.01), pauses=Pauses(every_s=5.0, seconds=1.0))
    history, samples = watched(of, workers(2))
    ends = [b for a, b in pairwise(history.delivered) if b - a > 0.9]
    assert len(ends) == 3
    assert sum(sample.work_s for sample in samples) > 3.0
    assert [history.count(end - 1e-6, end + 0.1) >= 8 for end in ends] == [True] * 3
