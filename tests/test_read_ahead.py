"""Reading further ahead than torch behind a straggler cannot be seen: batches, samplers and generators are torch's."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, DistributedSampler, RandomSampler, SequentialSampler, get_worker_info
from waiting import until

from dpex import DpexDataLoader

DEADLINE_S = 60.0
LENGTH, AHEAD = 24, 6
"""Batches of an epoch; how many of them others have made before the slow one is: torch's workers may make 2 each."""


class Augmented(Dataset[torch.Tensor]):
    """Samples that move the worker's generator. With ``others`` the first that worker 0 makes waits for those of others
    to be `AHEAD`."""

    def __init__(self, others: Any = None) -> None:
        self.others = others
        self.first = True

    def __len__(self) -> int:
        return LENGTH

    def __getitem__(self, index: int) -> torch.Tensor:
        info = get_worker_info()
        assert info is not None
        if self.others is not None:
            self.keep_pace(info.id)
        return torch.cat([torch.tensor([float(index), float(info.id)]), torch.rand(2)])

    def keep_pace(self, worker: int) -> None:
        if worker:
            with self.others.get_lock():
                self.others.value += 1
        elif self.first:
            self.first = False
            until(lambda: self.others.value >= AHEAD, DEADLINE_S, told=lambda: "the others to run ahead")


SAMPLERS: dict[str, Callable[[Any], Any]] = {
    "in order": SequentialSampler,
    "shuffled": RandomSampler,
    "distributed": lambda dataset: DistributedSampler(dataset, num_replicas=1, rank=0, seed=5),
}


def seen(loader: Any, taken: int | None) -> list[torch.Tensor]:
    """All that a script could look at in two epochs, of which the first may be broken off."""
    found = []
    for epoch in range(2):
        if isinstance(loader.sampler, DistributedSampler):
            loader.sampler.set_epoch(epoch)
        iterator = iter(loader)
        found.append(torch.get_rng_state())
        for number, batch in enumerate(iterator):
            found += [batch.clone(), torch.get_rng_state()]
            if epoch == 0 and number + 1 == taken:
                break
        del iterator
    return found


@pytest.mark.timeout(2 * DEADLINE_S)
@pytest.mark.parametrize("taken", [None, 3], ids=["whole", "broken off"])
@pytest.mark.parametrize("kind", list(SAMPLERS))
def test_workers_run_ahead_of_a_straggler_and_nobody_can_tell(kind: str, taken: int | None) -> None:
    def loader(make: Any, dataset: Dataset[Any]) -> Any:
        torch.manual_seed(3)
        return make(dataset, batch_size=1, num_workers=2, sampler=SAMPLERS[kind](dataset))

    ours = Augmented(multiprocessing.get_context("fork").Value("i", 0))
    expected = seen(loader(DataLoader, Augmented()), taken)
    found = seen(loader(DpexDataLoader, ours), taken)
    assert len(found) == len(expected)
    assert all(map(torch.equal, found, expected))
