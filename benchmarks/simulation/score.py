"""How good a controller was in a scenario, interval by interval, beside the best fixed setting with the same draws.

Regret is judged over the whole of an interval, start and learning included. An interval has two parts: settling (half
of it, at most half a minute beyond the start of workers) and the calm after it. Workers and changes are judged in the
calm, and regret a second time; time and decisions while settling; memory and limits always.
"""

from __future__ import annotations

import traceback
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from statistics import fmean

from benchmarks.simulation.history import History
from benchmarks.simulation.oracle import Search, Static, Truth
from benchmarks.simulation.scenarios import Scenario, calm_from
from benchmarks.simulation.simulator import simulate
from benchmarks.simulation.steering import Steering
from benchmarks.simulation.world import World
from dpex.autotune.config import AutotuneConfig, limits_of
from dpex.autotune.law.law import start as law_start
from dpex.autotune.supervisor import Supervisor
from dpex.autotune.types import Decision
from dpex.measure.reading import Reading
from dpex.measure.settings import Settings

MOST_REGRET = 0.05
MOST_DECISIONS = 3
MOST_EXCESS = 0.10
SETTLED = 0.95
SETTLE_S = 5.0
SETTLE_BATCHES = 50
UNBEATEN = 0.01
"""Better than the best fixed setting by more than this: either the search missed one, or settings that change are
better here than any that stay. What the controller held is played as a fixed setting, to tell which."""
_HELD = 0.1
"""Part of an interval for which a setting must have been held to be played so."""
_MISSED = 0.005
_LOOK_S = 2.0
_GRAIN_S = 0.1


def cold_start(world: World, config: AutotuneConfig | None = None) -> Settings:
    """What a loader begins with when nothing is known yet, within its limits."""
    return law_start(limits_of(config or AutotuneConfig()), world.cpus / world.ranks, memory=world.memory / world.ranks)


@dataclass(frozen=True, kw_only=True)
class Score:
    """One interval. Rates are batches per second and rank, times seconds.

    regret: 1 - rate / best rate, over all of it; settled_regret: in the calm, where another fixed setting may be best.
    settle_s: from when workers could be there until the rate is, and stays, within 5 %
    of the final one; it may take ``settle_allowed_s``. decisions: while settling, by the busiest rank. workers: the
    mean in the calm; excess: by which part that is more than the cheapest static setting's. changes: of the number of
    workers, per ten minutes of calm, by the busiest rank. over_bytes: by how much memory was exceeded.
    """

    start: float
    end: float
    best: Static
    cheapest: Static
    rate: float
    settled_rate: float
    best_settled_rate: float
    settle_s: float
    settle_allowed_s: float
    decisions: int
    workers: float
    changes: float
    over_bytes: float

    @property
    def regret(self) -> float:
        """See the class."""
        return 1.0 - self.rate / self.best.rate if self.best.rate else 0.0

    @property
    def settled_regret(self) -> float:
        """See the class."""
        return 1.0 - self.settled_rate / self.best_settled_rate if self.best_settled_rate else 0.0

    @property
    def excess(self) -> float:
        """See the class; beside a cheapest setting without workers each worker counts as 100 %."""
        cheapest = self.cheapest.settings.workers
        return (self.workers - cheapest) / max(1, cheapest)

    def figures(self) -> dict[str, float]:
        """What each target is about, as a number that is better the smaller it is."""
        return {
            "regret": self.regret,
            "settle": self.settle_s,
            "decisions": self.decisions,
            "cost": self.excess,
            "oscillation": self.changes,
            "memory": self.over_bytes,
        }

    def missed(self) -> dict[str, str]:
        """Targets missed, and the figure."""
        excess = f"{self.workers:.2f} workers, {self.cheapest.settings.workers} would do"
        checks = {
            "regret": (self.regret <= MOST_REGRET, f"regret {self.regret * 100:.1f} %"),
            "settle": (self.settle_s <= self.settle_allowed_s, f"settled after {self.settle_s:.1f} s"),
            "decisions": (self.decisions <= MOST_DECISIONS, f"{self.decisions} decisions"),
            "cost": (self.excess <= MOST_EXCESS + 1e-9, excess),
            "oscillation": (self.changes == 0, f"{self.changes:.1f} changes in 10 min"),
            "memory": (self.over_bytes <= 0, f"{self.over_bytes / 1e6:.0f} MB too much"),
        }
        return {name: figure for name, (met, figure) in checks.items() if not met}


