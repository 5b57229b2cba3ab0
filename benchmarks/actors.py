"""What people write by hand to load on Ray: one actor call per batch, the collated tensors as its result."""

from collections import deque
from collections.abc import Iterator
from itertools import cycle
from typing import Any

import ray
from torch.utils.data import BatchSampler, Dataset, SequentialSampler, default_collate


class BatchMaker:
    """Holds the dataset on its node; one call is one batch."""

    def __init__(self, dataset: Dataset[Any]) -> None:
        self.dataset = dataset

    def make(self, indices: list[int]) -> Any:
        return default_collate([self.dataset[i] for i in indices])


class ActorLoader:
    """Batches in order from `workers` actors in turn, `ahead` calls in flight for each. A context manager."""

    def __init__(self, dataset: Dataset[Any], batch_size: int, workers: int, ahead: int) -> None:
        held = ray.put(dataset)
        maker = ray.remote(BatchMaker).options(num_cpus=1)
        self.actors = [maker.remote(held) for _ in range(workers)]
        self.in_flight = workers * ahead
        self.batches = BatchSampler(SequentialSampler(dataset), batch_size, drop_last=False)

    def __enter__(self) -> "ActorLoader":
        return self

    def __exit__(self, *_: object) -> None:
        for actor in self.actors:
            ray.kill(actor)

    def __iter__(self) -> Iterator[Any]:
        pending: deque[ray.ObjectRef] = deque()
        for actor, indices in zip(cycle(self.actors), self.batches, strict=False):
            pending.append(actor.make.remote(indices))
            if len(pending) >= self.in_flight:
                yield ray.get(pending.popleft())
        while pending:
            yield ray.get(pending.popleft())
