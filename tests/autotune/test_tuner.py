"""The bridge between a running loader and the law: what is measured, what is carried out, and what stays."""

import gc
import os
import pickle
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from itertools import cycle
from pathlib import Path
from typing import Any

import pytest
from families import Augmented, assert_same, seeded, stacked, train_until
from inspection import engine_of, settings_of, tuner_of
from waiting import ManualClock, until

from dpex import AutotuneConfig, DpexDataLoader
from dpex.autotune.config import limits_of
from dpex.autotune.limits import Limits
from dpex.autotune.runtime.tuner import Tuner, cold_start
from dpex.autotune.types import Decision, RoomFound, RoomWanted
from dpex.errors import OptionError
from dpex.measure.reading import Reading
from dpex.measure.settings import Settings
from dpex.options import WorkerConfig
from dpex.pools.ray.room import RemoteRoom
from dpex.pools.ray.shares import Claim
from dpex.system.meter import CpuUse, MachineMeter, busy_s, cpu_used, others_s

QUICK = AutotuneConfig(interval_s=0.1, shrink_after=1)
ENDLESS = 10**7


def tuner_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "dpex-tuner"]


@pytest.fixture(autouse=True)
def no_tuner_is_left() -> Iterator[None]:
    yield
    gc.collect()
    until(lambda: not tuner_threads())


def train(loader: Any, enough: Callable[[], Any], step_s: float = 0.0) -> Any:
    """Take batches until ``enough()``; returns the iterator."""
    iterator = iter(loader)
    train_until(enough, loader, iterator, step_s=step_s)
    return iterator


def test_work_that_waits_grows_far_beyond_the_cores() -> None:
    """How much less the consumer then waits is a matter of what else the machine does: see the simulated worlds."""
    many = 3 * cold_start().local
    with DpexDataLoader(Augmented(ENDLESS, 0.005), batch_size=16, num_workers="auto") as loader:
        _ = train(loader, lambda: loader.stats().pools["local"].running >= many)
        first = loader.decisions[0]
        assert first.old == cold_start()
        assert first.new.local > first.old.local
        assert first.reason == "too few"
        assert first.evidence
        assert first.text


def test_a_slow_consumer_needs_few_workers() -> None:
    data = Augmented(ENDLESS, 0.0005)
    with DpexDataLoader(data, batch_size=8, num_workers=8, autotune=QUICK) as loader:
        assert loader.seeding == "batch"
        _ = train(loader, lambda: loader.stats().pools["local"].wanted <= 3, step_s=0.02)
        fewer = [decision.reason for decision in loader.decisions if decision.new.workers <= 3]
        assert fewer[0] in ("too many", "limit", "explore")  # a trial, where others leave it little of the CPUs


@pytest.mark.smoke
def test_batches_are_the_same_whatever_is_decided() -> None:
    """Fewer and more workers, at random times."""
    wanted = [Settings(local=local, prefetch=prefetch) for local, prefetch in ((2, 2), (3, 9), (1, 1), (1, 2), (6, 40))]

    class Restless:
        def __init__(self, config: AutotuneConfig, start: Settings, limits: Limits) -> None:
            self.wishes = cycle(wanted)

        def observe(self, window: Reading, limits: Limits) -> Decision:
            return Decision.to(window, next(self.wishes), "explore")

    options = {"batch_size": 4, "shuffle": True, "seeding": "batch"}
    plain = stacked(DpexDataLoader(Augmented(2_000), num_workers=0, generator=seeded(), **options))
    options |= {"persistent_workers": True, "autotune": AutotuneConfig(policy=Restless)}
    data = Augmented(2_000, 0.0005)
    with DpexDataLoader(data, num_workers="auto", generator=seeded(), **options) as loader:
        tuned = stacked(loader)
        assert len(loader.decisions) > len(wanted)
    assert_same(tuned, plain)


def test_the_next_epoch_begins_with_what_was_learnt() -> None:
    with DpexDataLoader(Augmented(ENDLESS, 0.005), batch_size=16, num_workers="auto") as loader:
        train(loader, lambda: loader._runtime.tuner.settings.local > cold_start().local)
        tuner = loader._runtime.tuner
        loader.resize(local=tuner.settings.local + 1)  # it changes no more
        again = iter(loader)
        assert engine_of(again).reading().settings.local == tuner.settings.local > cold_start().local + 1
        assert loader.num_workers == int(loader.num_workers)  # what frameworks see does not move


@pytest.mark.smoke
@pytest.mark.parametrize("options", [{"num_workers": "auto", "autotune": False}, {"num_workers": 2}])
def test_frozen(options: dict[str, Any]) -> None:
    with DpexDataLoader(Augmented(400, 0.001), batch_size=2, **options) as loader:
        for _ in loader:
            assert not tuner_threads()
        assert loader.decisions == []
        assert settings_of(loader) == Settings(local=loader.num_workers, prefetch=2 * loader.num_workers)


def test_auto_with_worker_seeds_is_a_number() -> None:
    loader = DpexDataLoader([1, 2], num_workers="auto", seeding="worker", autotune=False)
    assert tuner_of(loader) is None
    assert settings_of(loader).local == loader.num_workers


