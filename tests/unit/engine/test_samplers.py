"""Orders that are drawn as tensors are those of torch's samplers, and leave the same random states."""

from collections.abc import Callable
from itertools import islice
from typing import Any

import pytest
import torch
from torch.utils.data import BatchSampler, DistributedSampler, RandomSampler, Sampler, SubsetRandomSampler

from dpex.engine import samplers
from dpex.engine.samplers import batches_of

DATA: Any = range(23)
Made = Callable[[torch.Generator | None], Sampler[Any]]
SAMPLERS: dict[str, Made] = {
    "shuffle": lambda own: RandomSampler(DATA, generator=own),
    "part": lambda own: RandomSampler(DATA, num_samples=7, generator=own),
    "twice and more": lambda own: RandomSampler(DATA, num_samples=50, generator=own),
    "replacement": lambda own: RandomSampler(DATA, replacement=True, num_samples=50, generator=own),
    "subset": lambda own: SubsetRandomSampler(["a", "b", "c", "d", "e"], generator=own),
    "rank": lambda _: DistributedSampler(DATA, num_replicas=3, rank=1, seed=5),
    "last rank": lambda _: DistributedSampler(DATA, num_replicas=4, rank=3),
    "rank without the rest": lambda _: DistributedSampler(DATA, num_replicas=4, rank=2, drop_last=True),
    "more ranks than samples": lambda _: DistributedSampler(DATA, num_replicas=60, rank=55),
    "rank in order": lambda _: DistributedSampler(DATA, num_replicas=3, rank=2, shuffle=False),
}


@pytest.mark.parametrize("has_own", [False, True])
@pytest.mark.parametrize("name", SAMPLERS)
@pytest.mark.parametrize("count", [None, 2])
def test_order_and_random_states_are_torchs(
    name: str, has_own: bool, count: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(samplers, "CHUNK", 4)

    def drawn(of: Callable[[Any], Any]) -> Any:
        torch.manual_seed(3)
        own = torch.Generator().manual_seed(9) if has_own else None
        found = list(islice(of(BatchSampler(SAMPLERS[name](own), 3, drop_last=False)), count))
        return found, torch.get_rng_state().tolist(), own and own.get_state().tolist()

    assert drawn(batches_of) == drawn(iter)


def test_numbers_are_those_of_python() -> None:
    batches: Any = batches_of(BatchSampler(RandomSampler(DATA), 4, drop_last=True))
    assert {type(index) for batch in batches for index in batch} == {int}
