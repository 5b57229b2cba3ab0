"""Calls recorded where they are: what is named, that batches and objects stay as they are, and when it is done."""

import asyncio
import functools
import random
import sys
import threading
import time
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from families import setup_of
from torch import nn
from torch.utils.data import ConcatDataset, Dataset, IterableDataset, Subset
from workload import wait_as_work

import dpex
from dpex.measure.batch_times import COLLATE, LOAD, CallRow, batch_times, encoded_times
from dpex.measure.sampling import APART_S, FIRST_S, REST, SamplingSchedule
from dpex.profile import call_rows, call_tree
from dpex.profile.call_names import label_of_c, place
from dpex.profile.call_rows import rows_of
from dpex.profile.call_tree import CallNode, CallRecorder
from dpex.profile.live_timer import TicketTimer
from dpex.worker.draws import GeneratorDraws
from dpex.worker.fetch import Fetcher

HERE = "tests/measure/test_call_trees.py"


@pytest.fixture(autouse=True)
def all_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is folded, and nothing is subtracted."""
    monkeypatch.setattr(call_tree, "cost_of_event", lambda: 0.0)
    monkeypatch.setattr(call_rows, "LEAST", 1e-12)
    monkeypatch.setattr(call_rows, "MOST_ROWS", 500)


class AlwaysTimer(TicketTimer):
    """Times each batch, as a whole."""

    def start_batch(self, now: float, dataset: Any, load_s: float) -> bool:
        self._occasions.due, self._occasions._began, self._occasions._pass_by = 0.0, 0.0, 0
        return super().start_batch(now, dataset, 1e9)

    def stop_batch(self) -> None:
        super().stop_batch()
        self.due = 0.0

    def with_calls(self, times: Any) -> Any:
        found = super().with_calls(times)
        self.due = 0.0
        return found


def fetcher(dataset: Any, timer: TicketTimer | None, collate_fn: Callable[[Any], Any] = len) -> Fetcher:
    return Fetcher(setup_of(dataset, collate_fn=collate_fn), timer)


def timed(dataset: Any, index: Any = (0, 1), collate_fn: Callable[[Any], Any] = len) -> tuple[CallRow, ...]:
    making = fetcher(dataset, AlwaysTimer(draws_of=GeneratorDraws), collate_fn)
    return making.fetch(list(index))[1].calls


def shown(rows: tuple[CallRow, ...]) -> dict[str, int]:
    """Return the calls by path, without the places of the calls, those of own code and the roots' names."""
    found: dict[str, int] = {}
    for path, calls, *_ in rows:
        names = [name.partition(" (")[0].partition(" [")[0] for name in path.split(" > ")]
        if names[-1] != "own code":
            found[" > ".join(names)] = found.get(" > ".join(names), 0) + calls
    return found


def drawing(rows: tuple[CallRow, ...]) -> list[str]:
    """Return the last names of the rows that draw."""
    return [row[0].rpartition(" > ")[2].partition(" (")[0].partition(" [")[0] for row in rows if row[4]]


def half(value: Any) -> Any:
    return value / 2


class Compose:
    def __init__(self, *steps: Any) -> None:
        self.steps = steps

    def __call__(self, value: Any) -> Any:
        for step in self.steps:
            value = step(value)
        return value


class Step:
    def __call__(self, value: Any) -> Any:
        return self.applied(value)

    def applied(self, value: Any) -> Any:
        return value


class Flip(Step):
    pass


class Crop(Step):
    def applied(self, value: Any) -> Any:
        return value + random.randint(0, 5)


class Samples(Dataset[Any]):
    def __init__(self, function: Callable[[Any], Any] = half) -> None:
        self.function = function

    def __len__(self) -> int:
        return 100

    def __getitem__(self, index: int) -> Any:
        return self.function(float(index))


def test_calls_are_named_with_their_lines() -> None:
    rows = timed(Samples())
    line = Samples.__getitem__.__code__.co_firstlineno + 1
    paths = [row[0] for row in rows]
    assert f"load > Samples.__getitem__ > half ({HERE}:{line})" in paths
    assert any(path.startswith(f"load > Samples.__getitem__ > own code ({HERE}:{line - 1}-{line})") for path in paths)
    assert rows[0][1] == 2
    assert "collate" in paths


def test_objects_of_two_classes_are_told_apart() -> None:
    found = shown(timed(Samples(Compose(Flip(), Crop(), Flip()))))
    at = "load > Samples.__getitem__ > Compose.__call__"
    assert found[f"{at} > Flip.__call__"] == 4
    assert found[f"{at} > Crop.__call__ > Crop.applied"] == 2


