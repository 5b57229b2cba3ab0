"""What the controller achieved in each scenario when that was last recorded, so that a change for the worse is noticed.

The simulator runs on virtual time and draws from seeds, so the same code gives the same figures. The file holds, for
each scenario, the regret of each interval and the targets that are missed, with the figure that missed them.
`python -m benchmarks.simulation --record` plays the scenarios (all, or those of ``--only``) and records them anew; the
difference belongs to the change that causes it.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from benchmarks.simulation.scenarios import BASELINE, FOLDER
from benchmarks.simulation.score import Result

RECORD = "python -m benchmarks.simulation --record"
REGRET_TOLERANCE = 0.005
"""Regrets nearer to one another than this are equal: a sum in another order, or another C library, may do as much."""
_DIGITS = 4


@dataclass(frozen=True, kw_only=True)
class Achieved:
    """One scenario's record: the regret of each interval, and the worst figure of each target that was missed."""

    regrets: tuple[float, ...]
    missed: Mapping[str, float] = field(default_factory=dict)


def achieved(result: Result) -> Achieved:
    """The figures of a result, as they are kept."""
    missed: dict[str, float] = {}
    for score in result.scores:
        figures = score.figures()
        for target in score.missed().keys() & set(result.scenario.holds):
            missed[target] = max(missed.get(target, figures[target]), figures[target])
    if result.beyond:
        missed["limits"] = len(result.beyond)
    rounded = {target: round(missed[target], _DIGITS) for target in sorted(missed)}
    return Achieved(regrets=tuple(round(score.regret, _DIGITS) for score in result.scores), missed=rounded)


def differences(recorded: Achieved, now: Achieved) -> list[str]:
    """What got worse, and what got better and should be recorded; empty if nothing changed."""
    return [*_regrets(recorded, now), *_targets(recorded, now)]


def _regrets(recorded: Achieved, now: Achieved) -> Iterable[str]:
    if len(recorded.regrets) != len(now.regrets):
        yield f"the record is out of date: it has {len(recorded.regrets)} intervals, the scenario {len(now.regrets)}"
        return
    for number, (then, found) in enumerate(zip(recorded.regrets, now.regrets, strict=True)):
        if abs(found - then) > REGRET_TOLERANCE:
            how = "worse" if found > then else "better"
            yield f"{how}: the regret of interval {number} is {found:.2%} instead of {then:.2%}"


def _targets(recorded: Achieved, now: Achieved) -> Iterable[str]:
    for target in sorted(recorded.missed.keys() | now.missed.keys()):
        then, found = recorded.missed.get(target), now.missed.get(target)
        if then is None:
            yield f"worse: {target} is missed ({found:g}) and was met"
        elif found is None:
            yield f"better: {target} is met and was missed ({then:g})"
        elif target != "regret" and abs(found - then) > 10.0**-_DIGITS:  # regrets are compared interval by interval
            yield f"{'worse' if found > then else 'better'}: {target} is missed by {found:g} instead of {then:g}"


# -- the file ----------------------------------------------------------------------------------------------------------


def path_of(name: str) -> Path:
    """The file of a set."""
    return FOLDER / name / BASELINE


def read(path: Path) -> dict[str, Achieved]:
    """The record, by scenario."""
    entries = json.loads(path.read_text())
    return {name: Achieved(regrets=tuple(kept["regrets"]), missed=kept["missed"]) for name, kept in entries.items()}


def record(results: Sequence[Result], known: Iterable[str], path: Path) -> list[str]:
    """Write down these results beside those of other ``known`` scenarios; returns what changed, a line each."""
    before = read(path) if path.exists() else {}
    new = {result.scenario.name: achieved(result) for result in results}
    merged = {name: kept for name in known if (kept := new.get(name, before.get(name))) is not None}
    lines = [json.dumps({name: asdict(kept)})[1:-1] for name, kept in merged.items()]
    path.write_text("{\n" + ",\n".join(lines) + "\n}\n")
    return list(_changes(before, merged))


def _changes(before: Mapping[str, Achieved], after: Mapping[str, Achieved]) -> Iterable[str]:
    for name in sorted(before.keys() | after.keys()):
        if name not in after:
            yield f"{name}: removed, as there is no such scenario"
        elif name not in before:
            yield f"{name}: new"
        else:
            yield from (f"{name}: {change}" for change in differences(before[name], after[name]))
