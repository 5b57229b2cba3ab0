"""Published figures: how courses become rates and ratios, what may be kept, and the tables. Nothing is timed."""

import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks import keep, report
from benchmarks.contestants import AUTO, Contestant
from benchmarks.course import Course, drive
from benchmarks.journal import Journal, Measurement, Origin, Settings
from benchmarks.results import RowResult
from benchmarks.rows import BY_KEY

CORES = 2
NOON = "2026-11-22T12:00:00+00:00"
TORCH = {count: Contestant(engine="torch", workers=count) for count in (0, 2, 8, 64)}
DPEX = {count: Contestant(engine="dpex", workers=count) for count in (0, 2, 8)}
BATCH = Contestant(engine="dpex", workers=64, seeding="batch")
ORIGIN = Origin(machine_id="m", commit="c" * 40, dirty=False, settings=Settings())
MACHINE = {"processor": "P", "cores": CORES, "last_level_cache_bytes": 2**25, "memory_bytes": 2**34, "system": "Linux"}
ABOUT = {"machine": MACHINE, "versions": {"python": "3.11", "torch": "2.13", "ray": "2.60"}}
RUN_ABOUT = {**ABOUT, "commit": "c" * 40, "dirty": False, "since": NOON, "until": NOON}


def course(rate: float, settled: float | None = None) -> Course:
    """Ten seconds, of which the second half had ``settled`` batches a second."""
    later = 5 * (rate if settled is None else settled)
    return Course(batches=round(10 * rate), seconds=10.0, waited_s=5.0, marks=((5.0, round(10 * rate - later)),))


def result(courses: dict[Contestant, Any], key: str = "floats") -> RowResult:
    """Courses, or the rates of a round each, by contestant."""
    rounds = {
        one: dict(enumerate(x if isinstance(x, Course) else course(x) for x in (x if isinstance(x, list) else [x])))
        for one, x in courses.items()
    }
    return RowResult(row=BY_KEY[key], cores=CORES, courses=rounds, failed={})


def whole_row(key: str, rounds: int = 5) -> RowResult:
    """A row with every contestant of the plan; dpex makes twice as many batches as the others."""
    planned = BY_KEY[key].contestants(CORES)
    return result({one: [20.0 if one.engine.startswith("dpex") else 10.0] * rounds for one in planned}, key)


def kept_run(*rows: RowResult, **changes: Any) -> keep.Kept:
    fields = {"machine_id": "m", **RUN_ABOUT, "settings": Settings(), "rows": {row.row.key: row for row in rows}}
    return keep.Kept(**fields | changes)


def measurements(row: str, contestants: Iterable[Contestant], rounds: int = 5) -> Iterator[Measurement]:
    for one in contestants:
        for number in range(rounds):
            yield Measurement(row=row, contestant=one, round=number, course=course(10.0), error=None, at=NOON)


def cells(table: str) -> list[list[str]]:
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()[2:]]


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
    found = result({DPEX[2]: [10.0, 40.0, 95.0, 7.0], TORCH[2]: [10.0, 50.0, 100.0]})
    ratio = found.ratio(DPEX[2], TORCH[2])
    assert ratio is not None
    assert (ratio.median, ratio.low, ratio.high) == (0.95, 0.8, 1.0)
    assert found.ratio(DPEX[2], TORCH[8]) is None


def test_the_best_of_each_side_and_the_oracle() -> None:
    ahead = Contestant(engine="torch", workers=32, prefetch=16)
    rates = {TORCH[0]: 50.0, TORCH[2]: 20.0, ahead: 60.0, DPEX[0]: 40.0, DPEX[8]: 55.0, BATCH: 70.0, AUTO: 99.0}
    found = result(rates, "wait")
    assert (found.best("torch"), found.best("dpex"), found.best("dpex", "batch")) == (ahead, DPEX[8], BATCH)
    assert (found.at_cores("torch"), found.at_cores("dpex")) == (TORCH[2], None)
    assert (found.oracle(), found.best_dpex()) == (BATCH, AUTO)
    later = result({TORCH[0]: course(50, 50), TORCH[8]: course(40, 60), AUTO: course(30, 57)})
    assert (later.oracle(), later.oracle("settled")) == (TORCH[0], TORCH[8])


@pytest.mark.parametrize(
    ("kept", "why"),
    [
        (kept_run(whole_row("floats"), dirty=True), "commit without changes"),
        (kept_run(whole_row("floats"), settings=Settings(window_s=2.0)), "window_s is 2, not 4"),
        (kept_run(whole_row("floats", rounds=2)), "2 rounds"),
        (kept_run(result({TORCH[0]: [1.0] * 5})), "0 rounds"),
        (kept_run(whole_row("skewed-wait")), "courses of 10.0 s"),
    ],
    ids=["dirty", "short", "few rounds", "contestants missing", "short in a long row"],
)
def test_what_cannot_be_quoted_is_found(kept: keep.Kept, why: str) -> None:
    assert any(why in one for one in keep.problems(kept))


def test_a_kept_run_is_reported_without_incomplete_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """One row has too few contestants."""
    monkeypatch.setattr(keep, "RESULTS", tmp_path)
    monkeypatch.setattr(report, "kept_runs", lambda: keep.kept_runs(tmp_path))
    journal = Journal(tmp_path / "run.jsonl")
    journal.begin(ORIGIN, ABOUT)
    for one in [*measurements("floats", BY_KEY["floats"].contestants(CORES)), *measurements("jpeg", [TORCH[0]])]:
        journal.add(one)
    assert keep.main([str(journal.path), "one"]) == 0
    assert "left out: jpeg: " in capsys.readouterr().out
    (kept,) = keep.kept_runs(tmp_path)
    assert list(kept.rows) == ["floats"]
    page = tmp_path / "page.md"
    page.write_text("before\n<!-- bench:speed -->\nold\n<!-- /bench -->\nafter\n")
    assert report.main([str(page)]) == 0
    text = page.read_text()
    assert "| 5 floats, batch 1 | 10.0/s (2) |" in text
    assert "old" not in text
    keep.write(kept, tmp_path / "again.json")
    assert keep.kept_runs(tmp_path)[0].rows == kept.rows


def test_the_headline_compares_whole_auto_with_settled_torch() -> None:
    row = result({TORCH[0]: course(40, 60), TORCH[2]: course(40, 50), DPEX[8]: 90.0, AUTO: course(75, 99)})
    (line,) = cells(report.headline_table([kept_run(row)]))
    assert line[1:] == ["50.0/s (2)", "60.0/s (0)", "75.0/s", "1.50x (1.50 to 1.50)", "1.25x (1.25 to 1.25)"]


def test_auto_is_compared_with_the_oracle_whole_and_settled() -> None:
    row = result({TORCH[0]: course(50, 50), BATCH: course(40, 60), AUTO: course(30, 57)}, "wait")
    (line,) = cells(report.auto_table([kept_run(row)]))
    oracle = '60.0/s, dpex, 64 workers, seeding="batch"'
    assert line[1:] == [oracle, "30.0/s", "0.50x (0.50 to 0.50)", "0.95x (0.95 to 0.95)"]


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
    since = report.commits_since(run)
    assert since is None or since <= report.MOST_SINCE, f"measure again: {report.age(run)}"