@dataclass(frozen=True)
class Result:
    """What the controller did in a scenario, rank by rank, and how good that was, interval by interval.

    errors: what it raised. beyond: limits that it surpassed, and when. doubts: fixed settings that are better than the
    best that the search had found; the scores are beside these.
    """

    scenario: Scenario
    histories: Sequence[History]
    scores: Sequence[Score]
    errors: Sequence[str] = ()
    beyond: Sequence[str] = ()
    doubts: Sequence[str] = ()

    @property
    def gain(self) -> float:
        """Of the whole run: by which part more was delivered than the best fixed settings would have; less is below 0.

        Settings that follow the work can be better than any that stay.
        """
        best = sum(score.best.rate * (score.end - score.start) for score in self.scores)
        return sum(score.rate * (score.end - score.start) for score in self.scores) / best - 1.0 if best else 0.0

    @property
    def regret(self) -> float:
        """Of the whole run: what the best fixed setting of each interval would have delivered, and was not.

        Never below 0, so that a world in which settings that change are better makes up for no loss in another.
        """
        return max(0.0, -self.gain)

    @property
    def settled_regret(self) -> float:
        """Of the worst interval."""
        return max(score.settled_regret for score in self.scores)

    @property
    def decisions(self) -> int:
        """While settling, in the interval with most."""
        return max(score.decisions for score in self.scores)

    @property
    def settle_s(self) -> float:
        """In the interval that took longest."""
        return max(score.settle_s for score in self.scores)

    def missed(self) -> dict[str, str]:
        """Targets that the scenario holds to and some interval missed; the first figure of each."""
        missed: dict[str, str] = {}
        for score in self.scores:
            where = f" from {score.start:g} s on" if len(self.scores) > 1 else ""
            for name, figure in score.missed().items():
                if name in self.scenario.holds:
                    missed.setdefault(name, figure + where)
        return missed


# -- judging -----------------------------------------------------------------------------------------------------------


class Guarded:
    """A steering whose exceptions are kept, and end it."""

    def __init__(self, steering: Steering) -> None:
        self._steering = steering
        self.errors: list[str] = []

    def begin(self) -> Settings:
        """See `Steering.begin`."""
        return self._steering.begin()

    def step(self, window: Reading) -> Decision | None:
        """See `Steering.step`."""
        if self.errors:
            return None
        try:
            return self._steering.step(window)
        except Exception as error:  # whatever it is, it is a finding
            where = traceback.extract_tb(error.__traceback__)[-1]
            self.errors.append(
                f"{type(error).__name__}: {error} ({where.name}, line {where.lineno}) at {window.at:g} s"
            )
            return None


def play(scenario: Scenario, truths: Sequence[Truth], steering: Callable[[], Steering] | None = None) -> Result:
    """Let the law, or whatever ``steering`` makes for each rank, loose on a scenario."""
    world = scenario.world
    start = cold_start(world, scenario.config)
    steer = steering or (lambda: Supervisor(scenario.config, start))
    ranks = [Guarded(steer()) for _ in range(world.ranks)]
    histories = simulate(world, ranks, scenario.seconds, scenario.config.interval_s)
    scores = _scores(scenario, histories, truths)
    better, doubts = _challenged(scenario, histories, truths, scores)
    errors = [error for rank in ranks for error in rank.errors]
    scores = _scores(scenario, histories, better) if doubts else scores
    return Result(scenario, histories, scores, errors, _beyond(scenario, histories), doubts)


def _scores(scenario: Scenario, histories: Sequence[History], truths: Sequence[Truth]) -> list[Score]:
    pairs = zip(scenario.intervals(), truths, strict=True)
    return [_score(scenario, histories, *span, truth) for span, truth in pairs]


