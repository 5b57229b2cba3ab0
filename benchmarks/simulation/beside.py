"""The law beside the controller before it, by set of worlds: `python -m benchmarks.simulation --beside [SET ...]`.

What the controller before the law achieved is kept in ``before.json``, of the same worlds and draws; it had at least
one worker, like the law. A set of generated worlds is named by its kind and seed, as ``generated:307`` or ``busy:1``;
of one that is not kept only the law is shown. ``--fuzz`` says how many worlds of each set are played.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from statistics import fmean
from typing import Any

from benchmarks.simulation import kept
from benchmarks.simulation.families import FAMILIES
from benchmarks.simulation.generate import generate
from benchmarks.simulation.oracle import Truth
from benchmarks.simulation.scenarios import DEVELOPMENT, SETS, VALIDATION, Scenario, load
from benchmarks.simulation.score import MOST_DECISIONS, MOST_REGRET, Result, play
from benchmarks.simulation.simulator import Simulator
from benchmarks.simulation.steering import Fixed, Steering
from dpex.autotune.law.law import Law, start
from dpex.autotune.types import Settings

BEFORE = Path(__file__).parent / "before.json"
GENERATED = "generated"
KNOWN = (DEVELOPMENT, VALIDATION, "generated:307", "generated:1009", "busy:1", "saturated:1", "short:1")
WORLDS, OF_FAMILY = 100, 40
"""Of a set of generated worlds, and of one of the families."""
AWFUL = 0.3
TWO = Settings(local=2, prefetch=4)
"""What passes of `short` worlds are compared with."""
MOST_SLOWER = 0.05
NEAR = 0.15
SPARE_WORKERS = 2
"""Workers that a saturated machine may have beyond its CPUs."""
_ROW = "{:16} {:>6} {:>16} {:>16} {:>16} {:>8} {:>7} {:>16} {:>9}  {}"


@dataclass(frozen=True, kw_only=True)
class Figures:
    """Of a world that the law was let loose on. beside_two: rate over that with two workers, less 1, in short passes.

    cost: whether it held more workers than the target allows. workers: the most that it had. needed: the CPUs that
    would end the stall by the law's model, over those that the world needs; of saturated machines.
    """

    name: str
    regret: float
    decisions: int
    cost: bool
    limits: int
    errors: int
    workers: int
    cpus: float
    beside_two: float | None = None
    needed: float | None = None


@cache
def before() -> Mapping[str, Mapping[str, Mapping[str, Any]]]:
    """What the controller before the law achieved: by set and world."""
    return dict(json.loads(BEFORE.read_text()))


def worlds(of: str, number: int | None = None) -> list[Scenario]:
    """The worlds of a set. Raises ValueError for a name that is none."""
    if of in SETS:
        return list(load(of).values())[:number]
    kind, _, seed = of.partition(":")
    make = generate if kind == GENERATED else FAMILIES.get(kind)
    if make is None or not seed.isdigit():
        kinds = ", ".join(f"{kind}:SEED" for kind in (GENERATED, *FAMILIES))
        raise ValueError(f"{of!r} is no set of worlds; there are {', '.join(SETS)}, {kinds}")
    most = WORLDS if kind == GENERATED else OF_FAMILY
    return [make(int(seed), each) for each in range(number or most)]


def truths(of: str, scenario: Scenario) -> Sequence[Truth]:
    """The best fixed settings, kept or searched."""
    return kept.truths(of, scenario) if of in SETS else kept.cached(scenario)


def law_of(scenario: Scenario) -> Callable[[], Law]:
    """What makes the law for each rank of a world."""
    world, config = scenario.world, scenario.config
    begin = start(config, world.cpus / world.ranks, memory=world.memory / world.ranks)
    return lambda: Law(config, begin)


def figures(job: tuple[str, Scenario]) -> Figures:
    """Play a world of a set."""
    of, scenario = job
    laws: list[Law] = []

    def make() -> Steering:
        laws.append(law_of(scenario)())
        return laws[-1]

    result = play(scenario, truths(of, scenario), make)
    marks = [mark for history in result.histories for mark in history.marks]
    return Figures(
        name=scenario.name,
        regret=result.regret,
        decisions=result.decisions,
        cost=any("cost" in score.missed() for score in result.scores),
        limits=len(result.beyond),
        errors=len(result.errors),
        workers=max((mark.settings.workers for mark in marks), default=0),
        cpus=scenario.world.cpus,
        beside_two=_beside_two(scenario, result) if scenario.world.epochs is not None else None,
        needed=_needed(scenario, laws[0]) if of.startswith("saturated") else None,
    )


def _needed(scenario: Scenario, law: Law) -> float | None:
    work, step = scenario.world.phases[0].work, scenario.world.phases[0].step
    if work is None or step is None or law.model is None:
        return None
    truth = (work.cpu_s + work.encode_s + step.cpu_s) / (step.gpu_s + step.cpu_s)
    return law.model.to_end_stall().cpus / truth


def _beside_two(scenario: Scenario, result: Result) -> float:
    played = Simulator(scenario.world, [Fixed(TWO)] * scenario.world.ranks, is_tuned=False)
    played.run(scenario.seconds)
    of_two = fmean(rank.history.count(0.0, scenario.seconds) for rank in played.ranks)
    return fmean(history.count(0.0, scenario.seconds) for history in result.histories) / max(1.0, of_two) - 1.0


# -- the table ---------------------------------------------------------------------------------------------------------


def head() -> str:
    """The line above the table. What has two figures has that of the controller before, then the law's."""
    above, few = f"above {MOST_REGRET:.0%}", f"<= {MOST_DECISIONS} decisions"
    names = ("set", "worlds", "mean regret", above, "worst", f"> {AWFUL:.0%}", "limits", few, "cost", "other targets")
    return _ROW.format(*names)


