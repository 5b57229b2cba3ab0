"""Rounds of measurements, contestants taking turns, every one noted as soon as it is there.

Within a round every contestant is measured once, in the order of the row and in the next round in the reverse order,
so that neither drift of the machine nor the place in the round favours one side.
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from benchmarks.contestants import RIVALS, Contestant
from benchmarks.course import Course
from benchmarks.journal import Journal, Measurement, Settings, now
from benchmarks.machine import load
from benchmarks.measure import Request
from benchmarks.process import MeasurementError, Surroundings, run, run_module
from benchmarks.rows import NODES_LONGER, Row

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


def turns(
    row: Row, rounds: int, cores: int, *, rivals: bool = False, only: Sequence[str] | None = None, base: bool = False
) -> Iterator[Turn]:
    """Every measurement of a row, in order.

    only: the keys of the contestants, if not those of the row. base: dpex alone, and its twin of the base beside it.
    """
    contestants = [Contestant.from_key(key) for key in only] if only else [*row.contestants(cores, rivals=rivals)]
    if base:
        ours = [one for one in contestants if one.engine == "dpex"]
        contestants = [each for one in ours for each in (replace(one, engine="base"), one)]
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
    row, one = turn.row, turn.contestant
    slow = one.workers == "auto" or one.engine in RIVALS or row.same_length
    learns = row.counted if row.kind == "loaders" else slow
    seconds = settings.learning_window_s if learns else settings.window_s
    return seconds * NODES_LONGER if one.nodes else seconds


def run_turns(
    planned: Sequence[Turn], journal: Journal, settings: Settings, places: Mapping[str, Surroundings], say: Say
) -> None:
    """Measure all of one row and note each; what fails is noted with its reason, and the others go on.

    places: the surroundings of engines that do not run here.
    """
    if not planned:
        return
    row = planned[0].row
    say(f"{row.key}: making its data")
    run(Surroundings(), "-m", "benchmarks.measure", "--prepare", row.work, limit_s=PREPARE_LIMIT_S)
    for number, turn in enumerate(planned, 1):
        say(f"{row.key}, {number} of {len(planned)}: round {turn.round + 1}, {turn.contestant.label}")
        journal.add(_measured(turn, settings, places.get(turn.contestant.engine, Surroundings())))


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
    return Request(row=turn.row.key, contestant=turn.contestant, window_s=window_s(turn, settings))


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
