"""Keeping a run: `python -m benchmarks.keep FILE NAME` makes `benchmarks/results/NAME.json` of a run's file.

What is kept are every course's figures, with few of its marks, and the machine, versions and commit. Kept is only what
can be quoted: whole rows of at least five rounds of 4 s, and of 15 s where there is something to learn, measured on a
commit without changes.
"""

import argparse
import json
import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any

from benchmarks.contestants import AUTO, RIVALS, Contestant
from benchmarks.course import Course
from benchmarks.journal import (
    QUOTED_LEARNING_WINDOW_S,
    QUOTED_ROUNDS,
    QUOTED_WINDOW_S,
    Journal,
    JournalError,
    Settings,
)
from benchmarks.results import RowResult, results_of
from benchmarks.rows import BY_KEY

RESULTS = Path(__file__).resolve().parent / "results"
LOCAL = "local-"
"""Files of that name are runs that were not kept, or not yet."""
MARKS, AUTO_MARKS = 8, 24
"""How many marks of a course are kept; of "auto", whose way there is of interest, more."""
DIGITS = 4
LONGEST_ROUND_S = 2 * 3600.0
"""What is compared is measured in turns. In hours a machine that is shared becomes another."""


@dataclass(frozen=True, kw_only=True)
class Kept:
    """A kept run: what it was measured on, and the results by row."""

    machine_id: str
    machine: Mapping[str, Any]
    versions: Mapping[str, str]
    commit: str | None
    dirty: bool
    settings: Settings
    since: str
    until: str
    rows: Mapping[str, RowResult]

    @classmethod
    def of_journal(cls, journal: Journal) -> "Kept":
        """Everything in a run's file. Raises JournalError if it is empty."""
        if journal.origin is None or not journal.measurements:
            raise JournalError(f"{journal.path} holds no measurements")
        first = journal.sessions[0]
        return cls(
            machine_id=journal.origin.machine_id,
            machine=first["machine"],
            versions=first["versions"],
            commit=journal.origin.commit,
            dirty=journal.origin.dirty,
            settings=journal.origin.settings,
            since=journal.measurements[0].at,
            until=journal.measurements[-1].at,
            rows=results_of(journal.measurements, first["machine"]["cores"]),
        )

    def as_document(self) -> dict[str, Any]:
        """For a file."""
        fields = {name: getattr(self, name) for name in ("machine_id", "machine", "versions", "commit", "dirty")}
        times = {"settings": asdict(self.settings), "since": self.since, "until": self.until}
        return fields | times | {"rows": {key: _row_document(row) for key, row in self.rows.items()}}

    @classmethod
    def from_document(cls, document: Mapping[str, Any]) -> "Kept":
        """From what `as_document` gave; rows that are not measured any more are left out."""
        cores = document["machine"]["cores"]
        rows = {key: _row_result(key, fields, cores) for key, fields in document["rows"].items() if key in BY_KEY}
        return cls(**dict(document) | {"settings": Settings(**document["settings"]), "rows": rows})


def _row_document(result: RowResult) -> list[dict[str, Any]]:
    measured = [
        {
            **contestant.as_dict(),
            "courses": {number: _course_document(contestant, one) for number, one in courses.items()},
        }
        for contestant, courses in result.courses.items()
    ]
    return measured + [{**contestant.as_dict(), "failed": why} for contestant, why in result.failed.items()]


def _course_document(contestant: Contestant, course: Course) -> dict[str, Any]:
    """Its fields, rounded; empty ones left out, and of decisions the texts."""
    most = AUTO_MARKS if contestant == AUTO else MARKS
    thin = replace(
        course,
        marks=thinned(course, most),
        decisions=tuple({"at_s": one["at_s"], "new": one["new"]} for one in course.decisions),
    )
    return {name: _rounded(value) for name, value in thin.as_dict().items() if value not in (None, (), False)}


