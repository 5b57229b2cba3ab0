"""The law beside a loader of one line: what it decides, that it ends, and that no sample makes it raise."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dpex.autotune.config import AutotuneConfig
from dpex.autotune.law.constants import CONSTANTS
from dpex.autotune.law.law import Law, start
from dpex.autotune.types import Decision, Sample, Settings
from dpex.measure.samples import MachineSample, PoolSample

WINDOW_S = 0.5


class Loader:
    """A loader whose workers take ``service_s(workers)`` for a batch, and whose loop takes ``step_s`` for a step."""

    def __init__(
        self,
        service_s: Callable[[int], float],
        step_s: float = 0.01,
        *,
        cpus: float = 16.0,
        cpu_share: float = 0.0,
        memory: int | None = None,
        config: AutotuneConfig | None = None,
    ) -> None:
        self.service_s, self.step_s, self.cpus, self.cpu_share, self.memory = service_s, step_s, cpus, cpu_share, memory
        self.worker_bytes = 1e8
        self.config = config or AutotuneConfig()
        self.law = Law(self.config, start(self.config, cpus))
        self.settings = self.law.begin()
        self.at = 0.0

    def run(self, seconds: float) -> list[Decision]:
        """Let time pass; the decisions meanwhile."""
        decided = []
        while seconds > 0:
            seconds -= WINDOW_S
            self.at += WINDOW_S
            decision = self.law.step(self.window())
            if decision is not None:
                assert decision.old == self.settings
                assert decision.new != decision.old
                self.settings = decision.new
                decided.append(decision)
        return decided

    def window(self) -> Sample:
        """What is measured in the next window."""
        workers, service_s = self.settings.local, self.service_s(self.settings.local)
        batches = max(1, round(WINDOW_S * min(workers / service_s, 1.0 / self.step_s)))
        steps = batches + (self.at <= WINDOW_S)  # the first batch of a pass counts in no window, but its step does
        work_s = min(WINDOW_S, steps * self.step_s)
        pool = PoolSample(
            requested=workers,
            running=workers,
            tickets=batches,
            load_s=batches * service_s,
            cpu_s=self.cpu_share * batches * service_s,
            services_s=(service_s,),
        )
        free = None if self.memory is None else int(self.memory - workers * self.worker_bytes)
        machine = MachineSample(cpus=self.cpus, memory_free=free, worker_bytes=self.worker_bytes)
        return Sample(
            at=self.at,
            seconds=WINDOW_S,
            settings=self.settings,
            batches=batches,
            wait_s=WINDOW_S - work_s,
            work_s=work_s,
            batch_bytes=1e6,
            local=pool,
            machine=machine,
        )


def steady(service_s: float) -> Callable[[int], float]:
    return lambda workers: service_s


def limited(service_s: float, at_once: float, loss: float = 0.0) -> Callable[[int], float]:
    """Something serves so many batches at once, and gets slower by the part ``loss`` with each that waits for it."""

    def found(workers: int) -> float:
        beyond = max(0.0, workers - at_once)
        return service_s * max(1.0, workers / at_once) * (1.0 + loss * beyond)

    return found


# -- start -------------------------------------------------------------------------------------------------------------


def test_it_starts_with_the_cpus_and_at_most_eight() -> None:
    config = AutotuneConfig()
    assert [start(config, cpus).local for cpus in (0.5, 1.0, 3.5, 64.0)] == [1, 1, 3, 8]
    assert start(config, 64.0).prefetch == 16


def test_it_starts_with_fewer_where_memory_may_be_short() -> None:
    config = AutotuneConfig()
    assert start(config, 64.0, memory=1e12).local == 8
    assert start(config, 64.0, memory=7 * CONSTANTS.worker_bytes).local == 7
    assert start(config, 64.0, memory=1e6).local == 4


def test_it_starts_within_the_configuration() -> None:
    assert start(AutotuneConfig(max_local=3, max_prefetch=4), 8.0) == Settings(local=3, prefetch=4)
    assert start(AutotuneConfig(min_local=2, min_remote=1), 1.0) == Settings(local=2, remote=1, prefetch=6)


# -- jump --------------------------------------------------------------------------------------------------------------


def test_one_jump_brings_as_many_workers_as_the_loop_needs() -> None:
    loader = Loader(steady(0.2), 0.01)
    (first, *_) = loader.run(2.0)
    assert first.reason == "too few"
    assert first.new.local == math.ceil(CONSTANTS.headroom * 0.2 / 0.01)
    assert loader.window().wait_s == 0


def test_a_jump_is_bounded() -> None:
    loader = Loader(steady(1.0), 0.01)
    (first, *_) = loader.run(3.0)
    assert first.new.local == CONSTANTS.jump * 8


def test_cpus_bound_it_where_batches_compute() -> None:
    loader = Loader(lambda workers: 0.1 * max(1.0, workers / 12), 0.002, cpus=12.0, cpu_share=1.0)
    loader.run(30.0)
    assert 11 <= loader.settings.local <= 14


def test_nothing_is_changed_where_the_loop_does_not_wait() -> None:
    assert all(decision.reason == "too many" for decision in Loader(steady(0.02), 0.02).run(60.0))


# -- growth that fails -------------------------------------------------------------------------------------------------


def test_growth_that_only_makes_batches_slower_is_taken_back() -> None:
    """A storage that serves eight readers at once: with 32 each batch takes four times as long."""
    loader = Loader(limited(0.5, 8.0), 0.01)
    decisions = loader.run(20.0)
    assert [decision.reason for decision in decisions[:2]] == ["too few", "undo"]
    assert loader.law.decisions[0].outcome is not None
    assert not loader.law.decisions[0].outcome.kept
    assert decisions[1].new.local < 12


def test_it_is_tried_again_after_a_pause_and_at_half_the_size_in_the_ratio() -> None:
    loader = Loader(limited(0.5, 8.0), 0.01)
    (grown, undone, *_) = loader.run(20.0)
    again = next(decision for decision in loader.run(600.0) if decision.new.local > decision.old.local)
    assert again.at - undone.at > CONSTANTS.pause * (undone.at - grown.at)
    assert again.new.local <= math.ceil(math.sqrt(undone.new.local * grown.new.local))


def test_growth_that_does_harm_ends_before_its_batches_are_there() -> None:
    """With 32 readers a batch takes a minute, and none is made meanwhile."""
    loader = Loader(limited(0.5, 8.0, loss=1.0), 0.01)
    loader.run(1.0)
    grown = next(d for d in loader.run(5.0) if d.new.local > 8) if loader.settings.local == 8 else None
    assert grown is not None or loader.settings.local > 8
    ended = None
    for _ in range(60):
        sample = loader.window()
        loader.at += WINDOW_S
        nothing = replace(sample.local, tickets=0, load_s=0.0, cpu_s=0.0, services_s=())
        stalled = replace(sample, at=loader.at, batches=0, wait_s=WINDOW_S, work_s=0.0, local=nothing)
        ended = loader.law.step(stalled)
        if ended is not None:
            break
    assert ended is not None
    assert ended.reason == "undo"
    assert ended.new.local == 8
    assert loader.at < 20


def test_going_back_is_taken_back_if_it_was_worse() -> None:
    """Batches get slower at the very moment of the growth, and stay so: it was not to blame."""
    times = 1.0
    loader = Loader(lambda workers: 0.3 * times, 0.01)
    while loader.settings.local == 8:
        loader.run(WINDOW_S)
    many, times = loader.settings.local, 12.0
    loader.run(120.0)
    assert loader.settings.local >= many


# -- the rest ----------------------------------------------------------------------------------------------------------


def test_other_work_is_met_by_another_jump() -> None:
    loader = Loader(steady(0.1), 0.02)
    loader.run(30.0)
    few = loader.settings.local
    loader.step_s = 0.005
    most = max(decision.new.local for decision in loader.run(10.0))
    assert most == math.ceil(CONSTANTS.headroom * 0.1 / 0.005) > few


def test_workers_that_nobody_needs_are_given_back() -> None:
    loader = Loader(steady(0.1), 0.05)
    loader.run(60.0)
    assert 2 <= loader.settings.local <= 3


def test_who_wants_back_what_it_gave_back_waits_longer_with_the_next() -> None:
    def given_back_after_s(loader: Loader) -> float:
        began, loader.step_s = loader.at, 0.05
        while loader.settings.local > 4:
            loader.run(WINDOW_S)
        return loader.at - began

    loader = Loader(steady(0.1), 0.01)
    loader.run(10.0)
    first_s = given_back_after_s(loader)
    for _ in range(3):
        loader.step_s = 0.01
        loader.run(10.0)
        assert loader.settings.local > 8
        last_s = given_back_after_s(loader)
    assert last_s > 2 * first_s


def test_limits_hold_at_once() -> None:
    loader = Loader(steady(1.0), 0.01, memory=10**11)
    loader.run(10.0)
    assert loader.settings.local > 20
    loader.memory = int(1e9)
    (first,) = loader.run(WINDOW_S)
    assert first.reason == "limit"
    assert first.new.local * loader.worker_bytes <= 1e9


@given(
    service_s=st.floats(0.002, 2.0),
    step_s=st.floats(0.001, 1.0),
    cpus=st.integers(1, 64),
    at_once=st.floats(1.0, 128.0),
)
@settings(max_examples=15, deadline=None)
def test_it_settles(service_s: float, step_s: float, cpus: int, at_once: float) -> None:
    loader = Loader(limited(service_s, at_once), step_s, cpus=float(cpus))
    """What failed is tried again ever later: growth, a probe, and the way back from either."""
    loader.run(120.0)
    assert len(loader.run(60.0)) <= 4


# -- odd samples -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("odd", [{"at": 5.0}, {"seconds": 0.0}, {"batches": 0}, {"wait_s": math.nan}])
def test_it_goes_on_after_odd_windows(odd: dict[str, float]) -> None:
    """A clock that stands still, windows of no length, without batches, or whose times are none."""
    loader = Loader(steady(0.2), 0.01)
    for _ in range(20):
        loader.law.step(replace(loader.window(), **odd))  # type: ignore[arg-type]
    loader.at = max(loader.at, 5.0)
    loader.run(20.0)
    assert loader.settings.local >= 20
