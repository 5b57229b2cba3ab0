"""One measurement in a process of its own: `python -m benchmarks.measure REQUEST`, where REQUEST is JSON.

The last line of its output is JSON: the consumer's course. A process per measurement means that no loader inherits
another's warm memory, threads or leftovers. With `--prepare WORK` it only makes the files of a work, and
reads them into the page cache.
"""

import json
import os
import sys
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from itertools import repeat
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import DataLoader, Dataset, default_collate

from benchmarks.cluster import connected
from benchmarks.consumer import USES
from benchmarks.contestants import RIVALS, Contestant
from benchmarks.course import Course, drive
from benchmarks.rows import BY_KEY, MACHINE_CPUS
from benchmarks.tables import read_files_in_use
from benchmarks.works import WORKS

if TYPE_CHECKING:
    from benchmarks.gpu import Trainer

GPU_PREFETCH = 4
"""torch's `prefetch_factor` with a GPU, whose steps are short and uneven; dpex finds its own."""
BALLAST_BYTES = 256 * 2**20
BALLAST_OBJECTS = 500_000
"""What the process of a training script holds, and what forking it must therefore copy the page tables of."""
Opened = AbstractContextManager[Iterable[Any]]


@dataclass(frozen=True, kw_only=True)
class Request:
    """What to measure. row: its key. window_s: seconds from before `iter()` on, unless the row counts batches."""

    row: str
    contestant: Contestant
    window_s: float

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
    row, contestant = BY_KEY[request.row], request.contestant
    work, count = WORKS[row.work], row.count(request.window_s)
    ballast = (bytearray(BALLAST_BYTES), [str(i) for i in range(BALLAST_OBJECTS)]) if row.kind == "start" else None
    trainer = _trainer() if row.kind == "training" else None
    batch_size = work.batch_size if trainer is None else work.gpu_batch_size
    nodes = [len(os.sched_getaffinity(0))] if row.kind == "remote" else [MACHINE_CPUS] * (contestant.nodes or 0)
    with connected(nodes), work.opened(count, contestant.form) as dataset:
        if trainer is not None:
            trainer.warm_up(_one_batch(dataset, batch_size))
        with open_loader(contestant, dataset, batch_size, trainer) as loader:
            if trainer is not None:
                return trainer.drive(loader, request.window_s)
            course = drive(loader, USES[row.use], window_s=request.window_s, step_s=row.step_s, count=count)
    del ballast
    return course


def _trainer() -> "Trainer | None":
    """What trains on the GPU, if there is one."""
    if not torch.cuda.is_available():
        return None
    from benchmarks.gpu import Trainer

    return Trainer(torch.device("cuda", 0))


def _one_batch(dataset: Any, batch_size: int) -> Any:
    return default_collate([dataset[index] for index in range(batch_size)])


# -- loaders -----------------------------------------------------------------------------------------------------------


def open_loader(
    contestant: Contestant, dataset: Dataset[Any], batch_size: int, trainer: "Trainer | None" = None
) -> Opened:
    """The contestant's loader; leaving the context closes it. Remote ones need Ray connected.

    With a ``trainer`` batches are on its GPU.
    """
    if contestant.engine == "limit":
        batch = _one_batch(dataset, batch_size)
        return nullcontext(repeat(batch if trainer is None else trainer.moved(batch)))
    if contestant.engine == "torch":
        return nullcontext(_torch(dataset, contestant, batch_size, trainer))
    if contestant.engine in ("dpex", "base", "dpex-remote"):
        return _dpex(dataset, contestant, batch_size, trainer)
    if contestant.engine == "actors":
        from benchmarks.actors import ActorLoader

        return ActorLoader(dataset, batch_size, int(contestant.workers), contestant.prefetch or 1)
    if contestant.engine in RIVALS:
        from benchmarks.rivals import open_rival

        return open_rival(contestant, dataset, batch_size)
    raise ValueError(f"there is no loader called {contestant.engine!r}")


def _options(contestant: Contestant, batch_size: int) -> dict[str, Any]:
    options: dict[str, Any] = {"batch_size": batch_size, "num_workers": contestant.workers}
    if contestant.prefetch is not None:
        options["prefetch_factor"] = contestant.prefetch
    return options


def _torch(dataset: Dataset[Any], contestant: Contestant, batch_size: int, trainer: "Trainer | None") -> Iterable[Any]:
    """As people write it: pinned memory and copies that do not block, where there is a GPU."""
    options = _options(contestant, batch_size)
    if trainer is None:
        return DataLoader(dataset, **options)
    if contestant.workers:
        options["prefetch_factor"] = GPU_PREFETCH
    return trainer.moving(DataLoader(dataset, pin_memory=True, **options))


def _dpex(dataset: Dataset[Any], contestant: Contestant, batch_size: int, trainer: "Trainer | None") -> Opened:
    from dpex import AutotuneConfig, ClusterConfig, DpexDataLoader

    options = _options(contestant, batch_size)
    if contestant.seeding is not None:
        options["seeding"] = contestant.seeding
    if contestant.engine == "dpex-remote":
        options["distribute_mode"] = True
    if contestant.nodes is not None:
        options["autotune"] = AutotuneConfig(max_local=MACHINE_CPUS)
    if contestant.nodes:
        options |= {"distribute_mode": "auto", "cluster_config": ClusterConfig(ray_remote_args={"num_cpus": 1})}
    if trainer is not None:
        options |= trainer.dpex_options()
    return DpexDataLoader(dataset, **options)


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
