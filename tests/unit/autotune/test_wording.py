"""Each text of a decision says once what changes, why, on what evidence, and what is expected."""

import re
from dataclasses import replace
from typing import Any

import pytest
from decisions import a_decision

from dpex.autotune.law.evidence import SettingStats
from dpex.autotune.law.wording import brought, decided, described, measured
from dpex.autotune.types import Outcome
from dpex.measure.pool_reading import PoolReading
from dpex.measure.reading import Reading
from dpex.measure.settings import Settings

OLD, NEW = Settings(local=1, prefetch=2), Settings(local=20, prefetch=60)
EVIDENCE = {"rate": 12.5, "wait": 0.63, "service_s": 0.08, "cpu_s": 0.004, "step_s": 0.02}
EVIDENCE |= {"cpus": 4.0, "others": 0.5, "expected_step_s": 0.02}
GROWTH = a_decision(old=OLD, new=NEW, evidence=EVIDENCE, predicted_rate=48.0, predicted_wait=0.04)
WINDOW = Reading(at=1.0, seconds=1.0, settings=OLD, later_batches=12, blocked_s=0.63, stepping_s=0.37)
FAILED = replace(GROWTH, outcome=Outcome(rate=11.0, wait=0.66, kept=False, at=2.0))


def test_a_decision_states_its_change_reason_and_expectation() -> None:
    assert decided(GROWTH, WINDOW) == (
        "From 1 local worker (prefetch 2) to 20 local workers (prefetch 60), because the training loop waits for data "
        "for 63 % of the time. A batch takes a worker 80 ms, 4 ms of it CPU time; a training step takes 20 ms "
        "without a wait for a CPU. Expected: 48 batches/s with a wait of 4 % and steps of 20 ms; measured so far: "
        "12.5 batches/s."
    )


def test_what_is_undone_says_what_it_brought() -> None:
    text = decided(
        replace(GROWTH, old=NEW, new=OLD, reason="undo", predicted_rate=12.5, predicted_wait=0.6), WINDOW, FAILED
    )
    assert text == (
        "Back from 20 local workers (prefetch 60) to 1 local worker (prefetch 2), because it did not help "
        "(11 batches/s since the change, 12.5 batches/s before, 48 batches/s were expected). "
        "Expected: 12.5 batches/s with a wait of 60 % and steps of 20 ms."
    )


@pytest.mark.parametrize(
    ("remote", "machine", "new", "why"),
    [
        ({"granted": 2}, {}, Settings(remote=2), "2 of the cluster's workers are this loader's share"),
        ({"unplaced": 3}, {}, Settings(remote=1), "the cluster has no room for 3 remote workers"),
        ({}, {"memory_free": -(10**8)}, Settings(remote=4, prefetch=4), "loading takes 100 MB more memory than"),
        ({}, {"memory_free": 10**7}, Settings(local=1), "the cluster has no room for 4 remote workers"),
        ({}, {}, Settings(remote=4, prefetch=1), "the memory for batches allows no more"),
    ],
)
def test_a_limit_is_named(remote: dict[str, Any], machine: dict[str, Any], new: Settings, why: str) -> None:
    old = Settings(remote=4, prefetch=8)
    window = replace(WINDOW, pools={"remote": PoolReading(**remote)}, **machine)
    assert f"because {why}" in decided(replace(GROWTH, old=old, new=new, reason="limit"), window)


@pytest.mark.parametrize(("signal", "clock"), [("events", "CUDA events"), ("nvml", "NVML"), ("wait", "training loop")])
@pytest.mark.parametrize("reason", ["too few", "too many", "spread", "explore"])
def test_the_clock_is_named(signal: Any, clock: str, reason: Any) -> None:
    text = decided(replace(GROWTH, reason=reason, signal=signal), WINDOW)
    assert clock in text
    assert text.count("prefetch") == 2
    assert text.endswith(".")
    assert not re.search(r"  | \.|,\.", text)


def test_before_anything_is_known_nothing_is_said_of_it() -> None:
    text = decided(replace(GROWTH, reason="limit", evidence={}, predicted_rate=0.0), WINDOW)
    assert text == (
        "From 1 local worker (prefetch 2) to 20 local workers (prefetch 60), because the memory for batches allows "
        "no more."
    )


def test_a_note_shows_its_text_and_no_expectation() -> None:
    why = "The dataset is read in 2 streams for its 8 shards, as num_workers says so."
    note = replace(GROWTH, old=OLD, new=OLD, reason="start", text=why, evidence={}, predicted_rate=0.0)
    assert described(note) == f"1 local, prefetch 2 (start): {why}"


def test_a_larger_prefetch_says_what_it_is_for() -> None:
    spread = replace(GROWTH, new=replace(OLD, prefetch=16), reason="spread", predicted_rate=12.5, predicted_wait=0.63)
    text = decided(spread, WINDOW)
    assert "and more batches in flight keep the workers busy while one batch is slow." in text
    assert "Expected: at least 12.5 batches/s with a wait of 63 %" in text
    assert "expected at least 12.5 batches/s" in described(spread)


def test_the_outcome_is_told() -> None:
    assert brought(GROWTH) == "not judged yet"
    assert brought(FAILED) == "measured 11 batches/s with a wait of 66 %, undone"


def test_before_the_first_window_that_counts_the_latest_one_does() -> None:
    record, window = SettingStats(), WINDOW.with_pools(local=PoolReading(tickets=12, load_s=0.96))
    assert measured(record, window) == {"rate": 12.0, "wait": 0.63}
    record.add(replace(window, later_batches=20, blocked_s=0.5, stepping_s=0.5), 0.01)
    assert measured(record, window) == {"rate": 20.0, "wait": 0.5}


def test_a_window_of_batches_made_earlier_has_no_rate() -> None:
    """Eight workers that take 1.27 s make 6.3 batches a second, and finish their first ones at about the same time."""
    record = SettingStats()
    made = WINDOW.with_pools(local=PoolReading(tickets=8, load_s=10.16))
    burst = replace(made, seconds=0.34, later_batches=8, blocked_s=0.2, stepping_s=0.14)
    pause = replace(burst, seconds=0.93, later_batches=0, blocked_s=0.93, stepping_s=0.0, pools={})
    for window in (burst, pause, burst, pause, burst):
        assert "rate" not in measured(record, window)
        record.add(window, 0.01)
    record.add(pause, 0.01)
    assert measured(record, pause)["rate"] == pytest.approx(8 / 1.27)
    no_rate = replace(GROWTH, evidence={name: value for name, value in EVIDENCE.items() if name != "rate"})
    assert decided(no_rate, burst).endswith("Expected: 48 batches/s with a wait of 4 % and steps of 20 ms.")
