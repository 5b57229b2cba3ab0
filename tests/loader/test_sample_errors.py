"""Samples that cannot be loaded, or whose loading hangs: batches stay full, and the user hears of it."""

import re
import threading
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import kept
from torch.utils.data import Dataset, IterableDataset
from torch.utils.data.datapipes.map import SequenceWrapper

from dpex import DpexDataLoader, SampleTimeoutError, TooManySampleErrors
from dpex.loader.states import index_of, plain_index
from dpex.options import WorkerConfig
from dpex.schedule.sample_policy import ALL_AT_ONCE, LeavingOut, SamplePolicy
from dpex.worker import sample_guard
from dpex.worker.sample_guard import LEAST, LOOKS, SampleGuard, SampleWatch

COUNT = 40
TIMEOUT_S = 1.0
"""Nothing here but what hangs takes a thousandth of it."""


class Numbers(Dataset[Any]):
    """Its own indices; ``bad`` ones are errors."""

    def __init__(self, bad: tuple[int, ...] = (3, 17), count: int = COUNT) -> None:
        self.bad = bad
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> int:
        if index in self.bad:
            raise ValueError(f"{index} is bad")
        return index


class InBulk(Numbers):
    def __getitems__(self, indices: list[int]) -> list[int]:
        return [self[index] for index in indices]


class Hanging(Numbers):
    """``hangs``: samples that never come; with ``until`` only as long as that file is not there."""

    def __init__(self, hangs: tuple[int, ...], until: Path | None = None) -> None:
        super().__init__(bad=())
        self.hangs = hangs
        self.until = until

    def __getitem__(self, index: int) -> int:
        if index in self.hangs and not (self.until and self.until.exists()):
            if self.until is not None:
                self.until.touch()
            wait_for_ever()
        return index


def wait_for_ever() -> None:
    threading.Event().wait()


PLACES: dict[str, dict[str, Any]] = {
    "torch's in-process iterator": {"num_workers": 0},
    "in-process": {"num_workers": 0, "seeding": "batch"},
    "two logical workers": {"num_workers": 2},
    "two workers": {"num_workers": 2, "seeding": "batch"},
}


def batches_of(dataset: Any, **options: Any) -> tuple[list[list[int]], DpexDataLoader[Any]]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        with DpexDataLoader(dataset, batch_size=4, **options) as loader:
            return [batch.tolist() for batch in loader], loader


def expected(**instead: Any) -> list[list[int]]:
    """All indices in order, and others at some places."""
    numbers = [instead.get(f"at_{index}", index) for index in range(COUNT)]
    return [numbers[at : at + 4] for at in range(0, COUNT, 4)]


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("dataset", [Numbers(), InBulk()], ids=["one by one", "in bulk"])
def test_a_sample_that_fails_is_skipped_and_its_batch_stays_full(place: str, dataset: Any) -> None:
    batches, loader = batches_of(dataset, sample_policy=SamplePolicy(on_error="skip", max_errors=0.1), **PLACES[place])
    assert batches == expected(at_3=0, at_17=18)
    assert loader.stats().failed_samples == 2


def test_what_is_skipped_is_warned_of_logged_and_named(caplog: pytest.LogCaptureFixture) -> None:
    with DpexDataLoader(Numbers(), batch_size=4, num_workers=2, sample_policy=SamplePolicy(on_error="skip")) as loader:
        with pytest.warns(RuntimeWarning, match=r"sample 3 could not be loaded \(ValueError: 3 is bad\): another"):
            list(loader)
        report = " ".join(str(loader.diagnose()).split())
    assert "sample 17 could not be loaded (ValueError: 17 is bad)" in caplog.text
    assert "2 samples could not be loaded" in report
    assert "17 is bad" in report


