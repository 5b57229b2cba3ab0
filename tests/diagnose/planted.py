"""Datasets with a planted bottleneck, and training loops that run into it: real work, real waiting."""

import os
import time
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch.utils.data import Dataset, IterableDataset, Sampler, get_worker_info

from dpex import AutotuneConfig, DpexDataLoader, decode_in_workers
from dpex.diagnose.diagnosis import Diagnosis
from dpex.diagnose.verdict import ENOUGH_BATCHES
from dpex.options import WorkerConfig
from tests.waiting import until
from tests.workload import wait_as_work


def compute(cpu_s: float) -> None:
    """Keep a CPU busy for that much of its own time, however many others want it."""
    until = time.thread_time() + cpu_s
    while time.thread_time() < until:
        pass


class Planted(Dataset[Any]):
    """Samples that are waited for, then computed; every ``every``-th is waited for ``slow_s`` longer."""

    def __init__(self, size: int, wait_s: float = 0.0, cpu_s: float = 0.0, every: int = 0, slow_s: float = 0.0) -> None:
        self.size, self.wait_s, self.cpu_s, self.every, self.slow_s = size, wait_s, cpu_s, every, slow_s

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> Any:
        wait_s = self.wait_s + (self.slow_s if self.every and index % self.every == 0 else 0.0)
        if wait_s:
            wait_as_work(wait_s)
        if self.cpu_s:
            compute(self.cpu_s)
        return self.value(index)

    def value(self, index: int) -> Any:
        return torch.zeros(3)


class Spread(Planted):
    """Waits of very different length, none of them hopeless."""

    def __getitem__(self, index: int) -> Any:
        wait_as_work(self.wait_s * (0.2, 0.3, 4.0, 0.2, 0.3, 0.2, 2.5, 0.3)[index % 8])
        return self.value(index)


class Wordy(Planted):
    """Large objects that are no tensors."""

    def value(self, index: int) -> Any:
        return {f"word {number}": [float(number)] * 3 for number in range(8000)}


class Shards(IterableDataset[Any]):
    """A stream of eight shards, of which each sample is waited for."""

    num_shards = 8

    def __init__(self, each: int, wait_s: float) -> None:
        self.each, self.wait_s = each, wait_s

    def __iter__(self) -> Iterator[Any]:
        worker = get_worker_info()
        for _ in range(0 if worker is None else worker.id, 8, 1 if worker is None else worker.num_workers):
            for number in range(self.each):
                wait_as_work(self.wait_s)
                yield torch.tensor(number)


class Large(Planted):
    """Samples of 6 MB, ready made."""

    def __init__(self, size: int) -> None:
        super().__init__(size)
        self.sample = torch.zeros(1_500_000)

    def value(self, index: int) -> Any:
        return self.sample


def as_they_are(samples: list[Any]) -> list[Any]:
    return samples


def computing_collate(samples: list[Any]) -> Any:
    compute(0.012)
    return torch.stack(samples)


class SlowSampler(Sampler[int]):
    """Thinks for that long about each index."""

    def __init__(self, size: int, seconds: float) -> None:
        self.size, self.seconds = size, seconds

    def __iter__(self) -> Iterator[int]:
        for index in range(self.size):
            wait_as_work(self.seconds)
            yield index

    def __len__(self) -> int:
        return self.size


def slow_start(worker: int) -> None:
    wait_as_work(1.5)


@dataclass(frozen=True, kw_only=True)
class Case:
    """A loader's dataset and arguments, a step, and what is to be found of it.

    accepted: verdicts that are right; the first is the planted one. where: what the place must mention.
    """

    dataset: Callable[[], Dataset[Any]]
    accepted: tuple[str, ...]
    where: str = ""
    step_s: float = 0.001
    options: dict[str, Any] = field(default_factory=dict)

    def run(self) -> Diagnosis:
        """One pass, announced, so that it is measured without workers too; on a cluster once all actors have come."""
        options = {"batch_size": 2, "num_workers": 4, "seeding": "batch", **self.options}
        with DpexDataLoader(self.dataset(), **options) as loader:
            if not loader.distribute_mode:
                loader.diagnose()
                train(loader, self.step_s)
                return loader.diagnose()
            running = iter(loader)
            until(lambda: all_run(loader, next(running)), 120.0, pause_s=0.05)
            loader.diagnose(reset=True)
            train(running, self.step_s)
            return loader.diagnose()


