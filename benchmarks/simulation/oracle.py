"""The best fixed setting of a world, found by trying them in the simulator with the very draws the controller gets.

Rates are over the whole of an interval, the start of workers included. A coarse grid of local and remote workers is
tried briefly; the best of it are played to the end, then their neighbours, ever closer, down to one worker. Fewer there
never are, as under ``num_workers="auto"``. The window is the deepest that memory allows, up to 32 batches a worker:
prefetch costs nothing here but memory.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean

from benchmarks.simulation.scenarios import Scenario, calm_from
from benchmarks.simulation.simulator import Simulator
from benchmarks.simulation.steering import Fixed
from dpex.measure.settings import Settings

AS_FAST = 0.975
"""The cheapest setting with this part of the best rate is what cost is measured against."""
MOST_LOCAL = 64
_COUNTS = (0, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
_REMOTES = (0, 1, 2, 4, 8, 16, 32, 64)
_DEEP = 32
"""Batches in flight per worker: as many as the controller takes at most."""
_LEAST_DEEP = 16
_BRIEF, _BRIEF_BATCHES = 0.05, 3000
"""The coarse grid is played for this part of an interval, and again for as much while there were fewer batches."""
_FLAT = 0.002
"""Rates that differ by less than this are equal."""
_NEAR, _MOST_NEAR = 0.9, 3
"""Of the grid, so many are played to the end that are so near to the best."""
_AS_NEAR = 0.95
"""The most workers of those so near are played to the end as well: what comes later may need more of them."""
_Pair = tuple[int, int]


@dataclass(frozen=True, kw_only=True)
class Static:
    """A fixed setting with its rate over an interval and over the calm part of it: batches per second and rank."""

    settings: Settings
    rate: float
    settled_rate: float


@dataclass(frozen=True, kw_only=True)
class Truth:
    """Of one interval: the fastest fixed setting; the cheapest that is nearly as fast; the best rate when settled."""

    best: Static
    cheapest: Static
    settled_rate: float


def truths(scenario: Scenario, *, with_cheapest: bool = True) -> list[Truth]:
    """Search each interval of a scenario, with the best fixed settings of the earlier ones up to where it begins.

    Without ``with_cheapest`` the best is given as the cheapest, which saves a third of the time.
    """
    found: list[Truth] = []
    for start, end in scenario.intervals():
        before = [(at, truth.best.settings) for at, truth in zip(scenario.judged_at, found, strict=False)]
        search = Search(scenario, start, end, before)
        best = search.best()
        cheapest = search.cheapest(best) if with_cheapest else best
        settled = max(static.settled_rate for static in search.played.values())
        found.append(Truth(best=best, cheapest=cheapest, settled_rate=settled))
    return found


class Search:
    """One interval; ``played`` holds what was played to the end, by local and remote workers.

    before: the settings of earlier intervals, and when each begins.
    """

    def __init__(
        self, scenario: Scenario, start: float, end: float, before: Sequence[tuple[float, Settings]] = ()
    ) -> None:
        world, config = scenario.world, scenario.config
        self._world, self._start, self._end, self._before = world, start, end, before
        self._calm = calm_from(world, start, end)
        phases = scenario.phases_of(start, end)
        self._bytes = max([1.0, *(phase.work.batch_bytes for phase in phases if phase.work is not None)])
        nodes = max((phase.nodes for phase in phases if phase.nodes is not None), default=0) // world.ranks
        self._least = config.min_local, config.min_remote
        self._locals = MOST_LOCAL if config.max_local is None else min(MOST_LOCAL, config.max_local)
        self._nodes = nodes if config.max_remote is None else min(nodes, config.max_remote)
        self._prefetch = config.max_prefetch or math.inf
        self._brief: dict[_Pair, float] = {}
        self.played: dict[_Pair, Static] = {}

    def best(self) -> Static:
        """From coarse to fine, until a step to either side changes next to nothing."""
        near = self._nearest()
        top = max(near, key=self._rate)
        step = max(1, self._gap(top) // 2)
        while True:
            around = self._around(top, step)
            rate, top = self._rate(top), max((top, *around), key=self._rate)
            is_flat = all(abs(self._rate(pair) - rate) <= _FLAT * rate for pair in around)
            if is_flat or (step == 1 and self._rate(top) == rate):
                return self.played[top]
            step = max(1, step // 2)

    def everything(self) -> Static:
        """The best of all pairs, each played to the end."""
        pairs = [(local, remote) for local in range(self._locals + 1) for remote in range(self._nodes + 1)]
        return self.played[max(filter(self._fits, pairs), key=self._rate)]

    def cheapest(self, best: Static) -> Static:
        """The fewest workers that are nearly as fast, by bisection: more workers are seldom slower below the best."""
        wanted = AS_FAST * best.rate
        pair = best.settings.local, best.settings.remote
        for remote in sorted({max(self._least[1], n) for n in (0, pair[1] // 2, pair[1])}):
            local = self._fewest(remote, sum(pair) - remote, wanted)
            if local is not None and local + remote < sum(pair):
                pair = local, remote
        remote = self._fewest_remote(pair, wanted)
        return self.played[pair[0], remote]

    # -- the grid ------------------------------------------------------------------------------------------------------

    def _nearest(self) -> list[_Pair]:
        grid = [pair for pair in self._grid() if self._fits(pair)]
        for pair in grid:
            self._brief[pair] = self._look(pair)
        top = max(self._brief.values())
        near = [pair for pair in grid if self._brief[pair] >= _NEAR * top]
        most = max((pair for pair in near if self._brief[pair] >= _AS_NEAR * top), key=sum)
        return [*sorted(near, key=lambda pair: (-self._brief[pair], sum(pair)))[:_MOST_NEAR], most]

    def _grid(self) -> Iterator[_Pair]:
        remotes = sorted({n for n in _REMOTES if n <= self._nodes} | {self._nodes, self._least[1]})
        for remote in remotes:
            counts = sorted({*(_COUNTS if remote in (0, self._nodes) else _COUNTS[::2]), self._least[0], self._locals})
            yield from ((local, remote) for local in counts if local <= self._locals)

    @staticmethod
    def _gap(pair: _Pair) -> int:
        """How far the next of the grid is."""

        def gap(counts: tuple[int, ...], at: int) -> int:
            return max((b - a for a, b in pairwise(counts) if a <= at <= b), default=1)

        return max(gap(_COUNTS, pair[0]), gap(_REMOTES, pair[1]))

    def _around(self, pair: _Pair, step: int) -> Iterable[_Pair]:
        local, remote = pair
        moves = [(local + step, remote), (local - step, remote)]
        if self._nodes:
            moves += [(local, remote + step), (local, remote - step), (local - step, remote + step)]
            moves += [(local + step, remote - step)]
        return [to for to in moves if self._fits(to)]

    def _fewest(self, remote: int, most: int, wanted: float) -> int | None:
        low, high = max(self._least[0], int(not remote)), min(most, self._locals)
        if high < low or not self._fits((high, remote)) or self._rate((high, remote)) < wanted:
            return None
        while low < high:
            middle = (low + high) // 2
            low, high = (low, middle) if self._rate((middle, remote)) >= wanted else (middle + 1, high)
        return low

    def _fewest_remote(self, pair: _Pair, wanted: float) -> int:
        low, high = max(self._least[1], int(not pair[0])), pair[1]
        while low < high:
            middle = (low + high) // 2
            low, high = (low, middle) if self._rate((pair[0], middle)) >= wanted else (middle + 1, high)
        return low

    # -- playing -------------------------------------------------------------------------------------------------------

    def _rate(self, pair: _Pair) -> float:
        return self._play(pair).rate

    def _play(self, pair: _Pair) -> Static:
        if pair not in self.played:
            self.played[pair] = self.simulate(self.deepest(*pair), self._end)
        return self.played[pair]

    def _look(self, pair: _Pair) -> float:
        """Roughly the rate: from a part of the interval where batches are many, from all of it where they are few."""
        part_s = _BRIEF * (self._end - self._start)
        tried = self._begun(self.deepest(*pair))
        while tried.loop.now < self._end - part_s / 2:
            tried.run(part_s)
            if sum(rank.history.count(self._start, tried.loop.now) for rank in tried.ranks) >= _BRIEF_BATCHES:
                break
        return fmean(rank.history.rate(self._start, tried.loop.now) for rank in tried.ranks)

    def simulate(self, settings: Settings, end: float) -> Static:
        """Play up to ``end`` with settings from the beginning of the interval on."""
        tried = self._begun(settings)
        tried.run(end - tried.loop.now)
        whole, calm = (fmean(rank.history.rate(at, end) for rank in tried.ranks) for at in (self._start, self._calm))
        return Static(settings=settings, rate=whole, settled_rate=calm if end > self._calm else 0.0)

    def _begun(self, settings: Settings) -> Simulator:
        """At the beginning of the interval, with these settings from now on."""
        plan = [*self._before, (self._start, settings)]
        tried = Simulator(self._world, [Fixed(plan[0][1])] * self._world.ranks, is_tuned=False)
        for at, each in plan[1:]:
            tried.run(at - tried.loop.now)
            tried.set(each)
        return tried

    def deepest(self, local: int, remote: int) -> Settings:
        """That many workers with as many batches in flight as memory allows."""
        workers = local + remote
        return Settings(
            local=local, remote=remote, prefetch=max(1, min(max(_LEAST_DEEP, _DEEP * workers), self._room(local)))
        )

    def _fits(self, pair: _Pair) -> bool:
        if not (self._least[0] <= pair[0] <= self._locals and self._least[1] <= pair[1] <= self._nodes):
            return False
        return sum(pair) > 0 and (self._room(pair[0]) >= 1 or pair == (1, 0))

    def _room(self, local: int) -> int:
        """Batches that have room in memory beside these workers."""
        world = self._world
        return int(min(self._prefetch, (world.memory / world.ranks - local * world.worker_bytes) / self._bytes))
