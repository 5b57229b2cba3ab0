"""What the measurements of a row come to: medians, ratios within a round, the best of each side, the oracle.

Pure. A ratio is taken between two courses of the same round and quoted as median and range over the rounds. The best
count of a side is the one with the highest median; the *oracle* is the best of all fixed counts of torch and dpex,
with every seeding and prefetch factor that was measured. "whole" is the rate over the whole course, start-up and
learning included; "settled" that of its second half.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Literal

from benchmarks.contestants import AUTO, LOCAL, RIVALS, Contestant
from benchmarks.course import Course
from benchmarks.journal import Measurement
from benchmarks.rows import BY_KEY, Row

Part = Literal["whole", "settled"]
Seeding = Literal["worker", "batch"]
SHOWN_DIGITS = 2
"""A ratio counts as behind if it is less than 1 as it is printed."""


@dataclass(frozen=True, kw_only=True)
class Spread:
    """Median and extremes of some values: how every figure is quoted."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> "Spread":
        """Of at least one value. Raises statistics.StatisticsError when there is none."""
        return cls(median=median(values), low=min(values), high=max(values))


@dataclass(frozen=True, kw_only=True)
class RowResult:
    """The courses of a row by contestant and round, and why some are missing."""

    row: Row
    cores: int
    courses: Mapping[Contestant, Mapping[int, Course]]
    failed: Mapping[Contestant, str]

    def rate(self, contestant: Contestant, part: Part = "whole") -> Spread:
        """Batches per second, by round."""
        return Spread.of([_rate(course, part) for course in self.courses[contestant].values()])

    def waiting(self, contestant: Contestant) -> Spread:
        """Share of the consumer's time in `iter()` and `next()`, by round."""
        return Spread.of([course.waiting for course in self.courses[contestant].values()])

    def memory_bytes(self, contestant: Contestant) -> float | None:
        """Median memory of all processes; None where it was not measured."""
        found = [course.memory_bytes for course in self.courses[contestant].values() if course.memory_bytes]
        return median(found) if found else None

    def batch_cpu_s(self, contestant: Contestant) -> float | None:
        """Median processor time of a batch, of all processes; None where it was not measured."""
        found = [course.batch_cpu_s for course in self.courses[contestant].values() if course.batch_cpu_s]
        return median(found) if found else None

    def gpu_stall(self, contestant: Contestant) -> Spread | None:
        """Share of the time in which the GPU's stream waited for data; None without a GPU."""
        courses = self.courses[contestant].values()
        found = [one.gpu_stall_s / one.seconds for one in courses if one.gpu_stall_s is not None]
        return Spread.of(found) if found else None

    def ratio(
        self, one: Contestant | None, other: Contestant | None, part: Part = "whole", other_part: Part | None = None
    ) -> Spread | None:
        """One's rate over the other's within each round; None if there is no round in which both got batches.

        other_part: the part of the other's course, if it is not the same.
        """
        mine, theirs = self.courses.get(one, {}), self.courses.get(other, {})  # type: ignore[arg-type]
        part_of_other = other_part or part
        rounds = [number for number in sorted(set(mine) & set(theirs)) if _rate(theirs[number], part_of_other)]
        return Spread.of([_rate(mine[n], part) / _rate(theirs[n], part_of_other) for n in rounds]) if rounds else None

    def cpu_ratio(self, one: Contestant, other: Contestant) -> Spread | None:
        """One's processor time per batch over the other's within each round, where it was long enough to be told."""
        mine, theirs = self.courses.get(one, {}), self.courses.get(other, {})
        pairs = [(mine[n].batch_cpu_s, theirs[n].batch_cpu_s) for n in sorted(set(mine) & set(theirs))]
        found = [own_s / other_s for own_s, other_s in pairs if own_s and other_s]
        return Spread.of(found) if found else None

    def to_oracle(self, part: Part) -> Spread | None:
        """The rate of "auto" over that of the oracle after its start.

        whole: with all of its learning, over a longer course than the oracle's, whose start is therefore left out.
        Where everybody's course has the same length, the same part of both is compared.
        """
        theirs = part if self.row.same_length else "settled"
        return self.ratio(AUTO, self.oracle(theirs), part, theirs)

    def fixed(self, *engines: str) -> list[Contestant]:
        """Those of these engines that were measured with a synchronous dataset, but for "auto" of dpex."""
        return [one for one in self.courses if one.engine in engines and one.form is None and one != AUTO]

    def best_of(self, contestants: Iterable[Contestant], part: Part = "whole") -> Contestant | None:
        """The one with the highest median rate; None if there is none."""
        return max(contestants, key=lambda one: self.rate(one, part).median, default=None)

    def best(self, engine: str, seeding: Seeding | None = None, part: Part = "whole") -> Contestant | None:
        """The best fixed count of an engine with that seeding and any prefetch factor."""
        return self.best_of((one for one in self.fixed(engine) if one.seeding == seeding), part)

    def at_cores(self, engine: str, seeding: Seeding | None = None) -> Contestant | None:
        """As many workers as cores, the usual guess."""
        found = Contestant(engine=engine, workers=self.cores, seeding=seeding)
        return found if found in self.courses else None

    def oracle(self, part: Part = "whole") -> Contestant | None:
        """The best of all fixed counts of torch and dpex."""
        return self.best_of(self.fixed(*LOCAL), part)

    def best_rivals(self, *others: str) -> list[Contestant]:
        """Of each rival, and of other engines, its best setting by form, the fastest first; of dpex "auto" as well."""
        groups: dict[tuple[str, str | None, bool], list[Contestant]] = defaultdict(list)
        for one in self.courses:
            if one.engine in (*others, *RIVALS):
                groups[one.engine, one.form, one.engine == "dpex" and one.workers == "auto"].append(one)
        found = [best for group in groups.values() if (best := self.best_of(group)) is not None]
        return sorted(found, key=lambda one: -self.rate(one).median)

    def best_dpex(self) -> Contestant | None:
        """The best of dpex, "auto", every seeding and every form included: what stands beside the rivals."""
        return self.best_of(one for one in self.courses if one.engine in ("dpex", "dpex-remote"))

    @property
    def seedings(self) -> list[Seeding | None]:
        """Those that dpex was measured with: the default, and "batch" where it was."""
        return [None, *(["batch"] if any(one.seeding == "batch" for one in self.courses) else [])]  # type: ignore[list-item]


