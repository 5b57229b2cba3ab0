"""The tuner without its thread over a loader that a few formulae stand for, on virtual time: windows, limits, law."""

import logging
import math
import threading
from dataclasses import replace
from typing import Any

import pytest
from inspection import engines_of
from waiting import ManualClock

from dpex.autotune.config import AutotuneConfig, limits_of
from dpex.autotune.constants import AWAY_S, MOST_WORKERS, SHORTEST_WINDOW_S, WINDOW_BATCHES, WINDOW_BATCHES_IF_STARVING
from dpex.autotune.limits import Limits
from dpex.autotune.runtime.tuner import Tuner, cold_start
from dpex.autotune.runtime.windows import MeasurementWindows
from dpex.autotune.types import Decision, RoomFound, RoomWanted
from dpex.measure.pool_reading import PoolReading
from dpex.measure.reading import EngineReport, Reading
from dpex.measure.settings import Settings
from dpex.system.meter import MachineCounts

BATCH_BYTES = 1e6


class Machine:
    """As a `MachineMeter`: nothing else runs."""

    def __init__(self, **known: Any) -> None:
        self.known = {"cpus": 8.0, **known}

    def counts(self, pids: object, running: int = 0, ranks: int = 1, seconds: float = 0.0) -> dict[str, Any]:
        return {"memory_free": None, "worker_bytes": 0.0, **self.known}


class Loader:
    """Workers take ``service_s`` for a batch, ``cpu_s`` of it CPU time; the training loop takes ``step_s``.

    ``shared``: the most batches per second that all workers make together, as from storage.
    """

    def __init__(
        self,
        settings: Settings,
        *,
        clock: ManualClock | None = None,
        service_s: float = 0.01,
        step_s: float = 0.01,
        cpu_s: float = 0.001,
    ) -> None:
        self.clock = clock or ManualClock()
        self.closed = False
        self.service_s, self.step_s, self.cpu_s, self.shared = service_s, step_s, cpu_s, math.inf
        self.settings = settings
        self.requests: list[Settings] = []
        self.odd: dict[str, Any] = {}
        self.credit = self.away_s = 0.0
        self.loop = Reading(step_count=0)
        self.pools = {"local": PoolReading(), "remote": PoolReading()}

    @property
    def workers(self) -> int:
        return self.settings.workers

    def request(self, settings: Settings) -> None:
        self.requests.append(settings)
        self.settings = settings

    def report(self) -> EngineReport:
        busy = min(self.workers, self.prefetch)
        reading = replace(
            self.loop,
            at=self.clock(),
            settings=self.settings,
            away_s=self.away_s,
            ready=max(0, self.prefetch - busy) if self.rate >= 1.0 / self.step_s else 0,
            in_flight=busy,
            batch_bytes=BATCH_BYTES,
            pools={name: self._pool(name) for name in ("local", "remote")},
        )
        odd = {name: value for name, value in self.odd.items() if name in Reading.declared()}
        others = {name: value for name, value in self.odd.items() if name not in odd}
        pools = {name: others.pop(name, pool) for name, pool in reading.pools.items()}
        return EngineReport(replace(reading, pools=pools, **odd), **others)

    def _pool(self, name: str) -> PoolReading:
        count = getattr(self.settings, name)
        return replace(self.pools[name], requested=count, running=count)

    @property
    def prefetch(self) -> int:
        return self.settings.prefetch

    @property
    def rate(self) -> float:
        """Batches per second that workers can make."""
        return min(min(self.workers, self.prefetch) / self.service_s, self.shared)

    def run(self, seconds: float) -> None:
        self.clock.advance(seconds)
        self.credit += min(self.rate, 1.0 / self.step_s) * seconds
        batches, self.credit = int(self.credit), self.credit % 1.0
        steps = batches + (
            self.loop.later_batches == 0 < batches
        )  # the first batch of a pass is not counted, its step is
        work_s = seconds if self.rate * self.step_s >= 1.0 else min(seconds, steps * self.step_s)
        self._spend(batches, seconds - work_s, work_s, steps, steps * self.step_s)
        each_s = max(self.service_s, self.workers / self.shared if math.isfinite(self.shared) else 0.0)
        for name, pool in self.pools.items():
            made = batches * getattr(self.settings, name) // max(1, self.workers)
            times = {"load_s": pool.load_s + each_s * made, "load_cpu_s": pool.load_cpu_s + self.cpu_s * made}
            times["services_s"] = (*pool.services_s, *[each_s] * made)[-64:]
            self.pools[name] = replace(pool, tickets=pool.tickets + made, **times)

    def _spend(self, batches: int, wait_s: float, work_s: float, steps: int, stepped_s: float) -> None:
        spent = {"seconds": wait_s + work_s, "blocked_s": wait_s, "stepping_s": work_s, "stepped_s": stepped_s}
        self.loop = self.loop.plus(Reading(**spent, later_batches=batches, step_count=steps))

    def work(self, batches: int, wait_s: float, work_s: float) -> None:
        """Let time pass in which the consumer gets batches, whatever the formulae say."""
        self.clock.advance(wait_s + work_s)
        self._spend(batches, wait_s, work_s, batches, work_s)
        self.away_s = 0.0 if batches or wait_s else self.away_s + work_s
        pool = self.pools["local"]
        self.pools["local"] = replace(pool, tickets=pool.tickets + batches, load_s=pool.load_s + 0.01 * batches)


