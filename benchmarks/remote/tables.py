"""The tables of remote workers, made of the kept runs: `benchmarks.report` writes them into the documents."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from benchmarks.remote import trainings
from benchmarks.remote.cells import Cell, Who
from benchmarks.remote.measure import Found
from benchmarks.rows import ROWS
from benchmarks.spread import Spread
from benchmarks.training import runs
from benchmarks.training.runs import Run
from benchmarks.training.tables import NOT_RUN, about, table

KEPT = runs.RESULTS / "remote"
QUOTED_ROUNDS = {"table": 2, "trainings": 1, "sweep": 3}
TITLES = {row.work: row.title for row in reversed(ROWS) if row.kind == "local"}
WHO: dict[Who, str] = {"dpex": "dpex", "before": "dpex, before", "ray-data": "Ray Data"}
STRETCH_S = 5
"""Seconds of a line in the table of trainings."""
MILLION = 1e6


# -- remote workers ----------------------------------------------------------------------------------------------------


def founds(run: Run, cell: Cell) -> list[Found]:
    """The measurements of a cell that did not fail, by round."""
    return [Found.from_dict(item) for item in run.rows.get(cell.key, ()) if "error" not in item]


def workers_table(run: Run) -> str:
    """A line for each contestant; those of a row in which dpex is behind anybody come first."""
    header = (
        "work",
        "remote workers",
        "loader",
        "first batch",
        "all workers run",
        "full speed",
        "batches/s, steady",
        "memory of the workers",
        "trainer's CPU time a batch",
    )
    rows: dict[tuple[str, int], list[Cell]] = {}
    for cell in map(Cell.of_key, run.settings["rows"]):
        rows.setdefault((cell.work, cell.workers), []).append(cell)
    ordered = sorted(rows.values(), key=lambda those: not _is_behind(run, those))
    return table(header, [_line(run, cell) for those in ordered for cell in those if cell.key in run.rows])


def _is_behind(run: Run, those: Sequence[Cell]) -> bool:
    """Whether anybody is faster than dpex in the end, or has its first batch or its full speed sooner."""
    found = {cell.who: founds(run, cell) for cell in those}
    ours = found.pop("dpex", [])
    rival = [those for those in found.values() if those]
    if not ours or not rival:
        return False
    sooner = any(
        _median(those, when) < _median(ours, when) for those in rival for when in (lambda f: f.first_s, _full_s)
    )
    return sooner or any(_median(those, _rate) > _median(ours, _rate) for those in rival)


def _rate(found: Found) -> float:
    return found.steady.rate


def _full_s(found: Found) -> float:
    return float("inf") if found.full_s is None else found.full_s


def _median(those: Sequence[Found], figure: Callable[[Found], float]) -> float:
    return Spread.of([figure(one) for one in those]).median


def _line(run: Run, cell: Cell) -> tuple[str, ...]:
    those = founds(run, cell)
    figures: list[tuple[Callable[[Found], float | None], str]] = [
        (lambda found: found.first_s, " s"),
        (lambda found: found.at_work_s, " s"),
        (lambda found: found.full_s, " s"),
        (lambda found: found.steady.rate, ""),
        (lambda found: found.added_bytes / MILLION, " MB"),
        (lambda found: _scaled(found.steady.batch_cpu_s), " ms"),
    ]
    shown = [_shown([figure(one) for one in those], unit) for figure, unit in figures]
    return (TITLES[cell.work], str(cell.workers), WHO[cell.who], *shown)


def _scaled(seconds: float | None) -> float | None:
    return None if seconds is None else 1000 * seconds


def _shown(values: Sequence[float | None], unit: str) -> str:
    """The median with the range; a dash where a value is missing."""
    known = [value for value in values if value is not None]
    if not known or len(known) < len(values):
        return NOT_RUN
    spread = Spread.of(known)
    return f"{_digits(spread.median)}{unit} ({_digits(spread.low)} to {_digits(spread.high)})"


def _digits(value: float) -> str:
    """Three digits that count, at least."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def workers_text(run: Run) -> str:
    """What the run was measured on and with."""
    before = f" *Before* is commit {run.settings['before'][:10]}." if run.settings["before"] else ""
    return f"{run.settings['rounds']} rounds: median (range).{before} {about(run)}."


# -- trainings ---------------------------------------------------------------------------------------------------------


def trainings_table(run: Run) -> str:
    """The first round of each: how long each training waited, and its workers, in stretches of time."""
    return "\n\n".join(_course_table(items[0]) for items in run.rows.values() if "error" not in items[0])


def _course_table(course: Mapping[str, Any]) -> str:
    each = [trainings.by_stretch(lines, STRETCH_S) for lines in course["trainings"]]
    header = ("seconds", *(f"training {number}" for number in range(1, len(each) + 1)))
    rows = []
    for stretch in sorted({number for one in each for number in one}):
        shares = [f"{one[stretch][0]:.0%}, {one[stretch][1]:.0f} workers" if stretch in one else "" for one in each]
        rows.append((f"{stretch * STRETCH_S} to {(stretch + 1) * STRETCH_S}", *shares))
    return table(header, rows)


def trainings_text(run: Run) -> str:
    """When they joined and left, how soon they waited equally, and what that was measured on."""
    (course, *_), *_ = run.rows.values()
    told = "; ".join(f"{key}: {_equal_text(items)}" for key, items in run.rows.items())
    return (
        f"Share of the time waited, and remote workers at the end of each stretch, of {trainings.ROOM} in all. The "
        f"others start {course['join_s']:g} s after the first training's first batches, and end "
        f"{course['leave_s']:g} s after them. Seconds from the first batch of the last one until all wait equally "
        f"long (within {trainings.ALIKE:.0%} of the time, for {trainings.SETTLED_S} s): {told}. {about(run)}."
    )


