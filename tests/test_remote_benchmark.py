"""`python -m benchmarks.remote`: when a rate is steady, what is planned and kept, and the tables made of it."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from benchmarks import report
from benchmarks.process import MeasurementError
from benchmarks.remote import __main__ as command
from benchmarks.remote import tables, trainings
from benchmarks.remote.cells import COUNTS, Cell, cells
from benchmarks.remote.measure import running_workers
from benchmarks.remote.processes import is_worker
from benchmarks.remote.steady import Look, UntilSteady, full_speed_s, steady_since, stretch_of
from benchmarks.training import runs
from benchmarks.training.runs import Run

ABOUT = {
    "machine": {"processor": "a CPU", "cores": 2, "gpu": None},
    "versions": {"python": "3.11.7", "torch": "2.13.0", "ray": "2.60.0"},
    "commit": "0123456789abcdef",
    "dirty": False,
    "since": "2026-11-22T10:00:00+00:00",
    "until": "2026-11-22T11:00:00+00:00",
}

# -- a course ----------------------------------------------------------------------------------------------------------


class Scripted:
    """A loader on a clock of its own: batch i comes after `waits_s[i]`, each for a CPU second in a hundred."""

    def __init__(self, waits_s: list[float]) -> None:
        self.waits_s = waits_s
        self.now = 0.0

    def __iter__(self) -> Iterator[int]:
        for number, wait_s in enumerate(self.waits_s):
            self.now += wait_s
            yield number


RAMP = [0.25] * 20 + [0.05] * 2000
"""Four batches a second while workers start, then twenty."""


def consumed(loader: Scripted, running: Any, most_s: float = 100.0) -> UntilSteady:
    steady = UntilSteady(
        loader, workers=2, most_s=most_s, running=running, clock=lambda: loader.now, cpu_clock=lambda: loader.now / 100
    )
    for _ in steady:
        pass
    return steady


def test_a_course_ends_once_all_workers_run_and_the_rate_stays() -> None:
    loader = Scripted(RAMP)
    found = consumed(loader, lambda: 2 if loader.now > 7.95 else 1)
    assert found.at_work_s == pytest.approx(8.0, abs=0.2)
    assert found.looks[-1].at_s == pytest.approx(found.at_work_s + 4.0, abs=0.2)
    stretch = stretch_of(found.looks, found.at_work_s)
    assert stretch.is_steady
    assert (stretch.rate, stretch.batch_cpu_s) == (pytest.approx(20.0), pytest.approx(0.0005))


def test_where_the_loader_does_not_tell_of_its_workers_the_rate_decides() -> None:
    found = consumed(Scripted(RAMP), lambda: None)
    assert found.at_work_s is None
    assert found.looks[-1].at_s == pytest.approx(4.25)  # four seconds of four batches each
    rising = consumed(Scripted([0.5] * 6 + [0.1] * 1000), lambda: None)
    assert rising.looks[-1].at_s > 6.0
    assert stretch_of(rising.looks, None).is_steady


def test_a_rate_of_few_batches_is_not_steady() -> None:
    found = consumed(Scripted([1.0] * 100), lambda: None, most_s=20.0)
    assert found.looks[-1].at_s == pytest.approx(20.0)
    assert stretch_of(found.looks, None).rate == pytest.approx(1.0)


def test_a_course_that_never_gets_steady_ends_all_the_same() -> None:
    times_s = [5.0 * math.log(number) for number in range(1, 2000)]  # half as many again every two seconds
    waits_s = [later - sooner for sooner, later in pairwise([0.0, *times_s])]
    found = consumed(Scripted(waits_s), lambda: None, most_s=30.0)
    stretch = stretch_of(found.looks, found.at_work_s)
    assert not stretch.is_steady
    assert stretch.until_s >= 30.0
    assert stretch.rate == pytest.approx((math.exp(6) - math.exp(3)) / 15, rel=0.1)


def test_the_time_before_all_workers_ran_is_not_steady() -> None:
    looks = [Look(at_s=second / 10, batches=second, cpu_s=0.0) for second in range(1, 60)]
    assert steady_since(looks, 0.0) == pytest.approx(1.9)
    assert steady_since(looks, 2.0) is None


def test_full_speed_begins_with_the_first_second_of_nearly_the_steady_rate() -> None:
    looks = consumed(Scripted(RAMP), lambda: None).looks
    assert full_speed_s(looks, 4.0) == pytest.approx(0.25)
    late = [Look(at_s=at, batches=n, cpu_s=0.0) for at, n in ((1, 1), (2, 2), (3, 3), (3.5, 8), (4, 13), (5, 23))]
    assert full_speed_s(late, 10.0) == pytest.approx(3)
    assert full_speed_s(late, 100.0) is None


def test_workers_are_known_from_the_statistics_of_any_checkout() -> None:
    class Pool:
        running = 3

    class Statistics:
        def __init__(self, pools: dict[str, Pool]) -> None:
            self.batches, self.of_each = 7, pools

    class Loader:
        def __init__(self, pools: dict[str, Pool]) -> None:
            self.stats = lambda: Statistics(pools)

    assert running_workers(Loader({"local": Pool(), "remote": Pool()})) == 3
    assert running_workers(Loader({"local": Pool()})) == 0
    assert running_workers([]) is None


def test_worker_processes_are_told_from_others_of_ray() -> None:
    assert is_worker(["ray::IDLE"])
    assert is_worker(["python", "/somewhere/default_worker.py", "--node-ip-address=127.0.0.1"])
    assert not any(map(is_worker, ([], ["ray::DashboardAgent"], ["python", "agent.py"])))


# -- the plan ----------------------------------------------------------------------------------------------------------


def test_what_computes_has_few_workers_and_what_waits_the_others() -> None:
    planned = cells(cores=2)
    counts = {work: {cell.workers for cell in planned if cell.work == work} for work in (cell.work for cell in planned)}
    assert counts.pop("wait") == {16, 64}
    assert set(map(frozenset, counts.values())) == {frozenset({1, 4})}
    assert [Cell.of_key(cell.key) for cell in planned] == planned
    assert {cell.workers for cell in cells(cores=64) if cell.work == "wait"} == {COUNTS[-1]}


@pytest.mark.parametrize("what", ["table", "trainings", "sweep"])
def test_the_plan_is_told(what: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main([what, "--plan"]) == 0
    assert "rounds: about" in capsys.readouterr().out


def measured(options: list[str], measure: Any) -> Run:
    return command.measured(command.parse(options), measure)


def test_rounds_take_turns_and_go_on_where_they_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runs, "commit", lambda root: ("c" * 40, False))
    options = ["--results", str(tmp_path / "run.json"), "--only", "jpeg:1:dpex", "jpeg:1:ray-data", "--rounds", "2"]
    asked: list[str] = []

    def measure(key: str) -> dict[str, Any]:
        asked.append(key)
        if len(asked) == 3:
            raise MeasurementError("no memory")
        return item(float(len(asked)))

    run = measured(options, measure)
    assert asked == ["jpeg:1:dpex", "jpeg:1:ray-data", "jpeg:1:ray-data", "jpeg:1:dpex"]
    assert [one.get("error") for one in run.rows["jpeg:1:ray-data"]] == [None, "no memory"]
    assert measured(options, measure).rows == run.rows
    assert len(asked) == 4
    assert measured([*options, "--rounds", "3", "--minutes", "0.001"], measure).rows == {}


# -- tables ------------------------------------------------------------------------------------------------------------


def item(rate: float, first_s: float = 0.5, at_work_s: float | None = 2.0) -> dict[str, Any]:
    steady = {"since_s": 4.0, "until_s": 8.0, "rate": rate, "batch_cpu_s": 0.0015, "is_steady": True}
    memory = {"memory_bytes": 700_000_000, "idle_bytes": 200_000_000, "processes": 5}
    times = {"first_s": first_s, "at_work_s": at_work_s, "full_s": 3.0}
    return {"at": "", "load": 0.1, "marks": [[0.5, 1]], "steady": steady, **memory, **times}


def table_run(**changes: Any) -> Run:
    keys = [f"{work}:4:{who}" for work in ("floats", "jpeg") for who in ("dpex", "before", "ray-data")]
    rows = {key: [item(rate) for rate in (9.0, 12.0, 10.0)] for key in keys} | changes
    settings = {"quick": False, "rounds": 3, "rows": keys, "before": "b" * 40}
    return Run(subject="table", settings=settings, about=ABOUT, rows=rows)


def cell_texts(text: str) -> list[list[str]]:
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines()[2:]]


def test_the_table_tells_medians_with_their_range_and_begins_with_what_dpex_is_behind_in() -> None:
    silent = [item(20.0, at_work_s=None)] * 3
    lines = cell_texts(tables.workers_table(table_run(**{"jpeg:4:ray-data": silent})))
    assert [line[2] for line in lines] == ["dpex", "dpex, before", "Ray Data"] * 2
    assert lines[0][0].startswith("JPEG")
    assert lines[0][3:] == [
        "0.5 s (0.5 to 0.5)",
        "2 s (2 to 2)",
        "3 s (3 to 3)",
        "10 (9 to 12)",
        "500 MB (500 to 500)",
        "1.5 ms (1.5 to 1.5)",
    ]
    assert lines[2][4] == "-"
    assert "*Before* is commit bbbbbbbbbb." in tables.workers_text(table_run())


def test_only_whole_runs_without_failures_are_kept() -> None:
    assert tables.problems(table_run()) == []
    failed = table_run(**{"jpeg:4:dpex": [item(1.0), item(1.0), {"error": "it hung"}]})
    assert tables.problems(failed) == ["jpeg:4:dpex failed: it hung"]
    assert tables.problems(table_run(**{"jpeg:4:dpex": [item(1.0)]})) == ["jpeg:4:dpex has 1 rounds, not 2"]
    quick = table_run()
    assert tables.problems(Run(**{**vars(quick), "settings": {**quick.settings, "quick": True}})) != []


def line(at: float, wait: float, workers: int) -> dict[str, float]:
    return {"at": at, "seconds": 0.25, "workers": workers, "wait": wait}


def course() -> dict[str, Any]:
    """The second one's first line comes at 10.9 s, and from 14 s on both wait equally."""
    first = [line(second + 0.9, 0.2 if second < 14 else 0.5, 12 if second < 14 else 6) for second in range(30)]
    second = [line(second + 0.9, 0.8 if second < 14 else 0.55, 6) for second in range(10, 25)]
    return {"join_s": 8.0, "leave_s": 25.0, "trainings": [first, second], "at": "", "load": 0.1}