def thinned(course: Course, most: int) -> tuple[tuple[float, int], ...]:
    """The first mark, those about the course's middle, by which it is judged, and others evenly between."""
    marks = course.marks
    if len(marks) <= most:
        return marks
    halves = {_around(marks, 0, course.seconds / 2), _around(marks, 1, course.batches // 2)}
    middle = {index for half in halves for index in (half - 1, half) if 0 <= index < len(marks)}
    spread = {round(number * (len(marks) - 1) / (most - 1)) for number in range(most)}
    return tuple(marks[index] for index in sorted({0, *middle, *spread}))


def _around(marks: Sequence[tuple[float, int]], field: int, value: float) -> int:
    """The first mark at or beyond a value."""
    return next((index for index, mark in enumerate(marks) if mark[field] >= value), len(marks) - 1)


def _rounded(value: Any) -> Any:
    if isinstance(value, float):
        return round(value, DIGITS)
    if isinstance(value, Mapping):
        return {name: _rounded(one) for name, one in value.items()}
    return [_rounded(one) for one in value] if isinstance(value, (list, tuple)) else value


def _row_result(key: str, fields: list[dict[str, Any]], cores: int) -> RowResult:
    courses, failed = {}, {}
    for one in fields:
        who = Contestant.from_dict({name: value for name, value in one.items() if name not in ("courses", "failed")})
        if "failed" in one:
            failed[who] = one["failed"]
        else:
            courses[who] = {int(number): Course.from_dict(course) for number, course in one["courses"].items()}
    return RowResult(row=BY_KEY[key], cores=cores, courses=courses, failed=failed)


def problems(kept: Kept) -> list[str]:
    """Why a run cannot be quoted; none for one that can."""
    found = []
    if kept.commit is None or kept.dirty:
        found.append("it was not measured on a commit without changes")
    if kept.settings.window_s < QUOTED_WINDOW_S:
        found.append(f"its courses are {kept.settings.window_s:g} s long, not {QUOTED_WINDOW_S:g}")
    if kept.settings.learning_window_s < QUOTED_LEARNING_WINDOW_S:
        found.append(f"learning has {kept.settings.learning_window_s:g} s, not {QUOTED_LEARNING_WINDOW_S:g}")
    return found + [f"{key}: {why}" for key, row in kept.rows.items() for why in row_problems(row)]


def row_problems(result: RowResult) -> list[str]:
    """Why a row cannot be quoted: somebody of its plan is missing, or was measured in too few rounds or too shortly."""
    planned = dict.fromkeys((*result.row.contestants(result.cores), *result.courses))
    rounds = {one: len(result.courses.get(one, ())) for one in planned if one not in result.failed}
    few = [
        f"{one.label}: {count} rounds, not {QUOTED_ROUNDS}"
        for one, count in rounds.items()
        if count < QUOTED_ROUNDS and not (count == 0 and one.engine in RIVALS)
    ]
    return few + [
        f"{one.label}: courses of {shortest:.1f} s, not {QUOTED_LEARNING_WINDOW_S:g}"
        for one, courses in (result.courses.items() if result.row.long else ())
        if (shortest := min(course.seconds for course in courses.values())) < QUOTED_LEARNING_WINDOW_S
    ]


def rounds_apart(journal: Journal) -> dict[str, str]:
    """The rows with a round that took too long to compare what was measured in it, and how long that is."""
    times: dict[tuple[str, int], list[float]] = defaultdict(list)
    for one in journal.measurements:
        times[one.row, one.round].append(datetime.fromisoformat(one.at).timestamp())
    took = {(row, number): max(at) - min(at) for (row, number), at in times.items()}
    return {
        row: f"its round {number} took {seconds / 3600:.1f} hours, and what it compares was not measured in turns"
        for (row, number), seconds in took.items()
        if seconds > LONGEST_ROUND_S
    }


def kept_runs(folder: Path = RESULTS) -> list[Kept]:
    """All that are kept, the newest first; files of one machine, commit and setting are one run."""
    files = [path for path in folder.glob("*.json") if not path.name.startswith(LOCAL)]
    found = [Kept.from_document(json.loads(path.read_text())) for path in files]
    merged: dict[tuple[Any, ...], Kept] = {}
    for kept in sorted(found, key=lambda one: one.until):
        settings = _settings_in_use(kept)
        origin = (kept.machine_id, kept.commit, kept.dirty, settings)
        earlier = merged.get(origin)
        rows = {**(earlier.rows if earlier else {}), **kept.rows}
        merged[origin] = replace(kept, since=earlier.since if earlier else kept.since, rows=rows, settings=settings)
    return sorted(merged.values(), key=lambda one: one.until, reverse=True)


def _settings_in_use(kept: Kept) -> Settings:
    """With the usual window if none of the rows has courses of that length: then it tells nothing."""
    unused = all(row.row.same_length or row.row.kind == "start" for row in kept.rows.values())
    return replace(kept.settings, window_s=QUOTED_WINDOW_S) if unused else kept.settings


def write(kept: Kept, path: Path) -> None:
    """One line a contestant, so that files can be compared."""
    document = kept.as_document()
    rows = document.pop("rows")
    head = json.dumps(document, indent=1)[:-2]
    lines = [
        f"  {json.dumps(key)}: [\n" + ",\n".join(f"   {json.dumps(one)}" for one in row) + "\n  ]"
        for key, row in rows.items()
    ]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(head + ',\n "rows": {\n' + ",\n".join(lines) + "\n }\n}\n")


def quotable(kept: Kept) -> tuple[Kept, list[str]]:
    """The run without the rows that cannot be quoted, and why those are left out."""
    why = {key: row_problems(row) for key, row in kept.rows.items()}
    rows = {key: row for key, row in kept.rows.items() if not why[key]}
    return replace(kept, rows=rows), [f"{key}: {one}" for key, found in why.items() for one in found]


def main(arguments: Sequence[str] | None = None) -> int:
    """0 if a run was kept."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.keep", description=__doc__)
    parser.add_argument("file", type=Path, help="what a run wrote")
    parser.add_argument("name", help="of the kept file, such as 2026-11-epyc-2-cores")
    options = parser.parse_args(arguments)
    try:
        journal = Journal(options.file)
        kept, left_out = quotable(Kept.of_journal(journal))
    except JournalError as error:
        print(error, file=sys.stderr)
        return 2
    apart = rounds_apart(journal)
    kept = replace(kept, rows={key: row for key, row in kept.rows.items() if key not in apart})
    left_out += [f"{key}: {why}" for key, why in apart.items()]
    print(*(f"left out: {why}" for why in left_out), sep="\n")
    if found := problems(kept) or ([] if kept.rows else ["it has no whole row"]):
        print("this run cannot be quoted:", *found, sep="\n", file=sys.stderr)
        return 1
    write(kept, RESULTS / f"{options.name}.json")
    print(f"kept {len(kept.rows)} rows")
    return 0


if __name__ == "__main__":
    sys.exit(main())