def tuned(config: AutotuneConfig | None = None, **work: Any) -> tuple[Tuner, Loader]:
    """A tuner and its loader, which begins with two workers."""
    given = {name: work.pop(name) for name in ("limits", "room", "machine", "start") if name in work}
    start = given.get("start", Settings(local=2, prefetch=4))
    loader = Loader(start, **work)
    tuner = Tuner(
        config or AutotuneConfig(),
        start,
        given.get("limits", limits_of(config or AutotuneConfig())),
        room=given.get("room"),
        clock=loader.clock,
        machine=given.get("machine", Machine()),
    )
    engines_of(tuner).append(loader)
    return tuner, loader


def run(tuner: Tuner, loader: Loader, seconds: float) -> None:
    until = loader.clock() + seconds
    while loader.clock() < until:
        loader.run(max(0.01, min(1.0, tuner.turn())))


class Listener:
    """In the place of a law: answers what the test says."""

    def __init__(self, config: AutotuneConfig, start: Settings, limits: Limits) -> None:
        self.limits = limits
        self.windows: list[Any] = []
        self.answers: list[Settings] = []
        self.useful: int | None = None

    def useful_remote(self, most: int) -> int | None:
        return None if self.useful is None else min(self.useful, most)

    def observe(self, window: Any, limits: Limits) -> Decision | None:
        self.windows.append(window)
        return Decision.to(window, self.answers.pop(), "too few") if self.answers else None


LISTENING = AutotuneConfig(policy=Listener)


@pytest.fixture
def parts() -> tuple[Tuner, Loader, Listener]:
    """A tuner without a thread, a loader that works as the test says, and what listens in the place of a law."""
    tuner, loader = tuned(LISTENING)
    return tuner, loader, tuner._law.policy  # type: ignore[return-value]


def test_windows_double_when_steady_and_shorten_after_a_change(parts: Any) -> None:
    tuner, loader, listener = parts
    tuner.turn()
    for _ in range(300):
        loader.work(1, 0.004, 0.006)
        tuner.turn()
    lengths = [window.seconds for window in listener.windows]
    assert lengths[:6] == pytest.approx([0.05, 0.1, 0.2, 0.4, 0.8, 1.0], rel=0.02)
    assert lengths[6:] == pytest.approx([1.0] * len(lengths[6:]), rel=0.02)
    window = listener.windows[3]
    assert (window.later_batches, window.local.tickets) == (40, 40)
    assert (window.blocked_s, window.stepping_s) == (pytest.approx(0.16), pytest.approx(0.24))
    listener.answers.append(Settings(local=5, prefetch=10))
    for _ in range(100):
        loader.work(1, 0.004, 0.006)
        tuner.turn()
    assert loader.requests == [Settings(local=5, prefetch=10)]
    assert tuner.settings == loader.requests[0]
    assert tuner._windows.length_s >= SHORTEST_WINDOW_S


def test_what_is_fixed_while_the_law_thinks_stays_so(parts: Any) -> None:
    tuner, loader, listener = parts

    def observe(window: Any, limits: Limits) -> Decision:
        tuner.pin({"local": 3})
        return Decision.to(window, Settings(local=7, prefetch=14), "too few")

    listener.observe = observe
    tuner.turn()
    loader.work(40, 0.6, 0.6)
    tuner.turn()
    assert {request.local for request in loader.requests} == {3}
    assert tuner.settings.local == 3


