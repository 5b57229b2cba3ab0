"""The bridge between a running loader and the law: what is measured, what is carried out, and what stays."""

from __future__ import annotations

import copy
import gc
import inspect
import logging
import os
import pickle
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from families import Augmented, assert_same, seeded, stacked
from torch.utils.data import IterableDataset
from waiting import ManualClock, until
from workload import wait_as_work

from dpex import AutotuneConfig, DpexDataLoader
from dpex.autotune.room import RoomFound, RoomWanted
from dpex.autotune.runtime.allowed import Limits, cold_start, within
from dpex.autotune.types import Decision, Sample, Settings
from dpex.errors import OptionError
from dpex.measure.consumer_time import Tally, Times
from dpex.measure.wait_causes import NONE_YET, STRAGGLER
from dpex.options import WorkerConfig
from dpex.pools.ray.room import RemoteRoom
from dpex.pools.ray.shares import Claim
from dpex.schedule.prefetch import PrefetchRules, Sizes
from dpex.system.machine import MachineMeter, busy_s, cpu_used, parse_runnable

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")
QUICK = AutotuneConfig(interval_s=0.1, shrink_after=1)
ENDLESS = 10**7
PATIENCE_S = 120.0


def tuner_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "dpex-tuner"]


@pytest.fixture(autouse=True)
def no_tuner_is_left() -> Iterator[None]:
    yield
    gc.collect()
    until(lambda: not tuner_threads())


def train(loader: Any, enough: Callable[[], Any], step_s: float = 0.0, patience_s: float = PATIENCE_S) -> Any:
    """Take batches until ``enough()``; returns the iterator."""
    iterator = iter(loader)
    deadline = time.monotonic() + patience_s
    for number, _ in enumerate(iterator):
        if step_s:
            wait_as_work(step_s)
        if number % 8 == 0 and enough():
            return iterator
        assert time.monotonic() < deadline, f"{loader.decisions}, {loader.stats()}"
    raise AssertionError("the data ended")


