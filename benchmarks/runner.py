"""Rounds of measurements, contestants taking turns, and what they come to.

Within a round every contestant is measured once, in the order of the row and in the next round in the
reverse order, so that neither drift of the machine nor the place in the round favours one side.
"""

import json
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from statistics import median
from typing import Any

from benchmarks.cluster import two_raylets
from benchmarks.loaders import Contestant
from benchmarks.measure import Request
from benchmarks.process import MeasurementError, run_module
from benchmarks.rows import Row
from benchmarks.spread import Spread

TIME_LIMIT_S = 300


@dataclass(frozen=True, kw_only=True)
class Settings:
    """rounds: measurements of each contestant. window_s: seconds of one. passes: of the first-batch row.

    auto_rounds, auto_window_s: the same of the rows of "auto". screen_s: seconds of the short look at each fixed
    count there, after which only the best `finalists` of each engine (and torch with the number of cores) are
    measured; 0: all are measured.
    """

    rounds: int = 5
    window_s: float = 3.0
    passes: int = 15
    auto_rounds: int = 1
    auto_window_s: float = 20.0
    screen_s: float = 1.0
    finalists: int = 2

    @classmethod
    def quick(cls) -> "Settings":
        return cls(rounds=2, window_s=1.0, passes=5, auto_window_s=4.0, screen_s=0.3, finalists=1)


@dataclass(frozen=True, kw_only=True)
class Result:
    """A row's outcome.

    samples: per contestant, per round, the values measured (batches per second, or seconds to the first
    batch).
    """

    row: Row
    samples: dict[Contestant, tuple[tuple[float, ...], ...]]

    def per_round(self, contestant: Contestant) -> list[float]:
        """One value a round: the median of those taken in it."""
        return [median(values) for values in self.samples[contestant]]

    def spread(self, contestant: Contestant) -> Spread:
        return Spread.of(self.per_round(contestant))

    @property
    def ours(self) -> Contestant:
        return next(c for c in self.samples if c.engine.startswith("dpex"))

    @property
    def theirs(self) -> Contestant:
        """The best of torch's or of the hand-written, by median."""
        others = [c for c in self.samples if c.engine in ("torch", "actors")]
        pick = min if self.row.quantity == "first-batch" else max
        return pick(others, key=lambda c: self.spread(c).median)

    @property
    def comparison(self) -> Spread:
        """dpex beside the best of the others, round by round, in the terms of the row's target."""
        pairs = zip(self.per_round(self.ours), self.per_round(self.theirs), strict=True)
        if self.row.target.kind == "ratio":
            return Spread.of([ours / theirs for ours, theirs in pairs])
        return Spread.of([1000 * (ours - theirs) for ours, theirs in pairs])

    @property
    def limit_ratio(self) -> float | None:
        """dpex's median rate as a share of the limit's, where the row measures a limit."""
        limits = [c for c in self.samples if c.engine == "bare"]
        return self.spread(self.ours).median / self.spread(limits[0]).median if limits else None

    @property
    def met(self) -> bool:
        return self.row.target.met(self.comparison.median)


def run_row(row: Row, settings: Settings, say: Callable[[str], None]) -> Result:
    """All rounds of one row; `say` hears of each measurement. Raises MeasurementError."""
    samples: dict[Contestant, list[tuple[float, ...]]] = {c: [] for c in row.contestants}
    with two_raylets(row.remote_cpus) if row.remote_cpus else nullcontext() as address:
        for number in range(settings.rounds):
            for contestant in row.contestants[:: -1 if number % 2 else 1]:
                say(f"{row.key}, round {number + 1} of {settings.rounds}: {contestant.label}")
                samples[contestant].append(run_one(_request(row, contestant, settings, address)))
    return Result(row=row, samples={c: tuple(rounds) for c, rounds in samples.items()})


def _request(row: Row, contestant: Contestant, settings: Settings, address: str | None) -> Request:
    return Request(
        work=row.work,
        contestant=contestant,
        quantity=row.quantity,
        warm_up=row.warm_up,
        window_s=settings.window_s,
        count=row.count,
        passes=settings.passes,
        address=address,
    )


def run_one(request: Request) -> tuple[float, ...]:
    """The values of one measurement, made in a fresh process. Raises MeasurementError."""
    return tuple(measured(request))


def measured(request: Request, limit_s: float = TIME_LIMIT_S) -> Any:
    """What `benchmarks.measure` prints for the request, read as JSON. Raises MeasurementError."""
    try:
        return json.loads(run_module("benchmarks.measure", request.to_json(), limit_s).splitlines()[-1])
    except MeasurementError as error:
        raise MeasurementError(f"{request.contestant.label}: {error}") from error
