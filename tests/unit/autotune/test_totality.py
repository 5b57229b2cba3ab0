"""The law takes any sequence of legal samples: it raises nothing, stays within its limits, and recovers."""

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.simulation.simulator import simulate
from benchmarks.simulation.world import Phase, Step, Work, World
from dpex.autotune.config import AutotuneConfig, limits_of
from dpex.autotune.supervisor import Supervisor
from dpex.autotune.types import Decision
from dpex.measure.pool_reading import PoolReading
from dpex.measure.reading import Reading
from dpex.measure.settings import Settings

ODD = st.sampled_from([0.0, math.inf, -math.inf, math.nan, -1.0, 1e-15, 1e-9, 1e6, 1e300])


def number(most: float) -> st.SearchStrategy[float]:
    return st.one_of(st.floats(0.0, most), ODD)


def whole(most: int) -> st.SearchStrategy[int]:
    return st.one_of(st.integers(0, most), st.sampled_from([0, 1, 10**4, 10**12]))


POOLS = st.builds(
    PoolReading,
    requested=whole(64),
    running=whole(64),
    tickets=whole(200),
    load_s=number(10.0),
    collate_s=number(1.0),
    encode_s=number(1.0),
    load_cpu_s=number(10.0),
    queued_s=number(1.0),
    services_s=st.lists(number(1.0), max_size=4).map(tuple),
    room=st.none() | whole(30),
    unplaced=whole(8),
    granted=st.none() | whole(30),
)
WINDOWS = st.builds(
    Reading,
    at=number(100.0),
    seconds=number(2.0),
    settings=st.just(Settings()),
    later_batches=whole(200),
    blocked_s=number(1.0),
    next_busy_s=number(1.0),
    stepping_s=number(1.0),
    straggler_s=number(1.0),
    ready=whole(50),
    in_flight=whole(100),
    batch_bytes=number(1e8),
    pools=st.fixed_dictionaries({"local": POOLS, "remote": POOLS}),
    cpus=number(64.0),
    others_s=number(8.0),
    others_over_s=st.just(1.0),
    trainer_cpu_s=number(1.0),
    trainer_queued_s=st.none() | number(1.0),
    memory_free=st.none() | st.sampled_from([0, -(10**9), 10**6, 10**9, 10**10, 10**30]),
    worker_bytes=number(1e8),
    kernel_s=number(1.0),
    kernel_seen_s=st.sampled_from([0.0, 1.0]),
    gpu_running_stall_s=st.none() | number(1.0),
    gpu_steps=whole(200),
    gpu_steps_s=number(1.0),
    feed_wait_s=st.none() | number(1.0),
    pass_batches=whole(200),
    start_s=number(10.0),
    starts_anew=st.booleans(),
)
CONFIGS = st.sampled_from(
    [
        AutotuneConfig(),
        AutotuneConfig(max_local=3, max_prefetch=6),
        AutotuneConfig(min_local=2, max_local=8, max_remote=4),
        AutotuneConfig(max_local=0, min_remote=1),
        AutotuneConfig(min_local=2, min_remote=3, max_remote=3),
        AutotuneConfig(max_waiting=5, max_remote=0),
    ]
)
TURNS = st.lists(st.tuples(WINDOWS, st.booleans()), min_size=1, max_size=16)
"""A window, and whether the settings decided before it were carried out."""


def first(config: AutotuneConfig) -> Settings:
    local = max(config.min_local, 2 if config.max_local is None else min(2, config.max_local))
    return Settings(local=local, remote=config.min_remote, prefetch=4)


def plausible(window: Reading) -> Reading:
    """The same with times that are times, so that the rest of it is looked at."""
    times = {name: value if 0 <= (value := getattr(window, name)) <= 2 else 0.5 for name in ("seconds", "blocked_s")}
    return replace(window, **times, next_busy_s=0.01, stepping_s=0.2)


def play(law: Supervisor, turns: Iterable[tuple[Reading, bool]]) -> list[tuple[Reading, Decision]]:
    now, wanted, taken = law.begin(), law.begin(), []
    for window, carried_out in turns:
        now = wanted if carried_out else now
        shown = replace(window, settings=now)
        decision = law.step(shown)
        if decision is not None:
            wanted = decision.new
            taken.append((shown, decision))
    return taken


