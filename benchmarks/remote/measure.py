"""One measurement in a process of its own: `python -m benchmarks.remote.measure WORK:WORKERS:WHO`.

It starts a private cluster of two nodes, the trainer's without CPUs and one for the workers, and waits until that
rests. The clock starts before `iter()`. The last line of its output is JSON: what was found, and a mark for each tenth
of a second.
"""

import json
import os
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from benchmarks.cluster import connected
from benchmarks.course import Drive, drive
from benchmarks.loaders import open_loader
from benchmarks.remote.cells import Cell
from benchmarks.remote.processes import wait_for_rest, worker_memory_bytes
from benchmarks.remote.steady import Stretch, UntilSteady, full_speed_s, stretch_of
from benchmarks.works import WORKS

REMOTE = "remote"
DIGITS = 4


@dataclass(frozen=True, kw_only=True)
class Found:
    """What one course came to, in seconds from before `iter()` on.

    first_s: until the first batch. at_work_s: until all workers ran; None if the loader does not tell, or they never
    did. full_s: until full speed, None if never. steady: the steady stretch. memory_bytes, idle_bytes: of Ray's worker
    processes and those below them at the end, and before there was a loader. processes: their number at the end.
    """

    first_s: float
    at_work_s: float | None
    full_s: float | None
    steady: Stretch
    memory_bytes: int
    idle_bytes: int
    processes: int
    marks: tuple[tuple[float, int], ...]

    @property
    def added_bytes(self) -> int:
        """What the loader added to the node's memory."""
        return self.memory_bytes - self.idle_bytes

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any]) -> "Found":
        """From what `asdict` gave, also by way of JSON and among other fields."""
        named = {name: fields[name] for name in cls.__dataclass_fields__}
        marks = tuple((at_s, batches) for at_s, batches in fields["marks"])
        return cls(**named | {"steady": Stretch(**fields["steady"]), "marks": marks})


def running_workers(loader: Any) -> int | None:
    """Remote workers that run; None if the loader does not tell.

    The field of the pools is found by its type, as checkouts differ in its name.
    """
    if not hasattr(loader, "stats"):
        return None
    pools = next(value for value in vars(loader.stats()).values() if isinstance(value, Mapping))
    return pools[REMOTE].running if REMOTE in pools else 0


def measure(cell: Cell) -> Found:
    """One consumer's course on a cluster of its own."""
    work, memory = WORKS[cell.work], [(0, 0)]
    with connected([cell.workers]), work.opened() as dataset:
        wait_for_rest()
        idle_bytes, _ = worker_memory_bytes()
        with open_loader(cell.contestant, dataset, work.batch_size) as loader:
            steady = UntilSteady(
                loader,
                workers=cell.workers,
                most_s=cell.most_s,
                running=lambda: running_workers(loader),
                at_end=lambda: memory.append(worker_memory_bytes()),
            )
            course = drive(steady, Drive(step_s=0.0, window_s=2 * cell.most_s), cpu=dict)
    looks, (memory_bytes, processes) = steady.looks, memory[-1]
    stretch = stretch_of(looks, steady.at_work_s)
    return Found(
        first_s=course.first_batch_s,
        at_work_s=steady.at_work_s,
        full_s=full_speed_s(looks, stretch.rate),
        steady=stretch,
        memory_bytes=memory_bytes,
        idle_bytes=idle_bytes,
        processes=processes,
        marks=tuple((round(at_s, DIGITS), batches) for at_s, batches in course.marks),
    )


if __name__ == "__main__":
    print(json.dumps(asdict(measure(Cell.of_key(sys.argv[1])))), flush=True)
    os._exit(0)  # as in benchmarks.measure: threads that rivals leave behind
