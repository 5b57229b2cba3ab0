"""`python -m benchmarks.scale`, in small: real agents, whose batches are taken in both ways, and a coordinator."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.scale import main


@pytest.mark.timeout(240)
def test_each_way_is_measured_and_kept(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    results = tmp_path / "kept" / "scale.json"
    options = ["--sizes", "1000", "--rounds", "1", "--window-s", "0.1", "--jobs", "3", "--results", str(results)]
    assert main(options) == 0
    kept = json.loads(results.read_text())
    assert [(one["way"], one["nbytes"]) for one in kept["intake"]] == [("network", 1000), ("memory", 1000)]
    for one in kept["intake"]:
        assert one["batches"] > 0
        assert 0 < one["thread_cpu_s"] <= 1.01 * one["process_cpu_s"]
    (coordination,) = kept["coordination"]
    assert (coordination["jobs"], coordination["cpus"]) == (3, 90)
    shown = capsys.readouterr().out
    assert all(table in shown for table in kept["tables"])
