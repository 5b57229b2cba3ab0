"""Regret is divided into what learning cost and what a wrong choice cost."""

from __future__ import annotations

import pytest

from benchmarks.simulation.kept import truths
from benchmarks.simulation.parts import Parts, main, parts_of
from benchmarks.simulation.scenarios import load

pytestmark = pytest.mark.long


def found(name: str) -> Parts:
    return parts_of(load()[name], truths("development", load()[name]))


@pytest.mark.parametrize("name", ["cpu-4-cores", "shift-wait-much"])
def test_the_parts_add_up_to_what_was_not_delivered(name: str) -> None:
    parts = found(name)
    assert parts.learning + parts.prefetch + parts.workers == pytest.approx(-parts.result.gain)
    assert len(parts.held) == len(list(parts.result.scenario.intervals()))


def test_a_change_that_nobody_can_foresee_is_learnt() -> None:
    """What was settled on is as good as the best, and the time until then was lost."""
    parts = found("shift-wait-much")
    assert parts.result.regret > 0.02
    assert parts.learning > 0.8 * parts.result.regret


def test_the_command_tells_of_each_world_and_of_the_mean() -> None:
    lines: list[str] = []
    assert main(["--only", "cpu-4-cores", "--only", "consumer-two"], lines.append) == 0
    assert {line.split()[0] for line in lines[1:3]} == {"cpu-4-cores", "consumer-two"}
    assert lines[-1].startswith("mean of 2")