def row(of: str, found: Sequence[Figures]) -> str:
    """A set."""
    then = [before()[of][each.name] for each in found if each.name in before().get(of, {})]
    regrets, was = [each.regret for each in found], [each["regret"] for each in then]
    few, were_few = (
        _share(each.decisions <= MOST_DECISIONS for each in found),
        [each["decisions"] <= MOST_DECISIONS for each in then],
    )
    return _ROW.format(
        of,
        len(found),
        _pair(fmean(was) if was else None, fmean(regrets), ".2%"),
        _pair(_share(one > MOST_REGRET for one in was), _share(one > MOST_REGRET for one in regrets), ".1%"),
        _pair(max(was, default=None), max(regrets), ".1%"),
        sum(one > AWFUL for one in regrets),
        sum(each.limits > 0 for each in found),
        _pair(_share(were_few), few, ".0%"),
        _pair(sum(each["cost"] for each in then) if then else None, sum(each.cost for each in found), "d"),
        "; ".join(_others(of, found)),
    ).rstrip()


def _others(of: str, found: Sequence[Figures]) -> Iterator[str]:
    errors = sum(each.errors > 0 for each in found)
    if errors:
        yield f"{errors} raised"
    if of.startswith("saturated"):
        many = sum(each.workers > each.cpus + SPARE_WORKERS for each in found)
        yield f"{many} had more than CPUs + {SPARE_WORKERS} workers"
        near = [each.needed is not None and abs(each.needed - 1.0) <= NEAR for each in found]
        yield f"the CPUs that end the stall within {NEAR:.0%} in {sum(near)} of {len(near)}"
    two = [each.beside_two for each in found if each.beside_two is not None]
    if two:
        yield f"{sum(each < -MOST_SLOWER for each in two)} slower than two workers by {MOST_SLOWER:.0%}"


def worst(found: Sequence[Figures], number: int = 10) -> Iterator[str]:
    """The worlds with most regret."""
    for each in sorted(found, key=lambda figures: -figures.regret)[:number]:
        yield f"    {each.regret:6.1%}  {each.name}, {each.decisions} decisions"


def _share(held: Any) -> float | None:
    values = list(held)
    return fmean(values) if values else None


def _pair(then: float | None, now: float | None, form: str) -> str:
    return " / ".join("-" if value is None else f"{value:{form}}" for value in (then, now))
