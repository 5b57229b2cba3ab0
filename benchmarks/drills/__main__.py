"""`python -m benchmarks.drills`: make each fault that training recovers from happen, and measure how long that takes.

Faults take turns, each in a training process of its own, with samples that wait. The seconds are from the fault until
as many workers run as before, or until what `until` of the drill says; beside them stands the longest time that the
training loop was without a batch, which is shorter where others work on. Samples that were lost or came again are
counted: one of either makes the exit status 1. What needs Ray, or network namespaces and so root, is left out where
these are not there. `--keep NAME` keeps the run; `python -m benchmarks.report` writes it into the table of drills.
"""

import argparse
import importlib.util
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from benchmarks.drills import table
from benchmarks.drills.faults import DRILLS, Drill, Scene
from benchmarks.network.links import why_not
from benchmarks.training import runs
from benchmarks.training.runs import Run

TIMES = 5


def possible(drills: Sequence[Drill]) -> list[Drill]:
    """Those that can be had on this machine; of the others it is told why not."""
    missing = {
        "ray": "" if importlib.util.find_spec("ray") else "Ray is not installed",
        "network": why_not(),
    }
    found = []
    for drill in drills:
        if why := missing.get(drill.needs):
            print(f"left out: {drill.fault}: {why}", file=sys.stderr)
        else:
            found.append(drill)
    return found


def run(drills: Sequence[Drill], times: int, path: Path) -> Run:
    """Make each of them happen so many times; one that was interrupted goes on."""
    found = runs.begun(table.SUBJECT, {"times": times}, path)
    scene = Scene()
    try:
        for number in range(times):
            for drill in drills:
                before = list(found.rows.get(drill.fault, ()))
                if len(before) > number:
                    continue
                one = drill.make(scene)
                found = runs.with_row(found, drill.fault, [*before, {"until": drill.until, **asdict(one)}])
                runs.write(found, path)
                print(f"{drill.fault}: {one}", file=sys.stderr, flush=True)
    finally:
        scene.close()
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """0 if no sample was lost or repeated, and the run was kept if it was to be."""
    options = _parse(arguments)
    drills = [drill for drill in DRILLS if not options.only or any(part in drill.fault for part in options.only)]
    found = run(possible(drills), options.times, options.results)
    print(table.lines(found))
    wrong = table.wrong(found)
    print(*wrong, sep="\n", file=sys.stderr)
    if options.keep:
        wrong += runs.keep(found, options.keep, table.problems, table.KEPT)
        print(*wrong, sep="\n", file=sys.stderr)
    return 1 if wrong else 0


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.drills", description=__doc__)
    parser.add_argument("--times", type=int, default=TIMES, help=f"how often each fault happens ({TIMES})")
    parser.add_argument("--only", nargs="+", metavar="PART", help="faults whose text has one of these in it")
    parser.add_argument("--results", type=Path, default=runs.RESULTS / "local-drills.json", metavar="FILE")
    parser.add_argument("--keep", metavar="NAME", help="keep the run as results/drills/drills-NAME.json")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
