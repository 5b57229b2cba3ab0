"""A sampler for ranks whose number may change within an epoch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch.utils.data import DistributedSampler

from dpex.errors import StateError


class ElasticDistributedSampler(DistributedSampler[Any]):
    """A `torch.utils.data.DistributedSampler` that resumes with any number of ranks and any batch size.

    The order of an epoch is a function of the seed and the epoch, as torch's is. Rank r of R takes every R-th of the
    remaining samples, from the r-th on, so that all ranks together take the order from its begin to its end. No sample
    is repeated to make ranks equal: unless ``drop_last=True``, the last batches of ranks differ by one sample, and if
    fewer samples than ranks remain, some ranks have one batch fewer.

    The state of a `DpexDataLoader` with this sampler holds the number of samples that all ranks have had together. Each
    rank of a later run, of any number of ranks, loads the state of any rank. Call ``set_epoch`` before each epoch, as
    with torch's.

    Args:
        dataset: The dataset to sample from; only its length is used.
        num_replicas: The number of ranks. None: as in the process group.
        rank: The number of this rank. None: as in the process group.
        shuffle: True: a new order in each epoch.
        seed: The seed of the order.
        drop_last: True leaves out the last samples, so that all ranks have equally many.

    Examples:
        >>> from dpex import ElasticDistributedSampler
        >>> samplers = [ElasticDistributedSampler(range(8), 3, rank, shuffle=False) for rank in range(3)]
        >>> [list(sampler) for sampler in samplers]
        [[0, 3, 6], [1, 4, 7], [2, 5]]
    """

    is_elastic = True

    def __init__(
        self,
        dataset: Any,
        num_replicas: int | None = None,
        rank: int | None = None,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
    ) -> None:
        super().__init__(dataset, num_replicas, rank, shuffle, seed, drop_last)
        self._begin = 0
        self._taken = 0
        self.num_samples = len(self._share(range(len(dataset)), 0))

    def _order(self) -> Any:
        count = len(self.dataset)  # type: ignore[arg-type]
        if not self.shuffle:
            return range(count)
        generator = torch.Generator().manual_seed(self.seed + self.epoch)
        return torch.randperm(count, generator=generator).tolist()

    def _share(self, order: Any, begin: int) -> Any:
        end = len(order)
        if self.drop_last:
            end -= (end - begin) % self.num_replicas
        return order[begin + self.rank : end : self.num_replicas]

    def __iter__(self) -> Iterator[Any]:
        self._taken, self._begin = self._begin, 0
        for index in self._share(self._order(), self._taken):
            self._taken += self.num_replicas
            yield index

    def __len__(self) -> int:
        return self.num_samples

    def state_dict(self) -> dict[str, int]:
        """Return the epoch and how many samples all ranks have had of it, if each has had as many as this one."""
        return {"epoch": self.epoch, "samples": self._taken}

    def state_after(self, state: Mapping[str, int], samples: int) -> dict[str, int]:
        """Return the state that follows ``state`` once each rank has had ``samples`` more."""
        return {**state, "samples": state["samples"] + samples * self.num_replicas}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Have the next ``iter()`` continue after the samples that all ranks together have had.

        Args:
            state: What `state_dict` returned, on any rank.

        Raises:
            StateError: It counts more samples than the data set has.
        """
        if not 0 <= state["samples"] <= len(self.dataset) + self.num_replicas:  # type: ignore[arg-type]
            raise StateError(
                f"the state is of {state['samples']} samples that were taken, and the data set has "
                f"{len(self.dataset)}; load it with the data set that it was saved with"  # type: ignore[arg-type]
            )
        self.epoch, self._begin = state["epoch"], state["samples"]