def test_who_takes_the_place_does_not_depend_on_the_workers() -> None:
    found = {
        place: batches_of(
            Numbers(),
            sample_policy=SamplePolicy(on_error="replace"),
            generator=torch.Generator().manual_seed(1),
            **options,
        )[0]
        for place, options in PLACES.items()
    }
    batches = found["two workers"]
    instead = batches[0][3], batches[4][1]
    assert batches == expected(at_3=instead[0], at_17=instead[1])
    assert instead != (0, 18)
    assert all(other == batches for other in found.values())


@pytest.mark.parametrize("place", PLACES)
def test_more_errors_than_are_allowed_end_the_pass(place: str) -> None:
    bad = tuple(range(0, 2 * LEAST + 2, 2))
    with pytest.raises(
        TooManySampleErrors, match=r"SamplePolicy\(max_errors=0\.2\) allows 20.* sample \d+ \(ValueError"
    ):
        batches_of(Numbers(bad=bad), sample_policy=SamplePolicy(on_error="skip", max_errors=0.2), **PLACES[place])


@pytest.mark.parametrize("options", [{"seeding": "batch"}, {"seeding": "worker"}], ids=["any worker", "its worker"])
def test_a_sample_that_hangs_twice_is_skipped(options: dict[str, Any]) -> None:
    options |= {"sample_policy": SamplePolicy(on_error="skip", timeout_s=TIMEOUT_S)}
    with DpexDataLoader(Hanging((5,)), batch_size=4, num_workers=2, **options) as loader:
        with pytest.warns(RuntimeWarning) as caught:
            batches = [batch.tolist() for batch in loader]
        stats = loader.stats()
    assert batches == expected(at_5=6)
    assert stats.failed_samples == 1
    assert stats.deaths >= 2
    told = [str(warning.message) for warning in caught if "timeout_s=1" in str(warning.message)]
    assert "loading sample 5 took longer" in told[0]
    assert "in wait_for_ever" in told[0], "where it was"


def test_a_sample_that_hangs_once_is_made_again_elsewhere(tmp_path: Path) -> None:
    dataset = Hanging((5,), until=tmp_path / "again")
    batches, loader = batches_of(
        dataset, num_workers=2, seeding="batch", sample_policy=SamplePolicy(timeout_s=TIMEOUT_S)
    )
    assert batches == expected()
    assert loader.stats().failed_samples == 0


def test_a_sample_that_hangs_twice_raises_at_its_place() -> None:
    batches = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        with DpexDataLoader(
            Hanging((5,)), batch_size=4, num_workers=1, sample_policy=SamplePolicy(timeout_s=TIMEOUT_S)
        ) as loader:
            iterator = iter(loader)
            batches.append(next(iterator).tolist())
            with pytest.raises(SampleTimeoutError, match=r"sample 5 took longer[\s\S]*in 2 workers; batch 1"):
                next(iterator)
            batches += [batch.tolist() for batch in iterator]
    assert batches == [batch for batch in expected() if 5 not in batch]


def watched(timeout_s: float = 8.0) -> tuple[SampleWatch, list[Any]]:
    told: list[Any] = []
    watch = SampleWatch(timeout_s, lambda *about: told.append(about))
    return watch, told


