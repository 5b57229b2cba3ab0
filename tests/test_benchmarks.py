"""The benchmark: its plan, its file, what the measurements come to, and the tables. Nothing is timed."""

from __future__ import annotations

import json
import re
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks import keep, process, report
from benchmarks.__main__ import QUICK, main, parse, settings_of
from benchmarks.actors import mapped
from benchmarks.cluster import part_from_other_nodes
from benchmarks.contestants import AUTO, LIMIT, RIVALS, Contestant
from benchmarks.course import Course, Drive, drive
from benchmarks.forked import forking
from benchmarks.journal import Journal, JournalError, Measurement, Origin, Settings
from benchmarks.keep import Kept
from benchmarks.machine import commit
from benchmarks.measure import Request
from benchmarks.process import MeasurementError, Surroundings
from benchmarks.results import RowResult, is_behind, results_of
from benchmarks.rivals import MODULES
from benchmarks.rows import BY_KEY, COUNTS, ROWS
from benchmarks.runner import Interpreters, Turn, further_turns, missing, request, run_turns, turns, window_s
from benchmarks.works import WORKS
from dpex.pools.agent import same_machine

CORES = 2
TORCH = {count: Contestant(engine="torch", workers=count) for count in COUNTS}
DPEX = {count: Contestant(engine="dpex", workers=count) for count in COUNTS}
BATCH = {count: Contestant(engine="dpex", workers=count, seeding="batch") for count in COUNTS}


def course(rate: float, settled: float | None = None) -> Course:
    """Ten seconds of which the second half went at `settled` batches a second."""
    later = 5 * (rate if settled is None else settled)
    return Course(batches=round(10 * rate), seconds=10.0, waited_s=5.0, marks=((5.0, round(10 * rate - later)),))


def result(courses: dict[Contestant, Any], key: str = "floats") -> RowResult:
    """Courses, or the rates of a round each, by contestant."""
    rounds = {
        one: dict(
            enumerate(
                x if isinstance(x, Course) else course(x) for x in (given if isinstance(given, list) else [given])
            )
        )
        for one, given in courses.items()
    }
    return RowResult(row=BY_KEY[key], cores=CORES, courses=rounds, failed={})


# -- the plan ----------------------------------------------------------------------------------------------------------


def test_every_row_has_a_work_and_a_key_of_its_own() -> None:
    assert {row.work for row in ROWS} <= set(WORKS)
    assert len(BY_KEY) == len(ROWS)
    assert all(WORKS[row.work].counted <= row.counted for row in ROWS)


@pytest.mark.parametrize("cores", [2, 12])
def test_torch_and_dpex_have_every_count_and_that_of_the_cores(cores: int) -> None:
    for row in ROWS:
        found = row.contestants(cores)
        assert len(set(found)) == len(found)
        if row.kind == "local":
            for engine in ("torch", "dpex"):
                counts = {one.workers for one in found if one.engine == engine and not (one.seeding or one.prefetch)}
                assert counts - {"auto"} == {*COUNTS, cores}
            assert AUTO in found


def test_defaults_unless_workers_wait() -> None:
    plain, waiting = (BY_KEY[key].contestants(CORES) for key in ("jpeg", "wait"))
    assert not [one for one in plain if one.seeding or one.prefetch]
    assert {one.prefetch for one in waiting if one.engine == "torch"} == {None, 4, 16}
    assert {one.workers for one in waiting if one.seeding == "batch"} == set(COUNTS)
    assert LIMIT in {one.engine for one in plain} - {one.engine for one in waiting}


def test_rivals_take_part_only_where_asked_for() -> None:
    for row in ROWS:
        ours, all_of_them = row.contestants(CORES), row.contestants(CORES, rivals=True)
        assert not [one for one in ours if one.engine in RIVALS]
        assert {one.engine for one in all_of_them if one.engine in RIVALS} == set(row.rivals)
    assert set(MODULES) == set(RIVALS)


def test_every_second_round_goes_backwards() -> None:
    planned = list(turns(BY_KEY["floats"], 2, CORES, only=["torch:0", "dpex:2", "dpex:auto"]))
    keys = [(turn.round, turn.contestant.key) for turn in planned]
    forth = ["torch:0", "dpex:2", "dpex:auto"]
    assert keys == [(0, key) for key in forth] + [(1, key) for key in reversed(forth)]


