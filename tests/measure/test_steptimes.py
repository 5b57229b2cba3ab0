"""Transforms timed where they are: what is found, that batches and objects stay as they are, and when it is done."""

import functools
import random
import sys
import types
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from families import setup_of
from torch import nn
from torch.utils.data import ConcatDataset, Dataset, IterableDataset, Subset

from dpex.measure.batch_times import StepRow
from dpex.measure.sampling import FIRST_S, REST, SamplingSchedule
from dpex.profile import call_timer, live_timer
from dpex.profile.live_timer import TicketTimer
from dpex.worker.draws import GeneratorDraws
from dpex.worker.fetch import Fetcher


class Compose:
    """As torchvision's and albumentations'."""

    def __init__(self, transforms: Any) -> None:
        self.transforms = transforms

    def __call__(self, value: Any) -> Any:
        for transform in self.transforms:
            value = transform(value)
        return value


class Jitter:
    """Draws, and counts its calls; its base's call is part of its own."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, value: Any) -> Any:
        self.calls += 1
        return value + random.random() + torch.rand(()) + self.calls


class Strong(Jitter):
    def __call__(self, value: Any) -> Any:
        return super().__call__(value) * 2


class Slotted:
    __slots__ = ("factor",)

    def __init__(self, factor: float) -> None:
        self.factor = factor

    def __call__(self, value: Any) -> Any:
        return value * self.factor


class Module(nn.Module):
    def forward(self, value: Any) -> Any:
        return value + 1


def half(value: Any) -> Any:
    return value / 2


class Pictures(Dataset[Any]):
    """State, drawing, methods, functions, and one transform at two places."""

    def __init__(self, *steps: Callable[[Any], Any]) -> None:
        self.read = 0
        self.jitter = Jitter()
        default = [self.jitter, Strong(), half, functools.partial(torch.add, other=1), Slotted(0.5), Module()]
        self.transform = Compose(list(steps) or default)
        self.target_transforms = (half, self.jitter)
        self.augment = self.twice

    def twice(self, value: Any) -> Any:
        return value * 2

    def __len__(self) -> int:
        return 10_000

    def __getitem__(self, index: int) -> Any:
        self.read += 1
        value = self.augment(self.transform(torch.tensor(float(index + self.read))))
        for transform in self.target_transforms:
            value = transform(value)
        return value


class AlwaysTimer(TicketTimer):
    """Times each batch."""

    def begin(self, now: float, dataset: Any) -> bool:
        self._occasions.due, self._occasions._began, self._occasions._pass_by = 0.0, 0.0, 0
        return super().begin(now, dataset)

    def end(self) -> None:
        super().end()
        self.due = 0.0


def fetcher(dataset: Any, timer: TicketTimer | None, collate_fn: Callable[[Any], Any] = torch.stack) -> Fetcher:
    return Fetcher(setup_of(dataset, collate_fn=collate_fn), timer)


def rows(dataset: Any, index: Any = (0, 1), **options: Any) -> dict[str, StepRow]:
    _, stages = fetcher(dataset, AlwaysTimer(), **options).fetch(list(index))
    return {row[0]: row for row in stages.steps}


def test_what_there_is_is_timed() -> None:
    found = rows(Pictures())
    own = "Pictures.__getitem__"
    assert found.keys() == {
        own,
        "collate",
        f"{own} > Compose",
        f"{own} > Jitter",  # as a target's transform
        *(f"{own} > Compose > {name}" for name in ("Jitter", "Strong", "half", "Slotted", "Module")),
        f"{own} > half",
        f"{own} > twice",
    }
    assert all(row[1] == 2 for name, row in found.items() if name != "collate")
    assert found["collate"][1] == 1


def test_seconds_add_up_to_the_stages() -> None:
    """Nothing is counted twice: neither nested steps, nor shared ones, nor a call that goes on to the base's."""
    _, stages = fetcher(Pictures(), AlwaysTimer()).fetch(list(range(50)))
    load_s = sum(row[2] for row in stages.steps if row[0] != "collate")
    assert 0.999 * stages.load_s <= load_s < 1.5 * stages.load_s  # the cost of timing is an estimate
    collate_s = sum(row[2] for row in stages.steps if row[0] == "collate")
    assert 0 < collate_s < 1.5 * stages.collate_s


