"""When an agent compresses what it sends: a table of ways, workers and buffers."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dpex.pools.agent.compression_rule import (
    LONGEST_PAUSE_S,
    PAUSE_S,
    TRIAL_WINDOWS,
    AgentFlow,
    LevelCost,
    Trial,
    best_level,
    is_limiting,
)

MB = 1_000_000
SLOW = AgentFlow(
    seconds=1.0,
    batch_bytes=25 * MB,
    sent_bytes=25 * MB,
    sending_s=1.0,
    queued=1.0,
    busy_s=4.0,
    cpu_s=0.1,
    workers=8,
    cpus=4.0,
)
"""200 Mbit/s, full: 40 ns a byte. Workers that wait for most of the time could make twice as much."""
FAST = replace(SLOW, batch_bytes=1250 * MB, sent_bytes=1250 * MB, cpu_s=1.0)
"""10 Gbit/s, as full: 0.8 ns a byte."""
GOOD, FINE = LevelCost(1, 0.3, 4e-9, 1e-9), LevelCost(-5, 0.6, 2e-9, 0.7e-9)
NOISE = LevelCost(1, 1.0, 2e-9, 0.1e-9)
SLIGHT = LevelCost(1, 0.93, 3e-9, 1e-9)


def idle(flow: AgentFlow, share: float) -> AgentFlow:
    """The same way, which is used for this share of the time."""
    return replace(
        flow,
        batch_bytes=int(share * flow.batch_bytes),
        sent_bytes=int(share * flow.sent_bytes),
        sending_s=share * flow.sending_s,
    )


def test_the_table() -> None:
    table: list[tuple[str, AgentFlow, list[LevelCost], int | None, int | None]] = [
        ("a slow way, and less to carry", SLOW, [GOOD, FINE], None, 1),
        ("in another order", SLOW, [FINE, GOOD], None, 1),
        ("nothing was tried yet", SLOW, [], None, None),
        ("nothing becomes smaller", SLOW, [NOISE], None, None),
        ("hardly anything does: too little to begin with", SLOW, [SLIGHT], None, None),
        ("and not worth going on with, as it costs more CPU time than it saves", SLOW, [SLIGHT], 1, None),
        ("a fast way carries it sooner than it is compressed", FAST, [GOOD, FINE], None, None),
        ("nor is it gone on with there", FAST, [GOOD, FINE], 1, None),
        ("a way with time to spare limits nobody", idle(SLOW, 0.5), [GOOD], None, None),
        ("one that is nearly full: not begun", idle(SLOW, 0.8), [GOOD], None, None),
        ("one that is nearly full: gone on with", idle(SLOW, 0.8), [GOOD], 1, 1),
        ("a long way is always under way, and nothing waits for it", replace(SLOW, queued=0.1), [GOOD], None, None),
        ("workers limit: nothing comes sooner", replace(SLOW, busy_s=8.0), [GOOD], None, None),
        ("CPUs limit: compressing would take theirs", replace(SLOW, cpu_s=3.9), [GOOD], None, None),
        ("CPUs have little to spare, and the faster level fits", replace(SLOW, cpu_s=3.3), [GOOD, FINE], None, -5),
        ("nothing was sent", replace(SLOW, batch_bytes=0), [GOOD], None, None),
        ("nothing is known of the way", replace(SLOW, sent_bytes=0, sending_s=0.0), [GOOD], None, None),
    ]
    found = {what: best_level(flow, costs, now) for what, flow, costs, now, _ in table}
    assert found == {what: expected for what, *_, expected in table}


def test_a_way_that_has_become_roomy_by_compression_is_still_one_that_limits() -> None:
    compressed = replace(SLOW, batch_bytes=50 * MB, sent_bytes=15 * MB, sending_s=0.6)
    assert compressed.pressure == pytest.approx(2.0)
    assert is_limiting(compressed, compresses=True)
    assert best_level(compressed, [GOOD], 1) == 1


def test_a_training_loop_that_wants_less_ends_it() -> None:
    """What would be under way for half of the time needs no compression."""
    less = replace(SLOW, batch_bytes=12 * MB, sent_bytes=4 * MB, sending_s=0.16)
    assert less.pressure == pytest.approx(0.48)
    assert not is_limiting(less, compresses=True)
    assert best_level(less, [GOOD], 1) is None


def test_one_thread_that_compresses_is_no_slower_than_the_way() -> None:
    """However few bytes remain: a thread that takes 50 ns for each is slower than a way that takes 40."""
    assert best_level(SLOW, [LevelCost(1, 0.01, 39e-9, 0.5e-9)], 1) == 1
    assert best_level(SLOW, [LevelCost(1, 0.01, 39e-9, 0.5e-9)], None) is None
    assert best_level(SLOW, [LevelCost(1, 0.01, 50e-9, 0.5e-9)], 1) is None


def full(bits_per_s: float) -> AgentFlow:
    """A way of that speed, which is full, while workers and CPUs have time to spare."""
    return replace(SLOW, batch_bytes=int(bits_per_s / 8), sent_bytes=int(bits_per_s / 8))


def measured(*costs: tuple[float, float, float]) -> list[LevelCost]:
    """Of levels 3, 1 and -5: what remains, and ns for a byte to compress and to decompress."""
    return [
        LevelCost(level, remaining, compress_ns / 1e9, decompress_ns / 1e9)
        for level, (remaining, compress_ns, decompress_ns) in zip((3, 1, -5), costs, strict=True)
    ]


CONTENTS = {
    "photographs": measured((0.81, 5.7, 1.2), (0.89, 1.8, 0.9), (0.95, 0.6, 0.2)),
    "normalised photographs": measured((0.28, 5.0, 1.1), (0.36, 3.6, 1.0), (0.45, 2.9, 0.8)),
    "tokens": measured((0.06, 1.4, 0.5), (0.05, 1.1, 0.5), (0.10, 1.1, 0.5)),
    "four values": measured((0.31, 4.9, 1.0), (0.31, 4.1, 1.1), (0.38, 3.9, 1.1)),
    "random floats": measured((0.93, 1.6, 0.9), (0.92, 1.1, 0.8), (1.0, 0.2, 0.1)),
}
"""As measured for decision 67."""


@pytest.mark.parametrize(
    ("content", "at_200_mbit", "at_1_gbit", "at_2_5_gbit"),
    [
        ("photographs", 3, None, None),
        ("normalised photographs", -5, -5, None),
        ("tokens", -5, -5, -5),
        ("four values", -5, 1, None),
        ("random floats", None, None, None),
    ],
)
def test_what_it_decides_for_ways_and_contents(
    content: str, at_200_mbit: int | None, at_1_gbit: int | None, at_2_5_gbit: int | None
) -> None:
    """Where several levels leave it to the workers what comes, it is the fastest of them."""
    expected = {0.2e9: at_200_mbit, 1e9: at_1_gbit, 2.5e9: at_2_5_gbit, 10e9: None, 25e9: None, 100e9: None}
    assert {speed: best_level(full(speed), CONTENTS[content], None) for speed in expected} == expected
    slow = replace(full(10e9), sending_s=0.1)
    assert best_level(slow, CONTENTS[content], 1) is None


PARTS = st.floats(0.001, 1.0)
NS_A_BYTE = st.floats(0.01, 50.0)


@given(
    bits_per_s=st.floats(1e6, 1e11),
    costs=st.lists(st.tuples(PARTS, NS_A_BYTE, NS_A_BYTE), min_size=3, max_size=3),
    busy_s=st.floats(0.0, 8.0),
    cpu_s=st.floats(0.0, 4.0),
    now=st.sampled_from([None, 3, 1, -5]),
)
def test_it_never_takes_longer_than_it_saves(
    bits_per_s: float, costs: list[tuple[float, float, float]], busy_s: float, cpu_s: float, now: int | None
) -> None:
    flow = replace(full(bits_per_s), busy_s=busy_s, cpu_s=cpu_s)
    found = measured(*costs)
    level = best_level(flow, found, now)
    if level is None:
        return
    (cost,) = [cost for cost in found if cost.level == level]
    rounding = 1 + 1e-9
    assert cost.compress_s + cost.decompress_s < rounding * flow.way_s * (1 - cost.remaining)
    assert flow.cpu_s + cost.compress_s * flow.batch_bytes < rounding * flow.cpus * flow.way_s * flow.batch_bytes
    assert flow.busy_s < rounding * flow.workers


def after(trial: Trial, rates: list[float], *, compresses: bool, now: float = 0.0) -> list[bool]:
    """What a trial says after windows of a second with such rates."""
    return [
        trial.allows(replace(SLOW, batch_bytes=int(rate * MB)), compresses=compresses, now=now + second)
        for second, rate in enumerate(rates)
    ]


@pytest.mark.parametrize(
    ("what", "rates", "is_kept"),
    [
        ("more comes", [25, 30, 40, 50, 50], True),
        ("as many come, so that it is for nothing", [25] * TRIAL_WINDOWS, False),
        ("less comes", [25, 20, 15, 12, 12], False),
        ("more comes now and then only", [25, 40, 18, 18, 18], False),
        ("what was made before it does not count", [90, 24, 24, 24, 24], False),
    ],
)
def test_it_is_kept_if_more_batches_come(what: str, rates: list[float], is_kept: bool) -> None:
    trial = Trial()
    assert after(trial, [5, 25], compresses=False) == [True, True]
    assert after(trial, rates, compresses=True)[-1] == is_kept
    if is_kept:
        assert all(after(trial, [1] * 50, compresses=True)), "what comes later has other reasons"


def test_a_mistake_is_made_less_and_less_often() -> None:
    trial, now, pauses = Trial(), 0.0, []
    for _ in range(6):
        after(trial, [25], compresses=False, now=now)
        after(trial, [20] * TRIAL_WINDOWS, compresses=True, now=now)
        ended_at = now = now + TRIAL_WINDOWS - 1
        while not after(trial, [25], compresses=False, now=now)[0]:
            now += 1.0
        pauses.append(now - ended_at)
    assert pauses == [PAUSE_S, 2 * PAUSE_S, 4 * PAUSE_S, 8 * PAUSE_S, LONGEST_PAUSE_S, LONGEST_PAUSE_S]
    after(trial, [40] * TRIAL_WINDOWS, compresses=True, now=now)
    after(trial, [25, 25], compresses=False, now=now)
    after(trial, [20] * TRIAL_WINDOWS, compresses=True, now=now)
    assert after(trial, [25], compresses=False, now=now + TRIAL_WINDOWS - 1 + PAUSE_S) == [True]


def test_a_window_in_which_it_ended_is_not_compared_with() -> None:
    trial = Trial()
    after(trial, [25], compresses=False)
    after(trial, [50, 50], compresses=True)
    after(trial, [50], compresses=False)
    assert all(after(trial, [50] * TRIAL_WINDOWS, compresses=True))
