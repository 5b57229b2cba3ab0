"""Transforms in real loaders: the dear one is named wherever batches are made, and batches stay what they are."""

import functools
import random
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch.utils.data import Dataset, IterableDataset

from dpex import DpexDataLoader
from dpex.diagnose.diagnosis import Diagnosis, diagnose
from dpex.diagnose.facts import Facts, TransformFacts
from dpex.diagnose.verdict import dominant
from dpex.measure import sampling
from dpex.measure.sums import PoolStats, StepSums
from dpex.profile.live_timer import SWITCH
from tests.diagnose.planted import Case, Compose, Transformed, compute
from tests.unit.diagnose.test_verdict import COLLATING, COMPUTING, facts, pool

PLACES: dict[str, dict[str, Any]] = {
    "torch's own iterator": {"num_workers": 0, "seeding": "worker"},
    "in-process": {"num_workers": 0},
    "processes": {"num_workers": 2},
    "logical workers": {"num_workers": 2, "seeding": "worker"},
}
DEAR = "the transform Dear"


def transforms(found: Facts) -> dict[str, TransformFacts]:
    return {one.short: one for one in found.transforms}


def check_dear(diagnosis: Diagnosis) -> None:
    """The dear transform is known, with about its share, and its half is predicted."""
    found = transforms(diagnosis.facts)
    assert found.keys() >= {"Dear", "Cheap", "Transformed.__getitem__", "collate"}
    computed_s = sum(one.all_cpu_s for one in found.values())
    assert 0.6 < found["Dear"].all_cpu_s / computed_s < 0.95
    assert found["Cheap"].all_cpu_s < 0.5 * found["Dear"].all_cpu_s
    named = dominant(diagnosis.facts, "cpu")
    assert named is not None
    assert named[0].short == "Dear"
    changes = {one.change for one in diagnosis.predictions}
    assert not changes or "`Dear` at half its cost" in changes
    assert not any("single transforms" in gap for gap in diagnosis.facts.unmeasured)
    timed = found["Dear"].calls
    assert 2 <= timed < 0.5 * diagnosis.facts.samples  # of a batch now and then


@pytest.mark.alone  # two timed calls decide, and a neighbour slows one of them
@pytest.mark.parametrize("place", PLACES)
def test_the_dear_transform_is_named(place: str) -> None:
    size = 1500 if PLACES[place]["num_workers"] else 900  # over a second also on a machine three times as fast
    diagnosis = Case(dataset=partial(Transformed, size), accepted=("cpu",), options=PLACES[place]).run()
    check_dear(diagnosis)
    assert diagnosis.verdict.cause == "cpu", str(diagnosis)
    assert DEAR in diagnosis.verdict.where
    assert DEAR in diagnosis.verdict.sentence


class Augmented(Dataset[Any]):
    """Draws, and counts what it does."""

    def __init__(self) -> None:
        self.transform = Compose(self.noise, lambda value: value + torch.rand(()))
        self.calls = 0

    def noise(self, value: Any) -> Any:
        self.calls += 1
        return value + random.random() + self.calls

    def __len__(self) -> int:
        return 60

    def __getitem__(self, index: int) -> Any:
        return self.transform(torch.tensor(float(index)))


class Drawing(Augmented):
    """Without a count, so that it does not matter who makes a batch."""

    def noise(self, value: Any) -> Any:
        return value + random.random()


class Streamed(IterableDataset[Any]):
    def __init__(self) -> None:
        self.augmented = Augmented()

    def __iter__(self) -> Iterator[Any]:
        for index in range(60):
            yield self.augmented[index]


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (Augmented, {"num_workers": 0, "seeding": "worker"}),
        (Augmented, {"num_workers": 0, "seeding": "batch"}),
        (Augmented, {"num_workers": 2, "seeding": "worker"}),
        (Drawing, {"num_workers": 2, "seeding": "batch"}),
        (Streamed, {"num_workers": 2}),
    ],
)
def test_batches_are_the_same_with_all_of_them_timed(
    monkeypatch: pytest.MonkeyPatch, kind: Any, options: dict[str, Any]
) -> None:
    for name, value in (("FIRST_S", 0.0), ("REST", 0.0), ("_PART", 1e9), ("_BY", 1)):
        monkeypatch.setattr(sampling, name, value)

    def run(switch: str) -> tuple[list[Any], Facts]:
        monkeypatch.setenv(SWITCH, switch)
        torch.manual_seed(3)
        random.seed(3)
        with DpexDataLoader(kind(), batch_size=3, **options) as loader:
            loader.diagnose()
            made = [*loader, *loader]
            return made, loader.diagnose().facts

    timed, with_it = run("")
    plain, without = run("0")
    assert len(timed) == len(plain)
    assert all(torch.equal(one, other) for one, other in zip(timed, plain, strict=True))
    assert transforms(with_it)["noise"].calls > 40
    assert without.transforms == ()
    assert any(f"${SWITCH} forbids it" in gap for gap in without.unmeasured)


class Cropping:
    """Draws, and calls a function whose decorator another step shares."""

    def __call__(self, *, image: Any) -> Any:
        return shifted(image + random.random())


def unchanged(function: Any) -> Any:
    @functools.wraps(function)
    def inner(value: Any) -> Any:
        return function(value)

    return inner


@unchanged
def shifted(value: Any) -> Any:
    compute(0.002)
    return value + 1


@unchanged
def brightened(value: Any) -> Any:
    return value * 2


