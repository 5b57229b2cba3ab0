"""Scenarios: simulated worlds, why they are there, and what a controller must achieve in them. One file a family.

A file holds a list of objects: ``name``, ``why``, ``seconds``, ``world`` (fields of `World`), ``phases`` (fields of
`Phase`, with ``work`` and ``step``), and perhaps ``holds``, ``judged_at``, ``repeat_s`` and ``memory_grace_s``.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from benchmarks.simulation.world import Phase, Step, Work, World

FOLDER = Path(__file__).parent
ORACLE = "oracle.json"
BASELINE = "baseline.json"
HOLDS = ("regret", "settle", "decisions", "cost", "oscillation", "memory")
"""What can be asked of a controller, see `benchmarks.simulation.scoreboard`."""


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """A world, how long to run it, and what must hold.

    judged_at: each interval that begins there is judged by itself, against the setting that is best for it; where
    phases are too short for that, fewer moments than phases. memory_grace_s: so long after such a moment memory may be
    exceeded, as batches in flight have grown and nobody could know.
    """

    name: str
    family: str
    why: str
    seconds: float
    world: World
    judged_at: tuple[float, ...]
    holds: tuple[str, ...] = HOLDS
    memory_grace_s: float = 0.0

    def intervals(self) -> Iterator[tuple[float, float]]:
        """Beginning and end of what is judged by itself."""
        return zip(self.judged_at, (*self.judged_at[1:], self.seconds), strict=True)

    def only(self, start: float, end: float) -> World:
        """A world that is from its beginning as this one is from ``start`` to ``end``."""
        merged, later = Phase(), []
        for phase in self.world.phases:
            if phase.at <= start:
                said = {name: value for name, value in vars(phase).items() if value is not None}
                merged = replace(merged, **said)
            elif phase.at < end:
                later.append(replace(phase, at=phase.at - start))
        return replace(self.world, phases=(replace(merged, at=0.0), *later))


@cache
def load() -> Mapping[str, Scenario]:
    """All scenarios, by name."""
    found: dict[str, Scenario] = {}
    for path in sorted(FOLDER.glob("*.json")):
        if path.name in (ORACLE, BASELINE):
            continue
        for entry in json.loads(path.read_text()):
            scenario = _scenario(path.stem, entry)
            if scenario.name in found:
                raise ValueError(f"{path}: a second scenario {scenario.name!r}; names must differ")
            found[scenario.name] = scenario
    return found


def _scenario(family: str, entry: Mapping[str, Any]) -> Scenario:
    rest = dict(entry)
    seconds = float(rest.pop("seconds"))
    phases = _phases(rest.pop("phases"), seconds, rest.pop("repeat_s", None))
    judged_at = tuple(rest.pop("judged_at", [phase.at for phase in phases]))
    holds = tuple(rest.pop("holds", HOLDS))
    if unknown := set(holds) - set(HOLDS):
        raise ValueError(f"scenario {rest['name']!r}: {sorted(unknown)} in holds; there are {', '.join(HOLDS)}")
    world = World(**rest.pop("world"), phases=phases)
    return Scenario(family=family, seconds=seconds, world=world, judged_at=judged_at, holds=holds, **rest)


def _phases(entries: list[dict[str, Any]], seconds: float, repeat_s: float | None) -> tuple[Phase, ...]:
    phases = [_phase(entry) for entry in entries]
    times = 1 if repeat_s is None else max(1, int(seconds / repeat_s))
    return tuple(replace(phase, at=phase.at + n * (repeat_s or 0.0)) for n in range(times) for phase in phases)


def _phase(entry: Mapping[str, Any]) -> Phase:
    parts = dict(entry)
    work, step = parts.pop("work", None), parts.pop("step", None)
    return Phase(work=Work(**work) if work else None, step=Step(**step) if step else None, **parts)