def decorated(function: Callable[[Any], Any]) -> Callable[[Any], Any]:
    @functools.wraps(function)
    def wrapper(value: Any) -> Any:
        return function(value)

    return wrapper


@decorated
def twice(value: Any) -> Any:
    return value * 2


@decorated
def third(value: Any) -> Any:
    return value / 3


class Net(nn.Module):
    def forward(self, value: Any) -> Any:
        return value


KINDS: dict[str, tuple[Any, str]] = {
    "a function": (half, "half"),
    "a lambda": (lambda value: value, "<lambda>"),
    "functions that share code": (Compose(twice, third), "Compose.__call__ > wrapper > third"),
    "a partial": (functools.partial(pow, exp=2), ""),
    "a partial of a function": (functools.partial(np.clip, a_min=0, a_max=1), "clip"),
    "a function of C": (torch.tensor, "torch.tensor"),
    "modules": (nn.Sequential(Net(), nn.Identity()), "Net.forward"),
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_call_of_each_kind_is_named(kind: str) -> None:
    function, name = KINDS[kind]
    found = shown(timed(Samples(function)))
    assert any(path.endswith(name) for path in found)


def test_functions_of_c_are_named_by_module_or_class() -> None:
    assert label_of_c(len) == "len"
    assert label_of_c(np.zeros) in ("multiarray.zeros", "multiarray_umath.zeros")
    assert label_of_c([].append) == "list.append"
    assert label_of_c(torch.stack).endswith("stack")
    assert label_of_c(threading.Lock().acquire) == "_thread.lock.acquire"


def test_places_in_packages_are_told_from_the_users() -> None:
    assert place(torch.__file__, 3) == "[torch/__init__.py:3]"
    assert place(threading.__file__, 3) == "[threading.py:3]"
    assert place("/data/train.py", 3) == "(/data/train.py:3)"
    assert place(__file__, "3-4") == f"({HERE}:3-4)"


def test_datasets_within_are_in_the_tree() -> None:
    found = shown(timed(Subset(ConcatDataset([Samples(), Samples()]), [3, 103]), [0, 1]))
    assert any("ConcatDataset.__getitem__ > Samples.__getitem__ > half" in path for path in found)


def test_hidden_code_leads_to_the_dataset_within() -> None:
    found = shown(timed(dpex.cached(Samples(), memory="1MB")))
    assert found["load > Samples.__getitem__ > half"] >= 2


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        for number in range(9):
            yield half(number)


def test_a_generator_is_recorded_between_two_items() -> None:
    timer = TicketTimer(is_on=False)
    making = fetcher(Stream(), timer)
    assert not making.fetch([None] * 4)[1].calls
    making._timer = AlwaysTimer()
    assert shown(making.fetch([None] * 4)[1].calls)["load > Stream.__iter__ > half"] == 4
    assert making.fetch([None] * 4)[1].samples == 1
    with pytest.raises(StopIteration):
        making.fetch([None] * 4)
    assert sys.getprofile() is None


def test_the_collate_function_has_a_tree_of_its_own() -> None:
    found = shown(timed(Samples(), collate_fn=lambda samples: [half(each) for each in samples]))
    assert sum(calls for path, calls in found.items() if path.startswith("collate") and path.endswith("half")) == 2
    assert found["load > Samples.__getitem__ > half"] == 2


class Bulk(Samples):
    def __getitems__(self, indices: list[int]) -> list[Any]:
        return [half(index) for index in indices]


def test_getitems_is_recorded() -> None:
    assert any(path.endswith("half") for path in shown(timed(Bulk())) if "Bulk.__getitems__" in path)


async def answered() -> None:
    """Wait for a thread."""
    await asyncio.get_running_loop().run_in_executor(None, wait_as_work, 0.005)


class Answers(Samples):
    async def __getitem__(self, index: int) -> Any:
        await answered()
        return half(index)


def test_an_await_has_the_time_of_the_event_loop() -> None:
    rows = {row[0]: row for row in timed(Answers())}
    lines = [function.__code__.co_firstlineno for function in (Answers.__getitem__, answered)]
    place_of = f"answered ({HERE}:{lines[0] + 1}) > await ({HERE}:{lines[1] + 2})"
    awaited = rows[f"load > Answers.__getitem__ > {place_of}"]
    assert awaited[1] > 0
    assert awaited[3] <= 0.5 * awaited[2] > 0.0


class Threaded(Samples):
    def __getitem__(self, index: int) -> Any:
        has_begun = threading.Event()
        thread = threading.Thread(target=lambda: (has_begun.wait(), wait_as_work(0.002)))
        thread.start()
        has_begun.set()
        thread.join()
        return index


def test_waiting_for_a_thread_is_named() -> None:
    rows = [row for row in timed(Threaded()) if "Thread.join" in row[0]]
    assert max(rows, key=lambda row: row[2])[0].rpartition(" > ")[2].startswith("_thread.")


# -- times -------------------------------------------------------------------------------------------------------------


class Machine:
    """Clocks that are turned by hand."""

    def __init__(self) -> None:
        self.now_s = self.cpu_s = 0.0

    def compute(self, seconds: float) -> None:
        self.now_s += seconds
        self.cpu_s += seconds

    def wait(self, seconds: float) -> None:
        self.now_s += seconds


def recorded(machine: Machine, function: Callable[[], Any]) -> dict[str, tuple[int, float, float]]:
    root = CallNode(LOAD)
    recorder = CallRecorder(wall=lambda: machine.now_s, cpu=lambda: machine.cpu_s, event_s=0.0)
    assert recorder.start(root)
    function()
    recorder.stop()
    return {row[0].rpartition(" > ")[2].partition(" (")[0]: row[1:4] for row in rows_of(root, 1.0)}


def test_computing_and_waiting_are_told_apart() -> None:
    machine = Machine()

    def reading() -> None:
        machine.compute(0.1)
        machine.wait(0.4)

    def sample() -> None:
        machine.compute(0.2)
        for _ in range(2):
            reading()

    found = recorded(machine, sample)
    waits = found["Machine.wait"]
    assert waits == (2, pytest.approx(0.8), pytest.approx(0.0))
    assert found["Machine.compute"][1:] == (pytest.approx(0.2), pytest.approx(0.2))


def test_small_branches_are_folded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(call_rows, "LEAST", 0.02)
    machine = Machine()

    def long() -> None:
        machine.now_s += 0.7

    def short() -> None:
        machine.now_s += 0.01

    def sample() -> None:
        machine.now_s += 0.29
        long()
        short()

    found = recorded(machine, sample)
    assert set(found) == {LOAD, "sample", "own code", "long"}
    assert found["own code"][1] == pytest.approx(0.29)
    assert sum(row[1] for row in found.values()) == pytest.approx(1.0)


def test_rows_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(call_rows, "MOST_ROWS", 32)
    kinds = [type(f"Step{number}", (Flip,), {})() for number in range(100)]
    assert len(timed(Samples(Compose(*kinds)))) <= 64


def test_recursion_ends_at_the_limit_of_depth(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(call_tree, "MOST_DEPTH", 10)

    def down(count: float) -> Any:
        return down(count - 1) if count > 0 else 0

    found = timed(Samples(lambda _: down(50)))
    assert max(row[0].count(" > ") for row in found) <= 11


# -- batches stay as they are ------------------------------------------------------------------------------------------


class LostError(Exception):
    pass


def fail(value: Any) -> Any:
    raise LostError


@pytest.mark.parametrize("where", [LOAD, COLLATE])
def test_after_an_error_another_batch_may_be_timed(where: str) -> None:
    making = fetcher(Samples(fail if where == LOAD else half), AlwaysTimer(), fail if where == COLLATE else len)
    with pytest.raises(LostError):
        making.fetch([0])
    assert sys.getprofile() is None
    assert timed(Samples())


def test_an_error_that_the_dataset_catches_ends_its_call() -> None:
    def caught(value: Any) -> Any:
        try:
            return fail(value)
        except LostError:
            return half(value)

    found = shown(timed(Samples(caught)))
    assert found["load > Samples.__getitem__ > caught > fail"] == 2
    assert found["load > Samples.__getitem__ > caught > half"] == 2


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
    assert not fetcher(Samples(), timer).fetch([0])[1].calls
    assert sys.getprofile() is other_profile
    assert timer._occasions.timings == 1  # so that it is tried seldom


@pytest.mark.usefixtures("no_profile_afterwards")
def test_a_dataset_that_sets_a_profile_function_keeps_it() -> None:
    _, times = fetcher(Samples(lambda _: sys.setprofile(other_profile)), AlwaysTimer()).fetch([0])
    assert sys.getprofile() is other_profile
    assert not times.calls


def test_a_batch_of_very_many_calls_is_recorded_in_part(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(call_tree, "MOST_EVENTS", 50)
    batch, times = fetcher(Samples(Compose(*[Flip()] * 50)), AlwaysTimer()).fetch([0, 1])
    assert batch == 2
    assert 0 < sum(shown(times.calls).values()) < 100
    assert sys.getprofile() is None


def test_recording_ends_with_the_sample_that_costs_enough() -> None:
    timer = TicketTimer()
    timer._occasions._began, timer._occasions.due = 0.0, 0.0
    making = fetcher(Samples(), timer)
    making._load_s = 0.0
    found = shown(making.fetch(range(50))[1].calls)
    assert found["load > Samples.__getitem__"] == 2


def test_the_cost_of_recording_is_no_cpu_time_of_the_batch() -> None:
    making = fetcher(Samples(Compose(*[Flip()] * 2000)), AlwaysTimer())
    began = time.thread_time()
    _, times = making.fetch([0])
    cpu_s = time.thread_time() - began
    own_s = times.load_cpu_s + times.collate_cpu_s
    assert cpu_s > 2.0 * own_s
    assert batch_times(encoded_times(times, encode_s=0.0, cpu_s=cpu_s, nbytes=0, ended_at=0.0)).cpu_s < own_s + 0.5 * (
        cpu_s - own_s
    )


# -- random numbers ----------------------------------------------------------------------------------------------------

RNG = np.random.default_rng(1)


class Own:
    def __init__(self) -> None:
        self.rng = np.random.RandomState(3)

    def __call__(self, value: Any) -> Any:
        return value + self.rng.rand()


DRAWING: dict[str, Callable[[Any], Any]] = {
    "Python": lambda value: value + random.randrange(5),
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
def test_a_call_that_draws_is_known(kind: str, size: int) -> None:
    random.seed(1)
    rows = timed(Samples(Compose(half, DRAWING[kind], Flip())), range(size))
    found = [row[0] for row in rows if row[4]]
    name = "Own.__call__" if kind == "one that lies in the step" else "<lambda>"
    assert found
    assert all(name in path for path in found)


def test_numbers_from_a_fixed_seed_are_not_random() -> None:
    assert not drawing(timed(Samples(lambda value: value + np.random.default_rng(int(value)).random())))


def test_a_draw_in_a_later_sample_is_known() -> None:
    assert drawing(timed(Samples(lambda value: random.random() if value else 0.0), range(4))) == [LOAD]


class Plain(Samples):
    """Draws itself, before or after its call."""

    def __init__(self, *, before: bool = False, after: bool = False) -> None:
        super().__init__()
        self.before, self.after = before, after

    def __getitem__(self, index: int) -> Any:
        value = index + (random.random() if self.before else 0)
        return half(value) + (np.random.rand() if self.after else 0)


@pytest.mark.parametrize("where", [{"before": True}, {"after": True}, {}])
def test_a_dataset_that_draws_itself_is_known(where: dict[str, bool]) -> None:
    found = drawing(timed(Plain(**where)))
    assert found == ([] if not where else ["Random.random"] if "before" in where else [found[0]])
    assert "half" not in found


# -- when batches are timed --------------------------------------------------------------------------------------------


def looked_at(seconds: float, each_s: float, extra_ratio: float) -> tuple[list[int], float]:
    """Which of the batches that take so long each, on virtual time, and what looking cost in all."""
    occasions, now, chosen, cost_s, number = SamplingSchedule(), 100.0, [], 0.0, 0
    while now < 100.0 + seconds:
        began = now
        now += each_s
        if began >= occasions.due and occasions.is_chosen(began):
            now += extra_ratio * each_s
            cost_s += extra_ratio * each_s
            occasions.end_timing(now, extra_ratio * each_s)
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


def test_workers_are_not_timed_first_at_the_same_time() -> None:
    first = []
    for worker in range(3):
        timer = TicketTimer(worker=worker)
        timer.start_batch(100.0, None, 0.0)
        first.append(timer.due - 100.0)
    assert first == pytest.approx([FIRST_S, FIRST_S + APART_S, FIRST_S + 2 * APART_S])


def test_a_pass_of_a_few_tiny_batches_is_left_alone() -> None:
    assert looked_at(0.9 * FIRST_S, 0.00001, 0.3)[0] == []


def test_periodic_samples_are_measured_as_often_as_they_occur() -> None:
    chosen, _ = looked_at(40_000.0, 0.05, 0.01)
    for period in (2, 8):
        met = [sum(number % period == rest for number in chosen) / len(chosen) for rest in range(period)]
        assert max(met) < 1.6 / period
        assert min(met) > 0.4 / period
