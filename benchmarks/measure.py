"""One measurement in a process of its own: `python -m benchmarks.measure REQUEST`, where REQUEST is JSON.

The last line of its output is JSON: the consumer's course. A process per measurement means that no loader inherits
another's warm memory, threads or leftovers. With `--prepare WORK` it only makes the files of a work, and
reads them into the page cache.
"""

import json
import os
import sys
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from typing import Any

from benchmarks.cluster import connected
from benchmarks.consumer import Use
from benchmarks.contestants import RIVALS, Contestant
from benchmarks.course import Course, Drive, drive, tuning
from benchmarks.loaders import open_loader
from benchmarks.tables import read_files_in_use
from benchmarks.works import WORKS

BALLAST_BYTES = 256 * 2**20
BALLAST_OBJECTS = 500_000
"""What the process of a training script holds, and what forking it must therefore copy the page tables of."""


@dataclass(frozen=True, kw_only=True)
class Request:
    """What to measure.

    window_s: seconds from before `iter()` on, or count: batches; either ends with the pass. step_s: what the consumer
    waits after each batch. use: what it does with it. remote_cpus: processors of a second raylet (0: no cluster).
    ballast: whether the process holds as much as a training script does.
    """

    work: str
    contestant: Contestant
    window_s: float
    count: int | None = None
    step_s: float = 0.0
    use: Use = "read"
    remote_cpus: int = 0
    ballast: bool = False

    def to_json(self) -> str:
        """For the command line."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> "Request":
        """From what `to_json` gave."""
        fields = json.loads(text)
        return cls(**fields | {"contestant": Contestant(**fields["contestant"])})


def measure(request: Request) -> Course:
    """One consumer's course. The data, the cluster and the loader are made outside of it."""
    ballast = (bytearray(BALLAST_BYTES), [str(i) for i in range(BALLAST_OBJECTS)]) if request.ballast else None
    work = WORKS[request.work]
    cpus = [request.remote_cpus] if request.remote_cpus else []
    with (
        connected(cpus),
        work.opened(request.count) as dataset,
        open_loader(request.contestant, dataset, work.batch_size) as loader,
    ):
        course = _driven(loader, request)
    del ballast
    return course


def _driven(loader: Iterable[Any], request: Request) -> Course:
    how = Drive(step_s=request.step_s, window_s=request.window_s, count=request.count, use=request.use)
    course = drive(loader, how)
    decisions = getattr(loader, "decisions", ())
    return replace(course, **tuning(decisions)) if decisions else course


def main(arguments: list[str]) -> None:
    """See the module."""
    if arguments[0] == "--prepare":
        with WORKS[arguments[1]].opened():
            read_files_in_use()
        return
    request = Request.from_json(arguments[0])
    print(json.dumps(measure(request).as_dict()), flush=True)
    if request.contestant.engine in RIVALS:
        os._exit(0)  # threads that some of them leave behind crash the interpreter's end, after the course


if __name__ == "__main__":
    main(sys.argv[1:])
