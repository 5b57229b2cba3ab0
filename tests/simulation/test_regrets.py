"""The kept figures of simulated worlds, and the tables that are made of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from benchmarks.process import ROOT
from benchmarks.simulation import regrets
from benchmarks.simulation.scenarios import load
from benchmarks.training.runs import Run

pytestmark = pytest.mark.long


def world(regret: float, decisions: int = 1) -> dict[str, Any]:
    return {"scenario": "w", "regret": regret, "settled_regret": 0.0, "decisions": decisions, "settle_s": 1.0}


def run(**rows: list[dict[str, Any]]) -> Run:
    about = {"commit": "0123456789abcdef", "dirty": False, "until": "2026-11-23T01:00:00+00:00"}
    return Run(subject=regrets.NOW, settings={"worlds": 2, "seed": 5}, about=about, rows=rows)


def test_sums_are_of_the_worlds() -> None:
    sums = regrets.Sums.of([world(0.01), world(0.0), world(0.11, decisions=9), world(0.04)])
    assert sums.mean == pytest.approx(0.04)
    assert sums.median == pytest.approx(0.025)
    assert (sums.worlds, sums.worst, sums.above, sums.few) == (4, 0.11, 0.25, 0.75)
    assert not sums.meets
    assert regrets.Sums.of([world(0.02)] * 19 + [world(0.02)]).meets


def test_sets_that_miss_an_aim_come_first() -> None:
    now = run(gpu=[world(0.0)], validation=[world(0.3), world(0.0)])
    before = run(validation=[world(0.5)])
    lines = regrets.regret_table(now, before).splitlines()
    assert lines[2].startswith(f"| {regrets.NAMES['validation']} | 2 (1 before) | 50.0% | 15.0% | 15.0% | 30% | 100% |")
    assert lines[3].startswith(f"| {regrets.NAMES['gpu']} | 1 | - | 0.0% |")
    assert lines[2].endswith("| no |")
    assert lines[3].endswith("| yes |")


def test_the_paragraph_names_every_set_and_whether_the_aims_are_met() -> None:
    text = regrets.regret_short(run(validation=[world(0.1)], generated=[world(0.0)]), None)
    assert "10.0% over 1 worlds that nobody tunes for (above 5% in 100% of them, 10% in the worst)" in text
    assert "0.0% over 1 worlds made by a seed" in text
    assert "not all met" in text


def test_figures_are_those_of_the_command() -> None:
    name = next(iter(load("development")))
    (found,) = regrets._figures(ROOT, ["--set", "development", "--only", name])
    assert found["scenario"] == name
    assert set(found) == set(regrets.FIELDS)


def test_a_checkout_without_worlds_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="has no benchmarks/simulation"):
        regrets.played(tmp_path, 1, 1)