@pytest.mark.timeout(20)  # the test hangs if an end waits for the look
def test_an_engine_may_end_in_the_thread_that_looks(parts: Any) -> None:
    """The garbage collector may end an engine in any thread, that of the tuner among them."""
    tuner, loader, _ = parts
    other = Loader(tuner.settings, clock=loader.clock)
    engines_of(tuner).append(other)

    def look(_: Any) -> MachineCounts:
        tuner.remove_engine(other)
        return MachineCounts(at=0.0, cpu_s=0.0)

    tuner._windows = MeasurementWindows(look)
    for _ in range(2):
        loader.work(4, 0.1, 0.1)
        tuner.turn()
    assert set(tuner._windows._bases) == {id(loader)}


def test_an_engine_that_replaces_another_has_its_own_windows(parts: Any) -> None:
    tuner, loader, listener = parts
    tuner.turn()
    loader.work(1000, 5.0, 5.0)
    tuner.turn()
    loader.loop = Reading()
    for _ in range(20):
        loader.work(4, 0.05, 0.05)
        tuner.turn()
    assert len(listener.windows) > 1
    assert all(window.later_batches > 0 and window.seconds > 0 for window in listener.windows)


def test_a_window_says_what_the_gpu_missed(parts: Any) -> None:
    tuner, loader, listener = parts

    class Gpus:
        def busy_ratio(self) -> float:
            return 0.75

    tuner.turn()
    for number, stall_s in enumerate((None, 0.0, 0.5, 1.5)):
        steps = {"gpu_steps": 40 * number, "gpu_steps_s": 0.8 * number}
        loader.odd = {"gpu_running_stall_s": stall_s, "feed_wait_s": 0.1 * number, "ready": number % 2, **steps}
        loader.work(40, 0.6, 0.6)
        tuner.turn()
        tuner._gpus = Gpus()
    assert [window.gpu_running_stall_s for window in listener.windows] == [None, 0.0, 0.5, 1.0]
    assert [window.kernel_ratio for window in listener.windows] == [None, 0.75, 0.75, 0.75]
    assert [window.gpu_steps for window in listener.windows] == [0, 40, 40, 40]
    assert [window.gpu_steps_s for window in listener.windows] == pytest.approx([0.0, 0.8, 0.8, 0.8])
    assert [window.feed_wait_s for window in listener.windows] == pytest.approx([0.0, 0.1, 0.1, 0.1])
    use, known_s = tuner.kernels, sum(window.seconds for window in listener.windows[1:])
    assert (use.kernel_ratio, use.supplied_kernel_ratio) == pytest.approx((0.75, 0.75))
    assert use.kernel_seen_s == pytest.approx(known_s)
    assert 0.0 < use.supplied_s < known_s


def test_a_window_waits_for_a_few_batches(parts: Any) -> None:
    tuner, loader, listener = parts
    tuner.turn()
    for _ in range(WINDOW_BATCHES - 1):
        loader.work(1, 0.0, 0.1)
        tuner.turn()
    assert not listener.windows
    loader.work(1, 0.0, 0.1)
    tuner.turn()
    assert [window.later_batches for window in listener.windows] == [WINDOW_BATCHES]


def test_a_window_ends_without_batches_while_training_waits(parts: Any) -> None:
    tuner, loader, listener = parts
    tuner.turn()
    loader.work(0, 1.2, 0.0)
    tuner.turn()
    assert [(window.later_batches, window.blocked_s) for window in listener.windows] == [(0, pytest.approx(1.2))]


def steadily(tuner: Any, loader: Any, count: int) -> None:
    for _ in range(count):
        loader.work(1, 0.002, 0.018)
        tuner.turn()


@pytest.mark.parametrize("until_then_s", [0.0, 0.01, 0.03, 0.05])
def test_sudden_starvation_soon_gets_a_window_of_new_work_alone(parts: Any, until_then_s: float) -> None:
    tuner, loader, listener = parts
    tuner.turn()
    steadily(tuner, loader, 200)
    before = len(listener.windows)
    loader.work(1, 0.0, 0.02 + until_then_s)
    began = loader.clock()
    for turn in range(60):
        loader.work(int(turn % 4 == 3), 0.03, 0.0 if turn % 4 < 3 else 0.01)
        tuner.turn()
        if len(listener.windows) > before:
            break
    window = listener.windows[before]
    assert loader.clock() - began < 0.5
    assert window.later_batches >= WINDOW_BATCHES_IF_STARVING
    assert window.blocked_s / window.seconds > 0.7


