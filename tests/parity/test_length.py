"""`len(loader)`, `len(iter(loader))`, and the warning of a stream that gives more than it announced."""

import warnings
from typing import Any

import pytest
from torch.utils.data import BatchSampler, SequentialSampler

from .datasets import Counting, SizedStream, Stream, pair, take
from .harness import Loader, caught, parity

MAP: dict[str, dict[str, Any]] = {
    "one": {},
    "three": {"batch_size": 3},
    "three, last dropped": {"batch_size": 3, "drop_last": True},
    "all": {"batch_size": 100},
    "all, last dropped": {"batch_size": 100, "drop_last": True},
    "single": {"batch_size": None},
    "sampler": {"sampler": [1, 2, 3], "batch_size": 2},
    "single sampler": {"sampler": [1, 2, 3], "batch_size": None},
    "batch_sampler": {"batch_sampler": BatchSampler(SequentialSampler(range(7)), 2, True)},
    "batch_sampler without a length": {"batch_sampler": iter([[1], [2]])},
    "sampler without a length": {"sampler": iter([1, 2]), "batch_size": None},
    "sampler without a length, batched": {"sampler": iter([1, 2]), "batch_size": 2},
}


@pytest.mark.parametrize("case", MAP)
@parity
def test_map(cls: Loader, case: str) -> Any:
    loader = cls(Counting(10), **MAP[case])
    return [caught(len, loader), caught(lambda: len(iter(loader)))]


@parity
def test_map_that_grows(cls: Loader) -> Any:
    data = [1, 2, 3]
    loaders = [cls(data), cls(data, shuffle=True), cls(data, num_workers=1)]
    before = [len(loader) for loader in loaders]
    data.append(4)
    return [before, [len(loader) for loader in loaders], [sorted(map(int, loader)) for loader in loaders]]


class Buckets:
    """Batches of indices, which are drawn when an iterator is made. Before that it has no length."""

    def __iter__(self) -> Any:
        self.batches = [[0, 1], [2, 3]]
        yield from self.batches

    def __len__(self) -> int:
        return len(self.batches)


@pytest.mark.parametrize("workers", [0, 1])
@parity
def test_sampler_whose_length_is_known_late(cls: Loader, workers: int) -> Any:
    loader = cls(range(4), batch_sampler=Buckets(), num_workers=workers)
    return [[batch.tolist() for batch in loader], len(loader)]


class Unsized:
    def __getitem__(self, index: int) -> int:
        return index


@pytest.mark.parametrize("workers", [0, 1])
@parity
def test_map_without_a_length(cls: Loader, workers: int) -> Any:
    loader = cls(Unsized(), num_workers=workers)
    given = cls(Unsized(), num_workers=workers, sampler=[3, 4])
    return [caught(len, loader), caught(lambda: list(loader)), len(given), list(given)]


@pytest.mark.parametrize("batch_size", [None, 1, 3, 5, 20])
@pytest.mark.parametrize("drop_last", [False, True])
@parity
def test_stream(cls: Loader, batch_size: int | None, drop_last: bool) -> Any:
    if batch_size is None and drop_last:
        return None
    loader = cls(SizedStream(pair, 10, 10), batch_size=batch_size, drop_last=drop_last)
    before = loader._IterableDataset_len_called
    return [before, len(loader), loader._IterableDataset_len_called, caught(lambda: len(iter(loader)))]


@pytest.mark.parametrize("workers", [0, 1])
@parity
def test_stream_without_a_length(cls: Loader, workers: int) -> Any:
    loader = cls(Stream(pair, 3), num_workers=workers)
    iterator = iter(loader)
    return [caught(len, loader), caught(len, iterator), list(iterator)]


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize(("batch_size", "asked"), [(None, True), (1, False), (1, True), (2, True)])
@parity
def test_overrun(cls: Loader, workers: int, batch_size: int | None, asked: bool) -> Any:
    """Warned is about each batch beyond the *dataset's* length, and only if somebody asked for the length."""
    loader = cls(SizedStream(pair, 3, 6), batch_size=batch_size, num_workers=workers)
    if asked:
        len(loader)
    return list(loader)


@pytest.mark.parametrize("options", [{}, {"num_workers": 1}, {"num_workers": 2, "persistent_workers": True}], ids=str)
@parity
def test_overrun_that_a_filter_makes_an_error(cls: Loader, options: dict[str, Any]) -> Any:
    """The error takes the place of its batch, and the following call returns the following batch."""
    loader = cls(SizedStream(pair, 3, 6), batch_size=None, **options)
    len(loader)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "Length of IterableDataset")
        iterator = iter(loader)
        return [caught(next, iterator) for _ in range(15)]


@parity
def test_overrun_when_the_length_is_asked_during_the_epoch(cls: Loader) -> Any:
    """The iterator took the length at iter(): what is asked later counts for the next one."""
    loader = cls(SizedStream(pair, 2, 4))
    iterator = iter(loader)
    first = take(iterator, 1)
    len(loader)
    return [first, list(iterator), "now the next", list(loader)]
