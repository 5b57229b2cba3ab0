"""The best static setting of a world, found by trying them all in the simulator; kept in a file, as it takes minutes.

All pairs of local and remote workers are tried briefly with the deepest window that memory allows (the simulator
charges nothing for depth but memory); those that come near the best are tried for long, and then for the least depth.
"""

from __future__ import annotations

import ast
import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache
from multiprocessing import Pool
from pathlib import Path
from statistics import fmean
from typing import Any

from benchmarks.simulation.scenarios import FOLDER, ORACLE, Scenario
from benchmarks.simulation.simulator import Simulator
from benchmarks.simulation.steering import Fixed
from benchmarks.simulation.world import World
from dpex.autotune.types import Settings

REFRESH = "python -m benchmarks.simulation --refresh"
AS_FAST = 0.975
"""The cheapest setting with this part of the best rate is what cost is measured against."""
_PATH = FOLDER / ORACLE
_SOURCES = (
    *("event_loop.py", "world.py", "history.py", "steering.py", "window_counts.py", "rank.py", "simulator.py"),
    "oracle.py",
)
_MOST_LOCAL = 32
_REMOTES = (0, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32)
_LOCALS_BESIDE_REMOTE = (*range(9), 10, 12, 16, 20, 24, 28, 32)
_EQUAL = 0.995
_NEAR = 0.94
_LONGS = 40
_DEPTHS = (1.0, 1.5, 2.0, 3.0, 4.0, 6.0, 8.0, 12.0, 16.0)


@dataclass(frozen=True)
class _Effort:
    """Batches of a brief and of a long trial, seeds of the long one, and depth per worker."""

    brief: int
    long: int
    seeds: int
    deep: int


_EFFORTS = (_Effort(300, 1000, 1, 8), _Effort(600, 1500, 2, 8), _Effort(800, 3000, 3, 16))


def _randomness(world: World) -> int:
    """0: none, 1: little, 2: much."""
    spreads = [part.spread for phase in world.phases for part in (phase.work, phase.step) if part is not None]
    if any(phase.work is not None and phase.work.rare for phase in world.phases):
        return 2
    return 0 if not any(spreads) else 1 if max(spreads) <= 0.3 else 2


class StaleOracleError(RuntimeError):
    """The kept results are not of this simulator and this scenario; the message says what to run."""


@dataclass(frozen=True, kw_only=True)
class Static:
    """A static setting and its rate: batches per second and rank."""

    settings: Settings
    rate: float


@dataclass(frozen=True, kw_only=True)
class Truth:
    """Of one interval: the highest rate, with the setting of fewest workers that comes within half a percent of it; and
    the cheapest setting that is as good as that."""

    best: Static
    cheapest: Static


# -- the file ----------------------------------------------------------------------------------------------------------


def key(scenario: Scenario) -> str:
    """Hash of what the results depend on: the world, the intervals, the simulator's and this file's source."""
    parts = (repr(scenario.world), repr(list(scenario.intervals())), _source())
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]


@cache
def _source() -> str:
    """The code that the results depend on, without comments, docstrings and layout."""
    return "\n".join(_code(FOLDER.parent / file) for file in _SOURCES)


def _code(path: Path) -> str:
    tree = ast.parse(path.read_text())
    for node in ast.walk(tree):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)) and ast.get_docstring(node) is not None:
            node.body = node.body[1:] or [ast.Pass()]
    return ast.unparse(tree)


def truths(scenario: Scenario) -> list[Truth]:
    """What is kept of a scenario, interval by interval.

    Raises:
        StaleOracleError: nothing is kept, or the scenario, the simulator or the search has changed since.
    """
    entry = _kept().get(scenario.name)
    if entry is None or entry["key"] != key(scenario):
        raise StaleOracleError(f"{_PATH.name} knows nothing of {scenario.name!r} as it is now; run {REFRESH}")
    return [Truth(**{name: _static(found) for name, found in interval.items()}) for interval in entry["intervals"]]


