"""A dataset's time: what is found, that it is told right (on a fake clock), and that nothing else changes."""

from __future__ import annotations

import pickle
import random
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import ConcatDataset, Dataset, IterableDataset, Subset, default_collate

from dpex.profile.instrument import Profile
from dpex.profile.spans import Spans, percentile


class FakeClock:
    """Wall and CPU seconds that steps add to; shared by everything in this module."""

    wall = 0.0
    cpu = 0.0

    @classmethod
    def take(cls, wall: float, cpu: float = 0.0) -> None:
        cls.wall += wall
        cls.cpu += cpu


def profile_of(dataset: Any, collate_fn: Callable[[Any], Any] = default_collate) -> Profile:
    return Profile.of(dataset, collate_fn, lambda: FakeClock.cpu, lambda: FakeClock.wall)


def about(value: Any) -> Any:
    """What being told of calls takes is subtracted, from the fake clock's times as well."""
    return pytest.approx(value, rel=0.001, abs=0.001)


class Compose:
    """As torchvision's and albumentations'."""

    def __init__(self, transforms: list[Callable[[Any], Any]]) -> None:
        self.transforms = transforms

    def __call__(self, value: Any) -> Any:
        for transform in self.transforms:
            value = transform(value)
        return value


class Jitter:
    """Draws, counts its calls, and takes 4 s, of which 1 s CPU."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, value: float) -> float:
        self.calls += 1
        FakeClock.take(4, 1)
        return value + random.random() + float(torch.rand(()))


def half(value: float) -> float:
    FakeClock.take(0.5, 0.5)
    return value / 2


class Pictures(Dataset[tuple[float, int]]):
    """Reads for 2 s, 10 s for picture 5; its target_transform is a method of its own."""

    def __init__(self, length: int = 8) -> None:
        self.length = length
        self.read = 0
        self.transform = Compose([Jitter(), half, Compose([Jitter()]), half])
        self.target_transform = self.negative

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> tuple[float, int]:
        self.read += 1
        FakeClock.take(10 if index == 5 else 2)
        return self.transform(float(index)), self.target_transform(index)

    def negative(self, label: int) -> int:
        self.read += 1
        FakeClock.take(1)
        return -label

    def collate(self, batch: list[Any]) -> Any:
        FakeClock.take(3, 3)
        return default_collate(batch), self.length


def times(spans: Spans) -> dict[str, tuple[int, float, float, float]]:
    """Calls, wall, own wall and CPU of each step, by its path."""
    return {"/".join(s.path): (s.calls, s.wall_s, s.own_wall_s, s.cpu_s) for s in spans.steps}


def test_each_step_has_its_time() -> None:
    pictures = Pictures()
    profile = profile_of(pictures, pictures.collate)
    profile.collate_fn([profile.dataset[0], profile.dataset[1]])
    expected = {
        "Pictures.__getitem__": (2, 24.0, 4.0, 6.0),
        "Pictures.__getitem__/Compose": (2, 18.0, 0.0, 6.0),
        "Pictures.__getitem__/Compose/Jitter": (2, 8.0, 8.0, 2.0),
        "Pictures.__getitem__/Compose/half": (4, 2.0, 2.0, 2.0),
        "Pictures.__getitem__/Compose/Compose": (2, 8.0, 0.0, 2.0),
        "Pictures.__getitem__/Compose/Compose/Jitter": (2, 8.0, 8.0, 2.0),
        "Pictures.__getitem__/negative": (2, 2.0, 2.0, 0.0),
        "collate": (1, 3.0, 3.0, 3.0),
    }
    found = times(profile.spans())
    assert list(found) == list(expected)
    for name, values in expected.items():
        assert found[name] == about(values), name


def test_results_random_numbers_and_what_was_given_are_the_same() -> None:
    pictures, same = Pictures(), Pictures()
    before = vars(pictures).copy(), list(pictures.transform.transforms)
    made = []
    for dataset in (same, profile_of(pictures).dataset):
        random.seed(1)
        torch.manual_seed(1)
        made.append(([dataset[i] for i in range(8)], random.random(), len(dataset), dataset.read))
    assert made[0] == made[1]
    assert pictures.read == same.read == 16
    assert (vars(pictures), pictures.transform.transforms) == (before[0] | {"read": 16}, before[1])
    assert sys.getprofile() is None


def test_where_timing_is_off_nothing_is_booked() -> None:
    profile = profile_of(Pictures())
    profile.is_on = False
    assert profile.collate_fn([profile.dataset[0][1]]) == 0
    assert profile.spans() == Spans()


def test_the_slowest_samples_by_the_index_that_was_asked_for() -> None:
    pictures = Pictures()
    subset = Subset(ConcatDataset([pictures, pictures]), [3, 13, 5, 6])
    profile = profile_of(subset)
    assert len([profile.dataset[i] for i in range(4)]) == 4
    assert len(profile.dataset.__getitems__([1, 0])) == 2
    spans = profile.spans()
    assert spans.samples == 6
    assert sorted(slow.index for slow in spans.slowest[:3]) == [1, 1, 2]
    assert [slow.wall_s for slow in spans.slowest] == about([20.0] * 3 + [12.0] * 3)
    assert times(spans)["Subset.__getitems__/ConcatDataset.__getitem__/Pictures.__getitem__"][0] == 2


class Batches(Dataset[int]):
    """Answers a batch at once."""

    def __len__(self) -> int:
        return 9

    def __getitem__(self, index: int) -> int:
        raise AssertionError(index)

    def __getitems__(self, indices: list[int]) -> list[int]:
        FakeClock.take(6)
        return indices


def test_a_batch_made_at_once_is_parted_among_its_samples() -> None:
    profile = profile_of(Batches())
    assert profile.dataset.__getitems__([4, 7, 8]) == [4, 7, 8]
    assert profile.spans().sample_walls_s == about((2.0, 2.0, 2.0))
    assert [slow.index for slow in profile.spans().slowest] == [8, 7, 4]


class Stream(IterableDataset[int]):
    def __init__(self) -> None:
        self.transform = half

    def __iter__(self) -> Iterator[float]:
        for number in (1, 2):
            FakeClock.take(2)
            yield self.transform(number)


def test_streams() -> None:
    profile = profile_of(Stream())
    assert list(profile.dataset) == [0.5, 1.0]
    assert profile.spans().samples == 2
    assert times(profile.spans())["Stream.__iter__/half"] == about((2, 1.0, 1.0, 1.0))


def test_modules_and_lists() -> None:
    class Net(Dataset[Any]):
        def __init__(self) -> None:
            self.augmentation = nn.Sequential(nn.Identity(), nn.ReLU(), nn.ReLU())

        def __getitem__(self, index: int) -> Any:
            return self.augmentation(torch.tensor(-1.0))

    net = Net()
    profile = profile_of(net)
    assert profile.dataset[0] == 0
    names = [step.path[-1] for step in profile.spans().steps]
    assert names == ["Net.__getitem__", "Sequential", "Identity", "ReLU", "ReLU #2"]
    assert [type(module) for module in net.augmentation] == [nn.Identity, nn.ReLU, nn.ReLU]
    plain = profile_of([5, 6, 7])
    assert [plain.dataset[i] for i in range(len(plain.dataset))] == [5, 6, 7]
    assert plain.spans().samples == 3


def test_a_profile_travels_and_begins_anew_there() -> None:
    pictures = Pictures()
    profile = Profile.of(pictures, pictures.collate)
    _ = profile.dataset[0]
    there = pickle.loads(pickle.dumps(profile))
    assert there.spans() == Spans()
    assert there.collate_fn([there.dataset[1]])[1] == there.dataset.length == 8
    assert there.spans().samples == 1
    assert times(there.spans())["Pictures.__getitem__/Compose/Compose/Jitter"][0] == 1
    dataset = pickle.loads(pickle.dumps(profile.dataset))
    assert len(dataset) == 8
    assert dataset[1][1] == -1


def test_an_error_leaves_the_books_in_order() -> None:
    profile = profile_of([1, 2])
    with pytest.raises(IndexError):
        _ = profile.dataset[9]
    _ = profile.dataset[1]
    assert times(profile.spans())["list.__getitem__"][0] == 2
    assert profile.spans().samples == 1


def test_percentiles() -> None:
    assert [percentile(range(1, 101), share) for share in (0.5, 0.95, 0.99, 1.0)] == [50, 95, 99, 100]
    assert percentile([], 0.5) == 0.0
