"""With a number of workers a batch is at most as old as torch's prefetch, whatever the dataset reads."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from families import Of
from torch.utils.data import DataLoader, Dataset, DistributedSampler, RandomSampler, SequentialSampler
from workload import wait_as_work

from dpex import DpexDataLoader

LENGTH, WORKERS = 400, 2
STRAGGLER_S = 0.1


class OfTheStep(Dataset[torch.Tensor]):
    """Samples with the step of the training, which it writes to shared memory. Sample 0 may be slow."""

    def __init__(self, *, straggler_s: float = 0.0) -> None:
        self.step = torch.zeros(1, dtype=torch.int64).share_memory_()
        self.straggler_s = straggler_s

    def __len__(self) -> int:
        return LENGTH

    def __getitem__(self, index: int) -> torch.Tensor:
        if self.straggler_s and not index:
            wait_as_work(self.straggler_s)
        return torch.tensor([index, int(self.step[0])])


def augmented_at(index: int) -> torch.Tensor:
    """Samples that move the worker's generator."""
    return torch.cat([torch.tensor([float(index)]), torch.rand(2)])


def oldest(loader: Any, dataset: OfTheStep) -> int:
    """Return the largest number of steps between the making of a batch and its delivery, over two epochs."""
    step, ages = 0, []
    for _ in range(2):
        for batch in loader:
            ages.append(step - int(batch[0, 1]))
            step += 1
            dataset.step[0] = step
    return max(ages)


@pytest.mark.parametrize(
    ("seeding", "prefetch_factor", "straggler_s"),
    [("worker", None, 0.0), ("worker", 8, STRAGGLER_S), ("batch", None, STRAGGLER_S), ("batch", 8, 0.0)],
)
def test_batch_is_no_older_than_the_prefetch(seeding: str, prefetch_factor: int | None, straggler_s: float) -> None:
    dataset = OfTheStep(straggler_s=straggler_s)
    with DpexDataLoader(
        dataset, num_workers=WORKERS, seeding=seeding, prefetch_factor=prefetch_factor, shuffle=True
    ) as loader:
        assert oldest(loader, dataset) <= WORKERS * (prefetch_factor or 2)


SAMPLERS: dict[str, Callable[[Any], Any]] = {
    "in order": SequentialSampler,
    "shuffled": RandomSampler,
    "distributed": lambda dataset: DistributedSampler(dataset, num_replicas=1, rank=0, seed=5),
}


def seen(make: Any, kind: str, taken: int | None) -> list[torch.Tensor]:
    """Return all that a script could look at in two epochs, of which the first may be broken off."""
    torch.manual_seed(3)
    dataset = Of(augmented_at, LENGTH)
    loader = make(dataset, num_workers=WORKERS, sampler=SAMPLERS[kind](dataset), prefetch_factor=64)
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


@pytest.mark.parametrize(
    ("kind", "taken"), [("in order", None), ("shuffled", None), ("shuffled", 150), ("distributed", 150)]
)
def test_batches_that_travel_in_groups_are_those_of_torch(kind: str, taken: int | None) -> None:
    expected, found = seen(DataLoader, kind, taken), seen(DpexDataLoader, kind, taken)
    assert len(found) == len(expected)
    assert all(map(torch.equal, found, expected))
