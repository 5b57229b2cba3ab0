"""How the benchmark rows of "auto" are screened and judged, and what a consumer's course says. Nothing is timed."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from benchmarks.course import Course, Drive, drive
from benchmarks.loaders import Contestant
from benchmarks.oracle import (
    AUTO,
    AUTO_ROWS,
    AUTO_TARGETS,
    AutoResult,
    AutoRow,
    fixed_counts,
    picked,
    usual_guess,
)
from benchmarks.work import SHIFTING_WAITS_S, WORKS, ShiftingWaits

ROW = AutoRow(key="row", title="row", work="wait")
STEP_ROW = replace(ROW, step_s=0.02)
TORCH = {count: Contestant(engine="torch", workers=count) for count in (0, 2, 8)}
DPEX = {count: Contestant(engine="dpex", workers=count, seeding="batch") for count in (0, 2, 8)}


def course(rate: float, stall: float = 1.0) -> Course:
    return Course(batches=round(10 * rate), seconds=10.0, inside_s=10 * stall)


def outcome(courses: dict[Contestant, Course], row: AutoRow = ROW) -> dict[str, bool | None]:
    """Whether each target was met."""
    rounds = {contestant: (one,) for contestant, one in courses.items()}
    result = AutoResult(row=row, cores=2, courses=rounds, screened={}, failed={})
    return {verdict.target.against: verdict.met for verdict in result.verdicts}


def test_every_row_has_a_work_and_a_key_of_its_own() -> None:
    assert {row.work for row in AUTO_ROWS} <= set(WORKS)
    assert len({row.key for row in AUTO_ROWS}) == len(AUTO_ROWS) == 8


def test_the_number_of_cores_is_always_among_the_counts_of_torch() -> None:
    for cores in (2, 12):
        contestants = fixed_counts(cores)
        assert usual_guess(cores) in contestants
        assert len(set(contestants)) == len(contestants)


def test_screening_keeps_the_best_of_each_engine_and_torch_with_the_number_of_cores() -> None:
    rates = {TORCH[0]: 1.0, TORCH[2]: 2.0, TORCH[8]: 10.0, DPEX[0]: 9.5, DPEX[2]: 10.0, DPEX[8]: 9.9}
    assert picked(rates, most=2, near_ratio=0.85, always=TORCH[2]) == (TORCH[2], TORCH[8], DPEX[2], DPEX[8])
    assert picked(rates, most=1, near_ratio=0.85, always=TORCH[8]) == (TORCH[8], DPEX[2])


def test_screening_keeps_torch_with_the_number_of_cores_even_if_its_short_look_failed() -> None:
    assert picked({DPEX[2]: 1.0}, most=2, near_ratio=0.85, always=TORCH[2]) == (DPEX[2], TORCH[2])


def test_nine_tenths_of_the_oracle_are_enough() -> None:
    others = {TORCH[2]: course(50), TORCH[8]: course(80), DPEX[8]: course(100)}
    assert outcome({AUTO: course(90), **others})["oracle"] is True
    assert outcome({AUTO: course(89), **others})["oracle"] is False


def test_a_stall_as_low_as_the_oracles_is_enough_under_a_step_only() -> None:
    courses = {AUTO: course(40, stall=0.019), TORCH[2]: course(50, stall=0.01)}
    assert outcome(courses, STEP_ROW)["oracle"] is True
    assert outcome(courses, ROW)["oracle"] is False
    assert outcome(courses | {AUTO: course(40, stall=0.021)}, STEP_ROW)["oracle"] is False


def test_torch_with_the_number_of_cores_must_be_beaten_and_not_only_reached() -> None:
    assert outcome({AUTO: course(50), TORCH[2]: course(50)})["usual"] is False
    assert outcome({AUTO: course(51), TORCH[2]: course(50)})["usual"] is True


def test_the_best_count_of_torch_must_be_beaten_where_a_fixed_count_of_dpex_beats_it() -> None:
    torch = {TORCH[2]: course(50), TORCH[8]: course(100)}
    assert outcome({AUTO: course(99), **torch, DPEX[8]: course(101)})["torch"] is False
    assert outcome({AUTO: course(101), **torch, DPEX[8]: course(101)})["torch"] is True
    assert outcome({AUTO: course(99), **torch, DPEX[8]: course(95)})["torch"] is None


def test_what_could_not_be_measured_is_not_judged() -> None:
    assert "usual" not in outcome({AUTO: course(51), DPEX[2]: course(50)})
    assert [target.against for target in AUTO_TARGETS] == ["oracle", "usual", "torch"]


def test_the_ratio_is_taken_within_rounds() -> None:
    rounds = {AUTO: (course(10), course(40), course(95)), TORCH[2]: (course(10), course(50), course(100))}
    verdict = AutoResult(row=ROW, cores=2, courses=rounds, screened={}, failed={}).verdict(AUTO_TARGETS[0])
    assert verdict is not None
    assert (verdict.ratio.median, verdict.ratio.low, verdict.ratio.high) == (0.95, 0.8, 1.0)


def test_a_course_settles_when_its_rate_comes_near_that_of_its_second_half() -> None:
    marks = tuple((float(second), 10 * max(0, second - 4)) for second in range(1, 20))
    learning = Course(batches=160, seconds=20.0, inside_s=20.0, marks=marks)
    assert learning.settled_rate == pytest.approx(10)
    assert learning.settled_after_s == 4.0
    assert learning.rate == 8.0


def test_a_course_comes_back_from_json_as_it_was() -> None:
    original = Course(
        batches=3, seconds=1.5, inside_s=0.5, marks=((0.5, 1), (1.0, 2)), decisions=({"reason": "start"},)
    )
    assert Course.from_dict(json.loads(json.dumps(original.as_dict()))) == original


def test_a_counted_course_takes_as_many_batches_as_it_should_and_the_first_counts() -> None:
    driven = drive(range(100), Drive(step_s=0.0, window_s=0.0, count=7))
    assert driven.batches == 7
    assert driven.marks[0][1] == 1


def test_a_warm_up_is_not_counted() -> None:
    assert drive(range(10), Drive(step_s=0.0, window_s=1e9, warm_up=4)).batches == 6


def test_the_shifting_row_has_as_many_batches_of_each_cost(monkeypatch: pytest.MonkeyPatch) -> None:
    row = next(row for row in AUTO_ROWS if row.counted)
    batches = row.count(3.0)
    assert batches == 150
    waits: list[float] = []
    monkeypatch.setattr("benchmarks.work.time.sleep", waits.append)
    dataset = ShiftingWaits(batches)
    for index in range(len(dataset)):
        dataset[index]
    assert waits == [wait_s for wait_s in SHIFTING_WAITS_S for _ in range(len(dataset) // 3)]
