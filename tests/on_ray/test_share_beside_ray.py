"""Loaders that share batches in a process that is connected to Ray, whose threads make forking it unsafe."""

import os

import pytest
import torch
from families import Augmented, assert_same, seeded, stacked
from pools.test_clean_start import no_server  # noqa: F401

from dpex import DpexDataLoader
from dpex.options import WorkerConfig

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("shared_ray")]
SAMPLES, BATCH = 64, 4


def loader(workers: int, share: str | None) -> DpexDataLoader[torch.Tensor]:
    config = WorkerConfig(share=share)
    options = {"num_workers": workers, "seeding": "batch", "generator": seeded(), "shuffle": True}
    return DpexDataLoader(Augmented(SAMPLES, extra=3000), BATCH, worker_config=config, **options)


def test_batches_are_made_once_beside_ray() -> None:
    name = f"beside ray {os.getpid()}"
    with loader(2, name) as first, loader(2, name) as second, loader(0, None) as alone:
        both = [list(pair) for pair in zip(first, second, strict=True)]
        shared = [one.stats().pools["local"].shared for one in (first, second)]
        expected = stacked(alone)
    assert sum(shared) == SAMPLES // BATCH
    for got in zip(*both, strict=True):
        assert_same(torch.cat(got), expected)