def test_what_was_fixed_by_resize_stays_so_in_a_copy() -> None:
    loader = DpexDataLoader([1, 2], num_workers="auto")
    loader.resize(local=5)
    assert settings_of(pickle.loads(pickle.dumps(loader))).local == 5


@pytest.mark.parametrize(
    ("config", "remote", "least"),
    [
        (AutotuneConfig(), False, (1, 0)),
        (AutotuneConfig(), True, (1, 0)),
        (AutotuneConfig(max_local=0), True, (0, 1)),
        (AutotuneConfig(max_local=0), False, (1, 0)),  # the cluster is lost
    ],
)
def test_there_is_always_a_worker(config: AutotuneConfig, remote: bool, least: tuple[int, int]) -> None:
    limits = limits_of(config)
    found = limits.with_a_worker() if remote else limits.without_remote(1)
    assert (found.least_local, found.least_remote) == least


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"autotune": AutotuneConfig()}, "num_workers=0 has none: give num_workers='auto'"),
        ({"num_workers": "auto", "autotune": AutotuneConfig(max_local=0)}, "leaves no worker: give distribute_mode"),
    ],
)
def test_tuning_without_a_worker_is_refused(options: dict[str, Any], why: str) -> None:
    with pytest.raises(OptionError, match=why):
        DpexDataLoader([1, 2], **options)


def test_the_thread_lives_as_long_as_iterators() -> None:
    loader = DpexDataLoader(Augmented(400, 0.001), batch_size=2, num_workers="auto")
    assert not tuner_threads()
    first, second = iter(loader), iter(loader)
    (thread,) = tuner_threads()
    assert thread.daemon
    next(first), next(second)
    del first
    gc.collect()
    assert tuner_threads() == [thread]
    for _ in second:
        pass
    until(lambda: not tuner_threads())
    iterator = iter(loader)
    assert tuner_threads()
    loader.close()
    until(lambda: not tuner_threads())
    del iterator


