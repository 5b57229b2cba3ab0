"""Which scenario gets worse without each constant of the controller: `python -m benchmarks.simulation.without`.

Each constant gets the value with which it has no effect, or, where there is none, half and twice its value. The
scenarios are played anew, and the one that gets worst is kept in ``without.json``. What was measured before of the same
value and scenarios is not measured again, so that a run may be ended and gone on with.
`benchmarks.simulation.constants` writes the reference page from it.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from multiprocessing import Pool
from pathlib import Path

from benchmarks.simulation import baseline, kept
from benchmarks.simulation.baseline import REGRET_TOLERANCE
from benchmarks.simulation.fit import changed
from benchmarks.simulation.scenarios import DEVELOPMENT, load
from benchmarks.simulation.score import Result, play
from dpex.autotune.constants import Description
from dpex.autotune.constants.groups import described

KEPT = Path(__file__).parent / "without.json"
HALF_AND_TWICE = (0.5, 2.0)
QUICK = (
    *("burst-steps", "memory-both", "memory-workers", "mixed-one-short", "mixed-saturating", "nodes-lost"),
    *("noise-remote", "remote-far", "remote-helps", "remote-link-bound", "shift-kind", "shift-wait-back"),
    *("skew-wait-mild", "storage-seeks", "storage-slows", "thrash-mixed", "tiny-all", "tiny-turns-dear"),
    *("wait-2-cores", "blind-cpu"),
)
"""Scenarios of most families, each of which is played in less than a second."""


@dataclass(frozen=True, kw_only=True)
class Played:
    """A scenario: its regret, the targets that it missed with their figures, and what was decided."""

    regret: float
    missed: Mapping[str, float]
    decisions: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Without:
    """What becomes of the scenarios with another value of a constant.

    Attributes:
        value: The constant's own value.
        instead: The value that it had.
        scenarios: How many were played; ``different``: in how many of them something else was decided.
        worst: The scenario that got worst, "" if none did.
        target: What got worst in it: "regret", or the name of a target that was met before.
        before, after: The figure of that.
    """

    value: float
    instead: float
    scenarios: int
    different: int
    worst: str = ""
    target: str = ""
    before: float = 0.0
    after: float = 0.0


def values_instead(constant: Description) -> tuple[float, ...]:
    """The values to try in its place."""
    if constant.off is not None:
        return (constant.off,)
    values = (constant.value * factor for factor in HALF_AND_TWICE)
    return tuple(max(1, round(value)) if isinstance(constant.value, int) else value for value in values)


def played(name: str) -> Played:
    """The scenario of that name, with the constants as they are."""
    scenario = load(DEVELOPMENT)[name]
    result = play(scenario, kept.truths(DEVELOPMENT, scenario))
    return Played(regret=result.regret, missed=baseline.achieved(result).missed, decisions=tuple(_decisions(result)))


def _decisions(result: Result) -> Iterator[str]:
    for history in result.histories:
        yield from (f"{decision.at:.3f} {decision.new}" for decision in history.decisions)


def compare(
    constant: Description, instead: float, before: Mapping[str, Played], after: Mapping[str, Played]
) -> Without:
    """What got worst."""
    different = sum(after[name].decisions != was.decisions for name, was in before.items())
    found = Without(value=constant.value, instead=instead, scenarios=len(before), different=different)
    name = max(before, key=lambda name: after[name].regret - before[name].regret)
    if after[name].regret - before[name].regret > REGRET_TOLERANCE:
        regrets = {"before": round(before[name].regret, 4), "after": round(after[name].regret, 4)}
        return Without(**{**asdict(found), "worst": name, "target": "regret", **regrets})
    for name, was in before.items():
        for target in sorted(after[name].missed.keys() - was.missed.keys() - {"regret"}):
            return Without(**{**asdict(found), "worst": name, "target": target, "after": after[name].missed[target]})
    return found


def measure(job: tuple[Description, float], before: Mapping[str, Played]) -> tuple[str, Without]:
    """Play all scenarios of ``before`` with another value of a constant."""
    constant, instead = job
    with changed({constant.name: instead}):
        after = {name: played(name) for name in before}
    return constant.name, compare(constant, instead, before, after)


# -- what is kept ------------------------------------------------------------------------------------------------------


def read(path: Path = KEPT) -> dict[str, list[Without]]:
    """By the constant's name; one for each value that was tried."""
    entries = json.loads(path.read_text()) if path.exists() else {}
    return {name: [Without(**each) for each in found] for name, found in entries.items()}


def write(entries: Mapping[str, Sequence[Without]], path: Path = KEPT) -> None:
    """In the order of the descriptions; what is no constant any more is left out."""
    known = [name for name in described() if entries.get(name)]
    lines = (f"{json.dumps(name)}: {json.dumps([asdict(each) for each in entries[name]])}" for name in known)
    path.write_text("{\n" + ",\n".join(lines) + "\n}\n")


def _is_kept(entries: Mapping[str, Sequence[Without]], constant: Description, instead: float, scenarios: int) -> bool:
    wanted = (constant.value, instead, scenarios)
    return any((each.value, each.instead, each.scenarios) == wanted for each in entries.get(constant.name, ()))


def _with(entries: Iterable[Without], new: Without) -> list[Without]:
    same_value = [each for each in entries if each.value == new.value and each.instead != new.instead]
    return sorted([*same_value, new], key=lambda each: each.instead)


def main(arguments: Sequence[str] | None = None, say: Callable[[str], object] = print) -> int:
    """The command."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.simulation.without", description=__doc__)
    parser.add_argument("--constant", action="append", metavar="GROUP.NAME", help="only this one; may be repeated")
    parser.add_argument("--all-scenarios", action="store_true", help=f"not only {len(QUICK)} quick ones (hours)")
    options = parser.parse_args(arguments)
    if unknown := set(options.constant or ()) - described().keys():
        parser.error(f"no constant is called {', '.join(sorted(unknown))}; there are {', '.join(described())}")
    names = list(load(DEVELOPMENT)) if options.all_scenarios else list(QUICK)
    _measure_all(options.constant or list(described()), names, say)
    return 0


def _measure_all(constants: Sequence[str], names: Sequence[str], say: Callable[[str], object]) -> None:
    entries = read()
    wanted = [(described()[name], instead) for name in constants for instead in values_instead(described()[name])]
    jobs = [job for job in wanted if not _is_kept(entries, *job, len(names))]
    with Pool() as pool:
        before = dict(zip(names, pool.map(played, names, chunksize=1), strict=True))
        for name, found in pool.imap_unordered(partial(measure, before=before), jobs):
            entries[name] = _with(entries.get(name, ()), found)
            write(entries)
            figures = f"{found.worst}: {found.target} {found.before:g} -> {found.after:g}"
            say(f"{name} = {found.instead:g}: {figures if found.worst else 'none gets worse'}")


if __name__ == "__main__":
    sys.exit(main())
