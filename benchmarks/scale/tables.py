"""The tables of `python -m benchmarks.scale`, made of the newest kept run: `benchmarks.report` writes them."""

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from benchmarks.training import runs
from benchmarks.training.runs import Run
from benchmarks.training.tables import about, table

KEPT = runs.RESULTS / "scale"
SUBJECT = "scale"
QUOTED_ROUNDS = 3


@dataclass(frozen=True, kw_only=True)
class Intake:
    """One size on one way. CPU times are seconds for each batch: of the training thread, and of the whole process."""

    way: str
    nbytes: int
    batches: int
    seconds: float
    thread_cpu_s: float
    process_cpu_s: float

    @property
    def other_cpu_s(self) -> float:
        """Of the threads that receive; never negative, as the two clocks are not read at the same moment."""
        return max(0.0, self.process_cpu_s - self.thread_cpu_s)

    @property
    def busiest_s(self) -> float:
        """CPU time of the busiest thread: the one that trains, or the one that receives."""
        return max(self.thread_cpu_s, self.other_cpu_s)

    @property
    def rate(self) -> float:
        """Batches per second, as they came."""
        return self.batches / self.seconds


@dataclass(frozen=True, kw_only=True)
class Coordination:
    """A coordinator with so many loaders: the part of a core that it takes, and its slowest answer in seconds."""

    jobs: int
    cpus: int
    core_ratio: float
    slowest_s: float


def intake_key(way: str, nbytes: int) -> str:
    """The row of a size on a way."""
    return f"{way}:{nbytes}"


def coordination_key(jobs: int) -> str:
    """The row of so many loaders."""
    return f"coordination:{jobs}"


def intake_table(run: Run) -> str:
    """Medians of the rounds."""
    header = (
        "way",
        "batch",
        "training thread, per batch",
        "receiving threads",
        "one trainer takes in",
        "measured with agent and workers on the same cores",
    )
    return table(header, [_intake_line(found) for key in run.settings["intake"] if (found := _intakes(run, key))])


def _intakes(run: Run, key: str) -> list[Intake]:
    return [Intake(**item) for item in run.rows.get(key, ())]


def _intake_line(found: Sequence[Intake]) -> tuple[str, ...]:
    nbytes = found[0].nbytes
    thread_s = statistics.median(one.thread_cpu_s for one in found)
    other_s = statistics.median(one.other_cpu_s for one in found)
    most = 1.0 / statistics.median(one.busiest_s for one in found)
    rate = statistics.median(one.rate for one in found)
    times = (f"{1e6 * thread_s:,.0f} µs", f"{1e6 * other_s:,.0f} µs")
    return (found[0].way, _size(nbytes), *times, _flow(most, nbytes), _flow(rate, nbytes))


def _flow(rate: float, nbytes: int) -> str:
    return f"{rate:,.0f}/s, {_size(rate * nbytes)}/s"


def _size(nbytes: float) -> str:
    unit, name = next(one for one in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB"), (1.0, "B")) if nbytes >= one[0])
    return f"{nbytes / unit:.3g} {name}"


def coordination_table(run: Run) -> str:
    """Medians of the rounds, and the slowest answer of all."""
    header = ("loaders", "CPUs of the cluster", "CPU time, of one core", "slowest answer, in CPU time")
    found = [
        [Coordination(**item) for item in run.rows[key]] for key in run.settings["coordination"] if key in run.rows
    ]
    return table(header, [_coordination_line(those) for those in found])


def _coordination_line(found: Sequence[Coordination]) -> tuple[str, ...]:
    core_ratio = statistics.median(one.core_ratio for one in found)
    slowest_s = max(one.slowest_s for one in found)
    return (f"{found[0].jobs:,}", f"{found[0].cpus:,}", f"{core_ratio:.1%}", f"{1e3 * slowest_s:.0f} ms")


def origin_text(run: Run) -> str:
    """What was measured, and on what."""
    settings = run.settings
    return f"Medians of {settings['rounds']} rounds, of {settings['window_s']:g} s for each size. {about(run)}."


def problems(run: Run) -> list[str]:
    """What speaks against quoting a run."""
    keys = (*run.settings["intake"], *run.settings["coordination"])
    fewest = min((len(run.rows.get(key, ())) for key in keys), default=0)
    return runs.too_few(fewest, QUOTED_ROUNDS)


BLOCKS: dict[str, Callable[[Run], str]] = {
    "intake": intake_table,
    "coordination": coordination_table,
    "scale-origin": origin_text,
}


def block(name: str) -> str:
    """The text of a block. Raises ValueError without a kept run to make it of."""
    return BLOCKS[name](runs.quoted(name, SUBJECT, KEPT))
