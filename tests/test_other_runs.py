"""The tables beside those of the newest run: other machines, and rows measured again on later commits."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks import keep, other_runs
from benchmarks.contestants import AUTO
from benchmarks.journal import Journal
from benchmarks.rows import BY_KEY
from tests.test_benchmarks import (
    ABOUT,
    DPEX,
    ORIGIN,
    TORCH,
    cells,
    measurement,
    result,
    run_of,
    whole_row,
)


def test_each_machine_has_a_column_with_its_newest_run() -> None:
    newest = run_of(whole_row("floats"), whole_row("jpeg"))
    slow = result({TORCH[0]: 20.0, DPEX[0]: 10.0, AUTO: 30.0})
    other = replace(run_of(slow), machine_id="n", commit="d" * 40, until="2026-11-20T00:00:00+00:00")
    older = replace(other, commit="e" * 40, until="2026-11-19T00:00:00+00:00")
    table = other_runs.machines_table([newest, other, older])
    header = table.splitlines()[0]
    assert ("(ccccccc, 2026-11-22)" in header, "(ddddddd, 2026-11-20)" in header) == (True, True)
    assert "eeeeeee" not in header
    floats, jpeg = cells(table)
    assert floats == [BY_KEY["floats"].title, "2.00x", "0.50x", "2.00x", "1.50x"], "behind: first"
    assert jpeg == [BY_KEY["jpeg"].title, "2.00x", "-", "2.00x", "-"]


def test_runs_without_local_rows_have_no_column() -> None:
    remote = replace(run_of(whole_row("remote-large")), machine_id="n")
    assert other_runs.machines_table([remote, run_of(whole_row("floats"))]).count("dpex / torch") == 1


def test_rows_measured_again_set_auto_beside_the_best_that_took_part() -> None:
    fast, slow = (result({TORCH[0]: torch, DPEX[2]: 20.0, AUTO: 19.0}, key) for key, torch in LATER)
    newest, older = run_of(fast, slow), run_of(fast, commit="d" * 40)
    table = other_runs.later_table([newest, older])
    assert [line[0] for line in cells(table)] == [BY_KEY["floats"].title, BY_KEY["jpeg"].title]
    assert cells(table)[0][1:] == [
        "40.0/s, torch, 0 workers",
        "19.0/s",
        "0.47x (0.47 to 0.47)",
        "0.47x (0.47 to 0.47)",
        "0.47x (0.47 to 0.47)",
    ]
    assert cells(table)[1][1] == "20.0/s, dpex, 2 workers"
    assert cells(table)[1][5] == "1.90x (1.90 to 1.90)"


LATER = (("floats", 40.0), ("jpeg", 10.0))


def test_rows_in_which_only_some_took_part_are_kept_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keep, "RESULTS", tmp_path)
    monkeypatch.setattr(keep, "PARTS", tmp_path / "parts")
    monkeypatch.setattr(other_runs, "PARTS", tmp_path / "parts")
    with pytest.raises(ValueError, match="no kept part"):
        other_runs.block("later")
    journal = Journal(tmp_path / "run.jsonl")
    journal.begin(ORIGIN, ABOUT)
    for number in range(5):
        for one in (TORCH[0], DPEX[2], AUTO):
            journal.add(measurement(one, number, 10.0))
    journal.add(measurement(AUTO, 0, 10.0, row="jpeg"))
    assert keep.main([str(journal.path), "one"]) == 1, "not everybody took part"
    assert keep.main([str(journal.path), "one", "--part"]) == 0
    assert keep.kept_runs(tmp_path) == []
    (line,) = cells(other_runs.block("later"))
    assert line[0] == BY_KEY["floats"].title, "the other row has too few rounds"
