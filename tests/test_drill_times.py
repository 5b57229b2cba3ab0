"""The times of the table of drills: how they are measured, and how they come into the table."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.drills import table
from benchmarks.drills.__main__ import main
from benchmarks.drills.faults import DRILLS
from benchmarks.drills.table import HEADER, LEAST_TIMES, NOT_TIMED, filled, problems, wrong
from benchmarks.training.runs import Run

ROOT = Path(__file__).parents[1]
ONCE = {"until": "all workers run", "seconds": 0.25, "wait_s": 0.015, "lost": 0, "repeated": 0}
PAGE = f"""| {" | ".join(HEADER)} |
|---|---|---|---|---|---|---|
| **Workers** | | | | | | |
| a worker is killed | it goes on | 0 | 0 | by the test | not timed | `test_a.py::test_b` |
| a sample fails | an error | its batch | 0 | by the test | none: an error | `test_a.py::test_c` |"""


def run_of(**rows: Any) -> Run:
    return Run(subject=table.SUBJECT, settings={}, about={}, rows={name.replace("_", " "): rows[name] for name in rows})


def test_what_was_timed_is_written_into_its_row_and_nothing_else() -> None:
    found = run_of(a_worker_is_killed=[ONCE, {**ONCE, "seconds": 0.5}, {**ONCE, "seconds": 0.75}])
    times = "0.5 (0.25 to 0.75) until all workers run; longest wait 0.015 (0.015 to 0.015)"
    expected = PAGE.replace("by the test | not timed", f"3 times: 0 lost, 0 repeated | {times}")
    assert filled(PAGE, found) == expected
    assert filled(expected, found) == expected
    assert filled(expected, None) == PAGE


def test_what_was_lost_is_told_and_seldom_figures_are_not_kept() -> None:
    found = run_of(a_worker_is_killed=LEAST_TIMES * [ONCE], a_node_is_killed=[{**ONCE, "lost": 2}])
    assert wrong(found) == ["a node is killed: 1 times: 2 lost, 0 repeated"]
    assert problems(found) == [f"a node is killed: 1 times, not {LEAST_TIMES}"]


def test_each_fault_that_is_timed_has_one_row_in_the_table() -> None:
    page = (ROOT / "docs/reference/drills.md").read_text()
    rows = [
        line.removeprefix("| ").split(" | ")[0] for line in page.splitlines() if line.count(" | ") == len(HEADER) - 1
    ]
    assert len(set(rows)) == len(rows)
    assert {drill.fault for drill in DRILLS} <= set(rows)
    assert NOT_TIMED in page


@pytest.mark.timeout(200)
def test_a_fault_is_made_to_happen_and_timed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    results = tmp_path / "drills.json"
    fault = "the process that forks workers is killed"
    assert main(["--times", "1", "--only", fault, "--results", str(results)]) == 0
    ((kept,),) = json.loads(results.read_text())["rows"].values()
    assert kept["lost"] == kept["repeated"] == 0
    assert kept["seconds"] > 0
    assert kept["wait_s"] > 0
    assert f"{fault}: 1 times: 0 lost, 0 repeated" in capsys.readouterr().out
