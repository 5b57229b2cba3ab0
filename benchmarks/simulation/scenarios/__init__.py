"""Scenarios: simulated worlds, why they are there, and what a controller must achieve in them.

Three sets are kept as files, a folder each with a file per family: ``development``, on which the controller is made
better, ``validation``, which only says whether it became so, and ``gpu``, the worlds whose trainer has a GPU that works
beside it. A file holds a list of objects: ``name``, ``why``,
``seconds``, ``world`` (fields of `World`), ``phases`` (fields of `Phase`), and perhaps ``config`` (fields of
`AutotuneConfig`), ``holds``, ``judged_at``, ``repeat_s`` and ``memory_grace_s``.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

from benchmarks.simulation import world as parts
from benchmarks.simulation.replay import build
from benchmarks.simulation.world import Phase, World
from dpex.autotune.config import AutotuneConfig

_T = TypeVar("_T")
_PARTS: Mapping[str, type[Any]] = {
    "work": parts.Work,
    "step": parts.Step,
    "storage": parts.Storage,
    "shards": parts.Shards,
    "cache": parts.Cache,
    "bursts": parts.Bursts,
    "slow": parts.SlowSpells,
    "pauses": parts.Pauses,
    "gpu": parts.Gpu,
    "evaluation": parts.Pauses,
    "epochs": parts.Epochs,
}
FOLDER = Path(__file__).parent
ORACLE = "oracle.json"
BASELINE = "baseline.json"
HOLDS = ("regret", "settle", "decisions", "cost", "oscillation", "memory")
"""What can be asked of a controller, see `benchmarks.simulation.score`."""
DEVELOPMENT, VALIDATION, GPU = "development", "validation", "gpu"
SETS = (DEVELOPMENT, VALIDATION, GPU)
_SETTLING_S = 30.0
"""An interval is calm at the latest so long after workers can be there."""


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
    config: AutotuneConfig = field(default_factory=AutotuneConfig)

    def intervals(self) -> Iterator[tuple[float, float]]:
        """Beginning and end of what is judged by itself."""
        return zip(self.judged_at, (*self.judged_at[1:], self.seconds), strict=True)

    def phases_of(self, start: float, end: float) -> list[Phase]:
        """Those that hold at some time of an interval; what the first leaves as it was is filled in."""
        merged, later = Phase(), []
        for phase in self.world.phases:
            if phase.at <= start:
                merged = replace(merged, **{name: value for name, value in vars(phase).items() if value is not None})
            elif phase.at < end:
                later.append(phase)
        return [merged, *later]


def calm_from(world: World, start: float, end: float) -> float:
    """When the part of an interval begins in which a controller should have settled."""
    is_cluster = any(phase.nodes for phase in world.phases)
    startup_s = world.actor_s if is_cluster else world.fork_s
    return start + min((end - start) / 2, _SETTLING_S + startup_s)


@cache
def load(name: str = DEVELOPMENT) -> Mapping[str, Scenario]:
    """All scenarios of a set, by name."""
    found: dict[str, Scenario] = {}
    for path in sorted((FOLDER / name).glob("*.json")):
        if path.name in (ORACLE, BASELINE):
            continue
        for entry in json.loads(path.read_text()):
            scenario = scenario_of(path.stem, entry)
            if scenario.name in found:
                raise ValueError(f"{path}: a second scenario {scenario.name!r}; names must differ")
            found[scenario.name] = scenario
    return found


def scenario_of(family: str, entry: Mapping[str, Any]) -> Scenario:
    """The scenario that an object of a file describes.

    Raises:
        ValueError: a value that cannot be used; the message names it.
    """
    rest = dict(entry)
    seconds = float(rest.pop("seconds"))
    phases = _phases(rest.pop("phases"), seconds, rest.pop("repeat_s", None))
    judged_at = tuple(rest.pop("judged_at", [phase.at for phase in phases]))
    holds = tuple(rest.pop("holds", HOLDS))
    if unknown := set(holds) - set(HOLDS):
        raise ValueError(f"scenario {rest['name']!r}: {sorted(unknown)} in holds; there are {', '.join(HOLDS)}")
    streams = {at: number for number, at in enumerate(judged_at)}
    phases = tuple(replace(phase, stream=streams.get(phase.at)) for phase in phases)
    world = replace(_built(World, rest.pop("world")), phases=phases)
    config = AutotuneConfig(**rest.pop("config", {}))
    return Scenario(
        family=family, seconds=seconds, world=world, judged_at=judged_at, holds=holds, config=config, **rest
    )


def _phases(entries: list[dict[str, Any]], seconds: float, repeat_s: float | None) -> tuple[Phase, ...]:
    phases = [_built(Phase, entry) for entry in entries]
    times = 1 if repeat_s is None else max(1, int(seconds / repeat_s))
    return tuple(replace(phase, at=phase.at + n * (repeat_s or 0.0)) for n in range(times) for phase in phases)


def _built(kind: type[_T], entry: Mapping[str, Any]) -> _T:
    """A value from an object, in which nothing may be misspelt."""
    _check_names(kind, entry)
    return build(kind, entry)


def _check_names(kind: type[Any], entry: Mapping[str, Any]) -> None:
    known = {each.name for each in fields(kind)}
    if unknown := entry.keys() - known:
        raise ValueError(f"{kind.__name__}: {sorted(unknown)} is no field; there are {', '.join(sorted(known))}")
    for name, value in entry.items():
        if isinstance(value, Mapping):
            _check_names(_PARTS[name], value)