def results_of(measurements: Iterable[Measurement], cores: int) -> dict[str, RowResult]:
    """By row. A course measured again replaces the earlier one; what failed and was never made up for is noted."""
    courses: dict[str, dict[Contestant, dict[int, Course]]] = defaultdict(lambda: defaultdict(dict))
    failed: dict[str, dict[Contestant, dict[int, str]]] = defaultdict(lambda: defaultdict(dict))
    for one in measurements:
        if one.course is None:
            failed[one.row][one.contestant][one.round] = one.error or "unknown"
        else:
            courses[one.row][one.contestant][one.round] = one.course
            failed[one.row][one.contestant].pop(one.round, None)
    rows = dict.fromkeys((*courses, *failed))
    return {
        key: RowResult(
            row=BY_KEY[key],
            cores=cores,
            courses={contestant: dict(sorted(rounds.items())) for contestant, rounds in courses[key].items()},
            failed={contestant: whys[max(whys)] for contestant, whys in failed[key].items() if whys},
        )
        for key in rows
        if key in BY_KEY
    }


def is_behind(*ratios: Spread | None) -> bool:
    """Whether any of them, as it is printed, is less than 1."""
    return any(ratio is not None and round(ratio.median, SHOWN_DIGITS) < 1 for ratio in ratios)


def _rate(course: Course, part: Part) -> float:
    return course.rate if part == "whole" else course.settled_rate
