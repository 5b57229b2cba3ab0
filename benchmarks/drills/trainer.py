"""The training process of a drill: takes batches and tells of each on standard output, until its standard input ends.

Each line is a JSON object. Times are those of the machine's steady clock, which other processes read as well.
"""

import json
import os
import sys
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Literal

import psutil
import torch
from torch.utils.data import Dataset, IterableDataset

from benchmarks.network.measure import Request, agents_of
from dpex import AutotuneConfig, DpexDataLoader, SamplePolicy
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
    size: numbers of a sample, all the same. hangs: a sample that hangs when it is first loaded; that it was is noted in
    the file ``noted``. options: further arguments of the loader.
    """

    place: Place = "local"
    workers: int = 2
    also_local: int = 0
    address: str = ""
    nodes: tuple[str, ...] = ()
    reached_at: tuple[str, ...] = ()
    is_stream: bool = False
    size: int = 1
    hangs: int = -1
    noted: str = ""
    options: dict[str, Any] = field(default_factory=dict)


class Numbers(Dataset[torch.Tensor]):
    """Its own indices, each after a while."""

    def __init__(self, work: Work) -> None:
        self.size = work.size
        self.hangs = work.hangs
        self.noted = work.noted

    def __len__(self) -> int:
        return ENDLESS

    def __getitem__(self, index: int) -> torch.Tensor:
        threading.Event().wait(EACH_S)
        if index == self.hangs:
            self._hang_once()
        return torch.full((self.size,), index)

    def _hang_once(self) -> None:
        try:
            with open(self.noted, "x") as file:  # noqa: PTH123  (the drill's nodes have no more than this)
                file.write(str(monotonic()))
        except FileExistsError:
            return
        threading.Event().wait()


class Stream(IterableDataset[torch.Tensor]):
    """The same as a stream that knows where it is; worker k of n has each n-th number from k on."""

    def __init__(self) -> None:
        self.at = self.begin = 0

    def __iter__(self) -> Iterator[torch.Tensor]:
        info = torch.utils.data.get_worker_info()
        assert info is not None
        begin, self.begin = self.begin, 0
        for self.at in range(begin + 1, ENDLESS):
            threading.Event().wait(EACH_S)
            yield torch.tensor([(self.at - 1) * info.num_workers + info.id])

    def state_dict(self) -> dict[str, int]:
        """How many it has yielded."""
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Go on behind these."""
        self.begin = state["at"]


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
    with agents_of(_request(work)) if work.place == "agents" else nullcontext():
        yield


def _request(work: Work) -> Request:
    """The same for `benchmarks.network`."""
    return Request(
        split=None,
        most=(0, work.workers),
        nodes=work.nodes,
        reached_at=work.reached_at,
        rooms=[work.workers] * len(work.nodes),
        window_s=0.0,
    )


def loader_of(work: Work) -> DpexDataLoader[Any]:
    """The loader that has to survive."""
    dataset: Any = Stream() if work.is_stream else Numbers(work)
    options: dict[str, Any] = {"batch_size": BATCH, "seeding": "worker" if work.is_stream else "batch", **work.options}
    if work.place != "local":
        options |= {"distribute_mode": True}
    if "sample_policy" in options:
        options["sample_policy"] = SamplePolicy(**options["sample_policy"])
    if not work.workers:
        return DpexDataLoader(dataset, num_workers="auto", autotune=AutotuneConfig(max_local=2), **options)
    loader: DpexDataLoader[Any] = DpexDataLoader(dataset, num_workers=work.workers, **options)
    if work.also_local:
        loader.resize(local=work.also_local, remote=work.workers)
    return loader


def victims(iterator: Any) -> dict[str, list[int]]:
    """The processes of the pools that there are, by what they are."""
    found: dict[str, list[int]] = {}
    for pool in iterator._engine._pools.by_name.values():
        if pool.name == "local":
            template = psutil.Process(pool._source._process.pid)
            found |= {"template": [template.pid], "worker": [child.pid for child in template.children()]}
        elif pool.name == "remote":
            found |= _remote_victims(pool)
    return found


def _remote_victims(pool: Any) -> dict[str, list[int]]:
    nodes = pool._nodes
    guardians = [psutil.Process(node.pid) for node in getattr(nodes, "_nodes", {}).values()]
    agents = [agent for guardian in guardians for agent in guardian.children()]
    if hasattr(nodes, "processes"):
        agents = [psutil.Process(process.pid) for process in nodes.processes.values()]
    templates = [template for agent in agents for template in agent.children()]
    workers = [worker.pid for template in templates for worker in template.children()]
    return {
        "guardian": [one.pid for one in guardians],
        "agent": [one.pid for one in agents],
        "remote worker": workers,
    }


def train(loader: DpexDataLoader[Any], work: Work, over: threading.Event) -> None:
    """Take batches and tell of them; of the processes as soon as all workers run."""
    iterator, is_told = iter(loader), False
    for batch in iterator:
        stats = loader.stats()
        running = {name: pool.running for name, pool in stats.pools.items()}
        made = {name: pool.tickets for name, pool in stats.pools.items()}
        assert bool((batch == batch[:, :1]).all()), f"a sample of several numbers: {batch}"
        tell(at=monotonic(), batch=batch[:, 0].tolist(), running=running, made=made, deaths=stats.deaths)
        if not is_told and sum(running.values()) >= max(1, work.workers) + work.also_local:
            is_told = True
            tell(victims=victims(iterator))
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
    fields = json.loads(argument)
    work = Work(**{**fields, "nodes": tuple(fields["nodes"]), "reached_at": tuple(fields["reached_at"])})
    over = threading.Event()
    threading.Thread(target=_until_the_input_ends, args=(over,), name="drill-input", daemon=True).start()
    with joined(work), loader_of(work) as loader:
        train(loader, work, over)
        stats = loader.stats()
    tell(end=True, failed_samples=stats.failed_samples, decisions=[one.text for one in loader.decisions])


if __name__ == "__main__":
    main(sys.argv[1])
