"""`python -m benchmarks`: measure the rows and write every measurement to a file as it is made."""

import argparse
import os
import sys
from dataclasses import replace
from datetime import datetime
from pathlib import Path

from benchmarks.contestants import RIVALS
from benchmarks.journal import Journal, JournalError, Origin, Settings
from benchmarks.machine import commit, load, machine, machine_id, versions
from benchmarks.process import ROOT, MeasurementError, Surroundings
from benchmarks.report import row_text
from benchmarks.results import results_of
from benchmarks.rows import BY_KEY
from benchmarks.runner import Interpreters, Turn, estimate_s, missing, run_turns, turns

RESULTS = Path(__file__).resolve().parent / "results"
QUICK = Settings(rounds=2, window_s=2.0, learning_window_s=2.0)
QUIET_LOAD = 0.5
"""Above it other work runs on the machine."""


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("--rows", nargs="+", choices=BY_KEY, default=[*BY_KEY], metavar="ROW", help=", ".join(BY_KEY))
    parser.add_argument("--only", nargs="+", metavar="WHO", help="some contestants, such as torch:2 dpex:0 dpex:auto")
    parser.add_argument("--quick", action="store_true", help="a first look, not to be quoted: 2 rounds of 2 s")
    parser.add_argument("--rounds", type=int, metavar="N", help="everybody's rounds (5)")
    parser.add_argument("--window-s", type=float, metavar="S", help="seconds of a measurement, from iter() on (4)")
    parser.add_argument("--learning-window-s", type=float, metavar="S", help='the same for "auto" and the rivals (15)')
    parser.add_argument("--lock", type=Path, metavar="FILE", help="hold a lock of FILE during each measurement")
    parser.add_argument("--results", type=Path, metavar="FILE", help="where they go; a file that is there is continued")
    parser.add_argument("--resume", type=Path, metavar="FILE", help="continue a file with the settings it began with")
    parser.add_argument("--rivals", metavar="PYTHON", help="an interpreter that has the rivals: measure them as well")
    parser.add_argument("--machine", metavar="NAME", help="tells this machine from others that look the same")
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
    return {
        key: list(turns(BY_KEY[key], settings.rounds, cores, rivals=bool(options.rivals), only=options.only))
        for key in options.rows
    }


def print_row(key: str, journal: Journal) -> None:
    """What is known of a row."""
    say("")
    if key in journal.skipped:
        print(f"{BY_KEY[key].title}\n    not measured: {journal.skipped[key]}\n", flush=True)
    else:
        print(row_text(results_of(journal.measurements, machine()["cores"])[key]), end="\n\n", flush=True)


def measure(plan: dict[str, list[Turn]], journal: Journal, settings: Settings, options: argparse.Namespace) -> None:
    """All rows, each printed when it is done."""
    own = Surroundings(lock=options.lock)
    rivals = options.rivals and str(Path(options.rivals).absolute())
    theirs = Surroundings(python=rivals, lock=options.lock) if rivals else None
    interpreters = Interpreters(own=own, rivals=theirs)
    for key, row_turns in plan.items():
        try:
            run_turns(missing(row_turns, journal), journal, settings, interpreters, say)
        except MeasurementError as error:
            journal.skip(key, f"its data could not be made: {error}")
        print_row(key, journal)


def main(arguments: list[str]) -> int:
    """0 if everything planned was measured or skipped with a reason."""
    options = parse(arguments)
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
        origin = Origin(machine_id=machine_id(options.machine), commit=head, dirty=dirty, settings=settings)
        journal.begin(origin, {"machine": machine(), "versions": versions()})
    except JournalError as error:
        print(error, file=sys.stderr)
        return 2
    if load() > QUIET_LOAD:
        print(f"note: other work runs on this machine (load {load()}); figures will be noisy\n")
    measure(plan, journal, settings, options)
    print(f"written to {os.path.relpath(journal.path)}")
    failed = missing([turn for row_turns in plan.values() for turn in row_turns], journal)
    expected = {turn for turn in failed if turn.contestant.engine in RIVALS or turn.row.key in journal.skipped}
    return 1 if set(failed) - expected else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