def test_auto_has_further_rounds_beside_the_best_fixed_settings(tmp_path: Path) -> None:
    """The same ones however far the further rounds have come; none in a run that cannot be quoted."""
    journal = Journal(tmp_path / "run")
    rates = {TORCH[0]: 5.0, TORCH[2]: 4.0, DPEX[0]: 6.0, DPEX[2]: 7.0, AUTO: 9.0}
    for number in range(5):
        for one, rate in rates.items():
            journal.add(measurement(one, number, rate))
    row, settings = BY_KEY["floats"], Settings()
    planned = further_turns(row, journal, settings, CORES)
    forth = ["dpex:2", "dpex:0", "torch:0", "dpex:auto"]
    keys = [(turn.round, turn.contestant.key) for turn in planned]
    assert keys == [(5, key) for key in reversed(forth)] + [(6, key) for key in forth]
    journal.add(measurement(TORCH[0], 5, 100.0))
    assert further_turns(row, journal, settings, CORES) == planned
    assert len(missing(planned, journal)) == len(planned) - 1
    assert not further_turns(row, journal, replace(settings, rounds=4), CORES)
    assert not further_turns(BY_KEY["jpeg"], journal, settings, CORES)


def test_labels_say_what_is_no_default() -> None:
    assert Contestant(engine="torch", workers=1).label == "torch, 1 worker"
    assert Contestant(engine="torch", workers=16, prefetch=4).label == "torch, 16 workers, prefetch 4"
    assert BATCH[2].label == 'dpex, 2 workers, seeding="batch"'
    assert AUTO.label == "dpex, auto"
    assert Contestant(engine="limit", workers=2).label == "limit, 2 processes"
    assert Contestant(engine="spdl", workers=4).label == "SPDL, 4 threads"


def test_a_request_comes_back_from_json_as_it_was() -> None:
    turn = Turn(row=BY_KEY["shift"], round=0, contestant=BATCH[4])
    asked = request(turn, Settings(rounds=1, window_s=3.0, learning_window_s=3.0))
    assert (asked.count, asked.step_s) == (150, 0.02)
    assert Request.from_json(asked.to_json()) == asked


# -- the course --------------------------------------------------------------------------------------------------------


def test_start_up_counts_and_what_comes_after_learning_is_kept_beside_it() -> None:
    marks = tuple((float(second), 10 * max(0, second - 4)) for second in range(1, 20))
    learning = Course(batches=160, seconds=20.0, waited_s=20.0, marks=marks)
    assert learning.settled_rate == pytest.approx(10)
    assert learning.rate == 8.0


def test_counted_courses_are_settled_in_the_second_half_of_their_batches() -> None:
    slow_start = Course(batches=100, seconds=15.0, waited_s=15.0, marks=((10.0, 50),), counted=True)
    assert slow_start.settled_rate == pytest.approx(10)


def test_a_course_comes_back_from_json_as_it_was() -> None:
    original = Course(
        batches=3, seconds=1.5, waited_s=0.5, marks=((0.5, 1), (1.0, 2)), decisions=({"at_s": 1.0, "new": "2"},)
    )
    assert Course.from_dict(json.loads(json.dumps(original.as_dict()))) == original


def test_a_counted_course_takes_as_many_batches_as_it_should_and_the_first_counts() -> None:
    driven = drive(range(100), Drive(step_s=0.0, window_s=0.0, count=7))
    assert driven.batches == 7
    assert driven.counted
    assert driven.marks[0][1] == 1


