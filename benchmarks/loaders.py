"""The contestants: an engine and a number of workers turn a work into something that yields batches.

Nothing is tuned for one side: every loader gets the same dataset, batches, sampler and number of workers,
and keeps its own defaults otherwise, but for what a row says (`seeding`, and `ahead` for hand-written
actors).
"""

import dataclasses
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch.utils.data import DataLoader, Dataset

from benchmarks.work import Work

Engine = Literal["torch", "dpex", "dpex-remote", "actors", "bare"]


@dataclass(frozen=True, kw_only=True)
class Contestant:
    """One side of a comparison.

    engine: "torch" and "dpex" load on this machine, "dpex-remote" on the second raylet; "actors" is one actor
        call per batch there; "bare" is `dataset[i]` in this process alone, into one batch of memory already
        faulted in, its rate multiplied by `workers`: what as many cores could do at best.
    workers: how many, or "auto" (dpex only).
    ahead: batches that "actors" keeps in flight per actor.
    """

    engine: Engine
    workers: int | Literal["auto"]
    seeding: Literal["worker", "batch"] | None = None
    ahead: int = 2

    @property
    def label(self) -> str:
        name = {"bare": "limit", "dpex-remote": "dpex, remote", "actors": "actor calls"}.get(self.engine)
        if self.workers == "auto":
            return f"{name or self.engine}, auto"
        unit = "core" if self.engine == "bare" else "worker"
        return f"{name or self.engine}, {self.workers} {unit}{'' if self.workers == 1 else 's'}"

    def as_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


def open_loader(contestant: Contestant, work: Work, count: int | None = None) -> AbstractContextManager[Iterable[Any]]:
    """The contestant's loader over `work`; leaving the context closes it. Remote ones need Ray connected.

    count: batches of the measurement, for works that depend on it.
    """
    dataset = work.dataset(count) if work.counted else work.dataset()
    if contestant.engine == "bare":
        return nullcontext(BareLoop(dataset, work.batch_size))
    if contestant.engine == "actors":
        from benchmarks.actors import ActorLoader

        return ActorLoader(dataset, work.batch_size, contestant.workers, contestant.ahead)
    options: dict[str, Any] = {"batch_size": work.batch_size, "num_workers": contestant.workers}
    if work.sampler is not None:
        options["sampler"] = work.sampler(dataset)
    if contestant.engine == "torch":
        return nullcontext(DataLoader(dataset, **options))
    return _dpex(dataset, contestant, options)


def _dpex(dataset: Dataset[Any], contestant: Contestant, options: dict[str, Any]) -> AbstractContextManager[Any]:
    from dpex import DpexDataLoader

    if contestant.seeding is not None:
        options["seeding"] = contestant.seeding
    if contestant.engine == "dpex-remote":
        options |= {"distribute_mode": True, "worker_resources": {"num_cpus": 1}}
    return DpexDataLoader(dataset, **options)


class BareLoop:
    """Samples copied one by one into a single batch that is written over and over. Yields that batch."""

    def __init__(self, dataset: Dataset[Any], batch_size: int) -> None:
        self.dataset = dataset
        self.batch_size = batch_size

    def __iter__(self) -> Iterator[torch.Tensor]:
        torch.set_num_threads(1)
        batch = torch.zeros(self.batch_size, *_first(self.dataset[0]).shape)
        for start in range(0, len(self.dataset) - self.batch_size + 1, self.batch_size):  # type: ignore[arg-type]
            for row in range(self.batch_size):
                batch[row].copy_(_first(self.dataset[start + row]))
            yield batch


def _first(sample: Any) -> torch.Tensor:
    return sample[0] if isinstance(sample, tuple) else sample
