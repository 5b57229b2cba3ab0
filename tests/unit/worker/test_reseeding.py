"""Objects of a dataset that lie within each other: each is reseeded for a batch, by itself or by what it lies in."""

from __future__ import annotations

import random
from typing import Any

import pytest

from dpex.worker import own_generators
from dpex.worker.own_generators import OwnGenerators, _found_in


class Drawing:
    """As a ``Randomizable`` of MONAI: reseeding makes itself a new generator, and reaches no part of it."""

    def __init__(self, *parts: Any) -> None:
        self.rng = random.Random()
        self.parts = list(parts)

    def reseed(self, seed: int) -> None:
        self.rng = random.Random(seed)


class Passing(Drawing):
    """As a ``Compose``: its parts, as far as they are such objects, get the generator that it has."""

    def reseed(self, seed: int) -> None:
        super().reseed(seed)
        for part in self.parts:
            if isinstance(part, Drawing):
                part.rng = self.rng


class Other:
    """Something of the user's, which knows nothing of reseeding."""

    def __init__(self, part: Any) -> None:
        self.part = part


@pytest.fixture(autouse=True)
def known(monkeypatch: pytest.MonkeyPatch) -> None:
    kinds = [(Drawing, lambda one, seed: one.reseed(seed))]
    monkeypatch.setattr(own_generators, "_imported", lambda: kinds)


def reseeded(dataset: Any, *seeds: int) -> OwnGenerators:
    own = own_generators.own_generators(dataset, None, ())
    assert own is not None
    for seed in seeds:
        own.reseed(seed)
    return own


def states(*objects: Any) -> list[Any]:
    return [one.rng.getstate() for one in objects]


def test_what_a_dataset_does_not_reseed_of_itself_is_reseeded() -> None:
    """MONAI's SmartCacheDataset is such a one: it has a generator for the order of its cache."""
    found = []
    for before in ([], [7]):
        noise, flip = Drawing(), Drawing()
        dataset = Drawing(Other([noise, flip]))
        reseeded(dataset, *before, 5)
        found.append(states(dataset, noise, flip))
    assert found[0] == found[1]
    assert len(set(found[0])) == 3


def test_what_an_object_gives_its_parts_stays() -> None:
    noise, flip = Drawing(), Drawing()
    compose = Passing(noise, flip)
    own = reseeded(Other(compose), 5)
    assert noise.rng is compose.rng
    assert flip.rng is compose.rng
    own.reseed(6)
    own.reseed(7)
    assert noise.rng is compose.rng
    alone = Passing()
    reseeded(Other(alone), 7)
    assert states(compose) == states(alone), "draws do not depend on what lies in it"


def test_what_it_does_not_reach_is_reseeded_nevertheless() -> None:
    inner, below = Drawing(), Drawing()
    reached = Drawing(below)
    compose = Passing(Other(inner), reached)
    own = reseeded(Other(compose), 1, 2, 5)
    known = states(compose, reached, inner, below)
    own.reseed(8)
    own.reseed(5)
    assert states(compose, reached, inner, below) == known
    assert reached.rng is compose.rng
    assert len(set(known)) == 3


def test_the_first_batch_is_seeded_as_any_other() -> None:
    def made(*seeds: int) -> list[Any]:
        inner = Drawing()
        compose = Passing(Drawing(), Other(inner))
        reseeded(Other(compose), *seeds)
        return states(compose, *compose.parts[:1], inner)

    assert made(5) == made(4, 5) == made(5, 5)


def names(dataset: Any, registered: Any = ()) -> list[tuple[str, bool]]:
    return [(name, reseed is not None) for name, _, reseed in _found_in(dataset, None, registered)]


def test_a_generator_of_somebody_else_within_such_an_object_is_named() -> None:
    rng = random.Random()
    assert names(Other(Passing(Other(rng)))) == [("Other.part", True), ("Other.part.parts[0].part", False)]


def test_generators_that_such_an_object_has_itself_are_its_own() -> None:
    one = Drawing()
    one.parts = [random.Random(), {"more": (random.Random(),)}]
    assert names(Other(one)) == [("Other.part", True)]


def test_what_a_registered_object_consists_of_is_its_own() -> None:
    registered = ((Other, lambda other, seed: None),)
    assert names(Drawing(Other(Drawing(random.Random()))), registered) == [
        ("Drawing", True),
        ("Drawing.parts[0]", True),
    ]
