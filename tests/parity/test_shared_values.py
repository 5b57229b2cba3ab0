"""A training tells persistent workers something through shared memory before each epoch: every sample has that value.

The value lies in places that no search through a dataset finds. With torch it arrives wherever it lies, as workers get
the first index of an epoch at its `iter()`.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from typing import Any, Literal

import pytest
import torch
from torch.utils.data import DataLoader, Dataset
from workload import wait_as_work

from dpex import DpexDataLoader

OF_MODULE = multiprocessing.Value("i", 0)
OF_DEFAULT = multiprocessing.Value("i", 0)
TENSOR = torch.zeros(1, dtype=torch.int64).share_memory_()
SAMPLES = 64
EPOCHS = 4
STEP_S = 0.004
"""Seconds of a training step, in which workers would begin whatever they have to do for the next epoch."""


class Slots:
    __slots__ = ("value",)

    def __init__(self) -> None:
        self.value = multiprocessing.Value("i", 0)


class Told(Dataset[torch.Tensor]):
    """A dataset whose samples contain the value that ``read`` finds. It has no other shared memory than ``parts``."""

    of_class = multiprocessing.Value("i", 0)

    def __init__(self, read: Callable[[Any], int], **parts: Any) -> None:
        self.read = read
        vars(self).update(parts)

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor([index, self.read(self)])


def with_default(samples: list[torch.Tensor], value: Any = OF_DEFAULT) -> torch.Tensor:
    return torch.stack([torch.tensor([int(sample[0]), value.value]) for sample in samples])


def fill(data: Any, epoch: int) -> None:
    with torch.no_grad():
        data.layer.weight.fill_(epoch)


PLACES: dict[str, tuple[Callable[[Any], int], Callable[[Any, int], Any]]] = {
    "attribute": (lambda data: data.value.value, lambda data, epoch: setattr(data.value, "value", epoch)),
    "class": (lambda data: data.of_class.value, lambda _, epoch: setattr(Told.of_class, "value", epoch)),
    "slots": (
        lambda data: data.transform.value.value,
        lambda data, epoch: setattr(data.transform.value, "value", epoch),
    ),
    "far down a list": (
        lambda data: data.values[100].value,
        lambda data, epoch: setattr(data.values[100], "value", epoch),
    ),
    "module": (lambda _: OF_MODULE.value, lambda _, epoch: setattr(OF_MODULE, "value", epoch)),
    "tensor": (lambda _: int(TENSOR[0]), lambda _, epoch: TENSOR.fill_(epoch)),
    "default argument": (lambda _: 0, lambda _, epoch: setattr(OF_DEFAULT, "value", epoch)),
    "model": (lambda data: int(data.layer.weight.item()), fill),
}


def parts_for(place: str) -> dict[str, Any]:
    """Return the attributes in which the value of ``place`` lies."""
    makers: dict[str, Callable[[], dict[str, Any]]] = {
        "attribute": lambda: {"value": multiprocessing.Value("i", 0)},
        "slots": lambda: {"transform": Slots()},
        "far down a list": lambda: {"values": [*range(100), multiprocessing.Value("i", 0)]},
        "model": lambda: {"layer": torch.nn.Linear(1, 1).share_memory()},
    }
    return makers.get(place, dict)()


@pytest.mark.parametrize("num_workers", [2, "auto"])
@pytest.mark.parametrize("seeding", ["worker", "batch"])
@pytest.mark.parametrize("place", PLACES)
def test_samples_have_the_value_of_their_epoch(
    place: str, seeding: Literal["worker", "batch"], num_workers: int | Literal["auto"]
) -> None:
    read, tell = PLACES[place]
    collate = with_default if place == "default argument" else None
    data = Told(read, **parts_for(place))
    loader = DpexDataLoader(
        data,
        batch_size=4,
        shuffle=True,
        num_workers=num_workers,
        seeding=seeding,
        persistent_workers=True,
        collate_fn=collate,
    )
    assert values_of_epochs(loader, data, tell) == [{epoch} for epoch in range(1, EPOCHS)]


def test_torch_has_them_too() -> None:
    read, tell = PLACES["module"]
    data = Told(read)
    loader = DataLoader(data, batch_size=4, num_workers=2, persistent_workers=True)
    assert values_of_epochs(loader, data, tell) == [{epoch} for epoch in range(1, EPOCHS)]


def values_of_epochs(loader: Any, data: Any, tell: Callable[[Any, int], Any]) -> list[set[int]]:
    """Return the values in the samples of each epoch."""
    found = []
    for epoch in range(1, EPOCHS):
        tell(data, epoch)
        batches = []
        for batch in loader:
            batches.append(batch)
            wait_as_work(STEP_S)
        assert sorted(torch.cat(batches)[:, 0].tolist()) == list(range(SAMPLES))
        found.append({int(value) for value in torch.cat(batches)[:, 1]})
    return found
