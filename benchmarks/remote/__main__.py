"""`python -m benchmarks.remote`: what remote workers are, before and now, and beside Ray Data.

table (the default): time to the first batch, to full speed, steady rate, memory of the workers' node and CPU time of
the training process, for 1, 4, 16 and 64 remote workers, with small, JPEG and 38 MB batches and with samples that wait.
With `--before PATH` also with the dpex of another checkout. trainings: how long two and four trainings on one cluster
wait, over time. sweep: CPU time of one training, of four, and of four that share their batches.

A file of raw results is written after each measurement; the same command goes on with what is missing. Contestants take
turns, and every second round goes backwards.
"""

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.journal import now
from benchmarks.machine import commit, load
from benchmarks.process import MeasurementError, Surroundings, run, run_module, with_dpex_of
from benchmarks.remote import tables, trainings
from benchmarks.remote.cells import CONTESTANTS, QUICK, Cell, cells
from benchmarks.runner import PREPARE_LIMIT_S
from benchmarks.training import runs
from benchmarks.training.runs import Run

ROUNDS = {"table": 2, "trainings": 1, "sweep": 3}
MINUTES = {"table": 25.0, "trainings": 6.0, "sweep": 7.0}
START_LIMIT_S = 180.0
SWEEP_WORK, SWEEP_BATCHES, QUICK_BATCHES = "jpeg", (40, 200), (4, 8)
"""Batches that each training takes: a start counts much in the first, and little in the second."""
SWEEP_START_S, SWEEP_BATCH_S = 5.0, 0.35
"""A round on two cores, for the estimate alone: it takes the first, and the second for each batch."""
Measure = Callable[[str], dict[str, Any]]


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.remote", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", nargs="?", choices=ROUNDS, default="table", help="what is measured (table)")
    parser.add_argument("--before", type=Path, metavar="PATH", help="a checkout to compare with, for the table")
    parser.add_argument("--only", nargs="+", metavar="KEY", help="rows such as jpeg:4:dpex; --plan names them")
    parser.add_argument("--rounds", type=int, help="measurements of each row (table 2, trainings 1, sweep 3)")
    parser.add_argument("--minutes", type=float, help="none begins that would end later (25, 6 and 7)")
    parser.add_argument("--plan", action="store_true", help="only say what is measured, and how long that takes")
    parser.add_argument("--quick", action="store_true", help="a first look, which cannot be kept")
    parser.add_argument("--results", type=Path, metavar="FILE", help="where they go (results/local-remote-WHAT.json)")
    parser.add_argument("--keep", metavar="NAME", help="keep a whole run as results/remote/WHAT-NAME.json")
    options = parser.parse_args(arguments)
    options.rounds = options.rounds or (1 if options.quick else ROUNDS[options.what])
    options.minutes = options.minutes or MINUTES[options.what]
    options.results = options.results or runs.RESULTS / f"local-remote-{options.what}.json"
    return options


# -- what is planned ---------------------------------------------------------------------------------------------------


def planned(options: argparse.Namespace) -> dict[str, float]:
    """All rows of a round by their keys, with about how many seconds each takes."""
    if options.what == "sweep":
        lengths = QUICK_BATCHES if options.quick else SWEEP_BATCHES
        return {tables.sweep_row(batches): SWEEP_START_S + SWEEP_BATCH_S * batches for batches in lengths}
    if options.what == "trainings":
        times = times_of(options)
        rows = {f"{count} trainings": trainings.START_S + times.end_s for count in trainings.COUNTS}
    else:
        who = [one for one in CONTESTANTS if one != "before" or options.before]
        rows = {cell.key: cell.typical_s for cell in cells(len(os.sched_getaffinity(0)), who)}
        if options.quick:
            rows = {key: seconds for key, seconds in rows.items() if key in QUICK}
    return rows


def chosen(options: argparse.Namespace) -> dict[str, float]:
    """Those rows of the plan that are measured now."""
    return {key: seconds for key, seconds in planned(options).items() if options.only is None or key in options.only}


def times_of(options: argparse.Namespace) -> trainings.Times:
    """When trainings join and leave."""
    return trainings.QUICK if options.quick else trainings.Times()


def settings_of(options: argparse.Namespace) -> dict[str, Any]:
    """What must not change within a file."""
    settings: dict[str, Any] = {"quick": options.quick, "rounds": options.rounds, "rows": list(planned(options))}
    if options.what == "table":
        settings["before"] = commit(options.before)[0] if options.before else None
    return settings


