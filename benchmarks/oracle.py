"""The rows of `num_workers="auto"`: against every fixed number of workers, from a cold start, learning included.

The best of all fixed counts, torch's and dpex's, is the *oracle*. Fixed counts of dpex have `seeding="batch"`, which
is what "auto" has, so that they differ in the number of workers alone. A stall says something only under a consumer
that has a step of its own: without one every consumer waits all the time.

Everything here is pure; `autorunner` measures.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from statistics import median
from typing import Literal

from benchmarks.course import Course
from benchmarks.loaders import Contestant
from benchmarks.rows import Target
from benchmarks.spread import Spread

COUNTS = (0, 1, 2, 4, 8, 16, 32)
AUTO = Contestant(engine="dpex", workers="auto")


@dataclass(frozen=True, kw_only=True)
class AutoRow:
    """One row. step_s: what the consumer waits after each batch.

    counted: everybody takes the same number of batches, as many as the step allows in the window, in place of
    the same time: where the cost of a batch depends on its number.
    """

    key: str
    title: str
    work: str
    step_s: float = 0.0
    counted: bool = False

    def count(self, window_s: float) -> int | None:
        """Batches of a measurement of that length, in thirds; None: as many as fit."""
        return 3 * max(1, round(window_s / self.step_s / 3)) if self.counted else None


AUTO_ROWS = (
    AutoRow(key="auto-floats", title="5 floats, batch 1", work="endless-floats"),
    AutoRow(key="auto-small-images", title="28x28 images, batch 100", work="endless-small-images"),
    AutoRow(key="auto-jpeg", title="JPEG decode + random resized crop + normalise, batch 64", work="jpeg"),
    AutoRow(key="auto-large-batches", title="3x224x224 float32, batch 64 (38 MB)", work="endless-large-batches"),
    AutoRow(key="auto-wait", title="5 ms wait per sample, batch 16", work="wait"),
    AutoRow(
        key="auto-skewed-wait",
        title="log-normal wait per sample, mean 3 ms, batch 16, in order",
        work="skewed-wait",
    ),
    AutoRow(key="auto-jpeg-step", title="JPEG, batch 64, under a step of 30 ms", work="jpeg", step_s=0.030),
    AutoRow(
        key="auto-shift",
        title="1, then 8, then 2 ms wait per sample, batch 16, under a step of 20 ms",
        work="shifting-wait",
        step_s=0.020,
        counted=True,
    ),
)


def fixed_counts(cores: int) -> tuple[Contestant, ...]:
    """torch and dpex with every count; torch also with the number of cores, its users' usual guess."""
    torch = (Contestant(engine="torch", workers=count) for count in sorted({*COUNTS, cores}))
    dpex = (Contestant(engine="dpex", workers=count, seeding="batch") for count in COUNTS)
    return (*torch, *dpex)


def usual_guess(cores: int) -> Contestant:
    """torch with as many workers as there are cores."""
    return Contestant(engine="torch", workers=cores)


def picked(
    rates: Mapping[Contestant, float], *, most: int, near_ratio: float, always: Contestant
) -> tuple[Contestant, ...]:
    """Which fixed counts are measured at full length, in the order of `rates`.

    Of each engine the best, and up to `most` in all of those that reach `near_ratio` of it; `always` in any case.
    """
    chosen = {always}
    for engine in ("torch", "dpex"):
        ranked = sorted((c for c in rates if c.engine == engine), key=lambda c: -rates[c])[:most]
        chosen.update(c for c in ranked if rates[c] >= near_ratio * rates[ranked[0]])
    return (*(c for c in rates if c in chosen), *(() if always in rates else (always,)))


@dataclass(frozen=True, kw_only=True)
class AutoTarget:
    """What "auto" should reach beside one of the fixed counts.

    against: "oracle", the best of all; "usual", torch with the number of cores; "torch", torch's best count.
    or_stall: good enough as well, under a consumer with a step. where_dpex_leads: asked only where a fixed count
    of dpex is ahead of torch's best.
    """

    against: Literal["oracle", "usual", "torch"]
    rate: Target
    or_stall: Target | None = None
    where_dpex_leads: bool = False

    def __str__(self) -> str:
        return f"{self.rate}" + (f", or {self.or_stall}" if self.or_stall else "")


AUTO_TARGETS = (
    AutoTarget(against="oracle", rate=Target(kind="ratio", bound=0.9), or_stall=Target(kind="extra_stall", bound=1)),
    AutoTarget(against="usual", rate=Target(kind="lead", bound=1)),
    AutoTarget(against="torch", rate=Target(kind="lead", bound=1), where_dpex_leads=True),
)


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """ "auto" beside `other`, by round. extra_points: of stall, None for a consumer without a step.

    met: None where it is not asked.
    """

    target: AutoTarget
    other: Contestant
    ratio: Spread
    extra_points: Spread | None
    met: bool | None


@dataclass(frozen=True, kw_only=True)
class AutoResult:
    """A row's outcome: per contestant, the courses of all rounds.

    screened: batches per second of the short look at each fixed count; empty if all were measured at full length.
    failed: what could not be measured, and why.
    """

    row: AutoRow
    cores: int
    courses: Mapping[Contestant, tuple[Course, ...]]
    screened: Mapping[Contestant, float]
    failed: Mapping[Contestant, str]

    def rate(self, contestant: Contestant) -> Spread:
        """Batches per second, by round."""
        return Spread.of([course.rate for course in self.courses[contestant]])

    def stall(self, contestant: Contestant) -> float:
        """Median share of the consumer's time."""
        return median(course.stall for course in self.courses[contestant])

    def best(self, *engines: str) -> Contestant | None:
        """The fixed count of these engines with the highest median rate; None if none was measured."""
        fixed = [c for c in self.courses if c != AUTO and c.engine in engines]
        return max(fixed, key=lambda c: self.rate(c).median, default=None)

    @property
    def dpex_leads(self) -> bool:
        """Whether a fixed count of dpex is ahead of torch's best."""
        dpex, torch = self.best("dpex"), self.best("torch")
        return dpex is not None and torch is not None and self._ratio(dpex, torch).median > 1

    def _ratio(self, one: Contestant, other: Contestant) -> Spread:
        pairs = zip(self.courses[one], self.courses[other], strict=True)
        return Spread.of([mine.rate / theirs.rate for mine, theirs in pairs])

    def _extra_points(self, other: Contestant) -> Spread | None:
        if not self.row.step_s:
            return None
        pairs = zip(self.courses[AUTO], self.courses[other], strict=True)
        return Spread.of([100 * (mine.stall - theirs.stall) for mine, theirs in pairs])

    def _other(self, target: AutoTarget) -> Contestant | None:
        if target.against == "usual":
            usual = usual_guess(self.cores)
            return usual if usual in self.courses else None
        return self.best("torch") if target.against == "torch" else self.best("torch", "dpex")

    def verdict(self, target: AutoTarget) -> Verdict | None:
        """None if what it is measured against could not be measured."""
        other = self._other(target)
        if other is None:
            return None
        ratio, extra = self._ratio(AUTO, other), self._extra_points(other)
        good_stall = target.or_stall is not None and extra is not None and target.or_stall.met(extra.median)
        met: bool | None = target.rate.met(ratio.median) or good_stall
        if target.where_dpex_leads and not self.dpex_leads:
            met = None
        return Verdict(target=target, other=other, ratio=ratio, extra_points=extra, met=met)

    @property
    def verdicts(self) -> list[Verdict]:
        """On every target that can be judged."""
        found = (self.verdict(target) for target in AUTO_TARGETS)
        return [verdict for verdict in found if verdict is not None]