def test_when_trainings_wait_equally_is_found() -> None:
    assert trainings.equal_after_s(course()) == pytest.approx(14 - 10.9)
    never = course()
    never["trainings"][1] = [line(second + 0.9, 0.9, 1) for second in range(10, 25)]
    assert trainings.equal_after_s(never) is None


def test_the_course_of_trainings_is_a_table_and_a_drawing() -> None:
    settings = {"quick": False, "rounds": 1, "rows": ["2 trainings"]}
    run = Run(subject="trainings", settings=settings, about=ABOUT, rows={"2 trainings": [course()]})
    lines = cell_texts(tables.trainings_table(run))
    assert lines[0] == ["0 to 5", "20%, 12 workers", ""]
    assert lines[3] == ["15 to 20", "50%, 6 workers", "55%, 6 workers"]
    assert "2 trainings: 3 s" in tables.trainings_text(run)
    assert tables.problems(run) == []
    assert trainings.drawn(course()).startswith("<svg ")


def sweep_cost(cpu_s: float, way: str) -> dict[str, float]:
    """Preprocessing is half of it, and less where batches are shared."""
    return {"cpu_s": cpu_s, "preprocessing_s": cpu_s * (0.2 if way.endswith("share=") else 0.5), "wall_s": 1.0}


def sweep_run() -> Run:
    """Three rounds of a short and of a long sweep: starting takes 1 s of CPU for each training."""
    batch_s = {"1 training": 0.1, "4 trainings": 0.4, "4 trainings, share=": 0.15}
    starting_s = {"1 training": 1.0, "4 trainings": 4.0, "4 trainings, share=": 4.0}
    rows = {}
    for batches in (10, 90):
        costs = {way: starting_s[way] + batches * batch_s[way] for way in batch_s}
        rows[tables.sweep_row(batches)] = [
            {"costs": {way: sweep_cost(slower * cpu_s, way) for way, cpu_s in costs.items()}} for slower in (1, 2, 3)
        ]
    settings = {"quick": False, "rounds": 3, "rows": list(rows)}
    return Run(subject="sweep", settings=settings, about=ABOUT, rows=rows)