def refresh(scenarios: Sequence[Scenario], known: Sequence[Scenario]) -> list[str]:
    """Search for those not up to date, keep the results, and drop what is not ``known``; the names searched."""
    kept = {s.name: _kept()[s.name] for s in known if s.name in _kept()}
    stale = [s for s in scenarios if kept.get(s.name, {}).get("key") != key(s)]
    tasks = [(s, start, end) for s in stale for start, end in s.intervals()]
    with Pool(2) as pool:
        found = pool.starmap(search, tasks, chunksize=1)
    for scenario in stale:
        mine = [truth for (of, _, _), truth in zip(tasks, found, strict=True) if of is scenario]
        kept[scenario.name] = {"key": key(scenario), "intervals": [_plain(truth) for truth in mine]}
    lines = (f"{json.dumps(name)}: {json.dumps(kept[name])}" for name in sorted(kept))
    _PATH.write_text("{\n" + ",\n".join(lines) + "\n}\n")
    _kept.cache_clear()
    return [scenario.name for scenario in stale]


@cache
def _kept() -> dict[str, dict[str, Any]]:
    return dict(json.loads(_PATH.read_text())) if _PATH.exists() else {}


def _plain(truth: Truth) -> dict[str, dict[str, float]]:
    return {
        name: {**asdict(found.settings), "rate": float(f"{found.rate:.5g}")}
        for name, found in (("best", truth.best), ("cheapest", truth.cheapest))
    }


def _static(entry: dict[str, float]) -> Static:
    sizes = {name: int(entry[name]) for name in ("local", "remote", "depth")}
    return Static(settings=Settings(**sizes), rate=entry["rate"])


# -- the search --------------------------------------------------------------------------------------------------------


def search(scenario: Scenario, start: float, end: float) -> Truth:
    """The truth about one interval."""
    return _Search(scenario.only(start, end), end - start).run()


