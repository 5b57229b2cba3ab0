"""MONAI and albumentations: their own generators are reseeded for each batch, by their own interface."""

import os
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from dpex import DpexDataLoader
from dpex.run.install import install
from dpex.run.run_options import RunOptions


class Images:
    """Twelve images of zeros, so that what is there was drawn."""

    def __init__(self, transform: Any) -> None:
        self.transform = transform

    def __len__(self) -> int:
        return 12

    def __getitem__(self, _: int) -> torch.Tensor:
        return torch.as_tensor(np.asarray(self.transform(np.full((1, 4, 4), 0.5, np.float32))))


def noise_of_monai() -> Any:
    transforms = pytest.importorskip("monai.transforms", reason="needs MONAI: pip install monai")
    return transforms.Compose([transforms.RandGaussianNoise(prob=1.0), transforms.RandShiftIntensity(0.1, prob=1.0)])


class Augmented:
    """albumentations takes and returns a dict."""

    def __init__(self, compose: Any) -> None:
        self.compose = compose

    def __call__(self, image: Any) -> Any:
        return self.compose(image=image[0])["image"][None]


def noise_of_albumentations() -> Any:
    os.environ.setdefault("NO_ALBUMENTATIONS_UPDATE", "1")
    albumentations = pytest.importorskip("albumentations", reason="needs albumentations: pip install albumentations")
    return Augmented(albumentations.Compose([albumentations.GaussNoise(p=1.0)], seed=3))


NOISE = [noise_of_albumentations, pytest.param(noise_of_monai, marks=pytest.mark.long)]


def drawn(dataset: Any, workers: int | str) -> list[bytes]:
    torch.manual_seed(5)
    with DpexDataLoader(dataset, 3, num_workers=workers, seeding="batch") as loader:  # type: ignore[arg-type]
        return [image.numpy().tobytes() for _ in range(2) for batch in loader for image in batch]


@pytest.mark.filterwarnings("error:.*random generator")
@pytest.mark.parametrize("noise", NOISE)
def test_draws_are_distinct_and_the_same_in_each_run(noise: Any) -> None:
    dataset = Images(noise())
    by_torch = [image.numpy().tobytes() for batch in DataLoader(dataset, 3, num_workers=2) for image in batch]
    assert len(set(by_torch)) < 12, "torch's workers draw the same by now: this is not needed any more"
    two, auto = drawn(dataset, 2), drawn(dataset, "auto")
    assert two == auto
    assert len(set(two)) == 24


@pytest.mark.parametrize("noise", NOISE)
def test_below_dpex_run_draws_are_those_of_auto(noise: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    dataset = Images(noise())
    torch.manual_seed(5)
    monkeypatch.setattr(DataLoader, "_get_iterator", DataLoader._get_iterator)  # `install` replaces it
    install(RunOptions(quiet=True))
    loader = DataLoader(dataset, 3, num_workers=2)
    below = [image.numpy().tobytes() for _ in range(2) for batch in loader for image in batch]
    assert below == drawn(dataset, "auto")
