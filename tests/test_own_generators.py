"""Random generators that a dataset has of its own: which are found, which are reseeded, and which are warned of."""

from __future__ import annotations

import random
import warnings
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

from dpex import DpexDataLoader, OptionError, decode_in_workers, register_rng
from dpex.options import WorkerConfig
from dpex.worker import own_generators
from dpex.worker.own_generators import _found_in, warn_of_unseeded


class Jitter:
    """A transform with a generator that every copy has."""

    def __init__(self) -> None:
        self.rng = random.Random(1)

    def __call__(self, value: float) -> float:
        return value + self.rng.random() / 2


class Jittered:
    def __init__(self, transform: Any) -> None:
        self.transform = transform

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> float:
        return self.transform(float(index))  # type: ignore[no-any-return]


@pytest.fixture(autouse=True)
def nothing_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(own_generators, "_registered", [])
    monkeypatch.setattr(own_generators, "_named", set())


@pytest.fixture
def jitter_is_registered(nothing_known: None) -> None:
    register_rng(Jitter, lambda jitter, seed: jitter.rng.seed(seed))


def drawn(dataset: Any, workers: int, **options: Any) -> list[float]:
    torch.manual_seed(5)
    with DpexDataLoader(dataset, 3, num_workers=workers, seeding="batch", **options) as loader:
        return [round(float(value) % 1, 6) for _ in range(2) for batch in loader for value in batch]


@pytest.mark.usefixtures("jitter_is_registered")
@pytest.mark.parametrize("options", [{}, {"worker_config": WorkerConfig(local_engine="torch")}], ids=str)
def test_draws_are_distinct_and_the_same_wherever_batches_are_made(options: dict[str, Any]) -> None:
    dataset = Jittered([Jitter()][0])
    here, there = drawn(dataset, 0, **options), drawn(dataset, 2, **options)
    assert here == there
    assert len(set(here)) == 24


@pytest.mark.usefixtures("jitter_is_registered")
def test_what_decodes_a_stream_is_reseeded_too() -> None:
    dataset = decode_in_workers(range(12), Jitter())
    one, two = drawn(dataset, 1), drawn(dataset, 1)
    assert one == two
    assert len(set(one)) == 24


@pytest.mark.usefixtures("jitter_is_registered")
def test_with_the_random_state_of_workers_nothing_is_reseeded() -> None:
    torchs = list(torch.utils.data.DataLoader(Jittered(Jitter()), 3, num_workers=2))
    with DpexDataLoader(Jittered(Jitter()), 3, num_workers=2) as loader:
        assert [batch.tolist() for batch in loader] == [batch.tolist() for batch in torchs]


def use(jitter: Jitter) -> Any:
    return lambda value: jitter(value)


@pytest.mark.usefixtures("jitter_is_registered")
@pytest.mark.parametrize(
    ("transform", "name"),
    [
        (Jitter(), "Jittered.transform"),
        ([float, Jitter()], "Jittered.transform[1]"),
        ({"image": Jitter()}, "Jittered.transform['image']"),
        (partial(map, Jitter()), "Jittered.transform.args[0]"),
        (Jitter().__call__, "Jittered.transform.__self__"),
        (use(Jitter()), "Jittered.transform.jitter"),
        (torch.nn.Sequential(torch.nn.Linear(1, 1)), None),
        (list(range(100_000)), None),
        (np.random.mtrand._rand, None),  # type: ignore[attr-defined]
    ],
    ids=lambda one: one if isinstance(one, str) else "",
)
def test_where_generators_are_found(transform: Any, name: str | None) -> None:
    found = [found for found, _, _ in _found_in(Jittered(transform), None, own_generators.registered())]
    assert found == ([] if name is None else [name])


@pytest.mark.parametrize(
    ("generator", "kind"),
    [
        (np.random.default_rng(1), "numpy.random._generator.Generator"),
        (np.random.RandomState(1), "numpy.random.mtrand.RandomState"),
        (random.Random(1), "random.Random"),
        (torch.Generator(), "Generator"),
    ],
    ids=["numpy", "numpy's legacy", "python", "torch"],
)
def test_a_generator_that_nobody_reseeds_is_warned_of_once_by_its_name(generator: Any, kind: str) -> None:
    dataset = Jittered(generator)
    with pytest.warns(RuntimeWarning, match=r"Jittered\.transform is a random generator") as caught:
        warn_of_unseeded(dataset, None, ())
    assert kind in str(caught[0].message)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warn_of_unseeded(dataset, None, ())


def test_a_loader_warns_when_it_makes_workers() -> None:
    with (
        DpexDataLoader(Jittered(Jitter()), 3, num_workers=1, seeding="batch") as loader,
        pytest.warns(RuntimeWarning, match=r"Jittered\.transform\.rng .*dpex\.register_rng"),
    ):
        list(loader)


def test_generators_of_what_a_stream_reads_are_its_own() -> None:
    dataset = decode_in_workers([random.Random(1)], float)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warn_of_unseeded(dataset, None, ())
    with pytest.warns(RuntimeWarning, match=r"DecodedStream\.fn\.rng"):
        warn_of_unseeded(decode_in_workers(iter(()), Jitter()), None, ())


def test_what_cannot_be_registered_is_an_error() -> None:
    with pytest.raises(OptionError, match="give a class"):
        register_rng(3, print)  # type: ignore[arg-type]
    with pytest.raises(OptionError, match="give a function"):
        register_rng(Jitter, 3)  # type: ignore[arg-type]
