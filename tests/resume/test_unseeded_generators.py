"""Under ``seeding="worker"`` a resumed run continues generators without a seed in the dataset."""

import multiprocessing
import os
import random
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from inspection import engine_of
from torch.utils.data import Dataset
from workload import wait_as_work

from dpex import DpexDataLoader
from dpex.engine import with_workers


class Drawing(Dataset[float]):
    """Draws each sample from generators with states that no other process can make again."""

    def __init__(self) -> None:
        self.numpy, self.legacy, self.python = np.random.default_rng(), np.random.RandomState(), random.Random()
        self.torch = torch.Generator()
        self.torch.seed()

    def __len__(self) -> int:
        return 48

    def __getitem__(self, index: int) -> float:
        drawn = self.numpy.random() + self.legacy.random() + self.python.random()
        return float(drawn) + float(torch.rand((), generator=self.torch))


class MadeInWorker(Drawing):
    """Gets its generators from `make_generators`, in the worker."""

    def __init__(self) -> None:
        pass


def make_generators(worker: int) -> None:
    info = torch.utils.data.get_worker_info()
    assert info is not None
    Drawing.__init__(info.dataset)


def loader(dataset: Dataset[Any], **options: Any) -> DpexDataLoader[torch.Tensor]:
    if isinstance(dataset, MadeInWorker):
        options["worker_init_fn"] = make_generators
    return DpexDataLoader(dataset, batch_size=4, shuffle=True, num_workers=2, **options)


def values(batches: Any) -> list[list[float]]:
    return [batch.tolist() for batch in batches]


@pytest.mark.parametrize(
    ("dataset", "asked_at", "epoch", "delivered", "persistent"),
    [
        (Drawing, None, 0, 2, False),
        (Drawing, 1, 0, 11, False),
        (Drawing, None, 1, 5, True),
        (MadeInWorker, None, 0, 11, True),
        (MadeInWorker, 1, 0, 2, True),
        (MadeInWorker, 1, 1, 5, False),
    ],
)
def test_rest_is_the_same_whenever_a_state_was_asked_for(
    dataset: type[Dataset[Any]], asked_at: int | None, epoch: int, delivered: int, persistent: bool
) -> None:
    with loader(dataset(), persistent_workers=persistent) as first:
        for _ in range(epoch):
            list(first)
        batches = iter(first)
        for number in range(delivered):  # of two, one comes from each worker, so both have started
            next(batches)
            if number == asked_at:
                first.state_dict()
        state = first.state_dict()
        rest = values(batches)
    with loader(dataset(), persistent_workers=persistent) as second:
        second.load_state_dict(state)
        assert values(second) == rest


def test_state_before_the_first_batch_holds_the_first_states() -> None:
    with loader(Drawing()) as first:
        state = first.state_dict()
        epoch = values(first)
    with loader(Drawing()) as second:
        second.load_state_dict(state)
        assert values(second) == epoch


class Stuck(Drawing):
    """A dataset with a worker that does not start."""


def test_state_that_lacks_generators_is_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(with_workers, "FIRST_STATES_S", 0.1)
    may_start = multiprocessing.Event()

    def start_first_only(worker: int) -> None:
        assert worker == 0 or may_start.wait(60.0)

    with loader(Stuck(), worker_init_fn=start_first_only) as made:
        batches = iter(made)
        next(batches)
        with pytest.warns(RuntimeWarning, match=r"lacks the states .*\(Stuck.numpy, .*Call state_dict\(\) again"):
            made.state_dict()
        may_start.set()


def test_no_state_is_reported_without_generators() -> None:
    """A worker that starts reports a state only if a later run could not make it again."""

    class Plain(Dataset[int]):
        def __len__(self) -> int:
            return 4

        def __getitem__(self, index: int) -> int:
            return index

    reported = {}
    for name, dataset in (("plain", Plain()), ("drawing", Drawing())):
        with DpexDataLoader(dataset, num_workers=1) as made:
            batches = iter(made)
            next(batches)
            reported[name] = engine_of(batches).state.logicals.logs[0].point(0, 0).state is not None  # type: ignore[attr-defined]
    assert reported == {"plain": False, "drawing": True}


class Late(Drawing):
    """Its second worker takes a second longer to start."""

    def __init__(self, flag: str) -> None:
        super().__init__()
        self.flag = flag

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        try:
            os.close(os.open(self.flag, os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            wait_as_work(1.0)


def test_a_worker_that_starts_during_the_wait_is_in_the_state(tmp_path: Path) -> None:
    with loader(Late(str(tmp_path / "flag")), multiprocessing_context="spawn") as made:
        batches = iter(made)
        next(batches)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            made.state_dict()
