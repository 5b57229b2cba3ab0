"""Each text of a decision says once what changes, why, and what is expected."""

from __future__ import annotations

import math
import re

import pytest

from benchmarks.simulation.kept import truths
from benchmarks.simulation.scenarios import load
from benchmarks.simulation.score import play
from dpex.autotune import wording
from dpex.autotune.types import Settings

OLD, NEW = Settings(local=1, prefetch=2), Settings(local=20, prefetch=60)
EVIDENCE = {
    "wait": 0.63,
    "blocked": 0.6,
    "rate": 12.5,
    "worker_cpu_ms": 1e-13,
    "worker_wait_ms": 1360.0,
    "step_ms": 20.0,
}
TEXTS = {
    "faster": wording.faster(OLD, NEW, 48.0, EVIDENCE),
    "fewer": wording.fewer(OLD, NEW, 48.0, EVIDENCE),
    "memory": wording.too_much_memory(OLD, NEW, -1e8),
    "no place": wording.no_place(OLD, NEW, 1, 48.0),
    "out of turn": wording.longer_queue(OLD, NEW, wording.out_of_turn(0.2), 48.0),
    "burst": wording.longer_queue(OLD, NEW, wording.burst(6, 8), 48.0),
    "short queue": wording.longer_queue(OLD, NEW, wording.SHORT_QUEUE, 48.0),
    "held up": wording.held_up(OLD, NEW, 7.25),
    "trial": wording.trial(OLD, NEW, EVIDENCE),
    "in-process": wording.trial_in_process(NEW, OLD, 48.0, EVIDENCE),
    "undone": wording.undone(NEW, OLD, -0.4, 0.1, (20.0, 12.0, 30.0)),
}


@pytest.mark.parametrize("name", TEXTS)
def test_both_settings_are_named_once(name: str) -> None:
    text = TEXTS[name]
    assert text.count(wording.named(OLD)) == text.count(wording.named(NEW)) == 1
    assert text.endswith(".")
    assert "instead" not in text


def test_numbers_have_units_that_can_be_read() -> None:
    assert TEXTS["faster"] == (
        "From 1 local worker (prefetch 2) to 20 local workers (prefetch 60), because 63 % of the time is lost to "
        "loading. A batch takes 0 s of CPU time and 1.36 s of waiting; a training step takes 20 ms. "
        "Expected: 48 batches/s; measured so far: 12.5 batches/s."
    )
    crowded = wording.faster(OLD, NEW, 48.0, EVIDENCE | {"blocked": 0.05})
    assert "because 63 % of the time is lost to loading or to waiting for a CPU. A batch" in crowded
    assert "loading takes 100 MB more memory than the training process can spare" in TEXTS["memory"]
    assert "may take only 100 MB more memory than it takes now" in wording.too_much_memory(OLD, NEW, 1e8)
    assert wording.named(Settings(local=2, remote=1, prefetch=8)) == "2 local workers and 1 remote worker (prefetch 8)"
    assert wording.named(Settings(local=0, prefetch=1)) == "in-process loading"
    assert wording.changed(["step 5 ms → 20 ms"], "So it is.") == "The work has changed: step 5 ms → 20 ms. So it is."


@pytest.mark.parametrize(
    ("gain", "error", "since", "reason"),
    [
        (-0.4, 0.1, 12.0, "batches became 40 % slower"),
        (9.85, 20.0, 60.0, "a gain of 985 % is within its error of ±2000 %"),
        (9.85, math.inf, 60.0, "a gain of 985 % cannot be told from chance"),
        (0.02, 0.005, 20.4, "a gain of 2.0 % ± 0.5 % is too small"),
        (-1.0, 0.0, 0.0, "no batch has arrived since then"),
    ],
)
def test_what_is_undone_says_why_without_contradiction(gain: float, error: float, since: float, reason: str) -> None:
    text = wording.undone(NEW, OLD, gain, error, (20.0, since, 30.0))
    assert text.startswith(f"Back from {wording.named(NEW)} to {wording.named(OLD)}, because {reason}")


def test_workers_that_queue_are_told_of_with_what_they_queue_for() -> None:
    text = wording.queueing(NEW, OLD, (0.05, 0.5), (80.0, 76.0))
    assert text.startswith(
        f"Back from {wording.named(NEW)} to {wording.named(OLD)}, because a worker takes 500 ms for a batch, where it "
        "took 50 ms, and the rate went from 80 batches/s to 76 batches/s."
    )
    assert "storage" in text


@pytest.mark.parametrize("name", ["burst-steps-wait", "nodes-lost", "link-slows", "memory-batches-grow"])
def test_the_controllers_decisions_read_so(name: str) -> None:
    decisions = [
        decision
        for history in play(load()[name], truths("development", load()[name])).histories
        for decision in history.decisions
    ]
    assert decisions
    for decision in decisions:
        assert re.fullmatch(r"(The work has changed: .+\. )?(From|Back from|A trial: from) .+\.", decision.text)
        assert f"rom {wording.named(decision.old)} to {wording.named(decision.new)}" in decision.text
        assert "e-" not in re.sub(r"[a-z]e-|e-[a-z]", "", decision.text)
