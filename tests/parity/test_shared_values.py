"""A training tells persistent workers something through shared memory before each epoch: every sample has that value.

With torch it arrives wherever it lies, as workers get the first index of an epoch at its `iter()`.
"""

import multiprocessing
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset
from workload import wait_as_work

from dpex import DpexDataLoader

VALUE = multiprocessing.Value("i", 0)
TENSOR = torch.zeros(1, dtype=torch.int64).share_memory_()
SAMPLES = 64
STEP_S = 0.004
"""Seconds of a training step, in which workers would begin whatever they have to do for the next epoch."""
PLACES: dict[str, tuple[Callable[[], int], Callable[[int], Any]]] = {
    "value": (lambda: VALUE.value, lambda epoch: setattr(VALUE, "value", epoch)),
    "tensor": (lambda: int(TENSOR[0]), TENSOR.fill_),
}


class Told(Dataset[torch.Tensor]):
    """Samples contain the value that ``read`` finds."""

    def __init__(self, read: Callable[[], int]) -> None:
        self.read = read

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor([index, self.read()])


@pytest.mark.parametrize(
    ("make", "options"),
    [
        (DataLoader, {"num_workers": 2}),
        *(
            (DpexDataLoader, {"num_workers": count, "seeding": seeding})
            for count, seeding in ((2, "worker"), (2, "batch"), ("auto", "batch"))
        ),
    ],
)
@pytest.mark.parametrize("place", PLACES)
def test_samples_have_the_value_of_their_epoch(place: str, make: Any, options: dict[str, Any]) -> None:
    read, tell = PLACES[place]
    loader = make(Told(read), batch_size=4, shuffle=True, persistent_workers=True, **options)
    for epoch in range(1, 4):
        tell(epoch)
        batches = []
        for batch in loader:
            batches.append(batch)
            wait_as_work(STEP_S)
        assert sorted(torch.cat(batches)[:, 0].tolist()) == list(range(SAMPLES))
        assert {int(value) for value in torch.cat(batches)[:, 1]} == {epoch}
