"""Batches made in the training process in place of workers that are on their way: PyTorch's, and no trace left."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, default_collate, get_worker_info
from waiting import until

from dpex.worker.setup import WorkerSetup
from dpex.worker.stand_in import MOST_COPIED_BYTES, StandIn, StandInError

SEED = 5
BATCH = 4


class Drawing(Dataset[Any]):
    """Draws from all global generators and one of its own, keeps count, and asks who it is."""

    def __init__(self) -> None:
        self.own = np.random.default_rng(7)
        self.calls = 0

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> Any:
        self.calls += 1
        info = get_worker_info()
        return {
            "index": index,
            "drawn": (random.random(), float(np.random.rand()), float(torch.rand(())), float(self.own.random())),
            "calls": self.calls,
            "worker": (-1, -1) if info is None else (info.id, info.seed),
            "own copy": info is not None and info.dataset is self,
            "settings": (torch.get_num_threads(), torch.is_grad_enabled()),
            "strided": torch.arange(6).view(2, 3).t() + index,
        }


def collated(samples: list[Any]) -> Any:
    """A user's function that calls torch's."""
    return default_collate(samples), torch.stack([sample["strided"] for sample in samples])


def setup(dataset: Any, collate_fn: Callable[[Any], Any] = default_collate) -> WorkerSetup:
    return WorkerSetup(
        dataset=dataset,
        collate_fn=collate_fn,
        worker_init_fn=None,
        iterable=False,
        auto_collation=True,
        drop_last=False,
        num_workers=2,
        base_seed=int(torch.empty((), dtype=torch.int64).random_(generator=torch.Generator().manual_seed(SEED))),
        per_batch_seed=False,
    )


def torchs_batches(dataset: Any, collate_fn: Callable[[Any], Any]) -> list[Any]:
    generator = torch.Generator().manual_seed(SEED)
    batches = list(DataLoader(dataset, BATCH, num_workers=2, collate_fn=collate_fn, generator=generator))
    until(lambda: threading.active_count() == 1)  # torch's own threads would count as ones that may draw
    return batches


def index_of(number: int) -> list[int]:
    return list(range(BATCH * number, BATCH * (number + 1)))


def as_text(batch: Any) -> str:
    """All that can be seen of it: values to the last bit, types and strides."""
    if isinstance(batch, torch.Tensor):
        return f"{batch.dtype} {batch.stride()} {batch.tolist()}"
    if isinstance(batch, dict):
        return str({key: as_text(value) for key, value in batch.items()})
    if isinstance(batch, (list, tuple)):
        return f"{type(batch).__name__} {[as_text(value) for value in batch]}"
    return repr(batch)


@pytest.mark.parametrize("collate_fn", [default_collate, collated])
def test_its_batches_are_those_of_torchs_workers(collate_fn: Callable[[Any], Any]) -> None:
    dataset = Drawing()
    expected = torchs_batches(dataset, collate_fn)
    stand_in = StandIn(setup(dataset, collate_fn))
    with torch.no_grad():
        batches = [stand_in.make(number % 2, number, index_of(number), 0)[0] for number in range(len(expected))]
    assert list(map(as_text, batches)) == list(map(as_text, expected))
    assert dataset.calls == 0, "the trainer's dataset is as it was"


def test_what_the_trainer_draws_from_its_dataset_meanwhile_stays_drawn() -> None:
    dataset, same = Drawing(), Drawing()
    stand_in = StandIn(setup(dataset))
    stand_in.make(0, 0, index_of(0), 0)
    assert dataset.own.random() == same.own.random()
    stand_in.make(1, 1, index_of(1), 0)
    assert dataset.own.random() == same.own.random()


def surroundings() -> tuple[Any, ...]:
    return (
        random.getstate(),
        np.random.get_state()[1].tolist(),  # type: ignore[index]
        torch.get_rng_state().tolist(),
        torch.get_num_threads(),
        torch.is_grad_enabled(),
        get_worker_info(),
        dict(torch.utils.data._utils.collate.default_collate_fn_map),
    )


class Failing(Drawing):
    def __getitem__(self, index: int) -> Any:
        super().__getitem__(index)
        raise FileNotFoundError("only the nodes have this file")


@pytest.mark.parametrize("dataset", [Drawing(), Failing()])
def test_the_training_process_is_as_it_was(dataset: Drawing) -> None:
    torch.set_num_threads(2)
    before = surroundings()
    stand_in = StandIn(setup(dataset))
    for number in range(2):
        if isinstance(dataset, Failing):
            with pytest.raises(StandInError, match="only the nodes have this file"):
                stand_in.make(number, number, index_of(number), 0)
        else:
            stand_in.make(number, number, index_of(number), 0)
        assert surroundings() == before


def test_a_dataset_whose_copies_would_be_large_is_left_to_the_workers() -> None:
    dataset: Any = Drawing()
    dataset.table = np.zeros(MOST_COPIED_BYTES // 2 + 1, np.uint8)
    stand_in = StandIn(setup(dataset))
    stand_in.make(0, 0, index_of(0), 0)
    with pytest.raises(StandInError, match="2 copies of the dataset would take more than"):
        stand_in.make(1, 1, index_of(1), 0)


def test_a_dataset_that_cannot_be_copied_is_left_to_the_workers() -> None:
    dataset: Any = Drawing()
    dataset.lock = threading.Lock()
    with pytest.raises(StandInError, match=r"cannot be copied: .*lock"):
        StandIn(setup(dataset)).make(0, 0, index_of(0), 0)


class Meeting(Drawing):
    """Lets another thread run in the middle of a sample."""

    turn, done = threading.Event(), threading.Event()

    def __getitem__(self, index: int) -> Any:
        Meeting.turn.set()
        assert Meeting.done.wait(60)
        return super().__getitem__(index)


def test_a_batch_during_which_another_thread_ran_is_left_to_the_workers() -> None:
    def draw() -> None:
        Meeting.turn.wait(60)
        for _ in range(1000):
            random.random()
        Meeting.done.set()

    thread = threading.Thread(target=draw, name="drawing aside")
    thread.start()
    try:
        with pytest.raises(StandInError, match="'drawing aside' ran meanwhile"):
            StandIn(setup(Meeting())).make(0, 0, index_of(0), 0)
    finally:
        Meeting.turn.set()
        thread.join()
