"""Asynchronous datasets: a sample's random numbers depend on its seed, and not on which answer comes first."""

import asyncio
import os
import random
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from dpex import DpexDataLoader, batch_seed
from tests.asynchronous.works import Draws, Indices, batches, nap

WORKERS = [0, 1, 2, 3, "auto"]


@pytest.mark.parametrize("own", [False, True], ids=["global", "own"])
def test_batches_are_equal_with_any_number_of_workers(own: bool) -> None:
    dataset = Draws(own=own)
    first, *others = [batches(dataset, num_workers=count) for count in (0, 3, "auto")]
    assert others == [first] * 2


@pytest.mark.long
@pytest.mark.timeout(400)
@pytest.mark.parametrize("own", [False, True], ids=["global", "own"])
def test_batches_are_equal_in_many_runs(own: bool) -> None:
    """Answers come in another order in each run."""
    dataset = Draws(own=own)
    first = batches(dataset, num_workers=0)
    for _ in range(50):
        assert [batches(dataset, num_workers=count) for count in WORKERS] == [first] * len(WORKERS)


def test_a_first_draw_that_comes_late_changes_no_batch() -> None:
    first, *others = [batches(Draws(first=37), num_workers=count) for count in (0, 1, 2)]
    assert others == [first] * 2


def test_a_pass_that_is_resumed_draws_the_same() -> None:
    whole = batches(Draws(), num_workers=2)
    torch.manual_seed(1)
    options: dict[str, Any] = {"batch_size": 8, "seeding": "batch", "collate_fn": list}
    with DpexDataLoader(Draws(), num_workers=2, **options) as loader:
        iterator = iter(loader)
        found = [next(iterator) for _ in range(2)]
        state = loader.state_dict()
    with DpexDataLoader(Draws(), num_workers=3, **options) as loader:
        loader.load_state_dict(state)
        found += list(loader)
    assert [torch.tensor(batch, dtype=torch.float64).tolist() for batch in found] == [batch[0] for batch in whole]


class Fatal(Draws):
    """As `Draws`. Sample 20 kills its worker, once: ``killed`` is the file that shows that it has."""

    def __init__(self, killed: Path) -> None:
        super().__init__()
        self.killed = killed

    async def __getitem__(self, index: int) -> Any:
        if index == 20 and not self.killed.exists():
            self.killed.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return await super().__getitem__(index)


def test_batches_that_a_dead_worker_held_draw_the_same(tmp_path: Path) -> None:
    whole = batches(Draws(), num_workers=2)
    torch.manual_seed(1)
    loader = DpexDataLoader(Fatal(tmp_path / "killed"), 8, num_workers=2, seeding="batch", collate_fn=list)
    with loader, pytest.warns(RuntimeWarning, match="is killed by signal"):
        found = list(loader)
    assert found == [batch[0] for batch in whole]


@pytest.mark.parametrize("count", [0, 2])
def test_worker_seeding_repeats_if_it_is_asked_for(count: int) -> None:
    first, second = [batches(Draws(), num_workers=count, seeding="worker") for _ in range(2)]
    assert first == second


def test_inline_batches_keep_the_training_processs_generators() -> None:
    torch.manual_seed(3)
    random.seed(3)
    expected = torch.rand(()).item(), random.random()
    loader = DpexDataLoader(Draws(), batch_size=8, seeding="batch")
    torch.manual_seed(3)
    random.seed(3)
    list(iter(loader))
    torch.manual_seed(3)
    next(iter(loader))
    assert random.random() == expected[1]


class AsksInThread(Indices):
    async def __getitem__(self, index: int) -> Any:
        await nap()
        return batch_seed(), await asyncio.to_thread(batch_seed)


def test_batch_seed_is_that_of_the_batch_of_a_sample() -> None:
    def asked(count: int) -> list[Any]:
        torch.manual_seed(0)
        with DpexDataLoader(AsksInThread(16), batch_size=4, num_workers=count, seeding="batch", collate_fn=list) as it:
            return list(it)

    found = asked(2)
    assert found == asked(0)
    assert [len({seed for sample in batch for seed in sample}) for batch in found] == [1] * 4
    assert len({batch[0][0] for batch in found}) == 4
