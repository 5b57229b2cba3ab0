"""What is measured: each work with each number of remote workers by each contestant. Pure.

Works that compute have no more workers than a few for each core of this machine, which is the cluster's only one. Works
that wait have the larger numbers, as they would have with that many cores.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from benchmarks.contestants import Contestant

Who = Literal["dpex", "before", "ray-data"]
CONTESTANTS: tuple[Who, ...] = ("dpex", "before", "ray-data")
COMPUTING = ("floats", "jpeg", "large-batches")
WAITING = "wait"
COUNTS = (1, 4, 16, 64)
WORKERS_PER_CORE = 2
"""Of works that compute: with more, what is measured is how the system shares its cores."""
MOST_S = {1: 20.0, 4: 25.0, 16: 60.0, 64: 150.0}
"""When a course ends at the latest: 64 processes that each import torch take two minutes on two cores."""
START_S = 10.0
"""What a process takes to import, to start a cluster and to end both, for the estimate alone."""
TYPICAL_S: dict[Who, dict[int, float]] = {
    "dpex": {1: 8.0, 4: 9.0, 16: 10.0, 64: 15.0},
    "before": {1: 10.0, 4: 13.0, 16: 25.0, 64: 90.0},
    "ray-data": {1: 17.0, 4: 20.0, 16: 25.0, 64: 60.0},
}
"""What a course took on two cores, for the estimate alone."""


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One contestant on one work with so many remote workers."""

    work: str
    workers: int
    who: Who

    @property
    def key(self) -> str:
        """For files and the command line, such as "jpeg:4:before"."""
        return f"{self.work}:{self.workers}:{self.who}"

    @classmethod
    def of_key(cls, key: str) -> "Cell":
        """From its key."""
        work, workers, who = key.split(":")
        return cls(work=work, workers=int(workers), who=who)  # type: ignore[arg-type]

    @property
    def contestant(self) -> Contestant:
        """With its defaults, but for the number of workers."""
        return Contestant(engine="ray-data" if self.who == "ray-data" else "dpex-remote", workers=self.workers)

    @property
    def most_s(self) -> float:
        """When its course ends at the latest."""
        return MOST_S[self.workers]

    @property
    def typical_s(self) -> float:
        """About how long its measurement takes."""
        return START_S + TYPICAL_S[self.who][self.workers]


def cells(cores: int, contestants: Sequence[Who] = CONTESTANTS) -> list[Cell]:
    """All that is measured on a machine with so many cores; contestants take turns."""
    few = [count for count in COUNTS if count <= WORKERS_PER_CORE * cores]
    many = [count for count in COUNTS if count not in few] or list(COUNTS[-1:])
    rows = [(work, count) for work in COMPUTING for count in few] + [(WAITING, count) for count in many]
    return [Cell(work=work, workers=count, who=who) for work, count in rows for who in contestants]


QUICK = ("floats:1:dpex", "floats:1:before", "floats:1:ray-data", "jpeg:4:dpex", "jpeg:4:before", "jpeg:4:ray-data")
"""For a first look."""