def test_the_clock_starts_before_iter(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr("benchmarks.course.time.perf_counter", lambda: now[0])

    class Slow:
        def __iter__(self) -> Any:
            now[0] += 3.0
            for number in range(10):
                now[0] += 0.5
                yield number

    driven = drive(Slow(), Drive(step_s=0.0, window_s=5.0))
    assert (driven.batches, driven.seconds, driven.waited_s, driven.first_batch_s) == (4, 5.0, 5.0, 3.5)


def test_processor_time_is_that_of_the_second_half_per_batch() -> None:
    ended, stays, begins = (1, 0.0), (2, 0.0), (3, 0.0)
    known = iter([{ended: 9.0, stays: 1.0}, {stays: 3.0, begins: 1.0}])
    driven = drive(range(100), Drive(step_s=0.0, window_s=0.0, count=12), cpu=lambda: next(known))
    assert driven.batch_cpu_s == 0.5
    assert drive([], Drive(step_s=0.0, window_s=0.0)).batch_cpu_s is None


# -- the file ----------------------------------------------------------------------------------------------------------

ORIGIN = Origin(machine_id="m", commit="c" * 40, dirty=False, settings=Settings())
ABOUT = {
    "machine": {
        "processor": "P",
        "cores": CORES,
        "last_level_cache_bytes": 2**25,
        "memory_bytes": 2**34,
        "system": "Linux 6",
    },
    "versions": {"python": "3.11", "torch": "2.13", "ray": "2.60"},
}


NOON = "2026-11-22T12:00:00+00:00"


def measurement(
    contestant: Contestant, number: int, rate: float | None, row: str = "floats", at: str = NOON
) -> Measurement:
    found = None if rate is None else course(rate)
    return Measurement(
        row=row, contestant=contestant, round=number, course=found, error=None if found else "why", at=at
    )


def test_a_file_is_continued_with_what_is_missing(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    journal = Journal(path)
    journal.begin(ORIGIN, ABOUT)
    planned = list(turns(BY_KEY["floats"], 2, CORES, only=["torch:0", "dpex:2"]))
    journal.add(measurement(TORCH[0], 0, 1.0))
    journal.add(measurement(DPEX[2], 0, None))
    with path.open("a") as file:
        file.write('{"kind": "measured", "row"')  # killed here
    again = Journal(path)
    again.begin(ORIGIN, ABOUT)
    left = [(turn.round, turn.contestant.key) for turn in missing(planned, again)]
    assert left == [(0, "dpex:2"), (1, "dpex:2"), (1, "torch:0")]
    assert [one.course for one in Journal(path).measurements] == [course(1.0), None]


@pytest.mark.parametrize(
    "change",
    [{"machine_id": "n"}, {"commit": "d" * 40}, {"dirty": True}, {"settings": Settings(rounds=7)}],
    ids=lambda change: next(iter(change)),
)
def test_a_file_is_not_continued_with_something_else(tmp_path: Path, change: dict[str, Any]) -> None:
    Journal(tmp_path / "run").begin(ORIGIN, ABOUT)
    with pytest.raises(JournalError, match=next(iter(change))):
        Journal(tmp_path / "run").begin(replace(ORIGIN, **change), ABOUT)


def test_changes_of_what_is_measured_are_noticed_and_no_others(tmp_path: Path) -> None:
    def git(*words: str) -> None:
        author = ["-c", "user.name=n", "-c", "user.email=e"]
        subprocess.run(["git", *author, "-C", str(tmp_path), *words], check=True, capture_output=True)

    assert commit(tmp_path) == (None, True)
    for name in ("dpex/a.py", "benchmarks/b.py", "README.md"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("1")
    git("init")
    git("add", "-A")
    git("commit", "-m", "all")
    (tmp_path / "run.jsonl").write_text("{}")
    (tmp_path / "README.md").write_text("2")
    (tmp_path / "benchmarks" / "results").mkdir()
    (tmp_path / "benchmarks" / "results" / "one.json").write_text("{}")
    head, dirty = commit(tmp_path)
    assert len(head or "") == 40
    assert not dirty
    (tmp_path / "dpex" / "new.py").write_text("1")
    assert commit(tmp_path) == (head, True)


def test_a_file_that_is_resumed_brings_its_settings(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    Journal(path).begin(replace(ORIGIN, settings=Settings(rounds=9, window_s=1.0)), ABOUT)
    assert settings_of(parse(["--resume", str(path)]), Journal(path)) == Settings(rounds=9, window_s=1.0)
    assert settings_of(parse(["--quick", "--rounds", "3"]), Journal(path)) == replace(QUICK, rounds=3)
    assert main(["--resume", str(tmp_path / "none.jsonl")]) == 2


def test_a_line_that_is_not_json_is_named(tmp_path: Path) -> None:
    (tmp_path / "run").write_text("nonsense\n")
    with pytest.raises(JournalError, match="line 1"):
        Journal(tmp_path / "run")


def test_what_fails_is_noted_with_its_reason_and_the_others_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def measured(asked: Request, _: Surroundings, __: None) -> Course:
        if asked.contestant == TORCH[0]:
            raise MeasurementError("no memory")
        return course(2.0)

    monkeypatch.setattr("benchmarks.runner.measured", measured)
    monkeypatch.setattr("benchmarks.runner.run", lambda *_, **__: "")
    journal = Journal(tmp_path / "run")
    planned = list(turns(BY_KEY["floats"], 1, CORES, only=["torch:0", "dpex:2"]))
    run_turns(planned, journal, Settings(), Interpreters(own=Surroundings()), lambda _: None)
    found = results_of(journal.measurements, CORES)["floats"]
    assert set(found.courses) == {DPEX[2]}
    assert found.failed == {TORCH[0]: "no memory"}


def test_nodes_of_a_benchmark_are_other_machines_to_dpex(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(same_machine, "machine", same_machine.machine)  # put back after the test
    listener, _ = same_machine.listen(1)
    listener.close()
    part_from_other_nodes()
    assert same_machine.listen(1) is None


@pytest.mark.parametrize("batch", [torch.ones(2, 3), [torch.ones(2, 3), torch.zeros(2)]], ids=["tensor", "list"])
def test_actors_hand_over_arrays_that_become_the_tensors_they_were(batch: Any) -> None:
    arrays = mapped(batch, torch.Tensor, torch.Tensor.numpy)
    assert {type(one) for one in (arrays if isinstance(arrays, list) else [arrays])} == {np.ndarray}
    torch.testing.assert_close(mapped(arrays, np.ndarray, torch.from_numpy), batch)


def test_a_forked_process_measures_and_tells_why_it_failed() -> None:
    """Torch and dpex in processes of one server, one after the other; a request that fails costs the others nothing."""
    with forking(Surroundings()) as server:
        for contestant in (TORCH[0], DPEX[1]):
            asked = Request(work="wait", contestant=contestant, window_s=0.2)
            found = Course.from_dict(json.loads(server.run(asked.to_json(), 60.0).splitlines()[-1]))
            assert found.batches
        unknown = replace(asked, contestant=Contestant(engine="nobody", workers=0))
        with pytest.raises(MeasurementError, match="there is no loader called 'nobody'"):
            server.run(unknown.to_json(), 60.0)
        with pytest.raises(MeasurementError, match=r"nothing after 0\.3 s"):
            server.run(replace(asked, window_s=60.0).to_json(), 0.3)
        assert json.loads(server.run(asked.to_json(), 60.0).splitlines()[-1])["batches"]


def test_nothing_runs_beside_the_thread_that_forks() -> None:
    """Threads would be missing in the children; OpenBLAS starts its own anew there, and torch has started none."""
    asked = "import benchmarks.measure, threading; print(threading.active_count())"
    assert process.run(Surroundings(), "-c", asked, limit_s=60.0).strip() == "1"


def test_a_row_whose_packages_are_missing_is_skipped_with_a_word(tmp_path: Path) -> None:
    row = replace(BY_KEY["floats"], needs=("no_such_package",))
    planned = [Turn(row=row, round=0, contestant=DPEX[0])]
    journal = Journal(tmp_path / "run")
    run_turns(planned, journal, Settings(), Interpreters(own=Surroundings()), lambda _: None)
    assert "no_such_package" in Journal(tmp_path / "run").skipped["floats"]
    assert not journal.measurements


def test_the_command_measures_resumes_and_reports(tmp_path: Path) -> None:
    """Real processes, with the smallest windows."""
    path = tmp_path / "run.jsonl"
    command = ["--rows", "wait", "--only", "torch:0", "dpex:auto", "--window-s", "0.2", "--results", str(path)]
    assert main([*command, "--rounds", "1"]) == 0
    journal = Journal(path)
    assert {one.contestant.key for one in journal.measurements} == {"torch:0", "dpex:auto"}
    assert all(one.course and one.course.batches for one in journal.measurements)
    assert main(["--resume", str(path), *command[:5]]) == 0
    assert len(Journal(path).measurements) == 2
    assert main([*command, "--rounds", "2"]) == 2


# -- what they come to -------------------------------------------------------------------------------------------------


def test_ratios_are_taken_within_rounds() -> None:
    found = result({DPEX[2]: [10.0, 40.0, 95.0], TORCH[2]: [10.0, 50.0, 100.0]})
    ratio = found.ratio(DPEX[2], TORCH[2])
    assert ratio is not None
    assert (ratio.median, ratio.low, ratio.high) == (0.95, 0.8, 1.0)


def test_a_round_that_one_of_them_lacks_is_left_out() -> None:
    found = result({DPEX[2]: [10.0, 40.0], TORCH[2]: [10.0]})
    ratio = found.ratio(DPEX[2], TORCH[2])
    assert ratio is not None
    assert (ratio.low, ratio.high) == (1.0, 1.0)
    assert found.ratio(DPEX[2], TORCH[8]) is None


def test_who_got_no_batch_after_the_start_is_not_divided_by() -> None:
    early = Course(batches=1, seconds=10.0, waited_s=10.0, marks=((1.0, 1),))
    found = result({DPEX[2]: 10.0, TORCH[2]: early})
    assert found.ratio(DPEX[2], TORCH[2], "settled") is None
    assert found.ratio(DPEX[2], TORCH[2]) is not None


def test_the_best_of_each_side_and_the_oracle() -> None:
    prefetching = Contestant(engine="torch", workers=32, prefetch=16)
    rates = {
        TORCH[0]: 50.0,
        TORCH[2]: 20.0,
        prefetching: 60.0,
        DPEX[0]: 40.0,
        DPEX[8]: 55.0,
        BATCH[64]: 70.0,
        AUTO: 99.0,
    }
    found = result(rates, key="wait")
    assert found.best("torch") == prefetching
    assert (found.best("dpex"), found.best("dpex", "batch")) == (DPEX[8], BATCH[64])
    assert found.at_cores("torch") == TORCH[2]
    assert found.at_cores("dpex") is None
    assert found.oracle() == BATCH[64]
    assert found.best_dpex() == AUTO
    assert found.seedings == [None, "batch"]


def test_the_oracle_after_learning_may_be_another_than_that_of_the_whole_course() -> None:
    found = result({TORCH[0]: course(50, 50), TORCH[8]: course(40, 60), AUTO: course(30, 57)})
    assert (found.oracle(), found.oracle("settled")) == (TORCH[0], TORCH[8])
    whole, settled = (found.ratio(AUTO, found.oracle(part), part) for part in ("whole", "settled"))
    assert whole is not None
    assert settled is not None
    assert (whole.median, settled.median) == pytest.approx((0.6, 0.95))


def test_of_each_rival_the_best_setting_counts() -> None:
    rivals = {Contestant(engine=engine, workers=n): 10.0 * n for engine in ("spdl", "ray-data") for n in (2, 4)}
    found = result({**rivals, Contestant(engine="spdl", workers=8): 1.0})
    assert [one.key for one in found.best_rivals()] == ["spdl:4", "ray-data:4"]


def test_a_course_measured_again_replaces_the_failure() -> None:
    tries = [measurement(TORCH[0], 0, None), measurement(TORCH[0], 1, None), measurement(TORCH[0], 0, 3.0)]
    found = results_of(tries, CORES)["floats"]
    assert found.courses == {TORCH[0]: {0: course(3.0)}}
    assert found.failed == {TORCH[0]: "why"}


def test_behind_is_what_is_printed_as_less_than_one() -> None:
    behind, level = (result({DPEX[0]: one, TORCH[0]: 1000.0}).ratio(DPEX[0], TORCH[0]) for one in (994.0, 996.0))
    assert is_behind(behind)
    assert not is_behind(level, None)


def test_the_terminal_is_told_every_contestant_and_every_failure() -> None:
    found = replace(result({DPEX[2]: 30.0, TORCH[2]: 20.0, AUTO: 40.0}), failed={TORCH[64]: "Trace\nno memory"})
    text = report.row_text(found)
    assert "dpex / torch, workers = cores                 1.50x (1.50 to 1.50)" in text
    assert "torch, 64 workers: failed: no memory" in text


# -- kept results and tables -------------------------------------------------------------------------------------------


def whole_row(key: str, rate: float = 10.0, rounds: int = 5) -> RowResult:
    """Everybody of a row's plan; dpex makes twice as many batches as the others."""
    rates = {one: rate * (2 if one.engine.startswith("dpex") else 1) for one in BY_KEY[key].contestants(CORES)}
    return result({one: [value] * rounds for one, value in rates.items()}, key)


def run_of(*rows: RowResult, **changes: Any) -> Kept:
    fields: dict[str, Any] = {
        "machine_id": "m",
        **ABOUT,
        "commit": "c" * 40,
        "dirty": False,
        "settings": Settings(),
        "since": "2026-11-21T20:00:00+00:00",
        "until": "2026-11-22T04:00:00+00:00",
        "rows": {row.row.key: row for row in rows},
    }
    return Kept(**fields | changes)


ALL_KINDS = tuple(whole_row(key) for key in ("floats", "wait", "jpeg-step", "first-batch", "remote-large"))


def test_a_kept_run_comes_back_from_its_file_as_it_was(tmp_path: Path) -> None:
    kept = run_of(*ALL_KINDS)
    keep.write(kept, tmp_path / "one.json")
    (tmp_path / "local-speed.json").write_text("{}")  # a training's, which was not kept
    (again,) = keep.kept_runs(tmp_path)
    assert again == kept
    assert keep.problems(again) == []


def test_files_of_one_machine_and_commit_are_one_run(tmp_path: Path) -> None:
    first, second = run_of(ALL_KINDS[0]), run_of(*ALL_KINDS[1:], until="2026-11-23T00:00:00+00:00")
    for number, kept in enumerate((second, first, replace(first, commit="d" * 40, until="2026-11-01T00:00:00+00:00"))):
        keep.write(kept, tmp_path / f"{number}.json")
    newest, other = keep.kept_runs(tmp_path)
    assert (set(newest.rows), newest.until) == ({row.row.key for row in ALL_KINDS}, second.until)
    assert other.commit == "d" * 40


def test_a_window_that_no_row_has_does_not_tell_runs_apart(tmp_path: Path) -> None:
    long = run_of(whole_row("skewed-wait"), settings=Settings(window_s=15.0), until="2026-11-23T00:00:00+00:00")
    keep.write(run_of(*ALL_KINDS), tmp_path / "usual.json")
    keep.write(long, tmp_path / "long.json")
    (both,) = keep.kept_runs(tmp_path)
    assert (set(both.rows), both.settings) == ({*(row.row.key for row in ALL_KINDS), "skewed-wait"}, Settings())
    keep.write(replace(long, rows=run_of(whole_row("jpeg")).rows), tmp_path / "long.json")
    assert len(keep.kept_runs(tmp_path)) == 2


def test_few_marks_are_kept_and_the_figures_stay_as_they_were() -> None:
    marks = tuple((0.1 * number, number**2) for number in range(1, 151))
    for counted in (False, True):
        full = Course(batches=151**2, seconds=15.1, waited_s=1.0, marks=marks, counted=counted)
        thin = replace(full, marks=keep.thinned(full, keep.MARKS))
        assert len(thin.marks) < 15
        assert thin.settled_rate == pytest.approx(full.settled_rate)
        assert thin.first_batch_s == full.first_batch_s


@pytest.mark.parametrize(
    ("kept", "why"),
    [
        (run_of(*ALL_KINDS, dirty=True), "commit without changes"),
        (run_of(*ALL_KINDS, commit=None), "commit without changes"),
        (run_of(*ALL_KINDS, settings=Settings(window_s=2.0)), "2 s long"),
        (run_of(whole_row("floats", rounds=4)), "4 rounds"),
        (run_of(result({TORCH[0]: [1.0] * 5})), "0 rounds"),
        (run_of(whole_row("skewed-wait")), "courses of 10.0 s"),
    ],
    ids=["dirty", "no commit", "short", "few rounds", "screened", "short in a long row"],
)
def test_what_cannot_be_quoted_is_told(kept: Kept, why: str) -> None:
    assert any(why in one for one in keep.problems(kept))


def test_only_whole_rows_are_kept() -> None:
    kept, left_out = keep.quotable(run_of(whole_row("floats"), whole_row("jpeg", rounds=3)))
    assert list(kept.rows) == ["floats"]
    assert left_out
    assert all(why.startswith("jpeg") for why in left_out)


def test_who_failed_in_a_round_may_not_be_left_out_of_a_kept_row_silently() -> None:
    row = whole_row("floats")
    courses = {one: rounds for one, rounds in row.courses.items() if one != TORCH[64]}
    assert keep.row_problems(replace(row, courses=courses, failed={TORCH[64]: "no memory"})) == []
    assert keep.row_problems(replace(row, courses=courses)) != []


TEMPLATE = (
    "before\n" + "\n".join(f"<!-- bench:{name} -->\nold\n<!-- /bench -->\n" for name in report.BLOCKS) + "after\n"
)


def test_every_marked_block_is_made_anew_and_nothing_else() -> None:
    text = report.rewritten(TEMPLATE, [run_of(*ALL_KINDS)])
    assert "old" not in text
    assert text.startswith("before\n<!-- bench:origin -->\n")
    assert text.endswith("after\n")
    assert report.rewritten(text, [run_of(*ALL_KINDS)]) == text
    assert report.rewritten(text, [run_of(whole_row("floats", rate=50.0), *ALL_KINDS[1:])]) != text


def test_an_unknown_block_or_one_without_runs_is_refused() -> None:
    with pytest.raises(ValueError, match="speedy"):
        report.rewritten("<!-- bench:speedy -->\n<!-- /bench -->", [run_of()])
    with pytest.raises(ValueError, match="no kept run"):
        report.rewritten(TEMPLATE, [])
    assert report.rewritten("no blocks", []) == "no blocks"


def cells(table: str) -> list[list[str]]:
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()[2:]]


def test_a_speed_line_quotes_both_counts_and_both_ratios() -> None:
    rates = {TORCH[0]: 40.0, TORCH[2]: 10.0, DPEX[0]: 30.0, DPEX[2]: 50.0, Contestant(engine=LIMIT, workers=2): 100.0}
    (line,) = cells(report.speed_table([run_of(result(rates))]))
    shown = [
        "10.0/s (2)",
        "40.0/s (0)",
        "50.0/s (2)",
        "50.0/s (2)",
        "5.00x (5.00 to 5.00)",
        "1.25x (1.25 to 1.25)",
        "0.50",
    ]
    assert line == ["5 floats, batch 1", *shown]


def test_another_seeding_is_named_in_a_line_of_its_own() -> None:
    lines = cells(report.speed_table([run_of(result({TORCH[2]: 10.0, DPEX[2]: 9.0, BATCH[2]: 20.0}, "wait"))]))
    assert [line[0] for line in lines] == [BY_KEY["wait"].title, f'{BY_KEY["wait"].title}, `seeding="batch"`']
    assert [line[5] for line in lines] == ["0.90x (0.90 to 0.90)", "2.00x (2.00 to 2.00)"]


def test_rows_where_dpex_is_behind_come_first() -> None:
    rows = (result({TORCH[0]: 10.0, DPEX[0]: 20.0}), result({TORCH[0]: 10.0, DPEX[0]: 8.0}, "jpeg"))
    assert [line[0] for line in cells(report.speed_table([run_of(*rows)]))] == [
        BY_KEY["jpeg"].title,
        BY_KEY["floats"].title,
    ]


def test_a_rival_that_is_ahead_comes_first() -> None:
    spdl, grain = (Contestant(engine=engine, workers=2) for engine in ("spdl", "grain-threads"))
    lines = cells(report.rivals_table([run_of(result({DPEX[0]: 10.0, spdl: 5.0, grain: 20.0}))]))
    assert [line[2] for line in lines] == ["Grain, 2 threads", "SPDL, 2 threads"]


def test_auto_stands_beside_the_oracle_over_the_whole_course_and_after_learning() -> None:
    row = result({TORCH[0]: course(50, 50), BATCH[8]: course(40, 60), AUTO: course(30, 57)}, "wait")
    (line,) = cells(report.auto_table([run_of(row)]))
    assert line[1:] == [
        '60.0/s, dpex, 8 workers, seeding="batch"',
        "30.0/s",
        "0.50x (0.50 to 0.50)",
        "0.95x (0.95 to 0.95)",
    ]


def test_several_machines_give_the_range_of_the_medians() -> None:
    newest, other = (run_of(result({TORCH[0]: 10.0, DPEX[0]: rate})) for rate in (20.0, 40.0))
    (line,) = cells(report.speed_table([newest, replace(other, machine_id="n")]))
    assert line[6] == "2.00x (2.00 to 2.00); 2.00 to 4.00 on 2 machines"
    for alone in (other, replace(other, machine_id="n", commit="d" * 40)):
        (same,) = cells(report.speed_table([newest, alone]))
        assert same[6] == "2.00x (2.00 to 2.00)"


def test_rows_of_one_commit_may_come_from_several_machines() -> None:
    newest = run_of(result({TORCH[0]: 10.0, DPEX[0]: 20.0}, "jpeg"))
    other = replace(run_of(result({TORCH[0]: 10.0, DPEX[0]: 30.0})), machine_id="n")
    titles = [line[0] for line in cells(report.speed_table([newest, other]))]
    assert titles == [BY_KEY["floats"].title, BY_KEY["jpeg"].title]
    assert len(cells(report.speed_table([newest, replace(other, commit="d" * 40)]))) == 1


def test_rows_of_each_kind_are_of_the_newest_run_that_has_some() -> None:
    newest = run_of(whole_row("remote-large"), commit="d" * 40)
    older = run_of(whole_row("floats"), whole_row("remote-floats"))
    assert [line[0] for line in cells(report.remote_table([newest, older]))] == [BY_KEY["remote-large"].title]
    assert [line[0] for line in cells(report.speed_table([newest, older]))] == [BY_KEY["floats"].title]
    assert "commit dddddddddd" in report.origin_text([newest, older], "remote")
    assert "commit cccccccccc" in report.origin_text([newest, older])
    assert report.origin_text([newest, older], "start") == "Not measured yet."


def test_the_time_to_the_first_batch_is_told_in_milliseconds() -> None:
    row = result({TORCH[2]: 20.0, DPEX[2]: 25.0, TORCH[0]: 1000.0, DPEX[0]: 1000.0}, "first-batch")
    lines = cells(report.start_table([run_of(row)]))
    assert lines[1][1:] == ["2", "50 ms", "40 ms", "1.25x (1.25 to 1.25)"]


def test_the_headline_sets_the_whole_course_of_auto_beside_torch_after_its_start() -> None:
    row = result({TORCH[0]: course(40, 60), TORCH[2]: course(40, 50), DPEX[8]: 90.0, AUTO: course(75, 99)})
    (line,) = cells(report.headline_table([run_of(row)]))
    assert line[1:] == ["50.0/s (2)", "60.0/s (0)", "75.0/s", "1.50x (1.50 to 1.50)", "1.25x (1.25 to 1.25)"]


def test_the_headline_takes_torchs_best_after_its_start_and_names_its_prefetch_factor() -> None:
    ahead = replace(TORCH[8], prefetch=16)
    row = result({TORCH[2]: course(60, 40), ahead: course(50, 90), AUTO: course(80, 99)}, "wait")
    (line,) = cells(report.headline_table([run_of(row)]))
    assert (line[2], line[-1]) == ("90.0/s (8, prefetch 16)", "0.89x (0.89 to 0.89)")


def test_whole_courses_are_compared_where_everybodys_is_as_long() -> None:
    row = result({TORCH[2]: course(60, 90), TORCH[8]: course(50, 99), AUTO: course(80, 120)}, "skewed-wait")
    (line,) = cells(report.headline_table([run_of(row)]))
    assert (line[2], line[-1]) == ("60.0/s (2)", "1.33x (1.33 to 1.33)")
    assert row.to_oracle("whole") == row.ratio(AUTO, TORCH[2])


def test_in_a_long_row_everybody_is_measured_as_long_as_auto() -> None:
    lengths = {
        key: {window_s(Turn(row=BY_KEY[key], round=0, contestant=one), Settings()) for one in (TORCH[2], AUTO)}
        for key in ("wait", "skewed-wait", "slow-shards")
    }
    assert lengths == {"wait": {4.0, 15.0}, "skewed-wait": {15.0}, "slow-shards": {15.0}}


def test_the_line_above_the_tables_tells_of_further_rounds_of_auto() -> None:
    row = whole_row("floats")
    more = replace(row, courses={**row.courses, AUTO: dict.fromkeys(range(7), course(20.0))})
    assert "which has 7 rounds" in report.origin_text([run_of(more)])
    assert "which has" not in report.origin_text([run_of(more, whole_row("jpeg"))])


def test_the_headline_begins_with_what_auto_is_behind_in() -> None:
    ahead, behind = result({TORCH[0]: 10.0, AUTO: 20.0}), result({TORCH[0]: 10.0, AUTO: 8.0}, "jpeg")
    assert [line[0] for line in cells(report.headline_table([run_of(ahead, behind)]))] == [
        BY_KEY["jpeg"].title,
        BY_KEY["floats"].title,
    ]


@pytest.mark.parametrize("path", report.DOCUMENTS, ids=lambda path: path.name)
def test_the_tables_of_the_documents_are_those_of_the_kept_results(path: Path) -> None:
    text = path.read_text()
    assert report.rewritten(text, keep.kept_runs()) == text, "make bench-report, or keep the run that was quoted"


@pytest.mark.parametrize("path", report.DOCUMENTS, ids=lambda path: path.name)
def test_each_document_has_tables_or_a_place_for_them(path: Path) -> None:
    named = re.findall(r"<!-- (?:place for )?bench:([a-z-]+) -->", path.read_text())
    assert named
    assert len(set(named)) == len(named)
    assert set(named) <= set(report.names())


def test_no_document_is_written_where_a_table_of_another_cannot_be_made(tmp_path: Path) -> None:
    good, bad = tmp_path / "good.md", tmp_path / "bad.md"
    good.write_text("no table\n")
    bad.write_text("<!-- bench:speedy -->\n<!-- /bench -->\n")
    before = good.stat().st_mtime_ns
    assert report.main([str(good), str(bad)]) == 1
    assert good.stat().st_mtime_ns == before


def test_what_is_kept_can_be_quoted() -> None:
    assert [why for kept in keep.kept_runs() for why in keep.problems(kept)] == []
    assert [why for kept in keep.kept_runs(keep.PARTS) for why in keep.problems(kept, part=True)] == []


def test_a_round_that_took_hours_is_not_kept_as_its_contestants_took_no_turns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(keep, "RESULTS", tmp_path)
    journal = Journal(tmp_path / "run.jsonl")
    journal.begin(ORIGIN, ABOUT)
    for row in ("floats", "small-images"):
        for one in BY_KEY[row].contestants(CORES):
            for number in range(5):
                journal.add(measurement(one, number, 10.0, row))
    journal.add(measurement(TORCH[0], 3, 10.0, at="2026-11-22T15:00:00+00:00"))
    assert keep.main([str(journal.path), "one"]) == 0
    assert "left out: floats: its round 3 took 3.0 hours" in capsys.readouterr().out
    (kept,) = keep.kept_runs(tmp_path)
    assert list(kept.rows) == ["small-images"]


def test_keeping_and_reporting_by_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keep, "RESULTS", tmp_path)
    monkeypatch.setattr(report, "kept_runs", lambda: keep.kept_runs(tmp_path))
    journal = Journal(tmp_path / "run.jsonl")
    journal.begin(ORIGIN, ABOUT)
    for one in BY_KEY["floats"].contestants(CORES):
        for number in range(5):
            journal.add(measurement(one, number, 10.0))
    journal.add(measurement(TORCH[0], 0, 10.0, row="jpeg"))
    assert keep.main([str(journal.path), "one"]) == 0
    (kept,) = keep.kept_runs(tmp_path)
    assert list(kept.rows) == ["floats"]
    readme = tmp_path / "README.md"
    readme.write_text(TEMPLATE)
    page = tmp_path / "benchmarks.md"
    page.write_text("<!-- bench:speed -->\n<!-- /bench -->\n")
    assert report.main([str(readme), str(page)]) == 0
    assert all("| 5 floats, batch 1 | 10.0/s (2) |" in path.read_text() for path in (readme, page))
    empty = Journal(tmp_path / "dirty.jsonl")
    empty.begin(replace(ORIGIN, dirty=True), ABOUT)
    assert keep.main([str(empty.path), "two"]) == 2
    empty.add(measurement(TORCH[0], 0, 10.0))
    assert keep.main([str(empty.path), "two"]) == 1
