"""The columns "seen" and "seconds" of the table of drills (docs/reference/drills.md), made of the kept run."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.spread import Spread
from benchmarks.training import runs
from benchmarks.training.runs import RESULTS, Run

SUBJECT = "drills"
KEPT = RESULTS / "drills"
LEAST_TIMES = 5
HEADER = ("fault", "promised", "lost", "repeated", "seen", "seconds", "test")
SEEN, SECONDS = HEADER.index("seen"), HEADER.index("seconds")
BY_THE_TEST = "by the test"
NOT_TIMED = "not timed"
_FIGURE = re.compile(r"^\d")


def seen(outcomes: list[Mapping[str, Any]]) -> str:
    """How often it happened, and what that cost."""
    lost, repeated = (sum(one[name] for one in outcomes) for name in ("lost", "repeated"))
    return f"{len(outcomes)} times: {lost} lost, {repeated} repeated"


def seconds(outcomes: list[Mapping[str, Any]]) -> str:
    """Until when, and the longest wait of the training loop: medians, with the lowest and the highest."""
    found = [f"{_spread([one['seconds'] for one in outcomes])} until {outcomes[0]['until']}"]
    waits = [one["wait_s"] for one in outcomes if one["wait_s"] is not None]
    return "; ".join(found + ([f"longest wait {_spread(waits)}"] if waits else []))


def _spread(values: list[float]) -> str:
    spread = Spread.of(values)
    return f"{spread.median:.2g} ({spread.low:.2g} to {spread.high:.2g})"


def lines(run: Run) -> str:
    """For the terminal."""
    return "\n".join(f"{fault}: {seen(list(found))}; {seconds(list(found))}" for fault, found in run.rows.items())


def wrong(run: Run) -> list[str]:
    """Drills in which samples were lost or came again."""
    return [
        f"{fault}: {seen(list(found))}"
        for fault, found in run.rows.items()
        if any(one["lost"] or one["repeated"] for one in found)
    ]


def problems(run: Run) -> list[str]:
    """Why a run cannot be quoted."""
    return [
        f"{fault}: {len(found)} times, not {LEAST_TIMES}"
        for fault, found in run.rows.items()
        if len(found) < LEAST_TIMES
    ]


def filled(text: str, run: Run | None) -> str:
    """The table with both columns as the run has them. What it did not time keeps its words in "seconds": they say why
    there is no time."""
    rows = {} if run is None else run.rows
    return "\n".join(_filled_line(line, rows) for line in text.splitlines())


def _filled_line(line: str, rows: Mapping[str, Any]) -> str:
    cells = [cell.strip() for cell in line.strip().strip("|").split(" | ")]
    if len(cells) != len(HEADER) or tuple(cells) == HEADER or not cells[1]:
        return line
    if cells[0] in rows:
        cells[SEEN], cells[SECONDS] = seen(list(rows[cells[0]])), seconds(list(rows[cells[0]]))
    else:
        cells[SEEN] = BY_THE_TEST
        if not cells[SECONDS] or _FIGURE.match(cells[SECONDS]):
            cells[SECONDS] = NOT_TIMED
    return f"| {' | '.join(cells)} |"


def origin(run: Run | None) -> str:
    """What the times were measured on."""
    if run is None:
        return "No times are kept yet: `python -m benchmarks.drills`."
    machine, versions = run.about["machine"], run.about["versions"]
    return (
        f"{machine['processor']}, {machine['cores']} cores; Python {versions['python']}, torch {versions['torch']}, "
        f"Ray {versions['ray']}; commit {str(run.about['commit'])[:10]}, {run.day}: median (range)."
    )


def newest(folder: Path = KEPT) -> Run | None:
    """The kept run."""
    return runs.newest(SUBJECT, folder)
