"""Published figures: what a course counts, and that documents show what is kept. Nothing is timed."""

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks import keep, report
from benchmarks.contestants import Contestant
from benchmarks.course import Course, drive
from benchmarks.readme_table import readme_table
from benchmarks.results import RowResult
from benchmarks.rows import BY_KEY


def test_the_clock_starts_before_iter(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr("benchmarks.course.time.perf_counter", lambda: now[0])

    class Slow:
        def __iter__(self) -> Iterator[int]:
            now[0] += 3.0
            for number in range(10):
                now[0] += 0.5
                yield number

    driven = drive(Slow(), lambda _: None, window_s=5.0)
    assert (driven.batches, driven.seconds, driven.waited_s, driven.marks[0]) == (4, 5.0, 5.0, (3.5, 1))


def test_a_whole_course_has_the_start_and_its_settled_half_not() -> None:
    marks = tuple((float(second), 10 * max(0, second - 4)) for second in range(1, 20))
    learning = Course(batches=160, seconds=20.0, waited_s=20.0, marks=marks)
    assert (learning.rate, learning.settled_rate) == (8.0, pytest.approx(10))
    counted = Course(batches=100, seconds=15.0, waited_s=15.0, marks=((10.0, 50),), counted=True)
    assert counted.settled_rate == pytest.approx(10)


def test_ratios_are_taken_within_rounds_that_both_have() -> None:
    ours, theirs, other = (Contestant(engine=engine, workers=2) for engine in ("dpex", "torch", "threads"))
    rates = {ours: [10.0, 40.0, 95.0, 7.0], theirs: [10.0, 50.0, 100.0]}
    courses = {
        one: {number: Course(batches=round(10 * rate), seconds=10.0, waited_s=5.0) for number, rate in enumerate(each)}
        for one, each in rates.items()
    }
    found = RowResult(row=BY_KEY["floats"], cores=2, courses=courses, failed={})
    ratio = found.ratio(ours, theirs)
    assert ratio is not None
    assert (ratio.median, ratio.low, ratio.high) == (0.95, 0.8, 1.0)
    assert found.ratio(ours, other) is None


def row_of(key: str, rates: dict[str, float]) -> RowResult:
    """Make a row on two cores from one round, by the keys of its contestants."""
    courses = {
        Contestant.from_key(who): {0: Course(batches=round(10 * rate), seconds=10.0, waited_s=5.0)}
        for who, rate in rates.items()
    }
    return RowResult(row=BY_KEY[key], cores=2, courses=courses, failed={})


def test_the_readme_shows_what_people_type_and_slower_rows_first(tmp_path: Path) -> None:
    nodes = tmp_path / "nodes.json"
    rates = {"dpex, 0": 240.0, "dpex, 1": 248.0, "dpex, 2": 249.0, "auto, 0": 250.0, "Ray Data, actors, 0": 125.0}
    nodes.write_text(json.dumps({"commit": ["1", False], "nodes": {key: {"rate": one} for key, one in rates.items()}}))
    http = {"torch:2": 9.0, "torch:64:prefetch=4": 200.0, "dpex:auto": 150.0, "dpex:auto:form=aiohttp": 400.0}
    rows = [
        row_of("readme-photographs", {"torch:2": 10.0, "torch:4": 12.0, "dpex:auto": 18.0}),
        row_of("readme-http", http),
    ]
    _, _, *lines = (line.strip("| ").split(" | ") for line in readme_table(rows, nodes).splitlines())
    assert [line[1:] for line in lines] == [
        ["9.0/s", "200/s (64, prefetch 4)", "150/s", "0.75x (0.75 to 0.75)"],
        ["10.0/s", "12.0/s (4)", "18.0/s", "1.50x (1.50 to 1.50)"],
        ["9.0/s", "200/s (64, prefetch 4)", "400/s", "2.00x (2.00 to 2.00)"],
        ["-", "Ray Data: 125/s, 50%", "250/s, 100%; 248/s, 99%, `num_workers=16`", "2.00x"],
    ]


@pytest.mark.parametrize("path", report.DOCUMENTS, ids=lambda path: path.name)
def test_the_documents_tables_match_the_kept_results(path: Path) -> None:
    text = path.read_text()
    named = re.findall(r"<!-- (?:place for )?bench:([a-z-]+) -->", text)
    assert named
    assert set(named) <= set(report.BLOCKS)
    assert report.rewritten(text, keep.kept_runs()) == text, "make bench-report, or keep the run that was quoted"


def test_what_is_kept_can_be_quoted() -> None:
    assert [why for kept in keep.kept_runs() for why in keep.problems(kept)] == []


@pytest.mark.parametrize("run", report.quoted_first(keep.kept_runs()), ids=lambda run: str(run.commit)[:8])
def test_figures_that_readers_see_first_are_recent(run: keep.Kept) -> None:
    """The README and the first table of the benchmarks' page."""
    since = report.commits_since(run.commit, run.until)
    assert since is None or since <= report.MOST_SINCE, f"measure again: {report.age(run)}"