def assert_within(config: AutotuneConfig, window: Reading, decision: Decision) -> None:
    new = decision.new
    assert config.min_local <= new.local <= (math.inf if config.max_local is None else config.max_local)
    assert config.min_remote <= new.remote <= (math.inf if config.max_remote is None else config.max_remote)
    if config.max_local is None:
        cpus = max(window.cpus if math.isfinite(window.cpus) else 1e5, decision.evidence.get("cpus", 0.0))
        assert new.local <= max(decision.old.local, first(config).local, config.max_waiting, 2 * cpus + 2)
    assert 1 <= new.prefetch <= (config.max_prefetch or max(decision.old.prefetch, 32 * new.workers))
    assert new != decision.old
    assert all(math.isfinite(value) for value in (*decision.evidence.values(), decision.at))
    assert 0 <= decision.predicted_wait <= 1
    assert 0 <= decision.predicted_rate < math.inf
    if decision.predicted_rate:
        step_s = decision.evidence["expected_step_s"]
        assert decision.predicted_rate * step_s + decision.predicted_wait == pytest.approx(1.0)
    assert not re.search(r"(?<!\w)-\d", decision.text), decision.text
    assert all(value >= 0 for name, value in decision.evidence.items() if name.endswith(("_s", "_ms")))


@settings(max_examples=60, deadline=None)
@given(config=CONFIGS, turns=TURNS, is_plausible=st.booleans(), budget=st.sampled_from([1, 10**6, 10**9, math.inf]))
def test_any_sequence_of_legal_windows_keeps_the_limits(
    config: AutotuneConfig, turns: Sequence[tuple[Reading, bool]], is_plausible: bool, budget: float
) -> None:
    if is_plausible:
        turns = [(plausible(window), carried_out) for window, carried_out in turns]
    limits = replace(limits_of(config), batch_budget=budget)
    for window, decision in play(Supervisor(config, first(config), limits), turns):
        assert_within(config, window, decision)


WAITS = World(cpus=4, phases=(Phase(work=Work(wait_s=0.08, cpu_s=0.001), step=Step(gpu_s=0.02)),))


class After:
    """A law that was shown something else before."""

    def __init__(self, turns: Sequence[tuple[Reading, bool]]) -> None:
        self.law = Supervisor(AutotuneConfig(), Settings(local=2, prefetch=4))
        play(self.law, turns)

    def begin(self) -> Settings:
        return self.law.begin()

    def step(self, window: Reading) -> Decision | None:
        return self.law.step(window)


@pytest.mark.long
@settings(max_examples=12, deadline=None, derandomize=True)
@given(turns=TURNS, is_plausible=st.booleans())
def test_it_recovers_from_whatever_it_was_shown(turns: Sequence[tuple[Reading, bool]], is_plausible: bool) -> None:
    """Steps of 20 ms, batches that wait for 80: five workers are enough, and two are not."""
    if is_plausible:
        turns = [(plausible(window), carried_out) for window, carried_out in turns]
    (history,) = simulate(WAITS, [After(turns)], 240)
    assert history.rate(180, 240) > 0.9 / 0.0203


def lasting(seconds: float, **changes: Any) -> Reading:
    """A window in which the loop waits for most of the time."""
    here = PoolReading(running=2, requested=2, tickets=9, load_s=1.0, load_cpu_s=0.1, services_s=(0.1,) * 9)
    times = {"blocked_s": max(0.0, seconds - 0.02), "stepping_s": 0.02}
    values: dict[str, Any] = {"at": 5000.0, "later_batches": 9, "pools": {"local": here}, "cpus": 4.0}
    return Reading(seconds=seconds, settings=Settings(local=2, prefetch=4), **{**values, **times, **changes})


@pytest.mark.parametrize(
    ("lasted", "decides"),
    [([1.0], True), ([1.0, 3600.0], False), ([31.0], False), ([29.0], True), ([29.0, 290.0], True), ([0.0], False)],
)
def test_a_window_of_a_suspended_machine_is_left_out(lasted: list[float], decides: bool) -> None:
    """The law decides on the last window alone: those before it have no batches."""
    law = Supervisor(AutotuneConfig(), Settings(local=2, prefetch=4))
    for seconds in lasted[:-1]:
        assert law.step(lasting(seconds, later_batches=0, blocked_s=0.0)) is None
    assert (law.step(lasting(lasted[-1])) is not None) == decides


@pytest.mark.parametrize("odd", [math.nan, math.inf, -1.0, 1e300])
@pytest.mark.parametrize("name", ["at", "seconds", "blocked_s", "stepping_s", "batch_bytes", "start_s"])
def test_a_window_with_an_impossible_number_is_left_out(name: str, odd: float) -> None:
    law = Supervisor(AutotuneConfig(), Settings(local=2, prefetch=4))
    assert law.step(replace(lasting(1.0), **{name: odd})) is None
    pool = replace(lasting(1.0).local, load_s=odd)
    assert law.step(lasting(1.0, pools={"local": pool})) is None
    assert law.step(lasting(1.0)) is not None