class _Search:
    def __init__(self, world: World, seconds: float) -> None:
        self._world = replace(world, actor_s=0.01, fork_s=0.01)
        self._seconds = seconds
        self._work = [phase.work for phase in world.phases if phase.work is not None]
        self._effort = _EFFORTS[_randomness(world)]
        self._nodes = min((p.nodes for p in world.phases if p.nodes is not None), default=0) // world.ranks
        self._brief: dict[tuple[int, int], float] = {}
        self._long: dict[Settings, float] = {}

    def run(self) -> Truth:
        """Screen, measure the fastest for long, then go from few workers to many until one is as fast."""
        self._screen(self._pairs())
        near = sorted(self._brief, key=lambda pair: -self._brief[pair])
        best = max(near[:6], key=lambda pair: self._measured(self._deepest(*pair)))
        top = self._measured(self._deepest(*best))
        fastest = self._shallow(self._cheapest(best, _EQUAL * top))
        cheapest = self._shallow(self._cheapest(best, AS_FAST * top))
        if self._effort is not _EFFORTS[-1]:
            return Truth(best=replace(fastest, rate=top), cheapest=cheapest)
        return Truth(best=self._realised(fastest), cheapest=self._realised(cheapest))

    def _pairs(self) -> Iterable[tuple[int, int]]:
        remotes = sorted({n for n in _REMOTES if n <= self._nodes} | {self._nodes})
        locals_ = _LOCALS_BESIDE_REMOTE if self._nodes else range(_MOST_LOCAL + 1)
        return [(local, remote) for local in locals_ for remote in remotes]

    def _screen(self, pairs: Iterable[tuple[int, int]]) -> None:
        for pair in pairs:
            if pair not in self._brief and self._fits(pair):
                self._brief[pair] = self._rate(self._deepest(*pair), self._effort.brief, 0)

    def _cheapest(self, best: tuple[int, int], wanted: float) -> tuple[int, int]:
        limit = _NEAR * max(self._brief.values())
        by_cost = sorted((p for p in self._brief if self._brief[p] >= limit), key=lambda p: (sum(p), p[1]))
        found = next((p for p in by_cost[:_LONGS] if self._measured(self._deepest(*p)) >= wanted), best)
        while fewer := self._fewer(sum(found) - 1, limit, wanted):
            found = fewer
        return found

    def _fewer(self, workers: int, limit: float, wanted: float) -> tuple[int, int] | None:
        """A pair with so many workers that is as fast; for worlds with remote workers, whose grid is coarse."""
        if workers < 1 or not self._nodes:
            return None
        pairs = [(workers - remote, remote) for remote in range(min(self._nodes, workers) + 1)]
        pairs = [pair for pair in pairs if pair[0] <= _MOST_LOCAL and self._fits(pair)]
        self._screen(pairs)
        fast = [pair for pair in pairs if self._brief[pair] >= limit]
        return next((pair for pair in fast if self._measured(self._deepest(*pair)) >= wanted), None)

    def _shallow(self, pair: tuple[int, int]) -> Static:
        """The least depth that is as good as the deepest window."""
        deepest = self._deepest(*pair)
        rate = self._measured(deepest)
        depths = sorted({round(max(1, sum(pair)) * factor) for factor in _DEPTHS})
        tried = (replace(deepest, depth=depth) for depth in depths if depth < deepest.depth)
        settings = next((s for s in tried if self._measured(s) >= 0.99 * rate), deepest)
        return Static(settings=settings, rate=rate)

    # -- memory and depth ----------------------------------------------------------------------------------------------

    def _most_deep(self, local: int) -> int:
        world = self._world
        free = world.memory / world.ranks - local * world.worker_bytes
        return int(free / max([1.0, *(work.batch_bytes for work in self._work)]))

    def _fits(self, pair: tuple[int, int]) -> bool:
        return not sum(pair) or self._most_deep(pair[0]) >= 1

    def _deepest(self, local: int, remote: int) -> Settings:
        workers = local + remote
        if not workers:
            return Settings(depth=1)
        depth = min(max(16, self._effort.deep * workers), self._most_deep(local))
        return Settings(local=local, remote=remote, depth=depth)

    # -- measuring -----------------------------------------------------------------------------------------------------

    def _measured(self, settings: Settings) -> float:
        if settings not in self._long:
            seeds = range(1, self._effort.seeds + 1)
            self._long[settings] = fmean(self._rate(settings, self._effort.long, seed) for seed in seeds)
        return self._long[settings]

    def _realised(self, found: Static) -> Static:
        """With the rate that the very draws of the scenario allow: a few extreme ones may cost a tenth of it."""
        tried = Simulator(self._world, [Fixed(found.settings)] * self._world.ranks)
        tried.run(self._seconds)
        calm = min(self._seconds / 2, 30.0)
        return replace(found, rate=fmean(rank.history.rate(calm, self._seconds) for rank in tried.ranks))

    def _rate(self, settings: Settings, batches: int, seed: int) -> float:
        world = replace(self._world, seed=self._world.seed + 7919 * (seed + 1))
        tried = Simulator(world, [Fixed(settings)] * world.ranks)
        if len(world.phases) > 1:
            tried.run(self._seconds)
            return fmean(rank.history.rate(0.1 * self._seconds, self._seconds) for rank in tried.ranks)
        skipped = min(batches // 5 + 2 * settings.workers, batches // 2)
        while tried.loop.now < 600.0 and len(tried.ranks[0].history.delivered) < batches:
            tried.run(0.5)
        return fmean(_steady_rate(rank.history.delivered, skipped) for rank in tried.ranks)


def _steady_rate(delivered: Sequence[float], skipped: int) -> float:
    if len(delivered) < skipped + 2:
        return len(delivered) / 600.0
    return (len(delivered) - 1 - skipped) / (delivered[-1] - delivered[skipped])