def _equal_text(items: Sequence[Mapping[str, Any]]) -> str:
    found = [trainings.equal_after_s(course) for course in items if "error" not in course]
    return ", ".join("never" if seconds is None else f"{seconds:.0f} s" for seconds in found)


# -- a sweep -----------------------------------------------------------------------------------------------------------


def sweep_row(batches: int) -> str:
    """The key of a row in which each training takes so many batches."""
    return f"{batches} batches"


def sweep_batches(key: str) -> int:
    """How many batches each training takes in the row of that key."""
    return int(key.split()[0])


def sweep_table(run: Run) -> str:
    """CPU and wall seconds of each way, and its CPU time over that of one training in the same round: all of it, and
    that of preprocessing, which leaves out what the training processes themselves take."""
    rows = []
    for key in run.settings["rows"]:
        costs = _costs(run, key)
        for way in costs[0] if costs else ():
            cells = [_shown([one[way][field] for one in costs], " s") for field in ("wall_s", "cpu_s")]
            cells += [_of_one(costs, way, field) for field in ("cpu_s", "preprocessing_s")]
            rows.append((str(sweep_batches(key)), way.replace("share=", "`share=`"), *cells))
    header = (
        "batches of each",
        "trainings",
        "seconds",
        "CPU time",
        "of one training",
        "preprocessing, of one training",
    )
    return table(header, rows)


def _of_one(costs: Sequence[Mapping[str, Any]], way: str, field: str) -> str:
    return _shown([one[way][field] / one[_alone(one)][field] for one in costs], "")


def further_costs(run: Run, field: str = "cpu_s") -> dict[str, list[float]]:
    """By way: the CPU time of a further batch over that of one training, in each round, from the two lengths.

    What the trainings take to start is in neither. field: "preprocessing_s" leaves out the training processes.
    """
    short, long = (_costs(run, key) for key in run.settings["rows"])
    rounds = list(zip(short, long, strict=False))
    if not rounds:
        return {}

    def further_s(way: str) -> list[float]:
        return [more[way][field] - less[way][field] for less, more in rounds]

    first, *others = long[0]
    return {way: [some / one for some, one in zip(further_s(way), further_s(first), strict=True)] for way in others}


def sweep_text(run: Run) -> str:
    """What a further batch costs, and what the run was measured on and with."""
    further = f"CPU time of a further batch, without what starting takes, of one training: {_further(run, 'cpu_s')}."
    made = f"Of preprocessing alone: {_further(run, 'preprocessing_s')}."
    return f"{further} {made} {run.settings['rounds']} rounds: median (range). {about(run)}."


def _further(run: Run, field: str) -> str:
    found = further_costs(run, field).items()
    return "; ".join(f"{way.replace('share=', '`share=`')}: {_shown(costs, '')}" for way, costs in found)


def _costs(run: Run, key: str) -> list[dict[str, Any]]:
    return [item["costs"] for item in run.rows.get(key, ()) if "error" not in item]


def _alone(costs: Mapping[str, Any]) -> str:
    """The way that is measured first: one training."""
    return next(iter(costs))


# -- all of them -------------------------------------------------------------------------------------------------------

TABLES: dict[str, Callable[[Run], str]] = {"table": workers_table, "trainings": trainings_table, "sweep": sweep_table}
BLOCKS: dict[str, tuple[str, Callable[[Run], str]]] = {
    "remote-workers": ("table", workers_table),
    "remote-workers-origin": ("table", workers_text),
    "shared-cluster": ("trainings", trainings_table),
    "shared-cluster-origin": ("trainings", trainings_text),
    "sweep": ("sweep", sweep_table),
    "sweep-origin": ("sweep", sweep_text),
}
"""Each block by its name: of which subject's newest kept run it is made, and how."""


def block(name: str) -> str:
    """The text of a block. Raises ValueError without a kept run to make it of."""
    subject, make = BLOCKS[name]
    return make(runs.quoted(name, subject, KEPT))


def problems(run: Run) -> list[str]:
    """What speaks against quoting a run."""
    found = ["it was a first look"] if run.settings["quick"] else []
    least = QUOTED_ROUNDS[run.subject]
    for key in run.settings["rows"]:
        items = run.rows.get(key, ())
        found += [f"{key} has {len(items)} rounds, not {least}"] if len(items) < least else []
        found += [f"{key} failed: {item['error'].splitlines()[-1]}" for item in items if "error" in item]
    if run.subject == "table":
        found += [] if run.settings["before"] else ["it has nothing from before: --before PATH"]
    return found


def said(what: str, item: Mapping[str, Any]) -> str:
    """A measurement in a few words, while a run goes on."""
    if "error" in item:
        return f"failed: {item['error'].splitlines()[-1]}"
    if what == "sweep":
        return ", ".join(f"{way}: {cost['cpu_s']:.1f} s of CPU" for way, cost in item["costs"].items())
    if what == "trainings":
        return f"equal after {_equal_text([item])}"
    found = Found.from_dict(item)
    full = "never" if found.full_s is None else f"{found.full_s:.1f} s"
    memory = f"{found.added_bytes / MILLION:,.0f} MB"
    return f"first batch {found.first_s:.2f} s, full speed {full}, {_digits(found.steady.rate)}/s, {memory}"
