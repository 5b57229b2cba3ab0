"""The table of the law beside the controller before it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks.simulation import beside
from benchmarks.simulation.__main__ import main
from benchmarks.simulation.beside import Figures

pytestmark = pytest.mark.long

ONE = Figures(name="1009:0", regret=0.01, decisions=1, cost=False, limits=0, errors=0, workers=4, cpus=8.0)


def test_every_kept_set_can_be_played() -> None:
    for of in beside.KNOWN:
        assert {world.name for world in beside.worlds(of)} == beside.before()[of].keys()


def test_a_name_that_is_no_set_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"'calm:1' is no set of worlds; there are development, .* busy:SEED"):
        beside.worlds("calm:1")


def test_a_row_has_the_figures_of_both() -> None:
    then = beside.before()["generated:1009"]["1009:0"]["regret"]
    found = [ONE, replace(ONE, name="1009:99999", regret=0.35, decisions=4, limits=1, cost=True)]
    cells = [cell for cell in beside.row("generated:1009", found).split("  ") if cell]
    assert cells[2].strip() == f"{then:.2%} / 18.00%"
    assert "0.0% / 50.0%" in cells[3]
    assert [cell.strip() for cell in cells[5:7]] == ["1", "1"]
    assert "100% / 50%" in cells[7]


def test_more_workers_than_a_saturated_machine_may_have_are_told() -> None:
    row = beside.row("saturated:7", [replace(ONE, workers=11, needed=0.8), replace(ONE, workers=10, needed=1.1)])
    assert row.endswith("1 had more than CPUs + 2 workers; the CPUs that end the stall within 15% in 1 of 2")


def test_the_command_plays_a_set() -> None:
    lines: list[str] = []
    assert main(["--beside", "short:1", "--fuzz", "1", "--decisions"], lines.append) == 0
    assert [line.split()[:2] for line in lines[:2]] == [["set", "worlds"], ["short:1", "1"]]
    assert lines[1].endswith("slower than two workers by 5%")
    assert "short:1:0" in lines[2]
