"""The types that a user's checker is given: `make lint` checks this file by mypy and pyright, a test in the wheel."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset, RandomSampler
from typing_extensions import assert_type

from dpex import AutotuneConfig, Decision, Diagnosis, DpexDataLoader, LoaderStats


class Images(Dataset[tuple[Tensor, int]]):
    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return torch.zeros(3), index

    def __len__(self) -> int:
        return 3


class Lines(IterableDataset[str]):
    def __iter__(self) -> Iterator[str]:
        return iter(("3", "4"))


class Words:
    """It is no `Dataset`, and torch's loader takes it nevertheless."""

    def __getitem__(self, index: int) -> str:
        return str(index)


def collate(samples: list[tuple[Tensor, int]]) -> dict[str, Tensor]:
    return {"images": torch.stack([image for image, _ in samples])}


# The type parameter is that of a sample, as in torch. Batches are Any, as a collate function may return anything.
images = DpexDataLoader(Images(), 2, sampler=RandomSampler(Images()), collate_fn=collate, num_workers="auto")
assert_type(images, DpexDataLoader[tuple[Tensor, int]])
assert_type(images.dataset[0], tuple[Tensor, int])
assert_type(next(iter(images)), Any)
assert_type(len(images), int)
for pixels, labels in DpexDataLoader(Images()):
    print(pixels.shape, labels.tolist())

assert_type(DpexDataLoader(Lines(), num_workers=2), DpexDataLoader[str])
assert_type(DpexDataLoader(Words()), DpexDataLoader[str])
assert_type(DpexDataLoader([1, 2]), DpexDataLoader[int])

torchs: DataLoader[tuple[Tensor, int]] = images
wrong: DataLoader[str] = images  # type: ignore[assignment]  # pyright: ignore[reportAssignmentType]
DpexDataLoader(3)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
DpexDataLoader([1], seeding="by accident")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
AutotuneConfig(max_local="2")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]


class Mine(DpexDataLoader[int]):
    """A subclass."""


with Mine([1], autotune=AutotuneConfig(max_local=2)) as mine:
    assert_type(mine, Mine)
    assert_type(mine.stats(), LoaderStats)
    assert_type(mine.decisions, list[Decision])
    assert_type(mine.diagnose(), Diagnosis)
    assert_type(mine.state_dict(), dict[str, Any])
    mine.resize(local=2)
