"""Asynchronous datasets: a sample's random numbers depend on its seed, and not on which answer comes first."""

import asyncio
import contextlib
import os
import random
import re
import signal
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import ConcatDataset, DataLoader, StackDataset, Subset

from dpex import DpexDataLoader, UsageError, batch_seed
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

    async def fetch(self, index: int) -> Any:
        if index == 20 and not self.killed.exists():
            self.killed.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return await super().fetch(index)


def test_batches_that_a_dead_worker_held_draw_the_same(tmp_path: Path) -> None:
    whole = batches(Draws(), num_workers=2)
    torch.manual_seed(1)
    loader = DpexDataLoader(Fatal(tmp_path / "killed"), 8, num_workers=2, seeding="batch", collate_fn=list)
    with loader, pytest.warns(RuntimeWarning, match="is killed by signal"):
        found = list(loader)
    assert found == [batch[0] for batch in whole]


class Quiet(Draws):
    """As `Draws`, with a client that draws nothing."""

    async def fetch(self, index: int) -> float:
        await nap()
        return float(index)


@pytest.mark.parametrize("count", [0, 2])
def test_worker_seeding_draws_as_torch_does(count: int) -> None:
    expected = batches(Quiet(), DataLoader, num_workers=count)
    assert batches(Quiet(), num_workers=count, seeding="worker") == expected
    assert batches(Draws(), num_workers=count, seeding="worker") == expected


@pytest.mark.parametrize(
    "dataset",
    [Subset(Draws(96), range(48)), ConcatDataset([Draws(20), Draws(28)]), StackDataset(Draws(), range(48), Draws())],  # type: ignore[arg-type]
    ids=["subset", "concat", "stack"],
)
def test_wrapped_samples_are_decoded_with_their_own_seeds(dataset: Any) -> None:
    options: dict[str, Any] = {"collate_fn": list, "seeding": "batch"}
    torch.manual_seed(1)
    first = [[*DpexDataLoader(dataset, 8, num_workers=0, **options)]]
    torch.manual_seed(1)
    assert [[*DpexDataLoader(dataset, 8, num_workers=2, **options)]] == first


class DrawsAwaiting(Indices):
    """Sample 20 draws while it is awaited."""

    def __init__(self, draw: Callable[[], Any]) -> None:
        super().__init__()
        self.draw = draw

    async def __getitem__(self, index: int) -> Any:
        await nap()
        if index == 20:
            self.draw()
        return await super().__getitem__(index)


class DrawsFetching(Draws):
    """As `DrawsAwaiting`, in two parts."""

    def __init__(self, draw: Callable[[], Any]) -> None:
        super().__init__()
        self.draw = draw

    async def fetch(self, index: int) -> Any:
        if index == 20:
            self.draw()
        return await super().fetch(index)


OWN = np.random.RandomState(0)
KINDS: dict[Any, str] = {DrawsAwaiting: "__getitem__", DrawsFetching: "fetch"}
GENERATORS: dict[str, Callable[[], Any]] = {
    "python": random.random,
    "numpy": np.random.randn,
    "torch": partial(torch.rand, ()),
    "draw.__self__": OWN.random_sample,
}


@pytest.mark.parametrize("options", [{}, {"num_workers": 2}, {"num_workers": 1, "seeding": "worker"}])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", GENERATORS)
def test_a_draw_while_samples_are_fetched_is_named(kind: Any, name: str, options: dict[str, Any]) -> None:
    if kind is DrawsFetching and name == "python":  # clients draw the pause before another attempt from it
        assert batches(kind(GENERATORS[name]), **options) == batches(Draws(), **options)
        return
    method = KINDS[kind]
    line = getattr(kind, method).__code__.co_firstlineno
    where = rf"generator of .*{re.escape(name)}\) .*{kind.__name__}\.{method} \(.*test_random_numbers.py, line {line}\)"
    with pytest.raises(UsageError, match=rf"{where}.* `def decode\(self, index, raw\)` computes"):
        batches(kind(GENERATORS[name]), **options)


def test_numbers_drawn_while_fetching_are_never_delivered() -> None:
    found: list[Any] = []
    with DpexDataLoader(DrawsAwaiting(np.random.randn), 8, num_workers=1, seeding="batch", collate_fn=list) as loader:
        iterator = iter(loader)
        for _ in range(len(loader)):
            with contextlib.suppress(UsageError):
                found += next(iterator)
    assert 20 not in found


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
