"""Judge the controller in simulated worlds: `python -m benchmarks.simulation`."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.simulation import baseline
from benchmarks.simulation.oracle import refresh
from benchmarks.simulation.scenarios import BASELINE, FOLDER, load
from benchmarks.simulation.scoreboard import Result, decisions, plain, play, table


def main(arguments: Sequence[str] | None = None, write: Callable[[str], object] = print) -> int:
    """The command; 1 if a scenario missed what it holds to."""
    parser, known = _parser(), load()
    options = parser.parse_args(arguments)
    chosen = [s for s in known.values() if not options.only or {s.name, s.family} & set(options.only)]
    if not chosen:
        parser.error(f"no scenario is called {' or '.join(options.only)}; there are {', '.join(known)}")
    if options.refresh:
        searched = refresh(chosen, list(known.values()))
        write(f"searched: {', '.join(searched) or 'nothing, all was up to date'}")
    results = [play(scenario, seed=options.seed) for scenario in chosen]
    for line in _report(results, options):
        write(line)
    if options.record:
        for line in baseline.record(results, known, options.record) or ["recorded: nothing changed"]:
            write(line)
    return int(any(result.missed() for result in results))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.simulation", description=(__doc__ or "").strip())
    parser.add_argument("--only", action="append", metavar="NAME", help="a scenario or a family; may be repeated")
    parser.add_argument("--json", action="store_true", help="for programs")
    parser.add_argument("--decisions", action="store_true", help="list decisions too")
    parser.add_argument("--refresh", action="store_true", help="search again for the best static settings (minutes)")
    record: dict[str, Any] = {"nargs": "?", "type": Path, "const": FOLDER / BASELINE, "metavar": "FILE"}
    parser.add_argument("--record", **record, help="record what was achieved, for the tests to compare with")
    parser.add_argument("--seed", type=int, default=0, help="play with other draws than those everybody has seen")
    return parser


def _report(results: Sequence[Result], options: argparse.Namespace) -> Iterator[str]:
    if options.json:
        yield json.dumps([plain(result) for result in results], indent=1)
    else:
        for result in results if options.decisions else ():
            yield f"{result.scenario.name}: {result.scenario.why}"
            yield from decisions(result)
        yield from table(results)


if __name__ == "__main__":
    sys.exit(main())