def all_run(loader: DpexDataLoader[Any], _batch: Any) -> bool:
    """Whether all workers on the cluster run, now that there is a further batch."""
    return loader.stats().pools["remote"].running >= loader.num_workers


ELSEWHERE = ("cpu", "startup", "crowding")
"""What a loop truly waits for where other programs fill the CPUs, whatever was planted beside."""


def is_crowded(diagnosis: Diagnosis) -> bool:
    """Return True if workers waited for a CPU for longer than they had one, or other programs had most of the CPUs."""
    facts = diagnosis.facts
    pools = facts.pools.values()
    queued_s = sum(pool.queueing_s or 0.0 for pool in pools)
    return queued_s > sum(pool.cpu_s for pool in pools) or (facts.others or 0.0) > facts.cpus / 2


def check(case: Case) -> Diagnosis:
    """Run it and see that what was planted is found."""
    diagnosis = case.run()
    verdict = diagnosis.verdict
    if verdict.cause in case.accepted:
        assert case.where in verdict.where
    else:
        assert is_crowded(diagnosis), str(diagnosis)
        found = next(iter(verdict.shares)) if verdict.cause == "mixed" else verdict.cause
        assert found in (*case.accepted, *ELSEWHERE), str(diagnosis)
    return diagnosis


class Compose:
    """As torchvision's and albumentations'."""

    def __init__(self, *transforms: Callable[[Any], Any]) -> None:
        self.transforms = list(transforms)

    def __call__(self, value: Any) -> Any:
        for transform in self.transforms:
            value = transform(value)
        return value


BLOCK = bytes(400_000)
"""`zlib.crc32` of it takes 0.1 to 0.4 ms."""


class Computing:
    """A transform that takes ``blocks`` checksums. It makes few calls, so that a profile function does not slow it."""

    def __init__(self, blocks: int) -> None:
        self.blocks = blocks

    def __call__(self, value: Any) -> Any:
        for _ in range(self.blocks):
            zlib.crc32(BLOCK)
        return value


class Cheap(Computing):
    pass


class Dear(Computing):
    pass


class Transformed(Planted):
    """Of 50 checksums, 5 to 20 ms, the dear transform takes 40."""

    def __init__(self, size: int) -> None:
        super().__init__(size)
        self.transform = Compose(Cheap(7), Dear(40))

    def value(self, index: int) -> Any:
        for _ in range(3):
            zlib.crc32(BLOCK)
        return self.transform(torch.full((3,), float(index)))


class Uneven(Planted):
    """Waits on the node of `shared_ray` that calls itself "bare"."""

    def value(self, index: int) -> Any:
        if os.environ.get("DPEX_TEST_NODE") == "bare":
            wait_as_work(0.02)
        compute(0.001)
        return torch.zeros(3)


LONG_S = 2.0
"""A pass that has taken as long, and has enough batches for a verdict, is broken off: it would say nothing new."""


def train(loader: Iterable[Any], step_s: float) -> None:
    """Steps in which a GPU would be at work."""
    began = time.perf_counter()
    for number, _ in enumerate(loader):
        if step_s:
            wait_as_work(step_s)
        if number > 2 * ENOUGH_BATCHES and time.perf_counter() - began > LONG_S:
            return