def _challenged(
    scenario: Scenario, histories: Sequence[History], truths: Sequence[Truth], scores: Sequence[Score]
) -> tuple[list[Truth], list[str]]:
    """The truths, or better ones where the controller itself held a better fixed setting than the search had found."""
    found, doubts = list(truths), []
    for number, score in enumerate(scores):
        if score.regret > -UNBEATEN:
            continue
        before = [(at, truth.best.settings) for at, truth in zip(scenario.judged_at, truths[:number], strict=False)]
        search = Search(scenario, score.start, score.end, before)
        held = [search.simulate(settings, score.end) for settings in _held(histories[0], score.start, score.end)]
        top = max(held, key=lambda static: static.rate, default=score.best)
        if top.rate > (1.0 + _MISSED) * score.best.rate:
            doubts.append(f"{top.settings} makes {top.rate:.4g}/s, the best that was found {score.best.rate:.4g}/s")
            found[number] = replace(truths[number], best=top)
    return found, doubts


def _held(history: History, start: float, end: float) -> list[Settings]:
    """Settings that were held for a while."""
    seconds: dict[Settings, float] = {}
    for mark in history.marks:
        if start < mark.at <= end:
            seconds[mark.settings] = seconds.get(mark.settings, 0.0) + mark.seconds
    return [settings for settings, held_s in seconds.items() if held_s >= _HELD * (end - start)]


def _score(scenario: Scenario, histories: Sequence[History], start: float, end: float, truth: Truth) -> Score:
    world = scenario.world
    there = start + (world.actor_s if truth.cheapest.settings.remote else world.fork_s)
    calm = calm_from(world, start, end)
    settled_rate = fmean(history.rate(calm, end) for history in histories)
    held = [mark for history in histories for mark in history.marks if calm < mark.at <= end]
    held_s = sum(mark.seconds for mark in held)
    return Score(
        start=start,
        end=end,
        best=truth.best,
        cheapest=truth.cheapest,
        rate=fmean(history.rate(start, end) for history in histories),
        settled_rate=settled_rate,
        best_settled_rate=truth.settled_rate,
        settle_s=max(0.0, _settled_at(histories, there, calm, settled_rate) - there),
        settle_allowed_s=max(SETTLE_S, SETTLE_BATCHES / max(1e-9, settled_rate)),
        decisions=max(sum(start <= d.at < calm for d in history.decisions) for history in histories),
        workers=sum(mark.settings.workers * mark.seconds for mark in held) / held_s if held else 0.0,
        changes=max(_changes(history, calm, end) for history in histories) / (end - calm) * 600.0,
        over_bytes=histories[0].machine_bytes.most(start + scenario.memory_grace_s, end) - world.memory,
    )


def _beyond(scenario: Scenario, histories: Sequence[History]) -> list[str]:
    """Limits that were surpassed: those of the configuration, the memory, and what the cluster has room for."""
    config = scenario.config
    most = {"local": config.max_local, "remote": config.max_remote, "prefetch": config.max_prefetch}
    found = []
    for history in histories:
        for decision in history.decisions:
            for name, limit in most.items():
                if limit is not None and getattr(decision.new, name) > limit:
                    found.append(f"{getattr(decision.new, name)} {name} of {limit} at {decision.at:g} s")
        found += [f"{d.new.remote} remote, beyond the cluster's room, at {d.at:g} s" for d in history.beyond_room]
    for start, end in scenario.intervals():
        over = histories[0].machine_bytes.most(start + scenario.memory_grace_s, end) - scenario.world.memory
        if over > 0:
            found.append(f"{over / 1e6:.0f} MB beyond the memory after {start:g} s")
    return found


def _settled_at(histories: Sequence[History], there: float, calm: float, rate: float) -> float:
    """From when on the next fifty batches, and all until the calm, come at nearly the final rate."""
    delivered = sorted(at for history in histories for at in history.delivered)
    wanted = SETTLED * rate * len(histories)
    look = max(_LOOK_S, SETTLE_BATCHES / max(1e-9, wanted))
    at = there
    while at < calm:
        ends = (min(at + look, calm), calm)
        if all(bisect_right(delivered, e) - bisect_right(delivered, at) + 1 >= wanted * (e - at) for e in ends):
            return at
        at += _GRAIN_S
    return calm


def _changes(history: History, start: float, end: float) -> int:
    decided = [decision for decision in history.decisions if start <= decision.at < end]
    return sum((d.old.local, d.old.remote) != (d.new.local, d.new.remote) for d in decided)
