"""Keeping a run: `python -m benchmarks.keep FILE NAME` makes `benchmarks/results/NAME.json` of a run's file.

What is kept are every course's figures, and the machine, versions and commit. Kept is only what can be quoted: whole
rows with the rounds and windows of `LEAST`, measured on a commit without changes.
"""

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.contestants import RIVALS, Contestant
from benchmarks.course import Course
from benchmarks.journal import Journal, JournalError, Settings
from benchmarks.results import RowResult, results_of
from benchmarks.rows import BY_KEY

RESULTS = Path(__file__).resolve().parent / "results"
LOCAL = "local-"
"""Files of that name are runs that were not kept, or not yet."""
DIGITS = 4
LEAST = Settings()
"""What a figure needs in order to be quoted."""


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
            "courses": {number: _course_document(one) for number, one in courses.items()},
        }
        for contestant, courses in result.courses.items()
    ]
    return measured + [{**contestant.as_dict(), "failed": why} for contestant, why in result.failed.items()]


def _course_document(course: Course) -> dict[str, Any]:
    """Its fields, rounded; empty ones left out."""
    return {name: _rounded(value) for name, value in course.as_dict().items() if value not in (None, (), False)}


def _rounded(value: Any) -> Any:
    if isinstance(value, float):
        return round(value, DIGITS)
    return [_rounded(one) for one in value] if isinstance(value, (list, tuple)) else value


def _row_result(key: str, fields: list[dict[str, Any]], cores: int) -> RowResult:
    courses, failed = {}, {}
    for one in fields:
        who = Contestant(**{name: value for name, value in one.items() if name not in ("courses", "failed")})
        if "failed" in one:
            failed[who] = one["failed"]
        else:
            courses[who] = {int(number): Course.from_dict(course) for number, course in one["courses"].items()}
    return RowResult(row=BY_KEY[key], cores=cores, courses=courses, failed=failed)


def problems(kept: Kept) -> list[str]:
    """Why a run cannot be quoted; none for one that can."""
    found = [] if kept.commit and not kept.dirty else ["it was not measured on a commit without changes"]
    for name, least in asdict(LEAST).items():
        if (value := getattr(kept.settings, name)) < least:
            found.append(f"{name} is {value:g}, not {least:g}")
    return found + [f"{key}: {why}" for key, row in kept.rows.items() for why in row_problems(row)]


def row_problems(result: RowResult) -> list[str]:
    """Why a row cannot be quoted: somebody of its plan is missing, or was measured in too few rounds or too shortly."""
    planned = dict.fromkeys((*result.row.contestants(result.cores), *result.courses))
    rounds = {one: len(result.courses.get(one, ())) for one in planned if one not in result.failed}
    few = [
        f"{one.label}: {count} rounds, not {LEAST.rounds}"
        for one, count in rounds.items()
        if count < LEAST.rounds and not (count == 0 and one.engine in RIVALS)
    ]
    return few + [
        f"{one.label}: courses of {shortest:.1f} s, not {LEAST.learning_window_s:g}"
        for one, courses in (result.courses.items() if result.row.long else ())
        if (shortest := min(course.seconds for course in courses.values())) < LEAST.learning_window_s
    ]


def kept_runs(folder: Path = RESULTS) -> list[Kept]:
    """All that are kept, the newest first; files of one machine, commit and setting are one run."""
    files = [path for path in folder.glob("*.json") if not path.name.startswith(LOCAL)]
    found = [Kept.from_document(json.loads(path.read_text())) for path in files]
    merged: dict[tuple[Any, ...], Kept] = {}
    for kept in sorted(found, key=lambda one: one.until):
        origin = (kept.machine_id, kept.commit, kept.settings)
        earlier = merged.get(origin, kept)
        merged[origin] = replace(kept, since=earlier.since, rows={**earlier.rows, **kept.rows})
    return sorted(merged.values(), key=lambda one: one.until, reverse=True)


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
    print(*(f"left out: {why}" for why in left_out), sep="\n")
    if found := problems(kept) or ([] if kept.rows else ["it has no whole row"]):
        print("this run cannot be quoted:", *found, sep="\n", file=sys.stderr)
        return 1
    write(kept, RESULTS / f"{options.name}.json")
    print(f"kept {len(kept.rows)} rows")
    return 0


if __name__ == "__main__":
    sys.exit(main())
