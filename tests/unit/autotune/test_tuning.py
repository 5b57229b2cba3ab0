"""The tuner with its law, over a loader that a few formulae stand for, on virtual time."""

from __future__ import annotations

import logging
import math
from dataclasses import replace
from typing import Any

import pytest
from waiting import ManualClock

from dpex.autotune.config import AutotuneConfig
from dpex.autotune.room import RoomFound, RoomWanted
from dpex.autotune.runtime.allowed import Limits, cold_start
from dpex.autotune.runtime.tuner import Tuner
from dpex.autotune.types import Settings
from dpex.measure.consumer_time import EngineLook, Times
from dpex.measure.samples import MachineSample, PoolSample
from dpex.schedule.prefetch import Sizes

BATCH_BYTES = 1e6


class Machine:
    """As a `MachineMeter`: nothing else runs."""

    def __init__(self, **known: Any) -> None:
        self.known = {"cpus": 8.0, **known}

    def sample(self, pids: object, trainer_cpu_s: float, running: int = 0) -> MachineSample:
        return MachineSample(trainer_cpu_s=trainer_cpu_s, **self.known)


class Loader:
    """Workers take ``service_s`` for a batch, ``cpu_s`` of it CPU time; the training loop takes ``step_s``.

    ``shared``: the most batches per second that all workers make together, as from storage.
    """

    def __init__(self, sizes: Sizes, *, service_s: float, step_s: float, cpu_s: float = 0.001) -> None:
        self.clock = ManualClock()
        self.closed = False
        self.service_s, self.step_s, self.cpu_s, self.shared = service_s, step_s, cpu_s, math.inf
        self.sizes = sizes
        self.odd: dict[str, Any] = {}
        self.credit = 0.0
        self.times = Times()
        self.pools = {"local": PoolSample(), "remote": PoolSample()}

    @property
    def workers(self) -> int:
        return self.sizes.local + self.sizes.remote

    def request(self, sizes: Sizes) -> None:
        self.sizes = sizes

    def look(self) -> EngineLook:
        busy = min(self.workers, self.prefetch)
        look = EngineLook(
            at=self.clock(),
            epoch=0,
            times=self.times,
            sizes=self.sizes,
            resizing=False,
            refused=None,
            away_s=0.0,
            ready=max(0, self.prefetch - busy) if self.rate >= 1.0 / self.step_s else 0,
            in_flight=busy,
            batch_bytes=BATCH_BYTES,
            pids=(),
            **{name: self._pool(name) for name in ("local", "remote")},
        )
        return replace(look, **self.odd)

    def _pool(self, name: str) -> PoolSample:
        count = getattr(self.sizes, name)
        return replace(self.pools[name], requested=count, running=count)

    @property
    def prefetch(self) -> int:
        return self.sizes.prefetch or self.sizes.tuned_prefetch or 2

    @property
    def rate(self) -> float:
        """Batches per second that workers can make."""
        return min(min(self.workers, self.prefetch) / self.service_s, self.shared)

    def run(self, seconds: float) -> None:
        self.clock.advance(seconds)
        self.credit += min(self.rate, 1.0 / self.step_s) * seconds
        batches, self.credit = int(self.credit), self.credit % 1.0
        work_s = seconds * min(1.0, self.rate * self.step_s)
        self.times = self.times.plus(Times(batches=batches, wait_s=seconds - work_s, work_s=work_s))
        each_s = max(self.service_s, self.workers / self.shared if math.isfinite(self.shared) else 0.0)
        for name, pool in self.pools.items():
            made = batches * getattr(self.sizes, name) // max(1, self.workers)
            times = {"load_s": pool.load_s + each_s * made, "cpu_s": pool.cpu_s + self.cpu_s * made}
            self.pools[name] = replace(pool, tickets=pool.tickets + made, **times)


