"""How good the controller is: every scenario, against the best static setting. `python -m benchmarks.simulation`.

An interval of a scenario has two parts: settling (half of it, at most half a minute beyond the start of workers) and
the calm after it. Rates, workers and changes are judged in the calm, time and decisions while settling; memory always.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from statistics import fmean

from benchmarks.simulation.history import History
from benchmarks.simulation.oracle import Static, Truth, truths
from benchmarks.simulation.scenarios import HOLDS, Scenario
from benchmarks.simulation.simulator import simulate
from benchmarks.simulation.steering import Steering
from dpex.autotune.config import AutotuneConfig
from dpex.autotune.controller import Controller
from dpex.autotune.types import Settings

MOST_REGRET = 0.05
MOST_DECISIONS = 3
MOST_EXCESS = 0.10
SETTLED = 0.95
SETTLE_S = 5.0
SETTLE_BATCHES = 50
_SETTLING_S = 30.0
_LOOK_S = 2.0
_GRAIN_S = 0.1
_COLUMNS = "{:26} {:28} {:>7} {:>7} {:>7} {:>13} {:>4} {:>13} {:>6} {:>4}  {}"


def cold_start(cpus: float) -> Settings:
    """What a loader begins with when nothing is known yet."""
    workers = min(4, int(cpus))
    return Settings(local=workers, depth=2 * workers)


@dataclass(frozen=True, kw_only=True)
class Score:
    """One interval. Rates are batches per second and rank, times seconds.

    regret: 1 - rate / best rate. settle_s: from when workers could be there until the rate is, and stays, within 5 %
    of the final one; it may take ``settle_allowed_s``. decisions: while settling, by the busiest rank. workers: the
    mean in the calm; excess: by which part that is more than the cheapest static setting's. changes: of the number of
    workers, per ten minutes of calm, by the busiest rank. over_bytes: by how much memory was exceeded.
    """

    start: float
    end: float
    best: Static
    cheapest: Static
    rate: float
    settle_s: float
    settle_allowed_s: float
    decisions: int
    workers: float
    changes: float
    over_bytes: float

    @property
    def regret(self) -> float:
        """See the class."""
        return 1.0 - self.rate / self.best.rate

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
    """What the controller did in a scenario, rank by rank, and how good that was, interval by interval."""

    scenario: Scenario
    histories: Sequence[History]
    scores: Sequence[Score]

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


def play(scenario: Scenario, steering: Callable[[], Steering] | None = None, seed: int = 0) -> Result:
    """Let the controller, or whatever ``steering`` makes for each rank, loose on a scenario. With a ``seed`` the draws
    are others than those of the best static settings kept, which are as good on average.

    Raises:
        StaleOracleError: the best static settings kept are not of this simulator and this scenario.
    """
    found = truths(scenario)
    world = replace(scenario.world, seed=scenario.world.seed + seed)
    start = cold_start(world.cpus / world.ranks)
    steer = steering or (lambda: Controller(AutotuneConfig(), start))
    histories = simulate(world, [steer() for _ in range(world.ranks)], scenario.seconds)
    pairs = zip(scenario.intervals(), found, strict=True)
    return Result(scenario, histories, [_score(scenario, histories, *span, truth) for span, truth in pairs])


def _score(scenario: Scenario, histories: Sequence[History], start: float, end: float, truth: Truth) -> Score:
    world = scenario.world
    startup = world.actor_s if truth.cheapest.settings.remote else world.fork_s
    there = start + startup
    calm = start + min((end - start) / 2, _SETTLING_S + startup)
    rate = fmean(history.rate(calm, end) for history in histories)
    held = [mark.settings.workers for history in histories for mark in history.marks if calm < mark.at <= end]
    decisions = max(sum(start <= d.at < calm for d in history.decisions) for history in histories)
    return Score(
        start=start,
        end=end,
        best=truth.best,
        cheapest=truth.cheapest,
        rate=rate,
        settle_s=_settled_at(histories, there, calm, rate) - there,
        settle_allowed_s=max(SETTLE_S, SETTLE_BATCHES / max(1e-9, rate)),
        decisions=decisions,
        workers=fmean(held),
        changes=max(_changes(history, calm, end) for history in histories) / (end - calm) * 600.0,
        over_bytes=_most_memory(histories, start + scenario.memory_grace_s, end) - world.memory,
    )


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


def _most_memory(histories: Sequence[History], start: float, end: float) -> float:
    """Of all ranks together; their windows are the same."""
    total: dict[float, float] = {}
    for history in histories:
        for mark in history.marks:
            total[mark.at] = total.get(mark.at, 0.0) + mark.memory
    return max(held for at, held in total.items() if start < at <= end)


# -- showing -----------------------------------------------------------------------------------------------------------


def table(results: Sequence[Result]) -> Iterator[str]:
    """Lines for people: one an interval, then totals."""
    heads = ("regret", "settle", "dec.", "workers/least", "chg/10", "mem")
    yield _COLUMNS.format("scenario", "best static", "rate", "auto", *heads, "missed")
    for result in results:
        for number, score in enumerate(result.scores):
            yield _row(result, score, number)
    yield from _totals(results)


def _row(result: Result, score: Score, number: int) -> str:
    name = result.scenario.name if not number else f"  from {score.start:g} s"
    missed = [hold if hold in result.scenario.holds else f"({hold})" for hold in score.missed()]
    return _COLUMNS.format(
        name,
        str(score.best.settings),
        f"{score.best.rate:.1f}",
        f"{score.rate:.1f}",
        f"{score.regret * 100:.1f} %",
        f"{score.settle_s:.1f}/{score.settle_allowed_s:.1f} s",
        score.decisions,
        f"{score.workers:.2f}/{score.cheapest.settings.workers}",
        f"{score.changes:.1f}",
        "OVER" if score.over_bytes > 0 else "ok",
        " ".join(missed),
    ).rstrip()


def _totals(results: Sequence[Result]) -> Iterator[str]:
    scores = [score for result in results for score in result.scores]
    met = sum(not result.missed() for result in results)
    yield ""
    yield f"{met} of {len(results)} scenarios met all that they hold to ({len(scores)} intervals)"
    misses = [name for result in results for name in result.missed()]
    held = [name for result in results for name in result.scenario.holds]
    yield "missed: " + ", ".join(f"{name} {misses.count(name)} of {held.count(name)}" for name in HOLDS)
    regrets = [100 * score.regret for score in scores]
    used, least = sum(s.workers for s in scores), sum(s.cheapest.settings.workers for s in scores)
    yield f"regret: mean {fmean(regrets):.1f} %, worst {max(regrets):.1f} %; workers: {used:.0f}, {least} would do"


def decisions(result: Result) -> Iterator[str]:
    """Lines for people: what was decided, why, and what it brought."""
    for rank, history in enumerate(result.histories):
        who = f"rank {rank} " if len(result.histories) > 1 else ""
        for decision in history.decisions:
            yield f"    {who}{decision.at:7.2f} s  {decision.reason}: {decision.text}"


def plain(result: Result) -> dict[str, object]:
    """For programs."""
    scores = [{**asdict(s), "regret": s.regret, "excess": s.excess} for s in result.scores]
    return {"scenario": result.scenario.name, "missed": result.missed(), "intervals": scores}
