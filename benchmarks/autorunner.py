"""Measures the rows of "auto": a short look at every fixed count, then the best of them and "auto" in turns.

A full measurement is a process of its own and begins with `iter()`, for everybody: starting workers and learning
how many there should be count as what they are, time without batches.
"""

import json
from collections.abc import Callable, Iterable
from typing import Any

from benchmarks.course import Course
from benchmarks.loaders import Contestant
from benchmarks.measure import Request
from benchmarks.oracle import AUTO, AutoResult, AutoRow, fixed_counts, picked, usual_guess
from benchmarks.process import MeasurementError, run_module
from benchmarks.runner import Settings, measured

NEAR_RATIO = 0.85
"""A count that is slower than its engine's best by more than this in the short look is not measured again."""
START_LIMIT_S = 120.0
SLOWEST = 8.0
"""How many times longer than its window a measurement may take: one worker on a row of counted batches needs 4."""

Say = Callable[[str], None]


def run_auto_row(row: AutoRow, settings: Settings, cores: int, say: Say) -> AutoResult:
    """All rounds of one row. A fixed count that fails is left out; raises MeasurementError if "auto" does."""
    fixed = fixed_counts(cores)
    failed: dict[Contestant, str] = {}
    rates: dict[Contestant, float] = {}
    chosen = fixed
    if settings.screen_s:
        say(f"{row.key}: a short look at {len(fixed)} fixed counts")
        rates, failed = _screened(row, settings, fixed)
        chosen = picked(rates, most=settings.finalists, near_ratio=NEAR_RATIO, always=usual_guess(cores))
    courses, failed_later = _rounds(row, settings, (AUTO, *chosen), say)
    return AutoResult(row=row, cores=cores, courses=courses, screened=rates, failed=failed | failed_later)


def _screened(
    row: AutoRow, settings: Settings, contestants: tuple[Contestant, ...]
) -> tuple[dict[Contestant, float], dict[Contestant, str]]:
    """Rates, and why there is none for the others. The clock starts when every worker has had its turn.

    Counted batches differ, so they are all counted, and three times as many of them, as starting counts too.
    """
    window_s = (3 if row.counted else 1) * settings.screen_s
    requests = [_request(row, c, window_s, warm_up=0 if row.counted else _turns(c)) for c in contestants]
    limit_s = START_LIMIT_S + len(requests) * SLOWEST * window_s
    printed = run_module("benchmarks.screen", json.dumps([r.to_json() for r in requests]), limit_s)
    found = dict(zip(contestants, map(json.loads, printed.splitlines()), strict=True))
    rates = {c: value for c, value in found.items() if not isinstance(value, str)}
    return rates, {c: value for c, value in found.items() if isinstance(value, str)}


def _turns(contestant: Contestant) -> int:
    return max(1, int(contestant.workers))


def _rounds(
    row: AutoRow, settings: Settings, contestants: tuple[Contestant, ...], say: Say
) -> tuple[dict[Contestant, tuple[Course, ...]], dict[Contestant, str]]:
    courses: dict[Contestant, list[Course]] = {c: [] for c in contestants}
    failed: dict[Contestant, str] = {}
    for number in range(settings.auto_rounds):
        for contestant in _order(courses, number):
            say(f"{row.key}, round {number + 1} of {settings.auto_rounds}: {contestant.label}")
            try:
                courses[contestant].append(_course(_request(row, contestant, settings.auto_window_s)))
            except MeasurementError as error:
                if contestant == AUTO:
                    raise
                del courses[contestant]
                failed[contestant] = str(error)
    return {c: tuple(found) for c, found in courses.items()}, failed


def _order(contestants: Iterable[Contestant], number: int) -> list[Contestant]:
    """The order of round `number`: every second one backwards."""
    return list(contestants)[:: -1 if number % 2 else 1]


def _request(row: AutoRow, contestant: Contestant, window_s: float, warm_up: int = 0) -> Request:
    return Request(
        work=row.work,
        contestant=contestant,
        quantity="course",
        warm_up=warm_up,
        window_s=window_s,
        count=row.count(window_s),
        step_s=row.step_s,
    )


def _course(request: Request) -> Course:
    fields: dict[str, Any] = measured(request, START_LIMIT_S + SLOWEST * request.window_s)
    return Course.from_dict(fields)