CASES: dict[str, Case] = {
    "consumer": Case(dataset=partial(Planted, 200, wait_s=0.002), accepted=("consumer",), step_s=0.02),
    "reading": Case(dataset=partial(Planted, 400, wait_s=0.02), accepted=("storage",), where="dataset"),
    "computing": Case(
        dataset=partial(Planted, 800, cpu_s=0.005), accepted=("cpu",), where="dataset", options={"num_workers": 2}
    ),
    "collating": Case(
        dataset=partial(Planted, 800),
        accepted=("cpu",),
        where="collate",
        options={"num_workers": 2, "collate_fn": computing_collate},
    ),
    "large objects": Case(
        dataset=partial(Wordy, 600), accepted=("transfer",), options={"collate_fn": as_they_are, "num_workers": 2}
    ),
    "stragglers": Case(
        dataset=partial(Planted, 480, wait_s=0.001, every=32, slow_s=0.15),
        accepted=("straggler",),
        options={"prefetch_factor": 3},
    ),
    "too little memory": Case(
        dataset=partial(Spread, 240, wait_s=0.02),
        accepted=("memory",),
        where="memory_budget",
        options={"worker_config": WorkerConfig(memory_budget=4 * 24), "prefetch_factor": 16},
    ),
    "tiny batches": Case(
        dataset=partial(Planted, 120_000),
        accepted=("dispatch",),
        step_s=0.0,
        options={"batch_size": 1, "num_workers": 2, "prefetch_factor": 4},
    ),
    "slow sampler": Case(
        dataset=partial(Planted, 400),
        accepted=("sampler",),
        where="ms per batch",
        options={"sampler": SlowSampler(400, 0.005), "num_workers": 1},
    ),
    "slow start": Case(
        dataset=partial(Planted, 240, wait_s=0.001), accepted=("startup",), options={"worker_init_fn": slow_start}
    ),
}

_STREAM: dict[str, Any] = {"batch_size": 8, "num_workers": 2, "seeding": "worker"}
ADVICE: dict[str, tuple[Case, str]] = {
    "a free CPU": (
        Case(dataset=partial(Planted, 800, cpu_s=0.005), accepted=("cpu",), options={"num_workers": 1}),
        "num_workers=2 instead of 1",
    ),
    "shards that wait": (
        Case(dataset=partial(Shards, 160, 0.004), accepted=("storage",), options=_STREAM),
        "num_workers=8, which reads 8 streams instead of 2",
    ),
    'shards that wait, under "auto"': (
        Case(
            dataset=partial(Shards, 160, 0.004),
            accepted=("storage",),
            options={**_STREAM, "num_workers": "auto", "seeding": "batch", "autotune": AutotuneConfig(max_streams=2)},
        ),
        "AutotuneConfig(max_streams=8), which reads 8 streams instead of 2",
    ),
    "shards that wait behind decoders": (
        Case(
            dataset=lambda: decode_in_workers(Shards(160, 0.004), torch.neg),
            accepted=("storage",),
            where="the stream",
            options={**_STREAM, "seeding": "batch"},
        ),
        "num_workers=8, which reads 8 streams instead of 2",
    ),
}
"""Cases with the change that their report advises first."""

_MANY = 4000
"""Enough samples for the time in which actors come up, on a busy machine too; `train` breaks off before they end.

Of batches that are ready made a quick machine moves a thousand a second."""
_FAR: dict[str, Any] = {"distribute_mode": True, "num_workers": 2}
REMOTE: dict[str, Case] = {
    "computing": Case(
        dataset=partial(Planted, _MANY, cpu_s=0.01),
        accepted=("cpu",),
        where="dataset",
        options={**_FAR, "num_workers": 1},
    ),
    "large batches": Case(
        dataset=partial(Large, 10 * _MANY),
        accepted=("transfer",),
        step_s=0.0,
        options={**_FAR, "collate_fn": as_they_are, "batch_size": 4},
    ),
    "stragglers": Case(
        dataset=partial(Planted, _MANY, wait_s=0.001, every=32, slow_s=0.2),
        accepted=("straggler",),
        options={**_FAR, "prefetch_factor": 3},
    ),
}