def tuned(config: AutotuneConfig | None = None, **work: Any) -> tuple[Tuner, Loader]:
    """A tuner and its loader, which begins with two workers."""
    given = {name: work.pop(name) for name in ("limits", "room", "machine", "start") if name in work}
    start = given.get("start", Settings(local=2, prefetch=4))
    loader = Loader(Sizes(local=start.local, remote=start.remote, prefetch=None, tuned_prefetch=start.prefetch), **work)
    tuner = Tuner(
        config or AutotuneConfig(),
        start,
        given.get("limits", Limits()),
        room=given.get("room"),
        clock=loader.clock,
        machine=given.get("machine", Machine()),
    )
    tuner._engines.append(loader)
    return tuner, loader


def run(tuner: Tuner, loader: Loader, seconds: float) -> None:
    until = loader.clock() + seconds
    while loader.clock() < until:
        loader.run(max(0.01, min(1.0, tuner.turn())))


@pytest.mark.parametrize(("cpus", "ranks", "local"), [(0.5, 1, 1), (2, 1, 2), (64, 1, 8), (8, 4, 2), (2, 8, 1)])
def test_it_starts_with_the_cpus_of_the_rank_and_at_most_eight(cpus: float, ranks: int, local: int) -> None:
    assert cold_start(cpus, ranks, 1e12) == Settings(local=local, prefetch=2 * local)


@pytest.mark.parametrize(("memory", "ranks", "local"), [(24e9, 1, 8), (15e9, 1, 6), (24e9, 2, 5), (1e9, 1, 4)])
def test_it_starts_with_fewer_where_little_memory_is_free(memory: float, ranks: int, local: int) -> None:
    """Half of the rank's part, divided by what a worker may take."""
    assert cold_start(64.0, ranks, memory) == Settings(local=local, prefetch=2 * local)


def test_it_jumps_to_what_the_training_loop_takes_in_few_decisions() -> None:
    """Batches of 80 ms for steps of 10 ms need eight workers; the wait ends, and nothing is decided any more."""
    tuner, loader = tuned(service_s=0.08, step_s=0.01)
    run(tuner, loader, 10.0)
    first, *others = tuner.decisions
    assert first.reason == "too few"
    assert first.new.local >= 6
    assert loader.workers >= 8
    assert len(others) <= 2
    before = len(tuner.decisions)
    assert (first.evidence["service_s"], first.evidence["step_s"]) == pytest.approx((0.08, 0.01), rel=0.3)
    assert first.predicted_rate > first.evidence["rate"]
    assert first.outcome is not None
    run(tuner, loader, 60.0)
    assert len(tuner.decisions) <= before + 2  # what is not at work may be given back
    assert loader.workers >= 8


# -- limits ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("config", "limits", "machine", "most", "prefetch"),
    [
        (AutotuneConfig(max_local=3), Limits(), Machine(), 3, 4096),
        (AutotuneConfig(max_prefetch=6), Limits(), Machine(), 64, 6),
        (AutotuneConfig(), Limits(most_local=4), Machine(), 4, 4096),
        (AutotuneConfig(), Limits(memory_budget=5 * int(BATCH_BYTES)), Machine(), 64, 5),
        (AutotuneConfig(), Limits(), Machine(memory_free=4 * 10**8, worker_bytes=1e8), 6, 4096),
        (AutotuneConfig(), Limits(pins={"local": 2}), Machine(), 2, 4096),
    ],
)
def test_no_limit_is_exceeded(
    config: AutotuneConfig, limits: Limits, machine: Machine, most: int, prefetch: int
) -> None:
    tuner, loader = tuned(config, service_s=0.4, step_s=0.005, limits=limits, machine=machine)
    run(tuner, loader, 30.0)
    assert all(decision.new.local <= most for decision in tuner.decisions)
    assert all(decision.new.prefetch <= prefetch for decision in tuner.decisions)
    assert loader.workers <= most


def test_short_passes_that_start_workers_have_what_makes_a_pass_the_quickest() -> None:
    tuner, loader = tuned(service_s=0.02, cpu_s=0.02, step_s=0.01, start=Settings(local=8, prefetch=16))
    loader.odd = {"pass_batches": 10, "start_s": 1.0, "starts_anew": True}
    run(tuner, loader, 5.0)
    (limit,) = [decision for decision in tuner.decisions if decision.reason == "limit"]
    assert limit.text.startswith("Each pass of 10 batches starts its own workers, which takes 1.00 s: ")
    assert loader.sizes.local < 8


