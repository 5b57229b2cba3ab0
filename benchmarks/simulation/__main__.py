"""Judge the controller in simulated worlds: `python -m benchmarks.simulation`."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict
from functools import partial
from multiprocessing import Pool
from pathlib import Path
from typing import Any, TypeVar

from benchmarks.simulation import baseline, kept
from benchmarks.simulation.families import FAMILIES
from benchmarks.simulation.generate import generate
from benchmarks.simulation.report import decisions, summary, table, worst
from benchmarks.simulation.scenarios import SETS, Scenario, load
from benchmarks.simulation.score import Result, play

_Job = TypeVar("_Job")
_Found = TypeVar("_Found")
_AGAIN = "python -m benchmarks.simulation --decisions"


def main(arguments: Sequence[str] | None = None, write: Callable[[str], object] = print) -> int:
    """The command; 1 if a scenario missed what it holds to, or a generated world had an exception or passed a limit.

    1 too if the search for the best fixed setting missed a better one.
    """
    parser = _parser()
    options = parser.parse_args(arguments)
    if options.fuzz or options.world:
        return _fuzz(options, write)
    known = {name: load(name) for name in ([options.set] if options.set else SETS)}
    chosen = {name: [s for s in of.values() if _is_meant(s, options.only)] for name, of in known.items()}
    if not any(chosen.values()):
        names = [scenario for of in known.values() for scenario in of]
        parser.error(f"no scenario is called {' or '.join(options.only)}; there are {', '.join(names)}")
    missed = False
    for name, scenarios in chosen.items():
        missed |= bool(scenarios) and _judge(name, scenarios, options, write)
    return int(missed)


def _judge(name: str, scenarios: Sequence[Scenario], options: argparse.Namespace, write: Callable[[str], Any]) -> bool:
    """Whether a scenario of this set missed what it holds to."""
    if options.refresh:
        searched = kept.refresh(name, scenarios, list(load(name).values()))
        write(f"{name}: searched {', '.join(searched) or 'nothing, all was up to date'}")
    results = list(_in_parallel(partial(_play_kept, name), scenarios))
    for line in _report(name, results, options):
        write(line)
    if options.record:
        path = Path(options.record) if isinstance(options.record, str) else baseline.path_of(name)
        for line in baseline.record(results, load(name), path) or ["recorded: nothing changed"]:
            write(line)
    return any(result.missed() or result.doubts for result in results)


def _play_kept(name: str, scenario: Scenario) -> Result:
    return play(scenario, kept.truths(name, scenario))


def _is_meant(scenario: Scenario, only: Sequence[str] | None) -> bool:
    return not only or bool({scenario.name, scenario.family} & set(only))


def _report(name: str, results: Sequence[Result], options: argparse.Namespace) -> Iterator[str]:
    for result in results if options.decisions else ():
        yield f"{result.scenario.name}: {result.scenario.why}"
        yield from decisions(result)
    yield from table(results)
    yield from summary(name, results)


# -- generated worlds --------------------------------------------------------------------------------------------------


def _fuzz(options: argparse.Namespace, write: Callable[[str], object]) -> int:
    """Generated worlds, by seed and number; or one of them, with all its parameters."""
    make = FAMILIES.get(options.kind, generate)
    if options.world:
        seed, number = map(int, options.world.split(":")[-2:])
        worlds = [make(seed, number)]
        write(json.dumps(asdict(worlds[0].world), indent=1))
    else:
        worlds = [make(options.seed, number) for number in range(options.fuzz)]
    results = []
    for result in _in_parallel(_play_anew, worlds):
        results.append(result)
        if sys.stderr.isatty():
            print(f"\r{len(results)} of {len(worlds)} worlds", end="", file=sys.stderr)
    for line in _fuzz_report(results, options):
        write(line)
    return int(any(result.errors or result.beyond or result.doubts for result in results))


def _fuzz_report(results: Sequence[Result], options: argparse.Namespace) -> Iterator[str]:
    if options.world:
        yield from _report("generated", results, options)
    else:
        yield from summary(f"{options.kind} with seed {options.seed}", results)
        yield "  the worst, and the command that plays one alone:"
        yield from worst(results, f"{_AGAIN} --kind {options.kind} --world")


def _play_anew(scenario: Scenario) -> Result:
    return play(scenario, kept.cached(scenario))


def _in_parallel(work: Callable[[_Job], _Found], scenarios: Sequence[_Job]) -> Iterable[_Found]:
    if len(scenarios) < 2:
        yield from map(work, scenarios)
        return
    with Pool() as pool:
        yield from pool.imap(work, scenarios)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.simulation", description=(__doc__ or "").strip())
    parser.add_argument("--set", choices=SETS, help="one set only")
    parser.add_argument("--only", action="append", metavar="NAME", help="a scenario or a family; may be repeated")
    parser.add_argument("--decisions", action="store_true", help="list decisions too")
    parser.add_argument("--refresh", action="store_true", help="search again for the best fixed settings (minutes)")
    record: dict[str, Any] = {"nargs": "?", "const": True, "metavar": "FILE"}
    parser.add_argument("--record", **record, help="record what was achieved, for the tests to compare with")
    parser.add_argument("--fuzz", type=int, metavar="N", help="so many generated worlds instead (minutes)")
    kinds = ("generated", *FAMILIES)
    parser.add_argument("--kind", choices=kinds, default="generated", help="of the generated worlds (generated)")
    parser.add_argument("--seed", type=int, default=0, help="of the generated worlds")
    parser.add_argument("--world", metavar="SEED:NUMBER", help="one generated world, with its parameters")
    return parser


if __name__ == "__main__":
    sys.exit(main())