def plan_text(options: argparse.Namespace) -> str:
    """For people."""
    rows = chosen(options)
    minutes = options.rounds * sum(rows.values()) / 60
    lines = [f"{key:28}{seconds:6.0f} s" for key, seconds in rows.items()]
    return "\n".join([*lines, f"{options.rounds} rounds: about {minutes:.0f} minutes; {options.minutes:g} at most"])


# -- measuring ---------------------------------------------------------------------------------------------------------


def turns(found: Run, rows: Mapping[str, float], rounds: int) -> Iterator[tuple[int, str, float]]:
    """Every measurement that is missing, in order."""
    for number in range(rounds):
        for key in list(rows)[:: -1 if number % 2 else 1]:
            if len(found.rows.get(key, ())) <= number:
                yield number, key, rows[key]


def measured(options: argparse.Namespace, measure: Measure) -> Run:
    """All measurements that are missing and for which there is time; what fails is noted with its reason."""
    found = runs.begun(options.what, settings_of(options), options.results)
    until_s = time.monotonic() + 60 * options.minutes
    for number, key, seconds in turns(found, chosen(options), options.rounds):
        if time.monotonic() + seconds > until_s:
            _say(f"{options.minutes:g} minutes are over: the same command measures the rest")
            break
        item: dict[str, Any] = {"at": now(), "load": load()}
        try:
            item |= measure(key)
        except MeasurementError as error:
            item["error"] = str(error)
        found = runs.with_row(found, key, [*found.rows.get(key, ()), item])
        runs.write(found, options.results)
        _say(f"round {number + 1}, {key}: {tables.said(options.what, item)}")
    return found


def measured_table(options: argparse.Namespace) -> Run:
    """The table's measurements, each a process of its own."""
    with ExitStack() as stack:
        places = {"dpex": Surroundings(), "ray-data": Surroundings()}
        if options.before:
            places["before"] = stack.enter_context(with_dpex_of(options.before))
        for work in dict.fromkeys(Cell.of_key(key).work for key in chosen(options)):
            run(Surroundings(), "-m", "benchmarks.measure", "--prepare", work, limit_s=PREPARE_LIMIT_S)

        def measure(key: str) -> dict[str, Any]:
            cell = Cell.of_key(key)
            limit_s = START_LIMIT_S + 2 * cell.most_s
            return _last_line(run_module("benchmarks.remote.measure", key, limit_s, places[cell.who]))

        return measured(options, measure)


def measured_trainings(options: argparse.Namespace) -> Run:
    """The courses of several trainings."""
    times = times_of(options)

    def measure(key: str) -> dict[str, Any]:
        asked = json.dumps({"count": int(key.split()[0]), "times": asdict(times)})
        return _last_line(run_module("benchmarks.remote.trainings", asked, START_LIMIT_S + times.end_s))

    return measured(options, measure)


def measured_sweep(options: argparse.Namespace) -> Run:
    """A sweep's costs, of each way in one process a round."""
    asked = ["--work", SWEEP_WORK, "--rounds", "1", "--json"]
    run(Surroundings(), "-m", "benchmarks.measure", "--prepare", SWEEP_WORK, limit_s=PREPARE_LIMIT_S)

    def measure(key: str) -> dict[str, Any]:
        length = ["--batches", str(tables.sweep_batches(key))]
        found = _last_line(run(Surroundings(), "-m", "benchmarks.sweep", *asked, *length, limit_s=START_LIMIT_S))
        return {"costs": {way: cost for way, (cost,) in found.items()}}

    return measured(options, measure)


WAYS = {"table": measured_table, "trainings": measured_trainings, "sweep": measured_sweep}


def _last_line(printed: str) -> dict[str, Any]:
    try:
        found: dict[str, Any] = json.loads(printed.splitlines()[-1])
    except (IndexError, ValueError) as error:
        raise MeasurementError(f"nothing was printed but {printed[-200:]!r}") from error
    return found


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def main(arguments: Sequence[str] | None = None) -> int:
    """0 if everything was measured, and kept where that was asked for."""
    options = parse(arguments)
    if options.plan:
        print(plan_text(options))
        return 0
    try:
        found = WAYS[options.what](options)
    except MeasurementError as error:
        _say(str(error))
        return 1
    print(tables.TABLES[options.what](found))
    if options.keep is None:
        return 0
    against = runs.keep(found, options.keep, tables.problems, tables.KEPT)
    _say("\n".join(f"not kept: {why}" for why in against))
    return 1 if against else 0


if __name__ == "__main__":
    sys.exit(main())
