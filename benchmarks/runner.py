"""Rounds of measurements, contestants taking turns, every one noted as soon as it is there.

Within a round every contestant is measured once, in the order of the row and in the next round in the reverse order,
so that neither drift of the machine nor the place in the round favours one side.
"""

import json
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from benchmarks.contestants import AUTO, RIVALS, Contestant
from benchmarks.course import Course
from benchmarks.journal import Journal, Measurement, Settings, now
from benchmarks.machine import load
from benchmarks.measure import Request
from benchmarks.process import MeasurementError, Surroundings, run, run_module
from benchmarks.rows import Row

START_LIMIT_S = 180.0
SLOWEST = 8.0
"""How many times longer than its window a measurement may take: one worker on a row of counted batches needs 4."""
PREPARE_LIMIT_S = 1800.0
START_S = 4.0
"""Seconds that a process takes to start and to end, for the estimate alone."""
Say = Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class Turn:
    """One measurement that is to be made."""

    row: Row
    round: int
    contestant: Contestant


class Interpreters(NamedTuple):
    """Who runs what: `own` everything, `rivals` (None: not there) the rivals."""

    own: Surroundings
    rivals: Surroundings | None = None


def turns(
    row: Row, rounds: int, cores: int, *, rivals: bool = False, only: Sequence[str] | None = None
) -> Iterator[Turn]:
    """Every measurement of a row, in order. only: the keys of contestants, others are left out."""
    contestants = [c for c in row.contestants(cores, rivals=rivals) if only is None or c.key in only]
    for number in range(rounds):
        for contestant in contestants[:: -1 if number % 2 else 1]:
            yield Turn(row=row, round=number, contestant=contestant)


def missing(planned: Sequence[Turn], journal: Journal) -> list[Turn]:
    """Those that the file does not hold yet."""
    return [turn for turn in planned if not journal.has(turn.row.key, turn.contestant, turn.round)]


def estimate_s(planned: Sequence[Turn], settings: Settings) -> float:
    """About how long they take."""
    return sum(START_S + (0.0 if turn.row.kind == "start" else window_s(turn, settings)) for turn in planned)


def window_s(turn: Turn, settings: Settings) -> float:
    """Seconds of the measurement."""
    learns = turn.contestant == AUTO or turn.contestant.engine in RIVALS or turn.row.same_length
    return settings.learning_window_s if learns else settings.window_s


def run_turns(
    planned: Sequence[Turn], journal: Journal, settings: Settings, interpreters: Interpreters, say: Say
) -> None:
    """Measure all of one row and note each; what fails is noted with its reason, and the others go on."""
    if not planned:
        return
    row = planned[0].row
    say(f"{row.key}: making its data")
    run(interpreters.own, "-m", "benchmarks.measure", "--prepare", row.work, limit_s=PREPARE_LIMIT_S)
    for number, turn in enumerate(planned, 1):
        say(f"{row.key}, {number} of {len(planned)}: round {turn.round + 1}, {turn.contestant.label}")
        where = interpreters.rivals if turn.contestant.engine in RIVALS else interpreters.own
        journal.add(_measured(turn, settings, where or interpreters.own))


def _measured(turn: Turn, settings: Settings, surroundings: Surroundings) -> Measurement:
    """One measurement, or why there is none."""
    at, before = now(), load()
    course, why = None, None
    try:
        course = measured(request(turn, settings), surroundings)
    except MeasurementError as error:
        why = str(error)
    return Measurement(
        row=turn.row.key, contestant=turn.contestant, round=turn.round, course=course, error=why, load=before, at=at
    )


def request(turn: Turn, settings: Settings) -> Request:
    """What the measuring process is asked for."""
    row = turn.row
    return Request(
        work=row.work,
        contestant=turn.contestant,
        window_s=window_s(turn, settings),
        count=row.count(settings.learning_window_s),
        step_s=row.step_s,
        use=row.use,
        remote_cpus=len(os.sched_getaffinity(0)) if row.kind == "remote" else 0,
        ballast=row.kind == "start",
    )


def measured(asked: Request, surroundings: Surroundings) -> Course:
    """What `benchmarks.measure` prints for the request. Raises MeasurementError."""
    limit_s, argument = START_LIMIT_S + SLOWEST * asked.window_s, asked.to_json()
    printed = run_module("benchmarks.measure", argument, limit_s, surroundings)
    try:
        course = Course.from_dict(json.loads(printed.splitlines()[-1]))
    except (IndexError, ValueError, TypeError) as error:
        raise MeasurementError(f"no course was printed, but {printed[-200:]!r}") from error
    if not course.batches:
        raise MeasurementError("there was not a single batch")
    return course
