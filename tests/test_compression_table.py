"""`python -m benchmarks.network.compression`: its table, and a run that was ended."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from benchmarks.network import compression as command
from benchmarks.network import compression_table as tables
from benchmarks.training import runs
from benchmarks.training.runs import Run

FAST, SLOW = "10 Gbit/s", "200 Mbit/s"


def pair(number: int, plain: float, compressed: float, saved_bytes: int = 0) -> list[dict[str, Any]]:
    """A round of a row: what came without compression, and with it."""
    nodes = {"node": {"sent_bytes": 100 - saved_bytes, "saved_bytes": saved_bytes}}
    return [
        {"round": number, "may_compress": False, "settled": plain, "nodes": nodes},
        {"round": number, "may_compress": True, "settled": compressed, "nodes": nodes},
    ]


def run_of(rows: dict[tuple[str, str], list[dict[str, Any]]]) -> Run:
    keyed = {tables.key_of(*where): found for where, found in rows.items()}
    settings = {"rounds": 3, "window_s": 8.0, "rows": [list(where) for where in rows]}
    return Run(subject="compression", settings=settings, about={}, rows=keyed)


def test_ratios_are_of_the_same_round_and_rows_that_lose_come_first() -> None:
    gains = [*pair(0, 10.0, 20.0, 80), *pair(1, 20.0, 60.0, 80), *pair(2, 10.0, 40.0, 80)]
    loses = [*pair(0, 50.0, 45.0), *pair(1, 50.0, 50.0), *pair(2, 50.0, 45.0)]
    table = tables.compression_table(run_of({(SLOW, "tokens"): gains, (FAST, "floats"): loses}))
    assert table.splitlines()[2:] == [
        "| 10 Gbit/s | floats | 50.0 | 45.0 | 0.90 (0.90 to 1.00) | 0% |",
        "| 200 Mbit/s | tokens | 10.0 | 40.0 | 3.00 (2.00 to 4.00) | 80% |",
    ]


def test_what_did_not_end_in_time_is_shown_as_nothing() -> None:
    failed = {"round": 0, "may_compress": False, "settled": 0.0, "error": "it had not ended after 10 s"}
    table = tables.compression_table(run_of({(SLOW, "tokens"): [failed, pair(0, 1.0, 2.0)[1]]}))
    assert "| 0.0 | 2.0 | inf (inf to inf) | 0% |" in table


def test_a_run_of_few_rounds_is_not_kept() -> None:
    few = [*pair(0, 1.0, 1.0), *pair(1, 1.0, 1.0), pair(2, 1.0, 1.0)[0]]
    assert tables.problems(run_of({(SLOW, "tokens"): few})) == ["it has rows of 2 rounds, and 3 are quoted"]
    whole = [*few, pair(2, 1.0, 1.0)[1]]
    assert tables.problems(run_of({(SLOW, "tokens"): whole})) == []


def test_a_run_that_was_ended_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[bool] = []

    def measured(link: Any, split: Any, window_s: float, *, content: str, may_compress: bool) -> dict[str, Any]:
        asked.append(may_compress)
        if len(asked) == 3:
            raise KeyboardInterrupt
        return {"settled": 1.0, "nodes": {}}

    monkeypatch.setattr(runs, "commit", lambda root: ("c" * 40, False))
    monkeypatch.setattr(command, "why_not", lambda: "")
    monkeypatch.setattr(command, "measured", measured)
    results = tmp_path / "run.json"
    options = ["--links", "0", "--content", "tokens", "--rounds", "2", "--results", str(results)]
    with pytest.raises(KeyboardInterrupt):
        command.main(options)
    assert command.main(options) == 0
    assert asked == [True, False, False, False, True]
    assert [one["round"] for one in runs.read(results).rows[tables.key_of(SLOW + ", 1 ms", "tokens")]] == [0, 0, 1, 1]
