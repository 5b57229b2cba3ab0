"""The training process of a drill: takes batches and tells of each on standard output, until its standard input ends.

Each line is a JSON object. Times are those of the machine's steady clock, which other processes read as well.
"""

import json
import os
import sys
import threading
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

import torch
from torch.utils.data import Dataset

from benchmarks.network.nodes import agents_in
from dpex import AutotuneConfig, DpexDataLoader, PoolReading, SamplePolicy
from dpex.system.clock import monotonic

BATCH = 4
ENDLESS = 10**9
EACH_S = 0.005
"""What a sample takes: so long that two workers are at work all the time, and the training loop waits for them."""

Place = Literal["local", "cluster", "agents"]


@dataclass(frozen=True, kw_only=True)
class Work:
    """What is trained on, and where its batches are made.

    place: this machine, the Ray cluster at ``address``, or agents in the network namespaces ``nodes``, which reach this
    process at ``reached_at``. workers: of that place; 0 is "auto". also_local: workers of this machine beside those.
    size: numbers of a sample, all the same. options: further arguments of the loader.
    """

    place: Place = "local"
    workers: int = 2
    also_local: int = 0
    address: str = ""
    nodes: Sequence[str] = ()
    reached_at: Sequence[str] = ()
    size: int = 1
    options: dict[str, Any] = field(default_factory=dict)


class Numbers(Dataset[torch.Tensor]):
    """Its own indices, each after a while."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return ENDLESS

    def __getitem__(self, index: int) -> torch.Tensor:
        threading.Event().wait(EACH_S)
        return torch.full((self.size,), index)


_one_line = threading.Lock()
"""Warnings may come of another thread than the batches, and `print` writes the end of a line by itself."""


def tell(**about: Any) -> None:
    """Write a line for whoever makes the fault happen."""
    with _one_line:
        print(json.dumps(about), flush=True)


def show_warning(message: Any, category: type[Warning], *_: Any, **__: Any) -> None:
    """Tell of a warning of dpex, as `warnings.showwarning`; those of libraries are of other kinds."""
    if issubclass(category, RuntimeWarning):
        tell(warning=str(message))


@contextmanager
def joined(work: Work) -> Iterator[None]:
    """Be where the workers can be reached."""
    if work.place == "cluster":
        import ray

        ray.init(address=work.address, log_to_driver=False, logging_level="ERROR")
        ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])
    agents = agents_in(work.nodes, work.reached_at, work.workers)
    with agents if work.place == "agents" else nullcontext():
        yield


def loader_of(work: Work) -> DpexDataLoader[Any]:
    """The loader that has to survive."""
    dataset = Numbers(work.size)
    options: dict[str, Any] = {"batch_size": BATCH, "seeding": "batch", **work.options}
    if work.place != "local":
        options["distribute_mode"] = True
    if "sample_policy" in options:
        options["sample_policy"] = SamplePolicy(**options["sample_policy"])
    if not work.workers:
        return DpexDataLoader(dataset, num_workers="auto", autotune=AutotuneConfig(max_local=2), **options)
    loader: DpexDataLoader[Any] = DpexDataLoader(dataset, num_workers=work.workers, **options)
    if work.also_local:
        loader.resize(local=work.also_local, remote=work.workers)
    return loader


def train(loader: DpexDataLoader[Any], over: threading.Event) -> None:
    """Take batches and tell of them."""
    for batch in loader:
        stats = loader.stats()
        running = {name: pool.running for name, pool in stats.pools.items()}
        made = {name: pool.tickets for name, pool in stats.pools.items()}
        assert bool((batch == batch[:, :1]).all()), f"a sample of several numbers: {batch}"
        counts = {"running": running, "made": made, "deaths": stats.deaths, "late": stats.late}
        tell(at=monotonic(), batch=batch[:, 0].tolist(), **counts)
        if over.is_set():
            return


def _until_the_input_ends(over: threading.Event) -> None:
    """Without `sys.stdin`, whose lock would be held in every process that is forked meanwhile."""
    while os.read(0, 1024):
        pass
    over.set()


def main(argument: str) -> None:
    """Train as the argument says."""
    warnings.simplefilter("always", RuntimeWarning)
    warnings.showwarning = show_warning
    work = Work(**json.loads(argument))
    over = threading.Event()
    threading.Thread(target=_until_the_input_ends, args=(over,), name="drill-input", daemon=True).start()
    with joined(work), loader_of(work) as loader:
        train(loader, over)
        stats = loader.stats()
    nodes = [asdict(node) for node in stats.pools.get("remote", PoolReading()).nodes.values()]
    decisions = [one.text for one in loader.decisions]
    tell(end=True, failed_samples=stats.failed_samples, decisions=decisions, nodes=nodes)


if __name__ == "__main__":
    main(sys.argv[1])