def test_a_sweep_is_compared_with_one_training_of_its_round() -> None:
    lines = cell_texts(tables.sweep_table(sweep_run()))
    assert [line[0] for line in lines] == ["10"] * 3 + ["90"] * 3
    assert [line[4] for line in lines] == [
        "1 (1 to 1)",
        "4 (4 to 4)",
        "2.75 (2.75 to 2.75)",
        "1 (1 to 1)",
        "4 (4 to 4)",
        "1.75 (1.75 to 1.75)",
    ]
    assert [line[5] for line in lines][1:3] == ["4 (4 to 4)", "1.1 (1.1 to 1.1)"]


def test_a_further_batch_costs_nothing_for_starting() -> None:
    found = tables.further_costs(sweep_run())
    assert found["4 trainings"] == pytest.approx([4.0] * 3)
    assert found["4 trainings, share="] == pytest.approx([1.5] * 3)
    assert "`share=`: 1.5 (1.5 to 1.5)" in tables.sweep_text(sweep_run())


def test_a_sweep_of_which_one_length_is_measured_has_no_further_batch() -> None:
    run = sweep_run()
    half = replace(run, rows={key: run.rows[key] for key in list(run.rows)[:1]})
    assert tables.further_costs(half) == {}
    assert len(cell_texts(tables.sweep_table(half))) == 3


def test_the_report_makes_these_tables_of_kept_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tables, "KEPT", tmp_path)
    text = "<!-- bench:remote-workers -->\n<!-- /bench -->\n"
    with pytest.raises(ValueError, match="no kept run"):
        report.rewritten(text, [])
    assert runs.keep(table_run(), "one", tables.problems, tmp_path) == []
    assert json.loads((tmp_path / "table-one.json").read_text())["subject"] == "table"
    assert "| 10 (9 to 12) |" in report.rewritten(text, [])