class LostError(Exception):
    pass


def fail(value: Any) -> Any:
    raise LostError


@pytest.mark.parametrize("place", ["transform", "collate"])
def test_after_an_error_another_batch_may_be_timed(place: str) -> None:
    data = Pictures(*([fail] if place == "transform" else []))
    timer = AlwaysTimer()
    making = fetcher(data, timer, fail if place == "collate" else torch.stack)
    with pytest.raises(LostError):
        making.fetch([0])
    assert making._collate_fn is (fail if place == "collate" else torch.stack)
    assert rows(Pictures())  # another one may be timed


class Awkward(Dataset[Any]):
    """Looking at it fails."""

    def __init__(self) -> None:
        self.transform = Compose([half])
        self.transforms_of_all = _Trap()

    def __getitem__(self, index: int) -> Any:
        return self.transform(torch.tensor(float(index)))


class _Trap(list[Any]):
    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        raise LostError


def test_a_dataset_that_cannot_be_looked_at_is_served() -> None:
    data = Awkward()
    timer = TicketTimer()
    making = fetcher(data, timer)
    made = [making.fetch([1]) for _ in range(3)]
    timer.due = timer._occasions.due = 0.0
    made.append(making.fetch([1]))
    assert timer.taken == 1  # it was tried
    assert all(torch.equal(batch, torch.tensor([0.5])) and not stages.steps for batch, stages in made)
    assert rows(Pictures())


def test_datasets_within_are_told_apart() -> None:
    subset = Subset(ConcatDataset([Pictures(half), Pictures(half)]), [3, 10_013])
    found = rows(subset)
    inner = "Subset.__getitems__ > ConcatDataset.__getitem__ > Pictures.__getitem__"
    assert found[f"{inner} > Compose > half"][1] == 2
    assert found[inner][1] == 2
    assert vars(Subset)["__getitem__"].__qualname__ == "Subset.__getitem__"


class Stream(IterableDataset[Any]):
    def __init__(self) -> None:
        self.transform = Compose([half, Jitter()])

    def __iter__(self) -> Iterator[Any]:
        for number in range(9):
            yield self.transform(torch.tensor(float(number)))


def test_a_stream_that_runs_is_timed() -> None:
    timer = TicketTimer(is_on=False)
    making = fetcher(Stream(), timer)
    assert not making.fetch([None] * 4)[1].steps
    making._timer = AlwaysTimer()
    found = {row[0]: row[1] for row in making.fetch([None] * 4)[1].steps}
    assert found["Stream.__iter__ > Compose > Jitter"] == 4
    _, stages = making.fetch([None] * 4)
    assert stages.samples == 1
    with pytest.raises(StopIteration):
        making.fetch([None] * 4)
    assert sys.getprofile() is None


def test_a_datasets_collate_function_is_timed_apart_from_getitem() -> None:
    data = Pictures(half)
    found = rows(data, collate_fn=lambda samples: data.transform(torch.stack(samples)))
    assert found["collate > Compose > half"][1] == 1
    assert found["Pictures.__getitem__ > Compose > half"][1] == 2


def shifted(by: float) -> Callable[[Any], Any]:
    def shift(value: Any) -> Any:
        return value + by

    return shift