class Cluster:
    """Room for ``places`` remote workers."""

    def __init__(self, places: int, granted: int | None = None) -> None:
        self.places, self.granted = places, granted
        self.told: list[RoomWanted] = []

    def look(self, wanted: RoomWanted) -> RoomFound:
        self.told.append(wanted)
        most = self.places if self.granted is None else min(self.places, self.granted)
        return RoomFound(more=max(0, most - wanted.requested), granted=self.granted)

    def rest(self) -> None:
        pass


def test_what_the_cpus_here_cannot_make_is_made_elsewhere() -> None:
    """Batches of 100 ms of CPU for steps of 5 ms: eight CPUs make 80 of 200 a second."""
    tuner, loader = tuned(service_s=0.1, cpu_s=0.1, step_s=0.005, room=Cluster(30))
    run(tuner, loader, 30.0)
    assert loader.sizes.local <= 10
    assert 8 <= loader.sizes.remote <= 30


def test_the_share_of_a_cluster_is_kept() -> None:
    cluster = Cluster(30, granted=12)
    tuner, loader = tuned(service_s=0.1, cpu_s=0.1, step_s=0.005, room=cluster)
    run(tuner, loader, 20.0)
    assert all(decision.new.remote <= 12 for decision in tuner.decisions)
    cluster.granted = 2
    run(tuner, loader, 20.0)
    assert loader.sizes.remote <= 2


def test_the_cluster_is_told_of_a_loader_that_has_no_batch_yet() -> None:
    """Else the others would not give back what is its share, and it would wait for ever."""
    cluster = Cluster(0)
    tuner, loader = tuned(service_s=0.1, step_s=0.01, room=cluster, start=Settings(remote=2, prefetch=4))
    until = loader.clock() + 10.0
    while loader.clock() < until:
        loader.clock.advance(max(0.01, tuner.turn()))
    assert 9 <= len(cluster.told) <= 12
    assert {wanted.requested for wanted in cluster.told} == {2}
    assert {wanted.useful for wanted in cluster.told} == {None}


# -- nothing it is shown breaks it -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "odd",
    [
        {"batch_bytes": math.nan},
        {"batch_bytes": -1.0},
        {"start_s": math.nan, "starts_anew": True, "pass_batches": 3},
        {"start_s": math.inf, "starts_anew": True, "pass_batches": 3},
        {"ready": -4},
        {"gpu_stall_s": math.nan, "gpu_steps": 5},
        {"local": PoolSample(requested=2, running=2, tickets=9, load_s=math.nan)},
        {"local": PoolSample(requested=2, running=2, tickets=9, load_s=-1.0, cpu_s=math.inf)},
        {"times": Times(batches=50, wait_s=math.nan, work_s=1.0)},
    ],
    ids=repr,
)
def test_broken_measurements_end_nothing(odd: dict[str, Any]) -> None:
    tuner, loader = tuned(service_s=0.08, step_s=0.01)
    loader.odd = odd
    for _ in range(40):
        tuner.turn()
        loader.run(0.2)
    assert not tuner.is_frozen
    loader.odd = {}
    tuner._windows.clear()
    run(tuner, loader, 20.0)
    assert loader.workers >= 6


@pytest.mark.parametrize("known", [{"cpus": math.nan}, {"cpus": 0.0}, {"others": math.inf}, {"memory_free": -(10**30)}])
def test_a_broken_machine_ends_nothing(known: dict[str, Any]) -> None:
    tuner, loader = tuned(service_s=0.08, step_s=0.01, machine=Machine(**known))
    run(tuner, loader, 10.0)
    assert not tuner.is_frozen
    assert loader.workers >= 1


def test_each_decision_is_a_line_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "dpex")
    tuner, loader = tuned(service_s=0.08, step_s=0.01)
    run(tuner, loader, 10.0)
    assert caplog.messages == [f"auto: {decision.text}" for decision in tuner.decisions]
