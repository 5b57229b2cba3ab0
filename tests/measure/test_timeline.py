"""`DpexDataLoader.timeline`: the recording of a real run is a valid trace of what happened."""

import json
from collections import defaultdict
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from families import Augmented
from workload import wait_as_work

from dpex import DpexDataLoader, OptionError

Events = dict[tuple[int, int], list[dict[str, Any]]]
SAMPLE_S = 0.002


def parsed(path: Path) -> tuple[Events, dict[tuple[int, int], str]]:
    """Read a trace as the Trace Event Format defines it: complete events by process and thread, and threads' names."""
    trace = json.loads(path.read_text())
    assert trace["displayTimeUnit"] == "ms"
    events: Events = defaultdict(list)
    names: dict[tuple[int, int], str] = {}
    for event in trace["traceEvents"]:
        row = event["pid"], event["tid"]
        assert isinstance(event["name"], str)
        if event["ph"] == "M":
            if event["name"] == "thread_name":
                names[row] = event["args"]["name"]
            continue
        assert event["ph"] == "X"
        assert isinstance(event["ts"], int)
        assert isinstance(event["dur"], int)
        assert event["dur"] >= 0
        events[row].append(event)
    return events, names


def outer(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the events of a row that lie in no other, which must not overlap."""
    found: list[dict[str, Any]] = []
    for event in sorted(events, key=lambda one: (one["ts"], -one["dur"])):
        end = found[-1]["ts"] + found[-1]["dur"] if found else 0
        if found and event["ts"] + event["dur"] <= end + 2:
            continue
        assert event["ts"] >= end - 2, (found[-1:], event)
        found.append(event)
    return found


@pytest.mark.parametrize("seeding", ["worker", "batch"])
def test_a_timeline_has_the_stages_of_batches_and_the_steps(seeding: Any, tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    with DpexDataLoader(Augmented(48, SAMPLE_S), batch_size=4, num_workers=2, seeding=seeding) as loader:
        with loader.timeline(path):
            for _ in loader:
                wait_as_work(0.001)
        for _ in loader:  # not recorded
            pass
    events, names = parsed(path)
    (loop,) = [row for row, name in names.items() if name == "training loop"]
    workers = {row: outer(found) for row, found in events.items() if row != loop}
    assert sorted(int(one["name"].split()[1]) for row in workers.values() for one in row) == list(range(12))
    assert {names[row] for row in workers} <= {"worker 0", "worker 1"}
    batch = next(iter(workers.values()))[0]
    assert batch["dur"] >= 4 * SAMPLE_S * 1e6
    assert batch["args"]["samples"] == 4
    calls = [one for one in events[loop] if one["name"] == "next()"]
    steps = [one for one in events[loop] if one["name"] == "step"]
    assert (len(calls), len(steps)) == (13, 12)
    assert all(step["dur"] >= 1000 for step in steps)
    for one, other in pairwise(sorted(events[loop], key=lambda event: event["ts"])):
        assert abs(one["ts"] + one["dur"] - other["ts"]) <= 2


def test_a_pass_that_runs_already_is_recorded_from_then_on(tmp_path: Path) -> None:
    with DpexDataLoader(Augmented(48, SAMPLE_S), batch_size=4, num_workers=1) as loader:
        batches = iter(loader)
        next(batches)
        with loader.timeline(tmp_path / "run.json"):
            assert len(list(batches)) == 11
    events, _ = parsed(tmp_path / "run.json")
    assert 1 <= sum(one["name"].startswith("batch") for row in events.values() for one in row) <= 11


def test_without_workers_there_is_nothing_to_record(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="no workers of dpex's own"):
        DpexDataLoader(Augmented(48, SAMPLE_S)).timeline(tmp_path / "run.json")


def test_a_second_concurrent_timeline_is_refused(tmp_path: Path) -> None:
    with DpexDataLoader(range(8), batch_size=2, num_workers=1) as loader:
        with loader.timeline(tmp_path / "first.json"):
            second = loader.timeline(tmp_path / "second.json")
            with pytest.raises(OptionError, match=r"second.json'\): this loader already records a timeline"), second:
                pass
            list(loader)
        assert len(parsed(tmp_path / "first.json")[0]) == 2
        with loader.timeline(tmp_path / "third.json"):
            list(loader)
    assert len(parsed(tmp_path / "third.json")[0]) == 2
