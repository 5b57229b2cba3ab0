"""A dataset is asked for its state once somebody can use that, and not before."""

import random
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import Dataset, IterableDataset, Sampler

from dpex import AutotuneConfig, DpexDataLoader
from dpex.options import WorkerConfig
from dpex.system import user_warnings
from dpex.worker.states import is_stateful

LENGTH = 24


class Asked:
    """Notes in a file that it was asked for its state. ``seen``: samples that it has made, which is its state."""

    def __init__(self, notes: Path) -> None:
        self.notes = notes
        self.seen = 0

    def sample(self, number: int) -> tuple[int, int, float]:
        self.seen += 1
        return number, self.seen, random.random()

    def state_dict(self) -> dict[str, int]:
        with self.notes.open("a") as file:
            file.write("asked\n")
        return {"seen": self.seen}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.seen = state["seen"]


class Map(Asked, Dataset[Any]):
    def __len__(self) -> int:
        return LENGTH

    def __getitem__(self, index: int) -> Any:
        return self.sample(index)


class Stream(Asked, IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        for number in range(self.seen % LENGTH, LENGTH):
            yield self.sample(number)


class Failing(Stream):
    def state_dict(self) -> dict[str, int]:
        super().state_dict()
        raise RuntimeError("no state today")


class OfAnotherKind(Stream):
    """As litdata's, whose loader knows what to give."""

    def state_dict(self, num_samples_yielded: int, num_workers: int) -> dict[str, int]:  # type: ignore[override]
        raise AssertionError


KINDS = {"map": Map, "stream": Stream, "failing": Failing, "of another kind": OfAnotherKind}


@pytest.fixture
def notes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(user_warnings, "_said", set())
    path = tmp_path / "notes"
    path.touch()
    return path


def loader_of(dataset: Any, **options: Any) -> DpexDataLoader[Any]:
    options = {"batch_size": 2, "num_workers": 2, "generator": torch.Generator().manual_seed(1), **options}
    return DpexDataLoader(dataset, collate_fn=list, **options)


OTHERS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("map", {"persistent_workers": True}),
    ("stream", {"persistent_workers": True}),
    ("map", {"seeding": "batch"}),
    ("failing", {"num_workers": 0}),
    ("map", {"num_workers": 0}),
    ("stream", {"num_workers": "auto", "autotune": AutotuneConfig(max_streams=1)}),
)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(("kind", "options"), [*((kind, {}) for kind in KINDS), *OTHERS], ids=str)
def test_nobody_is_asked_where_nobody_asks(kind: str, options: dict[str, Any], notes: Path) -> None:
    with loader_of(KINDS[kind](notes), **options) as loader:
        for _ in range(2):
            assert {number for batch in loader for number, _, _ in batch} == set(range(LENGTH))
    assert notes.read_text() == ""


@pytest.mark.parametrize("kind", ["map", "stream"])
def test_whoever_sets_their_pace_asks_for_states(kind: str, notes: Path) -> None:
    with loader_of(KINDS[kind](notes), worker_config=WorkerConfig(snapshot_every_n_steps=1)) as loader:
        list(loader)
    assert len(notes.read_text().split()) >= LENGTH // 2


@pytest.mark.parametrize("at", [1, 5, 12])
def test_a_state_first_requested_in_mid_epoch_resumes_exactly(at: int, notes: Path) -> None:
    """Also in a later epoch of workers that persist, in which the dataset has counted on."""
    with loader_of(Stream(notes), persistent_workers=True) as loader:
        list(loader)
        batches = iter(loader)
        for _ in range(at):
            next(batches)
        state, rest = loader.state_dict(), list(batches)
    with loader_of(Stream(notes), persistent_workers=True) as later:
        later.load_state_dict(state)
        assert list(later) == rest


@pytest.mark.parametrize("kind", ["map", "stream"])
def test_persistent_workers_report_states_at_the_epochs_end(kind: str, notes: Path) -> None:
    with loader_of(KINDS[kind](notes), persistent_workers=True, seeding="worker") as loader:
        list(loader)
        state, following = loader.state_dict(), list(loader)
    assert [worker["dataset"]["dataset"]["seen"] for worker in state["workers"]] != [0, 0]
    with loader_of(KINDS[kind](notes), persistent_workers=True, seeding="worker") as later:
        later.load_state_dict(state)
        assert list(later) == following


def test_the_state_of_a_long_stream_that_was_not_asked_is_short(notes: Path) -> None:
    class Long(Stream):
        def __iter__(self) -> Iterator[Any]:
            yield from map(self.sample, range(4000))

    with loader_of(Long(notes)) as loader:
        batches = iter(loader)
        for _ in range(1500):
            next(batches)
        state = loader.state_dict()
    assert [len(worker["again"]) for worker in state["workers"]] == [1, 1]


def test_a_state_that_cannot_be_told_is_warned_of_once(notes: Path) -> None:
    with (
        warnings.catch_warnings(record=True) as caught,
        loader_of(Failing(notes), worker_config=WorkerConfig(snapshot_every_n_steps=1)) as loader,
    ):
        warnings.simplefilter("always")
        for _ in range(3):
            assert len(list(loader)) == LENGTH
    (warning,) = caught
    assert "state_dict() of the dataset failed" in str(warning.message)
    assert "no state today" in str(warning.message)


def test_methods_that_take_other_arguments_are_no_state() -> None:
    class Positional:
        def state_dict(self, *parts: Any, destination: Any = None) -> Any: ...
        def load_state_dict(self, state: Any, strict: bool = True) -> Any: ...

    class WithoutOne(Positional):
        def load_state_dict(self) -> Any: ...  # type: ignore[override]

    class OfTheClass(Positional):
        @classmethod
        def state_dict(cls, number: int) -> Any: ...  # type: ignore[override]

    assert is_stateful(Positional())
    assert is_stateful(torch.nn.Linear(1, 1))
    assert not is_stateful(OfAnotherKind(Path()))
    assert not is_stateful(WithoutOne())
    assert not is_stateful(OfTheClass())
    assert not is_stateful(object())


class Order(Sampler[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(LENGTH))

    def __len__(self) -> int:
        return LENGTH

    def state_dict(self) -> Any:
        raise RuntimeError("no state today")

    def load_state_dict(self, state: Any) -> None:
        raise AssertionError


@pytest.mark.parametrize("workers", [0, 2])
def test_a_sampler_whose_state_dict_fails_does_not_end_training(workers: int, notes: Path) -> None:
    """Its order is drawn again then."""
    options = {"num_workers": workers, "sampler": Order()}
    with warnings.catch_warnings(record=True) as caught, loader_of(Map(notes), **options) as loader:
        warnings.simplefilter("always")
        batches = iter(loader)
        got = [next(batches) for _ in range(3)]
        state = loader.state_dict()
        got += batches
        got += loader
    assert [number for batch in got for number, _, _ in batch] == [*range(LENGTH)] * 2
    assert ["state_dict() of the sampler failed" in str(warning.message) for warning in caught] == [True]
    with loader_of(Map(notes), **options) as later:
        later.load_state_dict(state)
        assert [number for batch in later for number, _, _ in batch] == list(range(6, LENGTH))