def traced(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    return wrapper


@traced
def double(value: Any) -> Any:
    return value * 2


@traced
def triple(value: Any) -> Any:
    return value * 3


def power(value: Any, by: float = 2) -> Any:
    return value**by


def twice_of(factor: float, value: Any) -> Any:
    return 2 * factor * value


class Traced(Jitter):
    __call__ = traced(Jitter.__call__)


class Keeping(Jitter):
    """Its own self is in a cell, as a function within uses it."""

    def __call__(self, value: Any) -> Any:
        return (lambda: value + self.calls)()


def third(value: Any) -> Any:
    return value / 3


def yielding(value: Any) -> Iterator[Any]:
    yield value + 1


KINDS: dict[str, tuple[Any, str]] = {
    "a function": (third, "third"),
    "a lambda": (lambda value: value + 1, "<lambda>"),
    "a closure": (shifted(2), "shift"),
    "a decorated function": (double, "double"),
    "a decorated method": (Traced(), "Traced"),
    "self in a cell": (Keeping(), "Keeping"),
    "a partial of a function": (functools.partial(shifted(3)), "shift"),
    "a partial of an object": (functools.partial(Strong()), "Strong"),
    "a bound method": (Jitter().__call__, "__call__"),
    "a module": (Module(), "Module"),
    "modules in a row": (nn.Sequential(Module(), nn.ReLU()), "Sequential > ReLU"),
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_step_of_each_kind_is_timed(kind: str) -> None:
    step, name = KINDS[kind]
    assert rows(Pictures(half, step, Slotted(2.0)))[f"Pictures.__getitem__ > Compose > {name}"][1] == 2


def counts_of(dataset: Any) -> dict[str, int]:
    """Calls of the steps of a Compose, by name; nested steps with the step around them."""
    found = {name.rpartition("Compose > ")[2]: row[1] for name, row in rows(dataset).items() if "Compose >" in name}
    return dict(sorted(found.items()))


def test_steps_of_one_class_or_one_function_are_told_apart() -> None:
    one, other = Jitter(), Jitter()
    steps = (Slotted(1.0), Slotted(2.0), one.__call__, other.__call__, functools.partial(power, by=1))
    assert counts_of(Pictures(*steps, functools.partial(power, by=2), functools.partial(twice_of, 2))) == {
        "Slotted": 2,
        "Slotted #2": 2,
        "__call__": 2,
        "__call__ #2": 2,
        "power": 2,
        "power #2": 2,
        "twice_of": 2,
    }


def test_functions_of_one_factory_are_told_apart() -> None:
    lambdas = [lambda value, by=by: value + by for by in (1, 2)]
    assert counts_of(Pictures(shifted(1), shifted(2), torch.sigmoid, *lambdas)) == {
        "<lambda>": 2,
        "<lambda> #2": 2,
        "shift": 2,
        "shift #2": 2,
    }


class Cropping:
    """Calls functions whose code other steps have, and none of these steps."""

    def __call__(self, value: Any) -> Any:
        return shifted(7)(triple(power(value, by=5)))


class Nested:
    def __init__(self, *transforms: Any) -> None:
        self.transforms = transforms

    def __call__(self, value: Any) -> Any:
        for transform in self.transforms:
            value = transform(value)
        return value


def test_a_function_with_the_code_of_a_step_is_no_step() -> None:
    steps = (shifted(1), double, functools.partial(power, by=3))
    assert counts_of(Pictures(Cropping(), Nested(*steps))) == {
        "Cropping": 2,
        "Nested": 2,
        "Nested > double": 2,
        "Nested > power": 2,
        "Nested > shift": 2,
    }


def test_steps_that_cannot_be_told_apart_are_their_composes() -> None:
    def copied(name: str) -> Callable[[Any], Any]:
        return types.FunctionType(third.__code__, globals(), name)

    assert counts_of(Pictures(copied("one"), copied("other"), Slotted(1.0))) == {"Slotted": 2}
    assert counts_of(Pictures(copied("same"), copied("same"))) == {"same": 4}


def test_the_steps_of_albumentations_are_those_that_run() -> None:
    albumentations = pytest.importorskip("albumentations")
    steps = (albumentations.RandomResizedCrop(size=(8, 8), p=1.0), albumentations.ColorJitter(p=1.0))
    image = np.zeros((16, 16, 3), np.uint8)

    class Photos(Pictures):
        def __getitem__(self, index: int) -> Any:
            return torch.from_numpy(self.transform(image=image)["image"])

    data = Photos()
    data.transform = albumentations.Compose([*steps])
    names = [name for name in rows(data) if "adjust_" in name]
    assert len(names) == 4
    assert all(" > Compose > ColorJitter > adjust_" in name for name in names)
    drawing = {name.rpartition(" > ")[2] for name, row in rows_with_draws(data).items() if row[4]}
    assert drawing >= {"RandomResizedCrop", "ColorJitter"}


RNG = np.random.default_rng(1)


def rows_with_draws(dataset: Any, index: Any = (0, 1)) -> dict[str, StepRow]:
    _, stages = fetcher(dataset, AlwaysTimer(draws_of=GeneratorDraws), len).fetch(list(index))
    return {row[0]: row for row in stages.steps}


class Own:
    def __init__(self) -> None:
        self.rng = np.random.RandomState(3)

    def __call__(self, value: Any) -> Any:
        return value + self.rng.rand()


DRAWING: dict[str, Callable[[Any], Any]] = {
    "Python": lambda value: value + random.random(),
    "NumPy": lambda value: value + np.random.rand(),
    "torch": lambda value: value + torch.rand(()),
    "one that lies in the step": Own(),
    "one of the module": lambda value: value + RNG.random(),
    "a new one of NumPy": lambda value: value + np.random.default_rng().random(),
    "a new one of Python": lambda value: value + random.Random().random(),
    "the seed of torch": lambda value: value + torch.initial_seed() % 2,
}


@pytest.mark.parametrize("kind", DRAWING)
@pytest.mark.parametrize("size", [1, 4])
def test_a_step_that_draws_is_known(kind: str, size: int) -> None:
    step = DRAWING[kind]
    found = rows_with_draws(Plain(Compose([half, step, Slotted(1.0)])), range(size))
    name = getattr(step, "__name__", "Own")
    assert [row[0].rpartition(" > ")[2] for row in found.values() if row[4]] == [name]


def test_numbers_from_a_fixed_seed_are_not_random() -> None:
    found = rows_with_draws(Plain(Compose([lambda value: value + np.random.default_rng(int(value)).random()])))
    assert not any(row[4] for row in found.values())


class Plain(Dataset[Any]):
    """Draws itself, before or after its Compose."""

    def __init__(self, transform: Any, *, before: bool = False, after: bool = False) -> None:
        self.transform, self.before, self.after = transform, before, after

    def __getitem__(self, index: int) -> Any:
        value = torch.tensor(float(index)) + (random.random() if self.before else 0)
        value = self.transform(value)
        return {"image": value, "label": index + (random.random() if self.after else 0)}


@pytest.mark.parametrize("size", [1, 4])
@pytest.mark.parametrize("where", [{"before": True}, {"after": True}, {}])
def test_a_dataset_that_draws_itself_is_known(where: dict[str, bool], size: int) -> None:
    found = rows_with_draws(Plain(Compose([half]), **where), range(size))
    assert [name for name, row in found.items() if row[4]] == (["Plain.__getitem__"] if where else [])


def test_an_error_that_the_dataset_catches_ends_its_step() -> None:
    class Catching(Pictures):
        def __getitem__(self, index: int) -> Any:
            try:
                return super().__getitem__(index)
            except LostError:
                return half(torch.tensor(1.0))

    found = rows(Catching(half, fail))
    assert {name: row[1] for name, row in found.items() if name != "collate"} == {
        "Catching.__getitem__": 2,
        "Catching.__getitem__ > Compose": 2,
        "Catching.__getitem__ > Compose > half": 2,
        "Catching.__getitem__ > Compose > fail": 2,
        "Catching.__getitem__ > half": 2,
    }


def test_a_generator_is_in_its_step_while_it_runs() -> None:
    class Generating(Pictures):
        def __getitem__(self, index: int) -> Any:
            return next(self.transform.transforms[0](torch.tensor(1.0))) + half(torch.tensor(1.0))

    data = Generating(yielding)
    found = rows(data, [0])
    assert "Generating.__getitem__ > yielding" in found
    assert found["Generating.__getitem__ > half"][1] == 1


def other_profile(*_: Any) -> None:
    """Somebody else's."""


@pytest.fixture
def no_profile_afterwards() -> Iterator[None]:
    yield
    sys.setprofile(None)


@pytest.mark.usefixtures("no_profile_afterwards")
def test_a_thread_with_a_profile_function_keeps_it() -> None:
    sys.setprofile(other_profile)
    timer = AlwaysTimer()
    assert not fetcher(Pictures(), timer).fetch([0])[1].steps
    assert sys.getprofile() is other_profile
    assert timer.taken == 1  # so that it is tried seldom


@pytest.mark.usefixtures("no_profile_afterwards")
@pytest.mark.parametrize("gives_back", [False, True])
def test_a_dataset_that_sets_a_profile_function_keeps_it(gives_back: bool) -> None:
    class Profiling(Pictures):
        def __getitem__(self, index: int) -> Any:
            before = sys.getprofile()
            sys.setprofile(other_profile)
            value = super().__getitem__(index)
            if gives_back:
                sys.setprofile(before)
            return value

    _, stages = fetcher(Profiling(), AlwaysTimer()).fetch([0])
    assert sys.getprofile() is (None if gives_back else other_profile)
    assert {row[0] for row in stages.steps} <= {"Profiling.__getitem__", "collate"}


def test_a_batch_of_very_many_calls_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(call_timer, "MOST_EVENTS", 20)
    timer = AlwaysTimer()
    batch, stages = fetcher(Pictures(), timer).fetch([0, 1])
    assert len(batch) == 2
    assert not stages.steps
    assert timer.taken == 1


def test_only_the_costliest_of_very_many_are_told() -> None:
    steps = [type(f"Step{number}", (Jitter,), {})() for number in range(100)]
    found = rows(Pictures(*steps))
    assert len(found) == live_timer.MOST_ROWS + 2


def looked_at(seconds: float, each_s: float, extra_ratio: float) -> tuple[list[int], float]:
    """Which of the batches that take so long each, on virtual time, and what looking cost in all."""
    occasions, now, chosen, cost_s, number = SamplingSchedule(), 100.0, [], 0.0, 0
    while now < 100.0 + seconds:
        began = now
        now += each_s
        if began >= occasions.due and occasions.comes(began):
            now += extra_ratio * each_s
            cost_s += extra_ratio * each_s
            occasions.took(now, extra_ratio * each_s)
            chosen.append(number)
        number += 1
    return chosen, cost_s


@pytest.mark.parametrize("each_s", [0.00002, 0.001, 0.02, 0.5])
@pytest.mark.parametrize("extra_ratio", [0.02, 0.3, 10.0])
def test_looking_costs_half_a_hundredth(each_s: float, extra_ratio: float) -> None:
    seconds = min(1000.0, 50_000 * each_s)
    chosen, cost_s = looked_at(seconds, each_s, extra_ratio)
    assert 0 not in chosen
    assert chosen
    assert cost_s <= seconds / REST + extra_ratio * each_s  # the last is not paid for yet


def test_dozens_in_a_short_run_and_no_end_of_them_in_a_long_one() -> None:
    short, _ = looked_at(2.0, 0.008, 0.01)
    long, _ = looked_at(3600.0, 0.05, 0.01)
    assert 10 <= len(short) <= 80
    assert 60 <= len(long) <= 250
    assert max(b - a for a, b in pairwise(long)) * 0.05 < 70


def test_a_pass_of_a_few_tiny_batches_is_left_alone() -> None:
    assert looked_at(0.9 * FIRST_S, 0.00001, 0.3)[0] == []


def test_periodic_samples_are_measured_as_often_as_they_occur() -> None:
    chosen, _ = looked_at(40_000.0, 0.05, 0.01)
    for period in (2, 8):
        met = [sum(number % period == rest for number in chosen) / len(chosen) for rest in range(period)]
        assert max(met) < 1.6 / period
        assert min(met) > 0.4 / period