# -- a real loader -----------------------------------------------------------------------------------------------------


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
def test_batches_are_the_same_whatever_is_decided(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fewer and more workers, at random times."""
    wanted = [Settings(local=local, prefetch=prefetch) for local, prefetch in ((2, 2), (3, 9), (1, 1), (1, 2), (6, 40))]

    class Restless:
        def __init__(self, config: AutotuneConfig, start: Settings) -> None:
            self.start, self.decisions = start, []

        def begin(self) -> Settings:
            return self.start

        def step(self, sample: Sample) -> Decision:
            new = wanted[len(self.decisions) % len(wanted)]
            told = Decision(
                at=0.0,
                old=sample.settings,
                new=new,
                reason="too few",
                text="why",
                evidence={},
                predicted_rate=1.0,
                predicted_wait=0.0,
            )
            self.decisions.append(told)
            return told

    options = {"batch_size": 4, "shuffle": True, "seeding": "batch"}
    plain = stacked(DpexDataLoader(Augmented(2_000), num_workers=0, generator=seeded(), **options))
    monkeypatch.setattr("dpex.autotune.runtime.tuner.law_for", Restless)
    options |= {"persistent_workers": True}  # else the start of workers is a limit, with another law
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
        assert again._engine.look().sizes.local == tuner.settings.local > cold_start().local + 1
        assert loader.num_workers == int(loader.num_workers)  # what frameworks see does not move


@pytest.mark.smoke
@pytest.mark.parametrize("options", [{"num_workers": "auto", "autotune": False}, {"num_workers": 2}])
def test_frozen(options: dict[str, Any]) -> None:
    with DpexDataLoader(Augmented(400, 0.001), batch_size=2, **options) as loader:
        for _ in loader:
            assert not tuner_threads()
        assert loader.decisions == []
        assert loader._current_sizes() == Sizes(local=int(loader.num_workers), remote=0, prefetch=None)


def test_resize_fixes_what_it_names(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "dpex")
    with DpexDataLoader(Augmented(ENDLESS, 0.005), batch_size=16, num_workers="auto") as loader:
        loader.resize(local=3)
        began = time.monotonic()
        iterator = train(loader, lambda: time.monotonic() - began > 1.5)
        assert iterator._engine.stats().pools["local"].wanted == 3
        assert all(decision.new.local == 3 for decision in loader.decisions)
        loader.resize(prefetch=2)
        iterator = train(loader, lambda: time.monotonic() - began > 2)
        assert iterator._engine.stats().prefetch == 2
        loader.resize(remote=0)
        assert loader._runtime.tuner.is_frozen
    assert "auto: local=3 is fixed by resize()" in caplog.text
    assert "nothing is tuned any more" in caplog.text


class Stream(IterableDataset[torch.Tensor]):
    def __iter__(self) -> Iterator[torch.Tensor]:
        for index in range(400):
            wait_as_work(0.001)
            yield torch.tensor([index])


def test_of_a_stream_only_the_prefetch_is_tuned() -> None:
    with DpexDataLoader(Stream(), batch_size=4, num_workers=2, autotune=QUICK) as loader:
        for _ in range(2):
            for _ in loader:
                assert loader.stats().pools["local"].wanted == 2
        assert {(d.new.local, d.new.remote) for d in loader.decisions} <= {(2, 0)}


def test_a_prefetch_and_a_budget_that_were_given_are_walls() -> None:
    sample_bytes = 8 * 4
    options = {
        "num_workers": 2,
        "autotune": QUICK,
        "batch_size": 4,
        "worker_config": WorkerConfig(memory_budget=5 * 4 * sample_bytes),
    }
    with DpexDataLoader(Augmented(ENDLESS, 0.002), **options) as loader:
        iterator = train(loader, lambda: len(loader.decisions) > 1 or loader.stats().batches > 300)
        stats = iterator._engine.stats()
        assert stats.prefetch <= 5
    with DpexDataLoader(Augmented(ENDLESS, 0.002), batch_size=4, num_workers="auto", prefetch_factor=3) as loader:
        iterator = train(loader, lambda: loader.decisions and loader.stats().batches > 100)
        assert iterator._engine.stats().prefetch <= 3 * loader._runtime.tuner.settings.workers


# -- options -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bad", [True, 1, 0, "on", {"max_local": 4}, AutotuneConfig])
def test_a_bad_value_is_named_and_so_is_the_remedy(bad: Any) -> None:
    with pytest.raises(OptionError) as caught:
        DpexDataLoader([1, 2], num_workers="auto", autotune=bad)
    assert f"autotune={bad!r}: give an AutotuneConfig(...), False" in str(caught.value)


@pytest.mark.parametrize("workers", [2, "auto"])
def test_tuning_needs_seeds_per_batch(workers: Any) -> None:
    with pytest.raises(OptionError, match="seeding='batch'"):
        DpexDataLoader([1, 2], num_workers=workers, seeding="worker", autotune=AutotuneConfig())
    assert DpexDataLoader([1, 2], num_workers=workers, autotune=AutotuneConfig()).seeding == "batch"


def test_auto_with_worker_seeds_is_a_number() -> None:
    loader = DpexDataLoader([1, 2], num_workers="auto", seeding="worker")
    assert loader._tuning() is None
    assert loader._current_sizes().local == loader.num_workers


def attributes(loader: Any) -> dict[str, Any]:
    names = set(inspect.signature(type(loader)).parameters) - {"shuffle", "batch_sampler"}
    return {name: getattr(loader, name) for name in names}


HOWS: dict[str, Callable[[Any], Any]] = {
    "rebuilt": lambda loader: type(loader)(**attributes(loader)),
    "pickled": lambda loader: pickle.loads(pickle.dumps(loader)),
    "copied": copy.copy,
    "deep-copied": copy.deepcopy,
}


@pytest.mark.parametrize("how", HOWS)
@pytest.mark.parametrize("autotune", [None, False, AutotuneConfig(max_local=3)])
def test_a_second_loader_is_tuned_alike(how: str, autotune: Any) -> None:
    loader = DpexDataLoader(Augmented(80), num_workers="auto", autotune=autotune)
    for _ in range(2):
        assert len(list(loader)) == 80
        loader = HOWS[how](loader)
    assert loader.autotune == autotune
    assert (loader._tuning() is None) == (autotune is False)
    assert len(list(loader)) == 80


def test_what_was_fixed_by_resize_stays_so_in_a_copy() -> None:
    loader = DpexDataLoader([1, 2], num_workers="auto")
    loader.resize(local=5)
    assert pickle.loads(pickle.dumps(loader))._current_sizes().local == 5


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
    found = within(config, Limits(), Settings(local=1, prefetch=2), remote=remote)
    assert (found.min_local, found.min_remote) == least


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


# -- life --------------------------------------------------------------------------------------------------------------


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
    assert not tuner_threads()
    iterator = iter(loader)
    assert tuner_threads()
    loader.close()
    assert not tuner_threads()
    del iterator


def test_tuning_goes_on_when_only_the_iterator_is_left() -> None:
    loader = DpexDataLoader(Augmented(ENDLESS, 0.005), batch_size=16, num_workers="auto")
    iterator, gone = iter(loader), weakref.ref(loader)
    del loader
    gc.collect()
    assert gone() is None
    for _ in iterator:
        if iterator._engine.look().local.running > 8:
            break
    del iterator, _
    gc.collect()
    assert not tuner_threads()


def test_persistent_workers_are_tuned_across_epochs() -> None:
    loader = DpexDataLoader(Augmented(160, 0.002), batch_size=4, num_workers=2, persistent_workers=True, autotune=QUICK)
    with loader:
        for _ in range(12):
            assert len(list(loader)) == 40
        assert loader.decisions
    assert not tuner_threads()


def test_a_forked_child_has_a_tuner_of_its_own() -> None:
    loader = DpexDataLoader(Augmented(200, 0.001), batch_size=2, num_workers="auto")
    iterator = iter(loader)
    next(iterator)
    child = os.fork()
    if not child:
        code = 1
        try:
            code = 0 if not tuner_threads() and len(list(loader)) == 100 and not tuner_threads() else 2
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert len(list(iterator)) == 99


def test_an_error_in_the_law_ends_tuning_and_not_training(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("dpex.autotune.law.law.Law.step", lambda *_: 1 / 0)
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
    found = room.look(RoomWanted(requested=requested, running=running, useful=7))
    assert found == RoomFound(more=expected[0], unplaced=expected[1], granted=granted)
    assert reported == [Claim(useful=7, most=capacity, requested=requested, running=running)]


def test_a_budget_of_the_loader_is_its_tuners() -> None:
    tuner = DpexDataLoader([1, 2], num_workers="auto", worker_config=WorkerConfig(memory_budget=2_000))._tuning()
    assert tuner is not None
    assert tuner._limits.memory_budget == 2_000


# -- what the tuner reads ----------------------------------------------------------------------------------------------


def test_the_prefetch_is_the_tuners_but_for_groups_and_walls() -> None:
    def rules(*, logical: bool = False, memory_budget: int | None = None) -> PrefetchRules:
        return PrefetchRules(base_prefetch=64, logical=logical, may_read_ahead=True, memory_budget=memory_budget)

    sizes = Sizes(local=5, remote=0, prefetch=None, tuned_prefetch=3)
    assert rules().prefetch(sizes) == 3
    assert rules().prefetch(replace(sizes, prefetch=2)) == 2
    assert rules(logical=True).prefetch(sizes) == 5
    assert rules(memory_budget=100).prefetch(sizes) == 1
    tiny = rules()
    for _ in range(20):
        tiny.learn(20e-6, 20)
    tiny.regroup(sizes, workers=2)
    assert tiny.prefetch(sizes) == 4 * tiny.group * 5


def test_the_tally_splits_the_consumers_time_and_leaves_the_start_out() -> None:
    tally = Tally()
    tally.enter(1.0)
    tally.block(1.5, NONE_YET)
    assert tally.times(2.0) == Times()
    tally.unblock(2.0)
    tally.batches = 1
    tally.leave(2.0, 2.0, over=False)
    assert tally.times(2.5) == Times(work_s=0.5)
    tally.enter(3.0)
    tally.block(3.25, STRAGGLER)
    assert tally.times(4.0) == Times(wait_s=0.75, own_s=0.25, work_s=1.0, head_s=0.75, work_squared=1.0)
    assert tally.times(4.0).seconds == 2.0
    assert tally.first_batch_s == 1.0


def test_an_engine_shows_where_time_went() -> None:
    loader = DpexDataLoader(Augmented(40, 0.005), batch_size=2, num_workers=2, seeding="batch")
    iterator = iter(loader)
    next(iterator)
    first = iterator._engine.look()
    assert first.times.batches == 0
    for _ in range(9):
        next(iterator)
    look = iterator._engine.look()
    pool = look.local
    assert look.times.batches == 9
    assert pool.tickets >= 9
    assert 0.01 * pool.tickets <= pool.busy_s
    assert 0 < pool.cpu_s < pool.busy_s
    assert len(pool.services_s) == pool.tickets
    assert look.times.wait_s > look.times.own_s
    list(iterator)
    ended = iterator._engine.look().times
    assert iterator._engine.look().times == ended  # the time after the last batch is not the work's


def test_what_psutil_does_not_read_is_parsed() -> None:
    assert parse_runnable("4.18 3.22 1.51 5/126 21870\n") == 4


def test_busy_time_is_that_of_the_cpus_in_use(monkeypatch: pytest.MonkeyPatch) -> None:
    spent = dict.fromkeys(("user", "nice", "system", "irq", "softirq", "steal"), 1.0)
    each = [SimpleNamespace(**spent, idle=9.0, iowait=9.0), SimpleNamespace(**spent | {"steal": 2.0})]
    monkeypatch.setattr("psutil.cpu_times", lambda percpu: each)
    assert (busy_s({0}), busy_s({1}), busy_s({0, 1})) == (6.0, 7.0, 13.0)
    assert busy_s({0, 2}) == 13.0  # a CPU between them is offline


def test_cpu_time_of_processes_that_ended_is_0() -> None:
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    everybody, own = cpu_used([process.pid])
    assert own == pytest.approx(time.process_time(), abs=0.1)
    assert everybody > own - 0.1


def test_threads_of_a_process_share_its_memory() -> None:
    one, four = (MachineMeter(ManualClock()).sample([os.getpid()], 0.0, workers).worker_bytes for workers in (1, 4))
    assert one is not None
    assert four is not None
    assert 0 < 4 * four == pytest.approx(one, rel=0.1)


def test_the_machine_is_sampled() -> None:
    clock = ManualClock()
    meter = MachineMeter(clock)
    for _ in range(3):
        sample = meter.sample([os.getpid()], 0.5)
        clock.advance(1.0)
    assert sample.trainer_cpu_s == 0.5
    assert 0 <= sample.others <= sample.cpus
    assert sample.memory_free
