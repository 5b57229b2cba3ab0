"""One measurement in a process of its own: `python -m benchmarks.measure REQUEST`, where REQUEST is JSON.

The last line of its output is JSON: the samples taken. A process per measurement means that no loader
inherits another's warm memory, threads or leftovers.
"""

import gc
import json
import logging
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from math import inf
from typing import Any, Literal

from benchmarks.consumer import Use, read_pages
from benchmarks.course import Course, Drive, drive, tuning
from benchmarks.loaders import Contestant, open_loader
from benchmarks.work import WORKS

BALLAST_BYTES = 256 * 2**20
BALLAST_OBJECTS = 500_000


@dataclass(frozen=True, kw_only=True)
class Request:
    """What to measure.

    warm_up: batches taken and not counted. window_s: seconds counted, or count: batches counted; either ends
    with the pass. step_s: what the consumer waits after each batch ("course" only). passes: how many
    "first-batch" starts. address: the Ray cluster's, or None.
    """

    work: str
    contestant: Contestant
    quantity: Literal["rate", "first-batch", "course"]
    warm_up: int
    window_s: float
    count: int | None
    passes: int = 1
    step_s: float = 0.0
    address: str | None = None
    use: Use = "read"

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> "Request":
        fields = json.loads(text)
        return cls(**fields | {"contestant": Contestant(**fields["contestant"])})


def batches_per_s(loader: Iterable[Any], request: Request) -> list[float]:
    """Batches per second of a consumer that does nothing else, after the warm-up: one value."""
    batches = iter(loader)
    for _ in range(request.warm_up):
        read_pages(next(batches))
    count = 0
    limit, window_s = (inf, request.window_s) if request.count is None else (request.count, inf)
    start_s = now_s = time.perf_counter()
    for batch in batches:
        read_pages(batch)
        count += 1
        now_s = time.perf_counter()
        if now_s - start_s >= window_s or count == limit:
            break
    return [count / (now_s - start_s)]


def first_batch_s(loader: Iterable[Any], passes: int) -> list[float]:
    """Seconds from `iter()` to the first batch, for `passes` fresh passes in a process that is not small."""
    ballast = bytearray(BALLAST_BYTES), [str(i) for i in range(BALLAST_OBJECTS)]
    times_s = []
    for _ in range(passes):
        start_s = time.perf_counter()
        batches = iter(loader)
        next(batches)
        times_s.append(time.perf_counter() - start_s)
        del batches
        gc.collect()
    del ballast
    return times_s


@contextmanager
def connected(address: str | None) -> Iterator[None]:
    """Connected to the Ray cluster at `address`, if there is one."""
    if address is None:
        yield
        return
    import ray

    ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
    try:
        yield
    finally:
        ray.shutdown()


def course(request: Request) -> Course:
    """One consumer's course; the loader is made and closed outside of it."""
    with open_loader(request.contestant, WORKS[request.work], request.count) as loader:
        how = Drive(
            step_s=request.step_s,
            window_s=request.window_s,
            count=request.count,
            warm_up=request.warm_up,
            use=request.use,
        )
        driven = drive(loader, how)
        return replace(driven, **tuning(loader.decisions)) if request.contestant.workers == "auto" else driven


def measure(request: Request) -> list[float] | dict[str, Any]:
    """Values of `request.quantity`: batches per second, or seconds to the first batch; or the fields of a course."""
    contestant = request.contestant
    if request.quantity == "course":
        return course(request).as_dict()
    with connected(request.address), open_loader(contestant, WORKS[request.work], request.count) as loader:
        if request.quantity == "first-batch":
            return first_batch_s(loader, request.passes)
        scale = contestant.workers if contestant.engine == "bare" else 1
        return [scale * rate for rate in batches_per_s(loader, request)]


if __name__ == "__main__":
    print(json.dumps(measure(Request.from_json(sys.argv[1]))), flush=True)