def test_an_epoch_does_not_wait_for_a_turn_of_the_tuner(monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread of the next epoch waits for it instead, so that no two turns run at the same time."""
    may_end, running, most, joins = threading.Event(), [], [], []
    join = threading.Thread.join

    def noted(self: threading.Thread, timeout: float | None = None) -> None:
        joins.append((threading.current_thread(), self))
        join(self, timeout)

    def slow(self: Tuner) -> float:
        running.append(threading.current_thread())
        most.append(len(running))
        may_end.wait()
        running.pop()
        return QUICK.interval_s

    monkeypatch.setattr(threading.Thread, "join", noted)
    monkeypatch.setattr(Tuner, "turn", slow)
    loader = DpexDataLoader(Augmented(ENDLESS, 0.001), batch_size=2, num_workers="auto")
    iterator = train(loader, lambda: running)
    loader.close()
    (former,) = running
    assert (threading.current_thread(), former) not in joins
    iterator = train(loader, lambda: former in [joined for _, joined in joins])
    assert running == [former]
    may_end.set()
    train_until(lambda: len(most) > 1, loader, iterator)
    assert not former.is_alive()
    loader.close()
    assert set(most) == {1}


def test_tuning_goes_on_when_only_the_iterator_is_left() -> None:
    loader = DpexDataLoader(Augmented(ENDLESS, 0.005), batch_size=16, num_workers="auto")
    iterator, gone = iter(loader), weakref.ref(loader)
    del loader
    gc.collect()
    assert gone() is None
    for _ in iterator:
        if engine_of(iterator).reading().local.running > 8:
            break
    del iterator, _
    gc.collect()
    until(lambda: not tuner_threads())


def test_an_error_in_the_law_ends_tuning_and_not_training(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("dpex.autotune.law.law.Law.observe", lambda *_: 1 / 0)
    with DpexDataLoader(Augmented(2_000, 0.0005), batch_size=2, num_workers="auto") as loader:
        for _ in range(2):
            assert len(list(loader)) == 1_000
        (said,) = loader.decisions
    assert (said.reason, said.old, said.new) == ("failed", cold_start(), cold_start())
    assert caplog.text.count("Tuning has stopped because of an error in dpex: ZeroDivisionError") == 1


@pytest.mark.parametrize(
    ("free", "capacity", "granted", "requested", "running", "expected"),
    [
        (8, 8, None, 0, 0, (8, 0)),
        (8, 8, 5, 1, 1, (4, 0)),
        (8, 8, 2, 3, 3, (0, 0)),  # granted less than it has: that is no lack of place
        (1, 8, None, 5, 0, (1, 0)),  # some of the five are starting
        (0, 4, None, 7, 5, (0, 2)),  # a node has gone, and one of the five runs on the trainer's
        (0, 0, None, 3, 0, (0, 3)),
    ],
)
def test_room_on_the_cluster(
    free: int, capacity: int, granted: int | None, requested: int, running: int, expected: tuple[int, int]
) -> None:
    room = RemoteRoom(None, every_s=1e9)
    room._look = lambda: (free, capacity)  # type: ignore[method-assign]
    reported: list[Claim] = []
    room._share.report = lambda claim, **_: (reported.append(claim), granted)[1]  # type: ignore[assignment, misc]
    found = room.find(RoomWanted(requested=requested, running=running, useful=7))
    assert found == RoomFound(more=expected[0], unplaced=expected[1], granted=granted)
    assert reported == [Claim(useful=7, most=capacity, requested=requested, running=running)]


def test_a_budget_of_the_loader_is_its_tuners() -> None:
    tuner = tuner_of(DpexDataLoader([1, 2], num_workers="auto", worker_config=WorkerConfig(memory_budget=2_000)))
    assert tuner is not None
    assert tuner._limits.batch_budget == 2_000


def test_an_engine_shows_where_time_went() -> None:
    loader = DpexDataLoader(Augmented(40, 0.005), batch_size=2, num_workers=2, seeding="batch")
    iterator = iter(loader)
    next(iterator)
    assert engine_of(iterator).reading().later_batches == 0
    for _ in range(9):
        next(iterator)
    reading = engine_of(iterator).reading()
    pool = reading.local
    assert reading.later_batches == 9
    assert pool.tickets >= 9
    assert 0.01 * pool.tickets <= pool.busy_s
    assert 0 < pool.cpu_s < pool.busy_s
    assert len(pool.services_s) == pool.tickets
    assert reading.blocked_s > 0
    assert reading.next_busy_s > 0
    list(iterator)
    ended = engine_of(iterator).reading()
    assert engine_of(iterator).reading().seconds == ended.seconds  # the time after the last batch is not the work's


def test_busy_time_is_that_of_the_cpus_in_use(tmp_path: Path) -> None:
    """The CPU of number 1 is offline. Idle times and those that the kernel repeats for virtual machines are 9."""
    second = os.sysconf("SC_CLK_TCK")
    rows = ("cpu", "cpu0", "cpu2")
    times = [(*[second] * 3, 9, 9, second, second, last * second, 9, 9) for last in (3, 1, 2)]
    lines = [" ".join(map(str, (name, *row))) for name, row in zip(rows, times, strict=True)]
    (tmp_path / "stat").write_text("\n".join([*lines, "intr 1"]))
    assert [busy_s(cpus, tmp_path) for cpus in ({0}, {2}, {0, 2}, {0, 1})] == [6.0, 7.0, 13.0, 6.0]


def test_cpu_time_of_processes_that_ended_is_0(monkeypatch: pytest.MonkeyPatch) -> None:
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    monkeypatch.setattr("dpex.system.meter.cgroup_cpus", lambda: None)  # a quota would hide other programs
    used = cpu_used([process.pid])
    assert used is not None
    assert used.own_s == pytest.approx(time.process_time(), abs=0.1)
    assert used.all_s > used.own_s - 0.1


def test_threads_of_a_process_share_its_memory() -> None:
    one, four = (MachineMeter(ManualClock()).counts([os.getpid()], workers)["worker_bytes"] for workers in (1, 4))
    assert 0 < 4 * four == pytest.approx(one, rel=0.1)


def test_the_median_worker_counts_not_the_largest() -> None:
    """The worker that starts first has a copy of the dataset's objects, and the next one will share them."""
    scripts = [f"held = b'x' * {size}; print(1, flush=True); input()" for size in (128 << 20, 1, 1)]
    with ExitStack() as stack:
        workers = [
            stack.enter_context(
                subprocess.Popen([sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
            )
            for script in scripts
        ]
        for worker in workers:
            assert worker.stdout is not None
            worker.stdout.readline()
        found = MachineMeter(ManualClock()).counts([worker.pid for worker in workers], len(workers))
    assert 0 < found["worker_bytes"] < 64 << 20


def test_the_machine_is_read() -> None:
    clock = ManualClock()
    meter = MachineMeter(clock)
    for _ in range(3):
        found = Reading(**meter.counts([os.getpid()]))
        clock.advance(1.0)
    assert found.others is not None
    assert 0 <= found.others <= found.cpus
    assert found.others_over_s == 1.0
    assert found.memory_free


@pytest.mark.parametrize(("within_s", "others"), [(1.0, 2.0), (60.0, 0.5)])
def test_workers_of_a_validation_are_no_other_programs(
    within_s: float, others: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock, used = ManualClock(), [CpuUse(100.0, 10.0)]
    monkeypatch.setattr("dpex.system.meter.cpu_used", lambda pids: used[0])
    meter = MachineMeter(clock)
    meter._usable = 8.0
    meter.counts([])
    clock.advance(1.0)
    used[0] = CpuUse(103.0, 11.0)
    assert Reading(**meter.counts([], seconds=1.0)).others == 2.0
    clock.advance(60.0)  # of which the training loop was in passes for ``within_s``
    used[0] = CpuUse(143.0, 21.0)
    assert Reading(**meter.counts([], seconds=within_s)).others == others


def test_cpu_time_of_workers_that_ended_is_not_that_of_others() -> None:
    before, now = CpuUse(100.0, 60.0), CpuUse(110.0, 20.0)
    assert others_s(now, before, 1.0) == 10.0
    assert others_s(now, before, 1.0, own_s=8.0) == 2.0
