"""When an agent compresses what it sends: a table of ways, workers and buffers."""

from __future__ import annotations

from dataclasses import replace

import pytest

from dpex.pools.agent.compression_rule import AgentFlow, LevelCost, best_level, is_limiting

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
