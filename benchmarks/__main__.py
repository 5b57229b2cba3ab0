"""`python -m benchmarks`: measure the rows and write every measurement to a file as it is made.

With ``--base CHECKOUT`` the dpex of another checkout is measured beside that of this one, in turns: the side that
begins changes from round to round. The figures are ratios within a round, this one over the base. Of the processor time
of a batch less is better; other work on the machine changes it less.
"""

import argparse
import os
import sys
from contextlib import nullcontext
from dataclasses import replace
from datetime import datetime
from pathlib import Path

from benchmarks import objects
from benchmarks.contestants import RIVALS
from benchmarks.journal import Journal, JournalError, Origin, Settings
from benchmarks.machine import commit, load, machine, machine_id, versions
from benchmarks.process import ROOT, MeasurementError, Surroundings, with_dpex_of
from benchmarks.report import row_text
from benchmarks.results import results_of
from benchmarks.rows import BY_KEY, ROWS
from benchmarks.runner import Turn, estimate_s, missing, run_turns, turns

RESULTS = Path(__file__).resolve().parent / "results"
QUICK = Settings(rounds=2, window_s=2.0, learning_window_s=2.0)
OBJECTS = "objects"
"""The row of `benchmarks.objects`: its figures are memory, and it keeps no file."""
QUIET_LOAD = 0.5
"""Above it other work runs on the machine."""


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    usual = [row.key for row in ROWS if row.kind in ("local", "start", "remote")]
    told = f"{', '.join(BY_KEY)} (all but landscape, loaders-, train- and readme-); {OBJECTS} (alone)"
    parser.add_argument("--rows", nargs="+", choices=[*BY_KEY, OBJECTS], default=usual, metavar="ROW", help=told)
    parser.add_argument("--only", nargs="+", metavar="WHO", help="these contestants, as torch:2 dpex:0 dpex:auto")
    parser.add_argument("--base", type=Path, metavar="CHECKOUT", help="measure dpex alone, beside that of a checkout")
    parser.add_argument("--quick", action="store_true", help="a first look, not to be quoted: 2 rounds of 2 s")
    parser.add_argument("--rounds", type=int, metavar="N", help="everybody's rounds (3)")
    parser.add_argument("--window-s", type=float, metavar="S", help="seconds of a measurement, from iter() on (4)")
    parser.add_argument("--learning-window-s", type=float, metavar="S", help='the same for "auto" and the rivals (12)')
    parser.add_argument("--results", type=Path, metavar="FILE", help="where they go; a file that is there is continued")
    parser.add_argument("--resume", type=Path, metavar="FILE", help="continue a file with the settings it began with")
    parser.add_argument("--rivals", metavar="PYTHON", help="an interpreter that has the rivals: measure them as well")
    parser.add_argument("--plan", action="store_true", help="say what would be measured, and how long it takes")
    return parser.parse_args(arguments)


def settings_of(options: argparse.Namespace, journal: Journal) -> Settings:
    """Those of the file that is continued, or of the command line."""
    if options.resume and journal.origin:
        return journal.origin.settings
    names = ("rounds", "window_s", "learning_window_s")
    given = {name: value for name in names if (value := getattr(options, name)) is not None}
    return replace(QUICK if options.quick else Settings(), **given)


def file_of(options: argparse.Namespace) -> Path:
    """The file of this run. Raises JournalError if one to be continued is not there."""
    if options.resume and not options.resume.exists():
        raise JournalError(f"there is no {options.resume} to continue")
    stamp = datetime.now().strftime("%Y%m%d-%H%M%S")
    chosen: Path = options.resume or options.results or RESULTS / f"local-{stamp}.jsonl"
    return chosen


def say(line: str) -> None:
    """Progress: overwritten on a terminal, silent elsewhere."""
    if sys.stderr.isatty():
        print(f"\r\x1b[K{line}", end="", file=sys.stderr, flush=True)


def planned(options: argparse.Namespace, settings: Settings) -> dict[str, list[Turn]]:
    """Every measurement, by row."""
    cores = len(os.sched_getaffinity(0))
    who = {"rivals": bool(options.rivals), "only": options.only, "base": bool(options.base)}
    return {key: list(turns(BY_KEY[key], settings.rounds, cores, **who)) for key in options.rows}


def measure(plan: dict[str, list[Turn]], journal: Journal, settings: Settings, options: argparse.Namespace) -> None:
    """All rows, each printed when it is done."""
    rivals = Surroundings(python=str(Path(options.rivals).absolute())) if options.rivals else Surroundings()
    with with_dpex_of(options.base) if options.base else nullcontext(Surroundings()) as base:
        places = {"base": base, **dict.fromkeys(RIVALS, rivals)}
        for key, row_turns in plan.items():
            try:
                run_turns(missing(row_turns, journal), journal, settings, places, say)
                found = results_of(journal.measurements, machine()["cores"])
                text = row_text(found[key]) if key in found else f"{BY_KEY[key].title}\n    nobody takes part"
            except MeasurementError as error:
                text = f"{BY_KEY[key].title}\n    not measured, as its data could not be made: {error}"
            say("")
            print(text, end="\n\n", flush=True)


def main(arguments: list[str]) -> int:
    """0 if everything planned was measured; a rival may fail."""
    options = parse(arguments)
    if OBJECTS in options.rows:
        objects.table()
        return 0
    try:
        journal = Journal(file_of(options))
        settings = settings_of(options, journal)
        plan = planned(options, settings)
        left = [turn for row_turns in plan.values() for turn in missing(row_turns, journal)]
        hours = estimate_s(left, settings) / 3600
        print(f"{len(left)} measurements, about {hours:.1f} hours", flush=True)
        if options.plan:
            return 0
        head, dirty = commit(ROOT)
        origin = Origin(machine_id=machine_id(), commit=head, dirty=dirty, settings=settings)
        journal.begin(origin, {"machine": machine(), "versions": versions()})
    except JournalError as error:
        print(error, file=sys.stderr)
        return 2
    if load() > QUIET_LOAD:
        print(f"note: other work runs on this machine (load {load()}); figures will be noisy\n")
    measure(plan, journal, settings, options)
    print(f"written to {os.path.relpath(journal.path)}")
    failed = missing([turn for row_turns in plan.values() for turn in row_turns], journal)
    return 1 if any(turn.contestant.engine not in RIVALS for turn in failed) else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