def test_a_single_late_batch_in_steady_work_ends_no_window(parts: Any) -> None:
    tuner, loader, listener = parts
    tuner.turn()
    steadily(tuner, loader, 500)
    before = len(listener.windows)
    loader.work(1, 0.04, 0.02)
    tuner.turn()
    steadily(tuner, loader, 20)
    assert len(listener.windows) == before


def test_a_validation_is_no_slow_step(parts: Any) -> None:
    tuner, loader, listener = parts
    tuner.turn()
    for _ in range(50):
        loader.work(1, 0.0, 0.01)
        tuner.turn()
    for _ in range(10):
        loader.work(0, 0.0, 0.3 * AWAY_S)
        tuner.turn()
    for _ in range(200):
        loader.work(1, 0.0, 0.01)
        tuner.turn()
    assert max(window.stepping_s / window.later_batches for window in listener.windows) == pytest.approx(0.01)
    assert len(listener.windows) == 5


def test_steps_of_many_seconds_are_steps(parts: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    tuner, loader, _ = parts
    windows: list[Any] = []
    monkeypatch.setattr(tuner._law, "step", windows.append)
    tuner.turn()
    for _ in range(60):
        for _ in range(4):
            loader.work(0, 0.0, 2.0)
            tuner.turn()
        loader.work(1, 0.0, 2.0)
        tuner.turn()
    assert sum(s.stepping_s for s in windows) / sum(s.later_batches for s in windows) == pytest.approx(10, rel=0.3)


def test_a_window_does_not_begin_before_a_request_is_granted(parts: Any) -> None:
    tuner, loader, listener = parts
    loader.odd = {"resizing": True}
    for _ in range(20):
        loader.work(1, 0.0, 0.05)
        tuner.turn()
    assert not listener.windows


def test_the_active_iterator_is_measured_and_both_are_resized(parts: Any) -> None:
    tuner, loader, listener = parts
    idle = Loader(tuner.settings, clock=loader.clock)
    engines_of(tuner).insert(0, idle)
    listener.answers.append(Settings(local=3, prefetch=6))
    tuner.turn()
    for _ in range(10):
        loader.work(1, 0.0, 0.01)
        tuner.turn()
    assert listener.windows[0].later_batches == 5
    assert [request.local for request in loader.requests + idle.requests] == [3, 3]


def test_what_the_system_refuses_is_learnt_as_a_limit() -> None:
    tuner, loader = tuned(LISTENING, start=Settings(local=6, prefetch=12))
    tuner.turn()
    for most, learnt in ((4, 4), (4, 4), (5, 4), (2, 2)):
        loader.odd = {"most_local": (most, "no more processes")}
        loader.work(99, 0.0, 1.0)
        tuner.turn()
        assert tuner._law.limits.local == learnt
        assert tuner.settings.local <= learnt
    assert loader.requests[-1].local <= 2


@pytest.mark.parametrize(("ranks", "free"), [("1", 3e9), ("4", 0.0)])
def test_ranks_divide_the_free_memory(parts: Any, monkeypatch: pytest.MonkeyPatch, ranks: str, free: float) -> None:
    """Half of 8 GB and of what two workers of 1 GB have, less these; or of a quarter of the 8 GB."""
    tuner, loader, _ = parts
    tuner._machine = Machine(memory_free=8 * 10**9, worker_bytes=1e9)  # type: ignore[assignment]
    loader.odd = {"batch_bytes": 0.0}
    monkeypatch.setenv("LOCAL_WORLD_SIZE", ranks)
    seen: list[Any] = []
    monkeypatch.setattr(tuner._law, "step", seen.append)
    tuner.turn()
    loader.work(9, 0.0, 0.09)
    tuner.turn()
    assert seen[0].memory_free == pytest.approx(free, abs=1e3)


def test_a_failure_of_tuning_reverts_an_unjudged_setting(parts: Any) -> None:
    tuner, loader, listener = parts
    start, judged, hasty = tuner.settings, Settings(local=3, prefetch=6), Settings(local=63, prefetch=126)
    for new in (judged, hasty):
        listener.answers.append(new)
        tuner.turn()
        loader.work(9, 0.0, 0.09)
        tuner.turn()
    assert tuner.settings == hasty
    tuner.give_up(ValueError("odd"))
    assert tuner.settings == judged != start
    assert (loader.requests[-1].local, loader.requests[-1].prefetch) == (3, 6)
    last = tuner.decisions[-1]
    assert (last.reason, last.old, last.new) == ("failed", hasty, judged)
    assert "ValueError('odd')" in last.text
    requests = len(loader.requests)
    loader.work(9, 0.0, 0.09)
    tuner.turn()
    assert (len(loader.requests), tuner.is_frozen) == (requests, True)


@pytest.mark.parametrize(("cpus", "ranks", "local"), [(0.5, 1, 1), (2, 1, 2), (64, 1, 8), (8, 4, 2), (2, 8, 1)])
def test_it_starts_with_the_cpus_of_the_rank_and_at_most_eight(cpus: float, ranks: int, local: int) -> None:
    assert cold_start(cpus, ranks, 1e12) == Settings(local=local, prefetch=2 * local)


@pytest.mark.parametrize(("memory", "ranks", "local"), [(24e9, 1, 8), (15e9, 1, 6), (24e9, 2, 5), (1e9, 1, 4)])
def test_it_starts_with_fewer_where_little_memory_is_free(memory: float, ranks: int, local: int) -> None:
    """Half of the rank's part, divided by what a worker may take."""
    assert cold_start(64.0, ranks, memory) == Settings(local=local, prefetch=2 * local)


def test_tuning_reaches_the_needed_workers_in_few_decisions() -> None:
    """Batches of 80 ms for steps of 10 ms need eight workers; the wait ends, and nothing is decided any more."""
    tuner, loader = tuned(service_s=0.08, step_s=0.01)
    run(tuner, loader, 10.0)
    first, *others = tuner.decisions
    assert first.reason == "too few"
    assert first.new.local >= 6
    assert loader.workers >= 8
    assert len(others) <= 2
    before = len(tuner.decisions)
    assert (first.evidence["service_s"], first.evidence["step_s"]) == pytest.approx((0.08, 0.01))
    assert "rate" not in first.evidence  # its windows are shorter than three batches
    assert first.outcome is not None
    run(tuner, loader, 60.0)
    assert len(tuner.decisions) <= before + 2  # what is not at work may be given back
    assert loader.workers >= 8


@pytest.mark.parametrize(
    ("limits", "machine", "most", "prefetch"),
    [
        (Limits(local=3), Machine(), 3, 4096),
        (Limits(prefetch=6), Machine(), 64, 6),
        (Limits(prefetch_factor=3), Machine(), 64, 3 * 64),
        (Limits(batch_budget=5 * BATCH_BYTES), Machine(), 64, 5),
        (Limits(), Machine(memory_free=4 * 10**8, worker_bytes=1e8), 6, 4096),
        (Limits().fixed(local=2), Machine(), 2, 4096),
    ],
)
def test_no_limit_is_exceeded(limits: Limits, machine: Machine, most: int, prefetch: int) -> None:
    tuner, loader = tuned(service_s=0.4, step_s=0.005, limits=limits, machine=machine)
    run(tuner, loader, 30.0)
    assert all(decision.new.local <= most for decision in tuner.decisions)
    assert all(decision.new.prefetch <= prefetch for decision in tuner.decisions)
    assert loader.workers <= most


def test_short_passes_have_no_more_workers_than_start_quickly() -> None:
    """Workers wait for storage, and ten batches are worth few more of them than there are CPUs."""
    tuner, loader = tuned(service_s=0.1, cpu_s=0.001, step_s=0.005, machine=Machine(cpus=4.0))
    loader.odd = {"pass_batches": 10, "start_s": 1.0, "starts_anew": True}
    run(tuner, loader, 5.0)
    few, loader.odd = loader.workers, {}
    run(tuner, loader, 5.0)
    assert few <= 8 < loader.workers


class Cluster:
    """Room for ``places`` remote workers, or what was found there; ``rests``: how often the loader was out of use."""

    def __init__(self, places: int | RoomFound, granted: int | None = None) -> None:
        self.places, self.granted = places, granted
        self.told: list[RoomWanted] = []
        self.rests = 0

    def find(self, wanted: RoomWanted) -> RoomFound:
        self.told.append(wanted)
        if isinstance(self.places, RoomFound):
            return self.places
        most = self.places if self.granted is None else min(self.places, self.granted)
        return RoomFound(more=max(0, most - wanted.requested), granted=self.granted)

    def rest(self) -> None:
        self.rests += 1


def test_what_the_cpus_here_cannot_make_is_made_elsewhere() -> None:
    """Batches of 100 ms of CPU for steps of 5 ms: eight CPUs make 80 of 200 a second."""
    tuner, loader = tuned(service_s=0.1, cpu_s=0.1, step_s=0.005, room=Cluster(30))
    run(tuner, loader, 30.0)
    assert loader.settings.local <= 10
    assert 8 <= loader.settings.remote <= 30


def test_the_share_of_a_cluster_is_kept() -> None:
    cluster = Cluster(30, granted=12)
    tuner, loader = tuned(service_s=0.1, cpu_s=0.1, step_s=0.005, room=cluster)
    run(tuner, loader, 20.0)
    assert all(decision.new.remote <= 12 for decision in tuner.decisions)
    cluster.granted = 2
    run(tuner, loader, 20.0)
    assert loader.settings.remote <= 2


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


def test_room_is_requested_only_if_remote_workers_are_possible(parts: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    assert parts[0]._law.limits.remote == 0
    cluster = Cluster(RoomFound(more=7, unplaced=2, granted=9))
    tuner, loader = tuned(LISTENING, room=cluster)
    loader.odd = {"remote": PoolReading(requested=5, running=3)}
    windows: list[Any] = []
    monkeypatch.setattr(tuner._law, "step", windows.append)
    tuner.turn()
    loader.work(9, 0.0, 0.09)
    tuner.turn()
    assert [(wanted.requested, wanted.running, wanted.may_grow) for wanted in cluster.told] == [(5, 3, False)]
    seen = windows[0].remote
    assert (seen.requested, seen.running, seen.room, seen.unplaced, seen.granted) == (5, 3, 7, 2, 9)
    assert tuner._law.limits.remote == MOST_WORKERS
    loader.odd = {"refused": "the dataset cannot travel"}
    loader.work(99, 0.0, 1.0)
    tuner.turn()
    assert tuner._law.limits.remote == 0


def test_a_request_for_nodes_is_told_and_ends_with_the_pass() -> None:
    cluster = Cluster(RoomFound(more=0, message="Asked the cluster for 3 places."))
    tuner, loader = tuned(replace(LISTENING, max_remote=5), room=cluster)
    tuner._law.policy.useful = 4  # type: ignore[attr-defined]
    tuner.turn()
    loader.work(9, 0.0, 0.09)
    tuner.turn()
    assert [(wanted.useful, wanted.may_grow) for wanted in cluster.told] == [(4, True)]
    (told,) = [decision for decision in tuner.decisions if decision.reason == "demand"]
    assert (told.old, told.new, told.text) == (tuner.settings, tuner.settings, "Asked the cluster for 3 places.")
    tuner.pin({"local": 2, "remote": 2, "prefetch": 4})
    tuner.turn()
    assert cluster.rests == 1
    engines_of(tuner).clear()
    tuner.add_engine(loader)
    tuner.remove_engine(loader)
    tuner.await_room_request()
    assert cluster.rests == 2


@pytest.mark.parametrize(
    "odd",
    [
        {"batch_bytes": math.nan},
        {"batch_bytes": -1.0},
        {"start_s": math.nan, "starts_anew": True, "pass_batches": 3},
        {"start_s": math.inf, "starts_anew": True, "pass_batches": 3},
        {"ready": -4},
        {"gpu_running_stall_s": math.nan, "gpu_steps": 5},
        {"local": PoolReading(requested=2, running=2, tickets=9, load_s=math.nan)},
        {"local": PoolReading(requested=2, running=2, tickets=9, load_s=-1.0, load_cpu_s=math.inf)},
        {"later_batches": 50, "blocked_s": math.nan, "stepping_s": 1.0},
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


def test_each_decision_is_a_line_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "dpex")
    tuner, loader = tuned(service_s=0.08, step_s=0.01)
    run(tuner, loader, 10.0)
    assert caplog.messages == [f"auto: {decision.text}" for decision in tuner.decisions]


def test_ray_is_shut_down_after_the_call_of_the_tuner_that_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    begun, may_end, ended = threading.Event(), threading.Event(), threading.Event()

    def slow(self: Tuner) -> float:
        begun.set()
        may_end.wait()
        ended.set()
        return 0.0

    def joined(self: threading.Thread, timeout: float | None = None) -> None:
        may_end.set()
        join(self, timeout)

    join = threading.Thread.join
    monkeypatch.setattr(Tuner, "turn", slow)
    tuner, loader = tuned(room=Cluster(3))
    tuner.add_engine(loader)
    begun.wait()
    monkeypatch.setattr(threading.Thread, "join", joined)
    tuner.remove_engine(loader)
    assert not ended.is_set()
    tuner.await_room_request()
    assert ended.is_set()
