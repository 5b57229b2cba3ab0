"""Make the validation set: `python -m benchmarks.simulation.scenarios.make_validation`, then ``--refresh --record``.

Half of it are development scenarios with other parameters and another seed, half are generated worlds of a seed that
is used for nothing else. It is kept as files, so that a change of the generator leaves it as it is.
"""

from __future__ import annotations

import json
import math
import random
from collections.abc import Iterator
from typing import Any

from benchmarks.simulation.generate import described, estimated_batches
from benchmarks.simulation.scenarios import BASELINE, DEVELOPMENT, FOLDER, ORACLE, VALIDATION, scenario_of
from benchmarks.simulation.score import cold_start

_SEED = 2026
_GENERATED = 36
_MOST_BATCHES = 20000
"""Of a generated world, so that the whole set is played in half a minute."""
_EVERY = 2
_FACTORS = (0.6, 1.7)
_TIMES = ("cpu_s", "wait_s", "encode_s", "gpu_s", "own_s", "fork_s", "actor_s", "rtt_s")


def main() -> None:
    """Write both files."""
    folder = FOLDER / VALIDATION
    folder.mkdir(exist_ok=True)
    _write("varied", list(_varied()))
    _write("generated", list(_generated()))


def _write(family: str, entries: list[dict[str, Any]]) -> None:
    lines = ",\n".join(json.dumps(entry) for entry in entries)
    (FOLDER / VALIDATION / f"{family}.json").write_text(f"[\n{lines}\n]\n")


def _generated() -> Iterator[dict[str, Any]]:
    number = found = 0
    while found < _GENERATED:
        entry = described(_SEED, number)
        number += 1
        if estimated_batches(entry) <= _MOST_BATCHES:
            found += 1
            yield entry | {"name": f"generated-{number}", "why": f"generated: {entry['why']}"}


def _varied() -> Iterator[dict[str, Any]]:
    number = 0
    for path in sorted((FOLDER / DEVELOPMENT).glob("*.json")):
        if path.name in (ORACLE, BASELINE):
            continue
        for entry in json.loads(path.read_text()):
            number += 1
            if number % _EVERY == 0 and "recorded" not in json.dumps(entry):
                yield _other(entry, random.Random(f"{_SEED} {entry['name']}"))


def _other(entry: dict[str, Any], rng: random.Random) -> dict[str, Any]:
    """The same with other parameters, such that the cold start fits into memory."""
    while True:
        world: dict[str, Any] = _scaled(entry["world"], rng) | {"seed": rng.randrange(10**6)}
        factors = {name: math.exp(rng.uniform(*map(math.log, _FACTORS))) for name in _TIMES}
        phases = [_scaled(phase, rng, factors) for phase in entry["phases"]]
        other = {**entry, "name": f"{entry['name']}-other", "world": world, "phases": phases}
        if _fits(other):
            return other


def _scaled(part: dict[str, Any], rng: random.Random, factors: dict[str, float] | None = None) -> dict[str, Any]:
    """Times by one factor for all phases where it is given, by one each else; CPUs and spread by a little."""
    scaled: dict[str, Any] = {}
    for name, value in part.items():
        if isinstance(value, dict):
            scaled[name] = _scaled(value, rng, factors)
        elif name in _TIMES:
            factor = factors[name] if factors else math.exp(rng.uniform(*map(math.log, _FACTORS)))
            scaled[name] = float(f"{value * factor:.4g}")
        elif name == "cpus" and "ranks" not in part:
            scaled[name] = max(1, round(value * rng.choice((0.5, 1.0, 1.5, 2.0))))
        elif name == "spread":
            scaled[name] = round(value * rng.uniform(0.7, 1.3), 3)
        else:
            scaled[name] = value
    return scaled


def _fits(entry: dict[str, Any]) -> bool:
    scenario = scenario_of("varied", entry)
    world, work = scenario.world, scenario.world.phases[0].work
    start = cold_start(world, scenario.config)
    held = start.local * world.worker_bytes + start.prefetch * (work.batch_bytes if work is not None else 0.0)
    return held * world.ranks <= world.memory


if __name__ == "__main__":
    main()