class Jitter:
    def __init__(self) -> None:
        self.transforms = [brightened]

    def __call__(self, *, image: Any) -> Any:
        return self.transforms[0](image)


class ByName:
    """As albumentations' Compose."""

    def __init__(self, *transforms: Any) -> None:
        self.transforms = list(transforms)

    def __call__(self, *, image: Any) -> Any:
        for transform in self.transforms:
            image = transform(image=image)
        return {"image": image}


class Photos(Dataset[Any]):
    def __init__(self) -> None:
        self.transform = ByName(Cropping(), Jitter())

    def __len__(self) -> int:
        return 500

    def __getitem__(self, index: int) -> Any:
        compute(0.003)
        return self.transform(image=torch.tensor(float(index)))["image"]


@pytest.mark.parametrize("place", ["in-process", "processes"])
def test_advice_can_be_followed_for_random_calls_by_name(place: str) -> None:
    with DpexDataLoader(Photos(), batch_size=5, **PLACES[place]) as loader:
        loader.diagnose()
        list(loader)
        diagnosis = loader.diagnose()
    found = {name.partition(" > ")[2]: one for name, one in ((one.name, one) for one in diagnosis.facts.transforms)}
    assert found.keys() == {
        "",
        *(f"ByName{rest}" for rest in ("", " > Cropping", " > Jitter", " > Jitter > brightened")),
    }
    assert {name for name, one in found.items() if one.drawing} == {"ByName > Cropping"}
    assert diagnosis.facts.compose == ("ByName", "Cropping", "Jitter")
    cached = [one.change for one in diagnosis.predictions if "cached" in one.change]
    assert all(change.startswith("`dpex.cached` around a dataset without its transforms (") for change in cached)


def test_only_what_came_since_a_reset_is_told() -> None:
    with DpexDataLoader(Transformed(120), batch_size=2, seeding="batch") as loader:
        loader.diagnose()
        list(loader)
        first = loader.diagnose(reset=True).facts
        second = first
        while second is first or "Dear" not in transforms(second):  # a batch is timed now and then, by the clock
            list(loader)
            second = loader.diagnose().facts
        third = loader.diagnose().facts
    assert transforms(second)["Dear"].calls == transforms(third)["Dear"].calls > 0
    assert transforms(second)["Dear"].wall_s < sum(pool.load_s for pool in second.pools.values()) + 1e-9
    assert transforms(first)["Dear"].all_wall_s == pytest.approx(
        sum(pool.load_s for pool in first.pools.values())
        * transforms(first)["Dear"].wall_s
        / sum(one.wall_s for one in first.transforms if not one.is_collating)
    )


def steps(**cpu_s: float) -> dict[str, StepSums]:
    """Of getting samples, with as much wall time."""
    within = {"own": "D.__getitem__", "collate": "collate", "mixup": "collate > Mixup"}
    return {
        within.get(name, f"D.__getitem__ > Compose > {name}"): StepSums(calls=9, wall_s=s, cpu_s=s)
        for name, s in cpu_s.items()
    }


def told(measured: Facts, timed: dict[str, StepSums]) -> Diagnosis:
    return diagnose(replace(measured, pools={"local": replace(measured.pools["local"], steps=timed)}))


def test_a_transform_that_takes_most_is_named() -> None:
    measured = facts({"read": 0.1, "transform": 6.0}, COMPUTING)
    assert told(measured, steps(own=0.1, Crop=0.7, Flip=0.2)).verdict.where == (
        "the dataset, 70 % of it in the transform Crop"
    )
    assert told(measured, steps(own=0.1, Crop=0.4, Flip=0.4)).verdict.where == "the dataset"
    assert told(measured, steps(own=0.9, Crop=0.1)).verdict.where == (
        "the dataset, 90 % of it in its own code, beside its transforms"
    )
    assert told(measured, steps(own=0.9)).verdict.where == "the dataset"


def test_the_verdict_names_the_slow_step_of_the_collate_function() -> None:
    measured = facts({"transform": 0.6, "collate": 5.4}, COLLATING)
    found = told(measured, steps(own=0.1, Crop=0.9, collate=0.1, mixup=0.9))
    assert found.verdict.where == "the collate function, 90 % of it in the transform Mixup"
    assert told(measured, steps(own=0.1, Crop=0.9, collate=1.0)).verdict.where == "the collate function"


def test_half_the_cost_of_a_transform_is_predicted_by_its_share() -> None:
    measured = facts({"read": 6.0}, pool(load_s=40.0, load_cpu_s=40.0))
    found = (diagnose(measured), told(measured, steps(own=0.0, Crop=1.0)), told(measured, steps(own=0.5, Crop=0.5)))
    plain, whole, part = (next(one.rate for one in each.predictions if one.kind == "cheaper") for each in found)
    assert plain == pytest.approx(whole)
    assert measured.rate < part < whole


def test_pools_stand_for_themselves() -> None:
    """A pool whose batches were timed seldom counts by what it did, not by what was timed of it."""
    seldom, often = steps(own=0.5, Crop=0.5), steps(own=10.0, Crop=90.0)
    pools = {
        "local": PoolStats(load_s=60.0, load_cpu_s=60.0, steps=seldom),
        "remote": PoolStats(load_s=20.0, load_cpu_s=10.0, steps=often),
    }
    found = Facts(pools=pools).transforms
    assert [one.all_wall_s for one in found] == pytest.approx([32.0, 48.0])
    assert [one.all_cpu_s for one in found] == pytest.approx([31.0, 39.0])
