"""What regret is made of, learning or a wrong choice: `python -m benchmarks.simulation.parts`.

A world is played twice more with fixed settings: with those that the controller held for longest once it had settled,
as if it had known them from the beginning of each interval, and with as many workers and the deepest prefetch. What the
controller delivered less than the first is what learning cost; it is below 0 where settings that follow the work are
better than any that stay. What the first delivers less than the second was lost by its prefetch, and what the second
delivers less than the best fixed settings by its number of workers.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from multiprocessing import Pool
from statistics import fmean

from benchmarks.simulation import kept
from benchmarks.simulation.generate import generate
from benchmarks.simulation.history import History
from benchmarks.simulation.oracle import Search, Truth
from benchmarks.simulation.scenarios import SETS, Scenario, calm_from, load
from benchmarks.simulation.score import Result, play
from benchmarks.simulation.simulator import Simulator
from benchmarks.simulation.steering import Fixed
from dpex.autotune.types import Settings

_ROW = "{:26} {:>8} {:>9} {:>9} {:>9}  {}"


@dataclass(frozen=True, kw_only=True)
class Parts:
    """Of a run, as shares of what the best fixed settings would have delivered.

    learning, prefetch, workers: see the module; their sum is 1 - delivered / best. held: the settled settings.
    """

    result: Result
    learning: float
    prefetch: float
    workers: float
    held: tuple[Settings, ...]


def parts_of(scenario: Scenario, truths: Sequence[Truth]) -> Parts:
    """Play the controller, and what it settled on."""
    result = play(scenario, truths)
    held = tuple(_held(scenario, result.histories[0], *span) for span in scenario.intervals())
    most = sum(score.best.rate * (score.end - score.start) for score in result.scores) or 1.0
    had = sum(score.rate * (score.end - score.start) for score in result.scores)
    kept_settings = _delivered(scenario, held)
    deepest = max(kept_settings, _delivered(scenario, [_deepest(scenario, settings) for settings in held]))
    return Parts(
        result=result,
        learning=(kept_settings - had) / most,
        prefetch=(deepest - kept_settings) / most,
        workers=1.0 - deepest / most,
        held=held,
    )


def _held(scenario: Scenario, history: History, start: float, end: float) -> Settings:
    """The settings that were held for longest in the calm of an interval."""
    calm, seconds = calm_from(scenario.world, start, end), dict[Settings, float]()
    for mark in history.marks:
        if calm < mark.at <= end:
            seconds[mark.settings] = seconds.get(mark.settings, 0.0) + mark.seconds
    before = [mark.settings for mark in history.marks if mark.at <= calm]
    return max(seconds, key=seconds.__getitem__) if seconds else before[-1] if before else Settings()


def _deepest(scenario: Scenario, settings: Settings) -> Settings:
    search = Search(scenario, 0.0, scenario.seconds)
    return search.deepest(settings.local, settings.remote) if settings.workers else settings


def _delivered(scenario: Scenario, held: Sequence[Settings]) -> float:
    """Batches of a rank, on average, with these settings from the beginning of each interval on."""
    world = scenario.world
    played = Simulator(world, [Fixed(held[0])] * world.ranks, is_tuned=False)
    for (start, _), settings in zip(scenario.intervals(), held, strict=True):
        played.run(start - played.loop.now)
        played.set(settings)
    played.run(scenario.seconds - played.loop.now)
    return fmean(rank.history.count(0.0, scenario.seconds) for rank in played.ranks)


def report(found: Sequence[Parts]) -> Iterator[str]:
    """A line for each world, those that lose most first, and the means."""
    yield _ROW.format("world", "regret", "learning", "prefetch", "workers", "settled on; best")
    for each in sorted(found, key=lambda parts: -parts.result.regret):
        best = "; ".join(str(score.best.settings) for score in each.result.scores)
        settings = f"{'; '.join(map(str, each.held))} | {best}"
        yield _ROW.format(each.result.scenario.name, *map(_percent, _shares(each)), settings)
    means = [fmean(column) for column in zip(*map(_shares, found), strict=True)]
    yield _ROW.format(f"mean of {len(found)}", *map(_percent, means), "")


def _shares(each: Parts) -> tuple[float, float, float, float]:
    return each.result.regret, each.learning, each.prefetch, each.workers


def _percent(share: float) -> str:
    return f"{share * 100:.2f} %"


def _of_set(name: str, scenario: Scenario) -> Parts:
    return parts_of(scenario, kept.truths(name, scenario))


def _generated(scenario: Scenario) -> Parts:
    return parts_of(scenario, kept.cached(scenario))


def main(arguments: Sequence[str] | None = None, write: Callable[[str], object] = print) -> int:
    """The command."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.simulation.parts", description=__doc__)
    parser.add_argument("--set", choices=SETS, default=SETS[0])
    parser.add_argument("--only", action="append", metavar="NAME", help="a scenario of the set; may be repeated")
    parser.add_argument("--fuzz", type=int, metavar="N", help="so many generated worlds instead")
    parser.add_argument("--seed", type=int, default=0, help="of the generated worlds")
    options = parser.parse_args(arguments)
    work: Callable[[Scenario], Parts]
    if options.fuzz:
        worlds, work = [generate(options.seed, number) for number in range(options.fuzz)], _generated
    else:
        known = load(options.set)
        worlds = [known[name] for name in options.only or known]
        work = partial(_of_set, options.set)
    with Pool() as pool:
        found = pool.map(work, worlds, chunksize=1)
    for line in report(found):
        write(line)
    return 0


if __name__ == "__main__":
    sys.exit(main())