@pytest.fixture
def no_exit(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    codes: list[int] = []
    monkeypatch.setattr(sample_guard.os, "_exit", codes.append)
    return codes


def test_a_watch_counts_its_own_looks(no_exit: list[int]) -> None:
    """However long a process stood still between two of them."""
    watch, told = watched()
    for place in range(3 * LOOKS):
        watch.begin(place, place)
        watch.look()
        watch.end()
    for _ in range(3 * LOOKS):
        watch.look()  # the worker waits for tickets
    watch.begin(ALL_AT_ONCE, [1, 2, 3], samples=3)
    for _ in range(3 * LOOKS):
        watch.look()
    watch.begin(2, "index")
    for _ in range(LOOKS):
        watch.look()
        assert not no_exit
    watch.look()
    assert no_exit == [sample_guard.EXIT_CODE]
    ((place, index, stack),) = told
    assert (place, index) == (2, "index")
    assert "test_a_watch_counts_its_own_looks" in stack


class ReadsInFunction(Dataset[int]):
    """Sample 0 looks at the watch so often that its worker would end."""

    def __init__(self, watch: SampleWatch) -> None:
        self.watch = watch

    def __len__(self) -> int:
        return 1

    def __getitem__(self, index: int) -> int:
        return self.reads_slowly()

    def reads_slowly(self) -> int:
        looking = threading.Thread(target=lambda: [self.watch.look() for _ in range(2 * LOOKS)])
        looking.start()
        looking.join()
        return 1


def test_reported_stack_begins_at_the_dataset(no_exit: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    watch, told = watched()
    monkeypatch.setattr(sample_guard, "watch_of_process", watch)
    assert guard_of(ReadsInFunction(watch)).sample(0) == 1
    stack = told[0][2]
    assert re.findall(r", in (\w+)\n", stack)[:2] == ["__getitem__", "reads_slowly"]
    assert stack.startswith('  File "')


def guard_of(dataset: Any, on_error: Any = "skip") -> SampleGuard:
    return SampleGuard(dataset, SamplePolicy(on_error=on_error), seed=1)


def test_the_next_good_sample_of_the_batch_takes_the_place() -> None:
    assert guard_of(Numbers(bad=(1,))).sample(1) != 1, "a sample that is a batch by itself"
    guard = guard_of(Numbers(bad=(1, 2, 5)))
    assert guard.samples([0, 1, 2, 3, 4, 5]) == [0, 3, 3, 3, 4, 0]
    assert guard.taken() == tuple((str(index), f"ValueError: {index} is bad") for index in (1, 2, 5))
    assert guard.taken() == ()


def test_a_batch_of_failed_samples_is_replaced_from_the_dataset() -> None:
    found = guard_of(Numbers(bad=(1, 2))).samples([1, 2])
    assert found == guard_of(Numbers(bad=(1, 2)), "replace").samples([1, 2])
    assert not {1, 2} & set(found)


@pytest.mark.parametrize(
    ("dataset", "index"), [(Numbers(bad=tuple(range(COUNT))), 3), ({"a": 1}, "b")], ids=["all are bad", "names"]
)
def test_where_there_is_no_other_sample_the_error_is_raised(dataset: Any, index: Any) -> None:
    with pytest.raises((ValueError, KeyError), match=f"{index}"):
        guard_of(dataset).samples([index])


def test_what_hung_is_not_loaded_again() -> None:
    guard = guard_of(Numbers(bad=()))
    assert guard.samples(LeavingOut(index=[7, 8], places={1: "it hung"})) == [7, 7]
    assert guard.taken() == (("8", "it hung"),)
    assert guard.samples(LeavingOut(index=[7, 8], places={ALL_AT_ONCE: "all hung"})) == [7, 8]
    index = LeavingOut(index=[4, (5, 6)], places={1: "it hung"})
    assert index_of(kept(plain_index(index))) == index, "it can be kept in a state"


class Stream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(())


@pytest.mark.parametrize(
    ("dataset", "policy", "why"),
    [
        (Numbers(), SamplePolicy(timeout_s=3.0), r"timeout_s=3\.0\): the training process cannot be ended"),
        (Stream(), SamplePolicy(on_error="skip"), "use a map-style dataset"),
        (SequenceWrapper([1]), SamplePolicy(on_error="skip"), "use a map-style dataset"),
    ],
    ids=["no workers", "stream", "DataPipe"],
)
def test_what_cannot_be_had_is_refused(dataset: Any, policy: SamplePolicy, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        DpexDataLoader(dataset, sample_policy=policy)
    share = WorkerConfig(share="a")
    with pytest.raises(ValueError, match="trainings that share batches"):
        DpexDataLoader(Numbers(), num_workers=1, worker_config=share, sample_policy=SamplePolicy(on_error="skip"))
